"""What every Runtime must do. A new one adds one `Case` to test_runtimes.py, and all of this is asked of it.

The suite speaks to workers as the driver does, over the links that `start` gives, and runs a real driver on top. The
flow is that of tests/integration/toy_flow.py: no learning, so that what is tested is the runtime alone.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from m2flow.comm.waiting import Closed
from m2flow.flow.plan import Place, Plan
from m2flow.protocols import Runtime
from m2flow.runtime.cluster import detect
from m2flow.runtime.driver import Driver, DriverConfig, Hooks
from m2flow.runtime.failures import RunFailed
from m2flow.runtime.wiring import wire
from m2flow.runtime.worker import Context, Program
from m2flow.types import Tick
from tests.contracts.channel_suite import WAIT, until
from tests.integration import toy_flow

PROTOCOLS = ("Runtime",)
SOURCE, SINK = "source+adder/0", "sink/0"  # the workers of the plan below


@dataclass(frozen=True)
class Case:
    """`make(program, logs)` is what a driver calls. `process`: workers are processes of their own, as the plan's places
    say. `killed`: a word in the exit reason of a worker that got a SIGKILL."""

    name: str
    make: Callable[[Program, Path], Runtime]
    process: bool
    killed: str = ""

    def plan(self) -> Plan:
        front, back = Place(("cpu:0",), process=self.process), Place(("cpu:1",), process=self.process)
        return Plan({"source": front, "adder": front, "sink": back})


class Stuck:
    """A source that says so and then does nothing until it is let go; not even its event loop moves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def work(self, items: Sequence[Tick]) -> AsyncIterator[Any]:
        (self.folder / "stuck").touch()
        try:
            until(lambda: (self.folder / "free").exists())
        finally:
            (self.folder / "went on").touch()
        for tick in items:
            yield {"step": tick.step}


@dataclass(frozen=True)
class StuckPart:
    folder: Path

    def __call__(self, context: Context) -> Stuck:
        return Stuck(self.folder)


def ours() -> set[str]:
    """Threads and child processes of this process."""
    threads = {f"thread {thread.name} {thread.ident}" for thread in threading.enumerate()}
    return threads | {f"process {child.pid}" for child in psutil.Process().children(recursive=True)}


def prepared(case: Case, logs: Path, **parts: Any) -> Runtime:
    """A runtime that has not been started; `parts` in place of those of the toy flow."""
    plan = case.plan().resolve(detect())
    wiring = wire(toy_flow.FLOW, plan, detect())
    return case.make(Program(toy_flow.FLOW, plan, wiring, toy_flow.parts() | parts, WAIT), logs)


@contextlib.contextmanager
def running(case: Case, logs: Path, **parts: Any) -> Iterator[tuple[Runtime, Mapping[str, Any], dict[str, int]]]:
    """A started runtime, the driver's links, and the process of each worker. At the end nothing may be left of it."""
    before, runtime = ours(), prepared(case, logs, **parts)
    links = runtime.start()
    try:
        said = {name: link.recv(timeout=WAIT) for name, link in links.items()}
        assert [(kind, name) for kind, name, _ in said.values()] == [("ready", name) for name in links]
        yield runtime, links, {name: pid for name, (_, _, pid) in said.items()}
    finally:
        for link in links.values():
            with contextlib.suppress(Closed):
                link.send(("stop",), timeout=WAIT)
        runtime.stop(WAIT)
        for link in links.values():
            link.close()
    until(lambda: ours() <= before)


def driver(case: Case, logs: Path, seen: dict[int, float] | None = None, **source: Any) -> Driver:
    def on_step(step: int, said: Any) -> None:
        if seen is not None:
            seen[step] = said[0][1]["train/policy_loss"].value

    return Driver(
        toy_flow.FLOW,
        case.plan(),
        toy_flow.parts(**source),
        cluster=detect(),
        config=DriverConfig(steps=3, stall_limit=WAIT, stop_limit=WAIT),
        hooks=Hooks(on_step=on_step),
        logs=logs,
        runtime=case.make,
    )


def heard(link: Any, kind: str) -> Any:
    """The next message of this kind."""
    while (message := link.recv(timeout=WAIT))[0] != kind:
        pass
    return message


# ---- checks


def check_every_worker_starts_where_the_plan_says_and_has_a_link(case: Case, logs: Path) -> None:
    with running(case, logs) as (_, links, pids):
        assert set(links) == {SOURCE, SINK}
        assert len(set(pids.values()) - {os.getpid()}) == (2 if case.process else 0)


def check_links_carry_questions_and_answers(case: Case, logs: Path) -> None:
    with running(case, logs) as (_, links, _):
        for number, name in enumerate(links):
            links[name].send(("status", number), timeout=WAIT)
        for number, name in enumerate(links):
            _, answered, status = heard(links[name], "answer")
            assert answered == number
            assert set(status["doing"]) == {name.partition("+")[0].partition("/")[0]}


def check_workers_reach_each_other(case: Case, logs: Path) -> None:
    """Items, calls and weights arrive: 4 values, each 10 * step + version, and at lag 0 the version is the step."""
    seen: dict[int, float] = {}
    before = ours()
    assert driver(case, logs, seen).run().steps == 3
    assert seen == {n: 4 * (10.0 * n + n) for n in range(3)}
    until(lambda: ours() <= before)


def check_workers_that_are_told_to_stop_end_by_themselves(case: Case, logs: Path) -> None:
    with running(case, logs) as (runtime, links, pids):
        for link in links.values():
            link.send(("stop",), timeout=WAIT)
        assert list(runtime.stop(WAIT)) == []
        for name, link in links.items():
            with pytest.raises(Closed):
                heard(link, "nothing more")
            assert runtime.exit_reason(name)
            assert pids[name] == os.getpid() or not psutil.pid_exists(pids[name])
        assert list(runtime.stop(0.0)) == [], "again is no harm"


def check_a_worker_whose_link_closes_ends(case: Case, logs: Path) -> None:
    """The driver is gone: nobody is left who could tell it to stop."""
    with running(case, logs) as (runtime, links, _):
        for link in links.values():
            link.close()
        assert list(runtime.stop(WAIT)) == []


def check_a_worker_that_does_not_stop_is_named_and_not_waited_for(case: Case, logs: Path) -> None:
    with running(case, logs, source=StuckPart(logs)) as (runtime, links, pids):
        try:
            for link in links.values():
                link.send(("go", 0), timeout=WAIT)
            links[SOURCE].send(("tick", "source", Tick(0, 0)), timeout=WAIT)
            until((logs / "stuck").exists)
            for link in links.values():
                link.send(("stop",), timeout=WAIT)
            assert SOURCE in runtime.stop(1.0)
            assert not (logs / "went on").exists(), "it was waited for to the end"
            assert not case.process or not psutil.pid_exists(pids[SOURCE])
        finally:
            (logs / "free").touch()  # a thread cannot be killed


def check_a_killed_worker_is_told_in_words(case: Case, logs: Path) -> None:
    if not case.killed:
        return
    with running(case, logs) as (runtime, links, pids):
        os.kill(pids[SINK], signal.SIGKILL)
        with pytest.raises(Closed):
            heard(links[SINK], "nothing more")
        assert case.killed in runtime.exit_reason(SINK)


def check_the_first_failure_ends_the_run_and_names_the_stage(case: Case, logs: Path) -> None:
    before = ours()
    with pytest.raises(RunFailed, match="ArithmeticError: the source went wrong") as failure:
        driver(case, logs, fail_at=1).run()
    assert (failure.value.stage, failure.value.rank) == ("source", 0)
    until(lambda: ours() <= before)


def check_a_stage_that_cannot_be_built_is_a_failure_too(case: Case, logs: Path) -> None:
    runtime = prepared(case, logs, sink=int)  # no part: it takes no context
    links = runtime.start()
    _, stage, rank, _, error, text = heard(links[SINK], "failed")
    assert (stage, rank) == ("sink", 0)
    assert "TypeError" in error and "Traceback" in text
    for link in links.values():
        link.send(("stop",), timeout=WAIT)
    assert list(runtime.stop(WAIT)) == []
    for link in links.values():
        link.close()


def check_what_cannot_be_sent_is_refused_before_anything_runs(case: Case, logs: Path) -> None:
    if not case.process:
        return
    before, runtime = ours(), prepared(case, logs, sink=lambda context: None)
    with pytest.raises(ValueError, match="cannot be sent"):
        runtime.start()
    gc.collect()  # a link that was left open would warn, and a warning is an error here
    assert ours() == before
    assert list(runtime.stop(0.0)) == []


def check_stopping_what_was_never_started_is_no_harm(case: Case, logs: Path) -> None:
    assert list(prepared(case, logs).stop(0.0)) == []


CHECKS: list[Callable[[Case, Path], None]] = [
    check for name, check in sorted(globals().items()) if name.startswith("check_")
]
