"""A Generator behind a service handle: many callers await answers, and all of them decode in one batch."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import replace

from m2flow.protocols import Generator, Resident
from m2flow.types import Answer, Request, Weights


class GenerationService:
    """Answers requests with the weights it was last given.

    One task drives the engine while anybody waits. Between two of its steps new requests join the running batch, and
    weights may change.
    """

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.version = 0
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._ids = itertools.count()
        self._pump: asyncio.Task[None] | None = None

    async def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Their answers, in the order of the requests, under the requests' own ids."""
        loop = asyncio.get_running_loop()
        own = [replace(request, id=next(self._ids)) for request in requests]
        futures = [loop.create_future() for _ in own]
        self.generator.submit(own)
        self._waiting |= {request.id: future for request, future in zip(own, futures, strict=True)}
        if self._pump is None or self._pump.done():
            self._pump = loop.create_task(self._drive())
        answers = await asyncio.gather(*futures)
        return [replace(answer, id=request.id) for answer, request in zip(answers, requests, strict=True)]

    async def _drive(self) -> None:
        """Steps of the engine until nobody waits. What fails it fails everybody who waits."""
        try:
            while self._waiting:
                await asyncio.sleep(0)  # whoever has something to ask joins now
                for answer in self.generator.step():
                    future = self._waiting.pop(answer.id, None)
                    if future is not None and not future.done():  # else whoever asked has gone
                        future.set_result(answer)
        except BaseException as error:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(error if isinstance(error, Exception) else RuntimeError("generation ended"))
            self._waiting.clear()
            with contextlib.suppress(Exception):  # an engine that failed may not even be able to forget
                self.generator.abort()
            if not isinstance(error, Exception):
                raise

    def load(self, weights: Weights) -> None:
        """Take weights named "policy.<parameter>"; what was computed with the old ones is dropped."""
        self.generator.load(weights)
        self.version = weights.version

    def onload(self) -> None:
        """Back to the engine's devices, where it can leave them."""
        if isinstance(self.generator, Resident):
            self.generator.onload()

    def offload(self) -> None:
        """Leave the engine's devices, where it can."""
        if isinstance(self.generator, Resident):
            self.generator.offload()

    def close(self) -> None:
        """End the engine."""
        if self._pump is not None:
            self._pump.cancel()
        self.generator.close()
