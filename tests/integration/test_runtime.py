"""The runtime alone: the same numbers under every plan, first failure wins, bounded ends, no process left."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from m2flow.flow.plan import Place, Plan
from m2flow.runtime.cluster import detect
from m2flow.runtime.driver import Driver, DriverConfig, Hooks
from m2flow.runtime.failures import RunFailed, Stalled
from m2flow.runtime.worker import Worker
from tests.integration import toy_flow

PLANS = [("shared", 1), ("shared", 2), ("apart", 1), ("processes", 1), ("processes", 2)]


def run(
    tmp_path: Path, kind: str, replicas: int = 1, *, steps: int = 4, lag: int = 0, stall: float = 60.0, **source: Any
) -> tuple[Driver, dict[int, float]]:
    seen: dict[int, float] = {}

    def on_step(step: int, said: Any) -> None:
        [(_, metrics)] = said
        seen[step] = metrics["train/loss"].value

    driver = Driver(
        toy_flow.FLOW,
        toy_flow.plan(kind, replicas, lag),
        toy_flow.parts(**source),
        cluster=detect(),
        config=DriverConfig(steps=steps, stall_limit=stall, stop_limit=5.0),
        hooks=Hooks(on_step=on_step),
        logs=tmp_path,
    )
    return driver, seen


@pytest.mark.parametrize(("kind", "replicas"), PLANS)
def test_every_plan_gives_the_same_numbers(tmp_path: Path, kind: str, replicas: int) -> None:
    driver, seen = run(tmp_path, kind, replicas)
    outcome = driver.run()
    assert outcome.steps == 4
    # 4 values per replica, each 10*step + rank + version, and version == step at lag 0
    want = {step: sum(4 * (10.0 * step + rank + step) for rank in range(replicas)) for step in range(4)}
    assert seen == want


def test_lag_one_lets_the_source_run_ahead(tmp_path: Path) -> None:
    driver, seen = run(tmp_path, "processes", lag=1, steps=6)
    driver.run()
    assert set(seen) == set(range(6))
    for step, value in seen.items():
        version = value / 4 - 10.0 * step
        assert step - 1 <= version <= step


@pytest.mark.parametrize("kind", ["shared", "processes"])
def test_a_stage_that_exits_fails_the_run_at_once(tmp_path: Path, kind: str) -> None:
    driver, _ = run(tmp_path, kind, fail_at=1, how="system exit")
    with pytest.raises(RunFailed, match="SystemExit"):
        driver.run()


@pytest.mark.parametrize("kind", ["shared", "processes"])
def test_first_failure_names_stage_rank_exception_and_log(tmp_path: Path, kind: str) -> None:
    driver, _ = run(tmp_path, kind, fail_at=2)
    with pytest.raises(RunFailed) as failure:
        driver.run()
    text = str(failure.value)
    assert failure.value.stage == "source" and failure.value.rank == 0
    assert "ArithmeticError: the source went wrong" in text and "log:" in text


def test_killed_worker_ends_the_run_and_leaves_no_process(tmp_path: Path) -> None:
    driver, _ = run(tmp_path, "processes", fail_at=1, how="exit")
    started = time.monotonic()
    with pytest.raises(RunFailed, match="SIGKILL"):
        driver.run()
    assert time.monotonic() - started < 30
    pids = [pid for pid in driver.pids.values() if pid != os.getpid()]
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_hang_is_reported_with_who_waits_for_whom(tmp_path: Path) -> None:
    driver, _ = run(tmp_path, "processes", fail_at=1, how="hang", stall=3.0)
    with pytest.raises(Stalled) as stalled:
        driver.run()
    text = str(stalled.value)
    assert "no progress for 3 s" in text
    assert "source" in text and "sink waits for step 1 from [('source', 0)]" in text
    assert "_misbehave" in text, "the stack of the stuck thread is in the message"


def test_processes_are_pinned_to_their_cores(tmp_path: Path) -> None:
    payloads: list[Any] = []
    driver, _ = run(tmp_path, "processes", steps=1)
    original = driver._on_report
    affinity: dict[int, list[int]] = {}

    def spy(worker: str, stage: str, rank: int, report: Any) -> None:
        payloads.append(report.payload)
        for pid in [*report.payload["pids"], report.payload["sink"]]:
            affinity[pid] = psutil.Process(pid).cpu_affinity()
        original(worker, stage, rank, report)

    driver._on_report = spy
    driver.run()
    cores = sorted(os.sched_getaffinity(0))
    assert [affinity[pid] for pid in payloads[0]["pids"]] == [[cores[0]]]
    assert affinity[payloads[0]["sink"]] == [cores[1]]


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_an_inbox_holds_at_most_lag_plus_one_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lag: int) -> None:
    """Nothing but the driver's admission bounds it. The sink waits until the source is as far ahead as it may be."""
    steps, most, ended, made = 8, 0, -1, threading.Semaphore(0)
    receive, consume = Worker._on_item, toy_flow.Sink.work

    def seen(worker: Worker, stage: str, producer: Any, step: int, item: Any, end: bool) -> None:
        nonlocal most
        receive(worker, stage, producer, step, item, end)
        most = max(most, sum(worker.hosts[stage].inbox.size(str(s)) > 0 for s in range(steps)))
        if end:
            made.release()

    async def slow(sink: toy_flow.Sink, items: Any) -> Any:
        nonlocal ended
        ahead = min(items[0]["step"] + lag, steps - 1)  # the last step that may be on its way during this one
        while ended < ahead:
            assert await asyncio.to_thread(made.acquire, timeout=60)
            ended += 1
        for output in consume(sink, items):
            yield output

    monkeypatch.setattr(Worker, "_on_item", seen)
    monkeypatch.setattr(toy_flow.Sink, "work", slow)
    front, back = Place(("cpu:0",)), Place(("cpu:1",))
    plan = Plan({"source": front, "adder": front, "sink": back}, lag=lag)
    driver = Driver(
        toy_flow.FLOW, plan, toy_flow.parts(), cluster=detect(), config=DriverConfig(steps=steps), logs=tmp_path
    )
    assert driver.run().steps == steps
    assert lag <= most <= lag + 1, "the source ran ahead, and no further"
