"""What every Channel must do. A new channel adds one `Case` to test_channels.py, and all of this is asked of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from m2flow.comm.replay import ReplayConfig
from m2flow.types import Trajectory, Units

PROTOCOLS = ("Channel",)
WAIT = 20.0  # seconds after which a test that hangs fails
SOON = 0.05  # seconds in which something that must wait would have happened


@dataclass(frozen=True)
class Case:
    """`build(capacity)` makes an empty channel; `item(n)` the n-th thing to put, of weight 1; `number` finds n again.

    `whole`: what goes in comes out (a replay samples instead). `keyed`: items have keys.
    """

    name: str
    build: Callable[[int | None], Any]
    item: Callable[[int], Any] = lambda n: n
    number: Callable[[Any], int] = lambda item: item
    whole: bool = True
    keyed: bool = True


def step(n: int) -> Trajectory:
    """One step of one lane, whose observation and reward are n."""
    one = np.zeros((1, 1), np.int64)
    return Trajectory(
        obs={"state": np.array([[n], [n + 0.5]])},
        obs_at=one,
        next_at=one + 1,
        reward=np.full((1, 1, 1), n, np.float32),
        valid=np.ones((1, 1, 1), bool),
        terminated=np.zeros((1, 1), bool),
        truncated=np.zeros((1, 1), bool),
        version=one,
        episode=one,
        group=one,
        lane=np.zeros(1, np.int64),
        units=Units((), np.zeros(1), {"action": np.full((1, 1), float(n))}),
        step=n,
    )


def replay(capacity: int | None) -> Any:
    """Batches of one row, one for each step put; the put after `capacity` waiting ones waits."""
    channel = ReplayConfig(capacity=capacity or 100_000, batch=1, start=0).build(5)
    channel.limit = WAIT
    return channel


class Background:
    """A call in a thread, whose outcome is looked at later."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.outcome: list[Any] = []
        self.thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self.thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self.outcome.append(call())
        except BaseException as error:
            self.outcome.append(error)

    @property
    def waits(self) -> bool:
        self.thread.join(SOON)
        return self.thread.is_alive()

    def result(self) -> Any:
        self.thread.join(WAIT)
        assert not self.thread.is_alive(), "still blocked"
        [outcome] = self.outcome
        return outcome


def until(condition: Callable[[], bool]) -> None:
    """Wait for a state that another thread brings about."""
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.001)


def run(coroutine: Any) -> Any:
    """A coroutine in an event loop of its own, with a limit."""
    return asyncio.run(asyncio.wait_for(coroutine, WAIT))
