"""The runtime alone: the same numbers under every plan, first failure wins, bounded ends, no process left."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from m2flow.flow.cluster import Cluster, Device
from m2flow.flow.graph import Call, Flow, Node, Stream, Weights
from m2flow.flow.plan import Place, Plan, PlanError
from m2flow.runtime.cluster import detect
from m2flow.runtime.driver import Driver, DriverConfig, Hooks
from m2flow.runtime.failures import RunFailed, Stalled
from m2flow.runtime.local import LocalRuntime
from m2flow.runtime.wiring import check_runnable, wire
from m2flow.runtime.worker import Program, Worker
from tests.integration import toy_flow

PLANS = [("shared", 1), ("shared", 2), ("apart", 1), ("processes", 1), ("processes", 2)]


def run(
    tmp_path: Path, kind: str, replicas: int = 1, *, steps: int = 4, lag: int = 0, stall: float = 60.0, **source: Any
) -> tuple[Driver, dict[int, float]]:
    seen: dict[int, float] = {}

    def on_step(step: int, said: Any) -> None:
        [(_, metrics)] = said
        seen[step] = metrics["train/policy_loss"].value

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


class Meeting(toy_flow.Source):
    """Each of two replicas works only while the other one does."""

    door = threading.Barrier(2, timeout=30.0)

    async def work(self, items: Any) -> Any:
        """The item, once both are at it."""
        self.door.wait()
        async for item in super().work(items):
            yield item


def test_replicas_on_cores_of_their_own_work_at_the_same_time(tmp_path: Path) -> None:
    """They take turns with the sink, which needs both cores, and not with each other."""
    driver, seen = run(tmp_path, "shared", 2)
    driver.program.parts["source"] = lambda context: Meeting(context, 4, None, "")  # type: ignore[index]
    spans: list[Any] = []
    driver.hooks.on_spans = spans.extend
    driver.run()
    assert len(seen) == 4
    turns = {(name, rank, step): (begin, end) for name, rank, _, step, begin, end, kind in spans if kind == "step"}
    for step in range(4):
        (a, b), (c, d) = turns["source", 0, step], turns["source", 1, step]
        assert max(a, c) < min(b, d), "their spans overlap"


def test_a_lease_covers_what_a_replica_reaches_by_calls() -> None:
    """The service of a service too, and of each only the replica that is asked."""
    flow = Flow(
        "chain",
        (Node("a", trigger="step"), Node("s", kind="service"), Node("t", kind="service"), Node("b")),
        (Stream("a", "b"), Call("a", "s"), Call("s", "t"), Weights("b", "t")),
    )
    two = {name: Place(("cpu:0", "cpu:1"), replicas=2) for name in "st"}
    plan = Plan({"a": Place(("robot:l", "robot:r"), replicas=2), **two, "b": Place(("cpu:0", "cpu:1"))})
    lab = Cluster((*(Device(f"cpu:{i}") for i in range(2)), Device("robot:l"), Device("robot:r")))
    leases = wire(flow, plan, lab).leases
    assert leases == {("a", 0): ("cpu:0",), ("a", 1): ("cpu:1",), ("b", 0): ("cpu:0", "cpu:1")}


def test_replicas_that_nobody_sends_to_are_refused() -> None:
    flow = Flow("wide", (Node("a", trigger="step"), Node("b")), (Stream("a", "b"),))
    cluster = Cluster((Device("cpu:0"), Device("cpu:1")))
    plan = Plan({"a": Place(("cpu:0",)), "b": Place(("cpu:1",), replicas=2)})
    with pytest.raises(PlanError, match="b: 2 replicas, and fewer that send to it"):
        check_runnable(flow, plan, cluster)
    check_runnable(flow, Plan({"a": plan.places["b"], "b": plan.places["a"]}), cluster)


class Late(Driver):
    """Looks around only when the stage that it waited for has failed at last."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fail = threading.Event()

    def _status(self) -> dict[str, Any]:
        self.fail.set()
        while not any(message[0] == "failed" for _, message in list(self.events.queue)):
            time.sleep(0.01)
        return super()._status()


def test_a_failure_that_comes_while_the_driver_asks_around_is_the_end_of_the_run(tmp_path: Path) -> None:
    class Patient(toy_flow.Source):
        async def work(self, items: Any) -> Any:
            """Nothing, then a failure."""
            await asyncio.to_thread(driver.fail.wait, 60)
            raise ArithmeticError("the source went wrong at last")
            yield

    driver = Late(
        toy_flow.FLOW,
        toy_flow.plan("shared"),
        toy_flow.parts() | {"source": lambda context: Patient(context, 4, None, "")},
        cluster=detect(),
        config=DriverConfig(steps=1, stall_limit=1.0, stop_limit=5.0),
        logs=tmp_path,
    )
    with pytest.raises(RunFailed, match="went wrong at last"):
        driver.run()


class Stubborn(subprocess.Popen[bytes]):
    """A process that does not end by itself, and what it was waited for."""

    def __init__(self) -> None:
        super().__init__([sys.executable, "-c", "import time; time.sleep(600)"])
        self.waits: list[float | None] = []

    def wait(self, timeout: float | None = None) -> int:
        """As ever, and noted."""
        self.waits.append(timeout)
        return super().wait(timeout)


def test_the_limit_for_stopping_is_one_for_all_workers(tmp_path: Path) -> None:
    plan = toy_flow.plan("processes")
    runtime = LocalRuntime(
        Program(toy_flow.FLOW, plan, wire(toy_flow.FLOW, plan, detect()), toy_flow.parts()), tmp_path
    )
    children = {name: Stubborn() for name in ("a", "b", "c")}
    runtime.processes.update(children)
    assert runtime.stop(0.2) == ["a", "b", "c"]
    assert [child.waits[0] for child in children.values()][1:] == [0.0, 0.0], "the first has used it up"
    assert all(child.poll() == -9 for child in children.values())


class Mover(toy_flow.Sink):
    """Notes where it is."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def work(self, items: Any) -> Any:
        """As ever."""
        self.log.append("work")
        return super().work(items)

    def close_step(self, step: int) -> Any:
        """As ever."""
        self.log.append("close")
        return super().close_step(step)

    def onload(self) -> None:
        """Comes."""
        self.log.append("on")

    def offload(self) -> None:
        """Goes."""
        self.log.append("off")


def moving(tmp_path: Path, sink: Any) -> Driver:
    """The toy flow, whose sink leaves the cores between its turns."""
    flow = replace(
        toy_flow.FLOW, nodes=tuple(replace(node, resident=node.name == "sink") for node in toy_flow.FLOW.nodes)
    )
    plan = toy_flow.plan("shared")
    plan = replace(plan, places=plan.places | {"sink": replace(plan.places["sink"], offload=True)})
    parts = toy_flow.parts() | {"sink": lambda _context: sink}
    return Driver(flow, plan, parts, cluster=detect(), config=DriverConfig(steps=2), logs=tmp_path)


def test_what_is_off_loaded_is_there_in_its_turns_only(tmp_path: Path) -> None:
    log: list[str] = []
    moving(tmp_path, Mover(log)).run()
    assert log == ["on", "work", "off", "on", "close", "off"] * 2


def test_a_node_that_says_it_can_leave_and_cannot_fails_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="sink: its node is resident, but Sink lacks onload or offload"):
        moving(tmp_path, toy_flow.Sink()).run()
