"""Requests that are being answered, one a slot, in arrays: what happens per token happens to all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from m2flow import seeds
from m2flow.types import Answer, Request

NOBODY = -1  # fills the rows of stop ids; no token is called so


class Slots:
    """Slots 0..n-1 hold a request each: its tokens so far, and what decides on the next one."""

    def __init__(self, wide: type[np.floating[Any]]) -> None:
        self.requests: list[Request] = []
        self.wide = wide  # dtype of log-probabilities
        # [slots, tokens of an answer]
        self.noise = np.zeros((0, 0))
        self.token = np.zeros((0, 0), np.int64)
        self.logprob = np.zeros((0, 0), wide)
        self.version = np.zeros((0, 0), np.int64)
        # [slots]
        self.count = np.zeros(0, np.int64)  # tokens of the answer so far
        self.prompt = np.zeros(0, np.int64)  # tokens of the prompt
        self.limit = np.zeros(0, np.int64)  # tokens of an answer at most
        self.temperature = np.zeros(0)
        self.stop = np.full((0, 1), NOBODY)  # [slots, ids that end an answer]

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request) -> int:
        """Put a request into the next slot, with what it had begun."""
        slot = len(self.requests)
        self._reserve(slot + 1, request.max_tokens, max(1, len(request.stop)))
        begun = request.begun
        done = 0 if begun is None else len(begun.tokens)
        if begun is not None:
            self.token[slot, :done], self.logprob[slot, :done] = begun.tokens, begun.logprob
            self.version[slot, :done] = begun.version
        if request.temperature != 0.0:
            turns = np.arange(request.max_tokens)
            self.noise[slot, : request.max_tokens] = seeds.uniform(request.seed, np.zeros(1, np.int64), turns, ())[:, 0]
        self.count[slot], self.prompt[slot], self.limit[slot] = done, len(request.prompt), request.max_tokens
        self.temperature[slot] = request.temperature
        self.stop[slot] = NOBODY
        self.stop[slot, : len(request.stop)] = sorted(request.stop)
        self.requests.append(request)
        return slot

    def _reserve(self, rows: int, width: int, stops: int) -> None:
        """Grow by doubling; what is there stays."""
        for name in ("noise", "token", "logprob", "version"):
            setattr(self, name, _grown(getattr(self, name), (rows, width), 0))
        for name in ("count", "prompt", "limit", "temperature"):
            setattr(self, name, _grown(getattr(self, name), (rows,), 0))
        self.stop = _grown(self.stop, (rows, stops), NOBODY)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[n]: tokens of each context, the answer so far included."""
        n = len(self)
        return self.prompt[:n] + self.count[:n]

    def last(self) -> NDArray[np.int64]:
        """[n]: the last token of each answer, which must have one."""
        n = len(self)
        return self.token[np.arange(n), self.count[:n] - 1]

    def context(self, slot: int) -> NDArray[np.int64]:
        """Prompt and answer so far."""
        prompt = np.asarray(self.requests[slot].prompt, np.int64)
        return np.concatenate([prompt, self.token[slot, : self.count[slot]]])

    def uniform(self, slots: NDArray[np.int64]) -> NDArray[np.float64]:
        """The number that decides on the next token of each of `slots`."""
        return self.noise[slots, self.count[slots]]

    def record(
        self, slots: NDArray[np.int64], token: NDArray[np.int64], logprob: NDArray[Any], version: int
    ) -> NDArray[np.int64]:
        """Append a token to each of `slots`; those whose answers are complete now, ascending."""
        at = self.count[slots]
        self.token[slots, at], self.logprob[slots, at], self.version[slots, at] = token, logprob, version
        self.count[slots] = at + 1
        ended = (self.stop[slots] == token[:, None]).any(1) | (self.count[slots] >= self.limit[slots])
        return np.sort(slots[ended])

    def answer(self, slot: int, *, aborted: bool = False) -> Answer:
        """What the slot's request has got. A stop id counts as such also where it is the last token allowed (A25)."""
        n = int(self.count[slot])
        request = self.requests[slot]
        finish: Literal["stop", "length", "abort"] = "abort"
        if not aborted:
            finish = finish_of(request, self.token[slot, :n])
        rows = (self.token, self.logprob, self.version)
        token, logprob, version = (x[slot, :n].copy() for x in rows)
        return Answer(request.id, tokens=token, logprob=logprob, version=version, finish=finish)

    def move_last(self, target: int) -> int:
        """Take the request of `target` out: the last slot's request goes there. The slot that is free now."""
        source = len(self.requests) - 1
        if target != source:
            for name in ("noise", "token", "logprob", "version", "count", "prompt", "limit", "temperature", "stop"):
                x = getattr(self, name)
                x[target] = x[source]
            self.requests[target] = self.requests[source]
        self.requests.pop()
        return source


def finish_of(request: Request, tokens: Sequence[int] | NDArray[np.int64]) -> Literal["stop", "length"]:
    """Why a complete answer ended."""
    return "stop" if len(tokens) and int(tokens[-1]) in request.stop else "length"


def complete(request: Request) -> bool:
    """Whether what a request had begun is a whole answer already."""
    begun = request.begun
    if begun is None or len(begun.tokens) == 0:
        return False
    return len(begun.tokens) >= request.max_tokens or int(begun.tokens[-1]) in request.stop


def _grown(x: NDArray[Any], wanted: tuple[int, ...], value: int) -> NDArray[Any]:
    if all(have >= want for have, want in zip(x.shape, wanted, strict=True)):
        return x
    shape = [have if have >= want else max(want, 2 * have) for have, want in zip(x.shape, wanted, strict=True)]
    out = np.full(shape, value, x.dtype)
    out[tuple(slice(0, have) for have in x.shape)] = x
    return out
