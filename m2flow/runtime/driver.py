"""The driver: starts workers, admits steps, collects reports, evaluates, checkpoints, stops. First failure wins.

    admit step s      when at most `lag` finished steps behind and every service has loaded version >= s - lag
    step s is done    when every stage that it reaches has ended it; then metrics are logged
    boundary          before an evaluation or checkpoint nothing is admitted until the last admitted step is done

Waits: only for events from workers; each has a limit, and on expiry every worker is asked what it does. Start-up has a
limit of its own: a child that imports its libraries from a slow disk says nothing for long, and is not stuck.
"""

from __future__ import annotations

import itertools
import queue
import socket
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from m2flow.comm.channel import Closed
from m2flow.flow.cluster import Cluster
from m2flow.flow.graph import Flow
from m2flow.flow.plan import Plan
from m2flow.flow.plan import check as check_plan
from m2flow.protocols import Runtime, Store, Transport
from m2flow.runtime.failures import RunFailed, Stalled
from m2flow.runtime.lease import LeaseManager
from m2flow.runtime.local import LocalRuntime
from m2flow.runtime.wiring import check_runnable, wire
from m2flow.runtime.worker import Part, Program
from m2flow.types import Metric, Report, Tick, Tree

Spans = Sequence[tuple[str, int, str, int, float, float, str]]
Said = Sequence[tuple[tuple[str, int], Mapping[str, Metric]]]  # ((stage, replica), its metrics) of each report


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverConfig:
    """When to do what between steps, and how long anything may take."""

    steps: int
    evaluate_every: int = 0  # steps between evaluations; 0: none in between
    evaluate_ends: bool = True  # also before the first and after the last step, where there is an evaluator
    save_every: int = 0  # steps between checkpoints; 0 or less: only the final one
    start_limit: float = 1800.0  # seconds that the next worker may take to get ready
    stall_limit: float = 600.0  # seconds without a word from any worker, once all are ready
    stop_limit: float = 15.0  # seconds a worker may take to stop


def _nothing(*_: Any) -> None:
    """A hook that nobody set."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A wish to end the run. `save` False: the weights are not to be trusted, the latest checkpoint stays as it is."""

    reason: str
    save: bool = True


@dataclass(slots=True)
class Hooks:
    """Who is told. `on_step` and `on_evaluation` may ask to stop."""

    on_step: Callable[[int, Said], Stop | None] = _nothing
    on_spans: Callable[[Spans], None] = _nothing
    on_evaluation: Callable[[int, list[Any]], Stop | None] = _nothing
    checkpoint_meta: Callable[[int], Mapping[str, Any]] = field(default=lambda _step: {})


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: steps done, and what stopped it before the last one, if anything did."""

    steps: int
    stop: Stop | None = None


@dataclass(slots=True)
class _Progress:
    """What the driver knows of the steps in flight."""

    admitted: int
    done: int
    left: dict[int, set[tuple[str, int]]] = field(default_factory=dict)  # stages that have not ended a step
    said: dict[int, list[tuple[tuple[str, int], Mapping[str, Metric]]]] = field(default_factory=dict)
    versions: dict[tuple[str, int], int] = field(default_factory=dict)


class Driver:
    """Runs one flow under one plan. `store` may be None: then nothing is saved."""

    def __init__(
        self,
        flow: Flow,
        plan: Plan,
        parts: Mapping[str, Part],
        *,
        cluster: Cluster,
        config: DriverConfig,
        hooks: Hooks | None = None,
        store: Store | None = None,
        logs: Path = Path("logs"),
        runtime: Callable[[Program, Path], Runtime] = LocalRuntime,
    ) -> None:
        flow.check()
        check_plan(flow, plan, cluster)
        check_runnable(flow, plan, cluster)
        plan = plan.resolve(cluster)
        self.flow, self.plan, self.config, self.store = flow, plan, config, store
        self.hooks = hooks or Hooks()
        self.program = Program(flow, plan, wire(flow, plan, cluster), parts, wait_limit=config.stall_limit)
        self.runtime = runtime(self.program, logs)
        self.logs = logs
        self.events: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue()
        self.leases = LeaseManager(config.stall_limit)
        self.answers: dict[int, Any] = {}
        self.evaluations: dict[int, list[Any]] = defaultdict(list)
        self.evaluators_left: set[tuple[str, int]] = set()
        self.ids = itertools.count()
        self.links: dict[str, Transport] = {}
        self.stopping = False
        self.saved: int | None = None  # step of the last checkpoint
        self.stop: Stop | None = None  # what a hook asked for
        self.pids: dict[str, int] = {}

    # ---- the run

    def run(self, start: int = 0, states: dict[str, Tree] | None = None) -> Outcome:
        """Train until the last step or until a hook asks to stop.

        To continue: `states` of the nodes, as they were saved after `start` steps. They are taken out as they are
        handed on, so that nobody keeps them for the whole run.
        """
        self.progress = _Progress(start, start)
        try:
            self._start(start, states)
            return self._train(start)
        finally:
            self._stop()

    def _start(self, start: int, states: dict[str, Tree] | None) -> None:
        self.links = dict(self.runtime.start())
        for name, link in self.links.items():
            threading.Thread(target=self._read, args=(name, link), name=f"driver<-{name}", daemon=True).start()
        limit = max(self.config.start_limit, self.config.stall_limit)
        self._until(lambda: len(self.pids) == len(self.links), self._not_ready, limit)
        if states:
            self._restore(states)
        for link in self.links.values():
            link.send(("go", start), timeout=self.config.stall_limit)

    def _restore(self, states: dict[str, Tree]) -> None:
        """Hand every node its state; the checkpoint must hold one for each that the plan has, and no more."""
        here = {f"{node}/{spec.rank}" for spec in self.program.wiring.workers for node in spec.nodes}
        lost = sorted(key for key in states if key.replace(".replay", "") not in here)
        known = {key.partition("/")[0] for key in states}
        new = sorted(key for key in here if key.partition("/")[0] in known and key not in states)
        if lost or new:
            raise ValueError(
                f"resume: the checkpoint holds {', '.join(sorted(states))}, and this plan runs "
                f"{', '.join(sorted(here))}; resume with as many replicas of each node as the run had"
            )
        for spec in self.program.wiring.workers:
            own = {f"{node}{part}": f"{node}{part}/{spec.rank}" for node in spec.nodes for part in ("", ".replay")}
            self._ask(spec.id, "restore", {name: states.pop(key) for name, key in own.items() if key in states})

    def _train(self, start: int) -> Outcome:
        progress, config = self.progress, self.config
        if config.evaluate_ends and start == 0:
            self._evaluate(start)
        while progress.done < config.steps and self.stop is None:
            barrier = self._next_boundary(progress.done)
            while progress.done < barrier and self.stop is None:
                self._admit(barrier)
                self._until(partial(self._moved, progress.done, barrier), "a step to finish")
                self._tell_steps()
            self._until(lambda: progress.done == progress.admitted, "admitted steps to finish")
            self._tell_steps()
            if self.stop is None:
                self._at_boundary(progress.done)
        self._save(progress.done)
        return Outcome(progress.done, self.stop)

    def _tell_steps(self) -> None:
        """Hand the reports of every finished step to the hook, in order."""
        for step in sorted(step for step in self.progress.said if step < self.progress.done):
            self._heed(self.hooks.on_step(step, self.progress.said.pop(step)))

    def _heed(self, wish: Stop | None) -> None:
        """The first reason stands; that weights are not to be trusted holds whoever says it."""
        if self.stop is None or wish is None:
            self.stop = self.stop or wish
        else:
            self.stop = replace(self.stop, save=self.stop.save and wish.save)

    def _moved(self, done: int, barrier: int) -> bool:
        """Whether a step has finished since `done`, or another may start."""
        return self.progress.done > done or self._admissible(barrier)

    def _at_boundary(self, done: int) -> None:
        evaluate, save, last = self.config.evaluate_every, self.config.save_every, done >= self.config.steps
        if (evaluate > 0 and done % evaluate == 0) or (last and self.config.evaluate_ends):
            self._evaluate(done)
        if save > 0 and done % save == 0:  # the last one is saved in any case
            self._save(done)

    def _next_boundary(self, done: int) -> int:
        rhythms = (self.config.evaluate_every, self.config.save_every)
        return min([self.config.steps, *((done // every + 1) * every for every in rhythms if every > 0)])

    def _admissible(self, barrier: int) -> bool:
        progress, lag = self.progress, self.plan.lag
        fresh = self._loaded(progress.admitted - lag)
        return progress.admitted < barrier and progress.admitted - progress.done <= lag and fresh

    def _admit(self, barrier: int) -> None:
        """Tick the sources for every step that may start now."""
        while self._admissible(barrier):
            step = self.progress.admitted
            reached = self.flow.downstream(node.name for node in self.flow.sources("step"))
            self.progress.left[step] = {(name, r) for name in reached for r in self._replicas(name)}
            self.progress.said[step] = []
            self.progress.admitted += 1
            self._tick(Tick(step, max(0, step - self.plan.lag)))

    def _tick(self, tick: Tick) -> None:
        for node in self.flow.sources(tick.kind):
            for rank in self._replicas(node.name):
                self._send(self.program.wiring.worker(node.name, rank), ("tick", node.name, tick))

    def _loaded(self, version: int) -> bool:
        """Whether every service that gets weights has loaded this version or a newer one."""
        services = [(edge.dst, rank) for edge in self.flow.weights for rank in self._replicas(edge.dst)]
        return all(self.progress.versions.get(service, -1) >= version for service in services)

    def _replicas(self, node: str) -> range:
        return range(self.plan.places[node].replicas)

    # ---- between steps

    def _evaluate(self, done: int) -> None:
        """Run the evaluators with the weights after `done` steps; nothing else is in flight."""
        evaluators = self.flow.sources("evaluate")
        if not evaluators:
            return
        self._until(lambda: self._loaded(done), "weights to arrive")
        self.evaluators_left = {(node.name, r) for node in evaluators for r in self._replicas(node.name)}
        self._tick(Tick(done, done, kind="evaluate"))
        self._until(lambda: not self.evaluators_left, "the evaluation to finish")
        self._heed(self.hooks.on_evaluation(done, self.evaluations.pop(done)))

    def _save(self, done: int) -> None:
        """A checkpoint of the weights after `done` steps, unless there is one already or they are not to be trusted."""
        if self.store is None or self.saved == done or (self.stop is not None and not self.stop.save):
            return
        states: dict[str, Tree] = {}
        for spec in self.program.wiring.workers:
            own = self._ask(spec.id, "state")
            states |= {f"{node}/{spec.rank}": state for node, state in own.items()}
        self.store.save(done, states, self.hooks.checkpoint_meta(done))
        self.saved = done

    # ---- messages

    def _read(self, name: str, link: Transport) -> None:
        while True:
            try:
                self.events.put((name, link.recv()))
            except Closed:
                self.events.put((name, ("closed",)))
                return
            except Exception as error:  # noqa: BLE001 - a message that cannot be read ends the run, as its first failure
                said = (f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))
                self.events.put((name, ("failed", f"link from {name}", None, socket.gethostname(), *said)))
                return

    def _send(self, worker: str, message: tuple[Any, ...]) -> None:
        try:
            self.links[worker].send(message, timeout=self.config.stall_limit)
        except Closed:
            # its last word, or its death, is queued
            self._until(lambda: False, f"{worker} to say why it closed its link")

    def _ask(self, worker: str, kind: str, *args: Any) -> Any:
        number = next(self.ids)
        self._send(worker, (kind, number, *args))
        self._until(lambda: number in self.answers, f"{worker} to answer {kind!r}")
        return self.answers.pop(number)

    def _not_ready(self) -> str:
        return f"{', '.join(sorted(self.links.keys() - self.pids.keys()))} to get ready"

    def _until(self, done: Callable[[], bool], what: str | Callable[[], str], limit: float | None = None) -> None:
        """Handle events until `done`; the limit (by default `stall_limit`) counts from the last word of any worker."""
        patience = self.config.stall_limit if limit is None else limit
        while not done():
            try:
                worker, message = self.events.get(timeout=patience)
            except queue.Empty:
                raise Stalled(what if isinstance(what, str) else what(), patience, self._status()) from None
            getattr(self, f"_on_{message[0]}")(worker, *message[1:])
            overdue = self.leases.overdue()
            if overdue is not None:
                raise Stalled(overdue, self.leases.limit, self._status())

    def _status(self) -> dict[str, Any]:
        """Ask every worker what it does; those that do not answer within two seconds are named as silent."""
        numbers = {}
        for name, link in self.links.items():
            numbers[next(self.ids)] = name
            try:
                link.send(("status", next(reversed(numbers))), timeout=1.0)
            except (Closed, TimeoutError):
                continue  # named as silent below
        deadline = time.monotonic() + 2.0
        while any(number not in self.answers for number in numbers) and time.monotonic() < deadline:
            try:
                worker, message = self.events.get(timeout=0.1)
            except queue.Empty:
                continue
            if message[0] in ("answer", "failed", "closed"):  # the first failure wins, also over a stall
                getattr(self, f"_on_{message[0]}")(worker, *message[1:])
        return {name: self.answers.pop(number, "no answer") for number, name in numbers.items()}

    def _on_ready(self, worker: str, _id: str, pid: int) -> None:
        self.pids[worker] = pid

    def _on_loaded(self, _worker: str, service: str, rank: int, version: int) -> None:
        self.progress.versions[service, rank] = version

    def _on_report(self, _worker: str, stage: str, rank: int, report: Report) -> None:
        if report.kind == "evaluate":
            self.evaluations[report.step].extend(report.payload or ())
        else:
            self.progress.said[report.step].append(((stage, rank), report.metrics))

    def _on_ended(self, _worker: str, stage: str, rank: int, step: int, kind: str) -> None:
        """A stage has said all it has to say about a step. What it reported before came over the same link."""
        progress = self.progress
        if kind == "evaluate":
            self.evaluators_left.discard((stage, rank))
            return
        progress.left[step].discard((stage, rank))
        while progress.done < progress.admitted and not progress.left[progress.done]:
            del progress.left[progress.done]
            progress.done += 1

    def _on_spans(self, _worker: str, spans: Spans) -> None:
        self.hooks.on_spans(spans)

    def _on_answer(self, _worker: str, number: int, value: Any) -> None:
        self.answers[number] = value

    def _on_acquire(self, worker: str, owner: str, devices: Sequence[str]) -> None:
        stage = owner.rpartition("/")[0]
        self.leases.acquire(owner, tuple(devices), lambda: self._send(worker, ("granted", stage)))

    def _on_release(self, _worker: str, owner: str) -> None:
        self.leases.release(owner)

    def _on_failed(self, worker: str, stage: str, rank: int | None, host: str, error: str, text: str) -> None:
        raise RunFailed(stage, rank, host, error, text, self._log_of(worker))

    def _on_closed(self, worker: str) -> None:
        if not self.stopping:
            for spec in self.program.wiring.workers:
                if spec.id == worker:
                    for node in spec.nodes:
                        self.leases.drop(f"{node}/{spec.rank}")
            reason = self.runtime.exit_reason(worker)
            raise RunFailed(worker, None, "this host", f"the worker is gone: {reason}", "", self._log_of(worker))

    def _log_of(self, worker: str) -> str:
        path = self.logs / f"{worker.replace('/', '-')}.log"
        return str(path) if path.exists() else "the driver's own output (the stage runs in a thread)"

    # ---- the end

    def _stop(self) -> None:
        """Ask every worker to stop, wait a bounded time, kill the rest."""
        self.stopping = True
        for link in self.links.values():
            try:
                link.send(("stop",), timeout=1.0)
            except (Closed, OSError, TimeoutError):
                continue  # already gone
        self.runtime.stop(self.config.stop_limit)
        for link in self.links.values():
            link.close()
