"""Stamps of env steps, process CPU seconds and wall seconds, taken at the end of each training iteration.

Imports the standard library only: it runs inside every measured process, the peers' among them.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

TICKS = os.sysconf("SC_CLK_TCK")
FILE = "M2FLOW_BENCH_CLOCK"  # where the first stamp is written as soon as it is taken, for measuring a start


def cpu_seconds() -> float:
    """CPU seconds of this process, of the children it has waited for, and of those that still run."""
    times = os.times()
    total = time.process_time() + times.children_user + times.children_system
    return total + sum(_cpu_of(pid) for pid in _descendants("self")) if _has_children() else total


def _has_children() -> bool:
    """Whether any child runs: one call, because reading /proc costs milliseconds where there are many threads."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _descendants(pid: str) -> list[str]:
    found = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = listing.read_text(encoding="ascii").split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended since
        for child in children:
            found += [child, *_descendants(child)]
    return found


def _cpu_of(pid: str) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0  # ended: it is among those waited for now
    return sum(int(field) for field in fields[11:15]) / TICKS  # user, system, and both of its own ended children


class Stamps:
    """(env steps so far, CPU seconds, wall seconds) at the end of every iteration."""

    def __init__(self) -> None:
        self.taken: list[tuple[float, float, float]] = []

    def take(self, env_steps: float) -> None:
        """An iteration has ended after `env_steps` steps in all."""
        self.taken.append((env_steps, cpu_seconds(), time.time()))

    def summary(self, skip: int = 1) -> dict[str, Any]:
        """Env steps per CPU second and per wall second, without the first `skip` iterations."""
        if len(self.taken) <= skip:
            raise ValueError(f"{len(self.taken)} iterations were stamped, more than {skip} are needed")
        kept = self.taken[skip - 1 :]
        steps, cpu, wall = (last - first for first, last in zip(kept[0], kept[-1], strict=True))
        each = [round(b[1] - a[1], 6) for a, b in itertools.pairwise(kept)]
        return {
            "value": steps / cpu,
            "env_steps": steps,
            "cpu_s": cpu,
            "wall_s": wall,
            "env_steps_per_wall_s": steps / wall,
            "iteration_cpu_s": each,
        }


class Clock:
    """A recorder of m2flow (`observe.recorders: ["benchmarks.clock:Clock"]`) that stamps every metric row."""

    stamps: ClassVar[Stamps] = Stamps()
    # (env steps, mean return, episodes) of iterations that ended some
    curve: ClassVar[list[tuple[int, float, int]]] = []

    def __init__(self, target: Any) -> None:  # noqa: ARG002 - every recorder is made alike
        self.steps = 0.0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        if "rollout/env_steps" not in metrics:
            return  # a row of an evaluation
        self.steps += metrics["rollout/env_steps"]
        self.stamps.take(self.steps)
        if metrics.get("rollout/episodes"):
            self.curve.append((int(self.steps), metrics["rollout/return"], int(metrics["rollout/episodes"])))
        path = os.environ.get(FILE)
        if path and len(self.stamps.taken) == 1:
            Path(path).write_text(json.dumps(self.stamps.taken[0]), encoding="ascii")

    def close(self) -> None:
        """Nothing is held open."""


def answer(result: Mapping[str, Any]) -> None:
    """Hand the result of a job to the harness."""
    print("RESULT " + json.dumps(result), flush=True)


def versions(names: Sequence[str]) -> dict[str, str]:
    """Installed versions of the named distributions that are there."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
