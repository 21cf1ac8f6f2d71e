"""What the other end of a link does, in a thread or a spawned process. Imports little: every process loads it."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from m2flow.comm.waiting import Closed


def echo(end: Any) -> None:
    """Send back what comes."""
    while True:
        try:
            end.send(end.recv())
        except Closed:
            return


def late_echo(end: Any, seconds: float) -> None:
    """Begin to receive only after a while."""
    time.sleep(seconds)
    echo(end)


def burst(end: Any, count: int) -> None:
    """Send numbers and close."""
    for n in range(count):
        end.send({"n": n, "x": np.full(n % 7, n)})
    end.close()


def large_then_close(end: Any, count: int) -> None:
    """Send arrays that need shared memory and close at once."""
    for n in range(count):
        end.send(np.full(300_000, n))
    end.close()


def deaf(end: Any) -> None:
    """Never receive; end when the link does."""
    try:
        while True:
            end.send("alive", timeout=60)
            time.sleep(0.05)
    except (Closed, TimeoutError):
        return


def die_after(end: Any, count: int) -> None:
    """Receive `count` messages, then be killed in the middle of whatever follows."""
    end.send(os.getpid())
    for _ in range(count):
        end.recv()
    time.sleep(60)


def modules(end: Any) -> None:
    """Say whether torch was loaded before and after the first message."""
    import sys

    before = "torch" in sys.modules
    end.recv()
    end.send((before, "torch" in sys.modules))
    echo(end)
