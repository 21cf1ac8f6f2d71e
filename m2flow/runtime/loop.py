"""The only loop: it feeds a stage, takes its turn on shared devices, and sends what comes out.

    source stage:   tick -> lease -> work([tick]) -> outputs -> end of step
    other stages:   items of step s as they arrive (cut by the plan's chunk) -> lease -> work(items) -> outputs
                    every producer has ended step s -> lease -> close_step(s) -> outputs -> end of step

Timing is free: every turn is a span. Waiting for items is the only wait here, and the channel says who waits for whom.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from m2flow.comm.channel import Channel
from m2flow.protocols import ClosesSteps, Opens, SeesInserted
from m2flow.types import Tick, Trajectory

Output = Any


@dataclass(frozen=True, slots=True)
class Entry:
    """An item on its way into a stage, or the end of a producer's step (`end`)."""

    producer: tuple[str, int]
    step: int
    item: Any = None
    end: bool = False


class Sampler(Protocol):
    """A channel with a sampling rule: takes trajectories, hands out batches while credits last."""

    def put(self, item: Any) -> None:
        """Insert a trajectory."""

    def ready(self) -> list[Any]:
        """All batches that may be drawn now."""


@dataclass(slots=True)
class Host:
    """A stage with everything around it that it does not know: where items come from, where they go, its turn."""

    name: str
    rank: int
    stage: Any
    device: str
    inbox: Channel
    producers: frozenset[tuple[str, int]]
    chunk: int
    emit: Callable[[Output, int], Awaitable[None]]
    end: Callable[[int, str], Awaitable[None]]
    acquire: Callable[[], Awaitable[None]] | None = None
    release: Callable[[], None] | None = None
    sampler: Sampler | None = None
    first_step: int = 0
    spans: list[tuple[str, int, str, int, float, float, str]] = field(default_factory=list)
    doing: str = "starting"

    async def run(self) -> None:
        """Until cancelled."""
        if self.producers:
            await self._consume()
        else:
            await self._answer_ticks()

    async def _answer_ticks(self) -> None:
        while True:
            self.doing = "waits for the driver's next tick"
            for tick in await self.inbox.aget(1):
                assert isinstance(tick, Tick)
                await self._turn(self.stage.work, [tick], tick.step, tick.kind)
                await self.end(tick.step, tick.kind)

    async def _consume(self) -> None:
        step = self.first_step
        while True:
            open_producers = set(self.producers)
            held: list[Any] = []
            while open_producers:
                self.doing = f"waits for step {step} from {sorted(open_producers)}"
                entries = await self.inbox.aget(self.chunk, key=str(step))
                open_producers -= {entry.producer for entry in entries if entry.end}
                items = [entry.item for entry in entries if not entry.end]
                if self.sampler is not None:
                    held += items
                elif items:
                    await self._turn(self.stage.work, items, step, "work")
            if self.sampler is not None:
                await self._sample(self.sampler, held, step)
            if isinstance(self.stage, ClosesSteps):
                await self._turn(self.stage.close_step, step, step, "close")
            await self.end(step, "step")
            step += 1

    async def _sample(self, sampler: Sampler, held: list[Trajectory], step: int) -> None:
        """Insert a step's trajectories in lane order (arrival order must not matter), then work through the samples."""
        ordered = sorted(held, key=lambda part: int(part.lane[0]))
        for trajectory in ordered:
            sampler.put(trajectory)
        if isinstance(self.stage, SeesInserted):
            self.stage.inserted(ordered)
        batches = sampler.ready()
        if batches:
            await self._turn(self.stage.work, batches, step, "work")

    async def _turn(self, work: Callable[[Any], Any], given: Any, step: int, kind: str) -> None:
        """One turn on the devices: lease, `work(given)`, emit what it yields, release, and a span of it."""
        if self.acquire is not None:
            self.doing = f"waits for its turn on {self.device} (step {step})"
            await self.acquire()
        self.doing = f"{kind} of step {step}"
        start = time.monotonic()
        try:
            made: Iterable[Any] | AsyncIterator[Any] = work(given)
            if isinstance(made, AsyncIterator):
                async for output in made:
                    await self.emit(output, step)
            else:
                for output in made:
                    await self.emit(output, step)
        finally:
            self.spans.append((self.name, self.rank, self.device, step, start, time.monotonic(), kind))
            if self.release is not None:
                self.release()

    def opening(self) -> Iterator[Any]:
        """What the stage has to say before the first step (initial weights)."""
        return iter(self.stage.start()) if isinstance(self.stage, Opens) else iter(())
