"""A small flow without learning, to test the runtime alone: numbers go source -> (asks a service) -> sink -> weights
back."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from m2flow.flow.graph import Call, Flow, Node, Stream, Weights
from m2flow.flow.plan import Place, Plan
from m2flow.runtime.worker import Context
from m2flow.types import Metric, Report, Tick
from m2flow.types import Weights as WeightSet

FLOW = Flow(
    "toy",
    nodes=(Node("source", trigger="step"), Node("adder", kind="service"), Node("sink")),
    edges=(Stream("source", "sink"), Call("source", "adder"), Weights("sink", "adder")),
)


class Adder:
    """Service: adds its weight (the version) to what it is asked."""

    def __init__(self) -> None:
        self.offset = -1.0

    def add(self, values: Any) -> Any:
        """values + offset."""
        return {"sum": values + self.offset, "pid": os.getpid()}

    def load(self, weights: WeightSet) -> None:
        """Take the offset."""
        self.offset = float(weights.arrays["offset"][0])


@dataclass
class Item:
    """What travels; a plain dict on the wire."""


class Source:
    """Asks the service about a block of numbers that depends on step and replica only."""

    def __init__(self, context: Context, size: int, fail_at: int | None, how: str) -> None:
        self.context, self.size, self.fail_at, self.how = context, size, fail_at, how

    async def work(self, items: Sequence[Tick]) -> AsyncIterator[dict[str, Any]]:
        """One item per tick."""
        for tick in items:
            if self.fail_at is not None and tick.step == self.fail_at and self.context.rank == 0:
                _misbehave(self.how)
            values = np.full(self.size, 10.0 * tick.step + self.context.rank)
            answer = await self.context.services["adder"].add(values)
            yield {"step": tick.step, "rank": self.context.rank, "values": answer["sum"], "pid": os.getpid()}


def _misbehave(how: str) -> None:
    if how == "raise":
        raise ArithmeticError("the source went wrong")
    if how == "system exit":
        raise SystemExit(3)
    if how == "exit":
        os.kill(os.getpid(), 9)
    if how == "hang":
        time.sleep(60)


class Sink:
    """Adds up what arrives; sends the step number as the next offset."""

    def __init__(self) -> None:
        self.sums: list[float] = []
        self.held: list[dict[str, Any]] = []
        self.version = 0

    def start(self) -> Iterator[WeightSet]:
        """Initial weights."""
        yield WeightSet(self.version, {"offset": np.array([float(self.version)])})

    def work(self, items: Sequence[dict[str, Any]]) -> Iterator[Any]:
        """Hold the items."""
        self.held.extend(items)
        yield from ()

    def close_step(self, step: int) -> Iterator[Any]:
        """Report the mean of all values of the step."""
        total = float(sum(item["values"].sum() for item in self.held))
        self.sums.append(total)
        pids = sorted({item["pid"] for item in self.held})
        self.held = []
        self.version = step + 1
        yield WeightSet(self.version, {"offset": np.array([float(self.version)])})
        yield Report(step, {"train/policy_loss": Metric(total)}, payload={"pids": pids, "sink": os.getpid()})

    def state(self) -> dict[str, Any]:
        """Everything."""
        return {"sums": list(self.sums), "version": self.version}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue."""
        self.sums, self.version = list(state["sums"]), int(state["version"])


@dataclass(frozen=True)
class SourcePart:
    """Builds a Source."""

    size: int = 4
    fail_at: int | None = None
    how: str = "raise"

    def __call__(self, context: Context) -> Source:
        return Source(context, self.size, self.fail_at, self.how)


@dataclass(frozen=True)
class AdderPart:
    """Builds an Adder."""

    def __call__(self, context: Context) -> Adder:
        return Adder()


@dataclass(frozen=True)
class SinkPart:
    """Builds a Sink."""

    def __call__(self, context: Context) -> Sink:
        return Sink()


def parts(**source: Any) -> dict[str, Any]:
    """Parts of FLOW."""
    return {"source": SourcePart(**source), "adder": AdderPart(), "sink": SinkPart()}


def plan(kind: str, replicas: int = 1, lag: int = 0) -> Plan:
    """Plans that must all give the same numbers."""
    cores = ("cpu:0", "cpu:1")
    front = {
        "shared": Place(cores, replicas=replicas),
        "processes": Place(cores[:1], replicas=replicas, process=True),
        "apart": Place(cores[:1], replicas=replicas),
    }[kind]
    back = Place(cores) if kind == "shared" else Place(cores[1:], process=kind == "processes")
    service = Place(cores[1:], process=False) if kind == "apart" else front
    shifts = (("source", "adder"), ("sink",)) if kind != "processes" else ()
    return Plan({"source": front, "adder": service, "sink": back}, shifts=shifts, lag=lag)
