"""The driver alone: who may end a run and whether it is saved then, and how long workers may take to get ready."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from m2flow.observe.metrics import reduce
from m2flow.runtime.cluster import detect
from m2flow.runtime.driver import Driver, DriverConfig, Hooks, Outcome, Stop
from m2flow.runtime.failures import Stalled
from m2flow.runtime.worker import Context
from m2flow.types import Metric, Report
from tests.integration import toy_flow


@dataclass
class Shelf:
    """A store that remembers which steps were saved."""

    saved: list[int] = field(default_factory=list)

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> None:
        self.saved.append(step)

    def load(self, step: int | None = None) -> tuple[int, Any, Mapping[str, Any]]:
        raise FileNotFoundError

    def steps(self) -> list[int]:
        return self.saved


@dataclass(frozen=True)
class SlowPart(toy_flow.SinkPart):
    """Takes its time to get ready."""

    seconds: float = 0.0

    def __call__(self, context: Context) -> toy_flow.Sink:
        time.sleep(self.seconds)
        return super().__call__(context)


def run(tmp_path: Path, stops: Mapping[int, Stop], *, lag: int = 0, steps: int = 6) -> tuple[Outcome, list[int]]:
    """Train the toy flow with hooks that ask to stop after the given steps; the outcome and the saved steps."""
    shelf = Shelf()
    driver = Driver(
        toy_flow.FLOW,
        toy_flow.plan("shared", lag=lag),
        toy_flow.parts(),
        cluster=detect(),
        config=DriverConfig(steps=steps, save_every=2, stall_limit=60.0),
        hooks=Hooks(on_step=lambda step, _metrics: stops.get(step)),
        store=shelf,
        logs=tmp_path,
    )
    return driver.run(), shelf.saved


def test_a_run_that_is_stopped_is_saved_where_it_stands(tmp_path: Path) -> None:
    stop = Stop("enough")
    assert run(tmp_path, {2: stop}) == (Outcome(3, stop), [2, 3])


def test_a_run_whose_weights_are_not_to_be_trusted_is_not_saved(tmp_path: Path) -> None:
    stop = Stop("loss is nan", save=False)
    assert run(tmp_path, {2: stop}) == (Outcome(3, stop), [2])
    assert run(tmp_path, {3: stop}) == (Outcome(4, stop), [2]), "neither where a checkpoint is due"
    assert run(tmp_path, {5: stop}) == (Outcome(6, stop), [2, 4]), "nor after the last step"


def test_a_step_that_was_in_flight_when_the_run_was_stopped_can_still_forbid_the_save(tmp_path: Path) -> None:
    outcome, saved = run(tmp_path, {0: Stop("enough"), 1: Stop("loss is nan", save=False)}, lag=1)
    assert outcome.steps in (1, 2), "step 1 may have started before step 0 was told of"
    assert outcome.stop is not None
    assert outcome.stop.reason == "enough"
    assert saved == ([] if outcome.steps == 2 else [1])


class Talker(toy_flow.Sink):
    """Reports twice in a step."""

    def close_step(self, step: int) -> Iterator[Any]:
        """How long the first part took; then as ever."""
        yield Report(step, {"time/learn_s": Metric(1.0, "sum")})
        yield from super().close_step(step)
        yield Report(step, {"time/learn_s": Metric(2.0, "sum")})


class TalkerPart(toy_flow.SinkPart):
    """Builds a Talker."""

    def __call__(self, context: Context) -> toy_flow.Sink:
        return Talker()


def test_several_reports_of_one_replica_are_not_taken_for_replicas(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []
    Driver(
        toy_flow.FLOW,
        toy_flow.plan("shared"),
        toy_flow.parts() | {"sink": TalkerPart()},
        cluster=detect(),
        config=DriverConfig(steps=2, stall_limit=60.0),
        hooks=Hooks(on_step=lambda _step, said: seen.append(reduce(said))),
        logs=tmp_path,
    ).run()
    assert [row["time/learn_s"] for row in seen] == [3.0, 3.0], "of replicas the slowest would count"


def slow(tmp_path: Path, seconds: float, **limits: float) -> Driver:
    """The toy flow in processes, with a sink that needs `seconds` to get ready."""
    return Driver(
        toy_flow.FLOW,
        toy_flow.plan("processes"),
        toy_flow.parts() | {"sink": SlowPart(seconds)},
        cluster=detect(),
        config=DriverConfig(steps=1, stop_limit=1.0, **limits),
        logs=tmp_path,
    )


def test_getting_ready_does_not_count_as_a_stall(tmp_path: Path) -> None:
    assert slow(tmp_path, 6.0, stall_limit=2.0).run() == Outcome(1)


def test_a_worker_that_does_not_get_ready_is_named(tmp_path: Path) -> None:
    with pytest.raises(Stalled, match=r"no progress for 8 s while waiting for sink/0 to get ready"):
        slow(tmp_path, 60.0, stall_limit=2.0, start_limit=8.0).run()
