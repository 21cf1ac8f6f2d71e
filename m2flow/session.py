"""One run of one recipe: the run folder, the driver and everything that listens to it.

The driver knows steps and workers; this knows what they mean to the user: metrics, alarms, evaluations, best
checkpoint, early stop, progress, trace, report, and a status file that always says how the run stands.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from m2flow import build, memory
from m2flow.config import EarlyStopConfig, Recipe, dump
from m2flow.flow.cluster import Cluster
from m2flow.flow.graph import Flow
from m2flow.flow.plan import Plan
from m2flow.observe import alarms as alarm_rules
from m2flow.observe import runinfo
from m2flow.observe.layout import RunFolder, write_json
from m2flow.observe.metrics import reduce
from m2flow.observe.progress import Progress
from m2flow.observe.rundata import attempted, show_interval, show_number
from m2flow.observe.samples import sample_files
from m2flow.observe.timeline import export_chrome
from m2flow.observe.trace import Tracer
from m2flow.protocols import Levelled, Policy
from m2flow.runtime.driver import Driver, DriverConfig, Hooks, Outcome, Said, Spans, Stop
from m2flow.sections import TaskConfig
from m2flow.types import Evaluation, Spec, Tree

STATUS_EVERY = 1.0  # seconds between two updates of the status file while steps finish
LEFT = "interrupted"  # why a run stops that was asked to by Ctrl-C, and was given the time to save itself


@dataclass(slots=True)
class EarlyStop:
    """Judges evaluations by one metric. State is small and goes into the checkpoint."""

    config: EarlyStopConfig
    best: float | None = None
    waited: int = 0

    def judge(self, metrics: Mapping[str, float]) -> str | None:
        """A reason to stop, or None."""
        config = self.config
        if config.metric not in metrics:
            raise ValueError(
                f"early_stop.metric: no {config.metric!r} among the evaluation's numbers: {', '.join(sorted(metrics))}"
            )
        value = metrics[config.metric]
        sign = 1.0 if config.mode == "max" else -1.0
        if config.threshold is not None and sign * value >= sign * config.threshold:
            return f"{config.metric} reached {value:.4g} (early_stop.threshold {config.threshold:.4g})"
        if self.best is None or sign * value > sign * self.best:
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        if config.patience is not None and self.waited >= config.patience:
            return f"{config.metric} stayed at {self.best:.4g} for {self.waited} evaluations (early_stop.patience)"
        return None


def entries_per_unit(objective: Any, policy: Policy) -> int:
    """Numbers that the policy draws for what the objective takes a mean over: one entry, one action or one decision.

    Every denoising step draws anew. The start of the chain does not count: its spread is 1 whatever the weights are.
    """
    level = objective.level if isinstance(objective, Levelled) else "chunk"
    if level in ("token", "sequence"):  # the latter reports a mean over its entries
        return 1
    steps = policy.noise[1][policy.axes.index("denoise")] - 1 if "denoise" in policy.axes else 1
    return policy.spec.action.size * steps * (1 if level == "action" else policy.chunk)


@contextmanager
def terminable(soon: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """SIGTERM and SIGHUP end a run at once: workers stopped, files closed, status written. Ctrl-C does so as well, but
    where `soon` says that the run ends by itself. In the main thread only; elsewhere its owner decides."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(f"ended by {signal.Signals(number).name}")

    def ask(_number: int, _frame: object) -> None:
        if not soon():
            raise KeyboardInterrupt

    # What is ignored stays ignored: `nohup m2flow train ...` lives on after logout.
    wanted: dict[signal.Signals, Callable[[int, Any], None]]
    wanted = {n: end for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        wanted[signal.SIGINT] = ask
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@dataclass
class Session:
    """A run in progress. `execute` runs it to its end, whatever the end is, and leaves the folder in order."""

    recipe: Recipe
    folder: RunFolder
    cluster: Cluster
    flow: Flow
    plan: Plan
    spec: Spec
    quiet: bool = False
    saved: tuple[int, Tree, Mapping[str, Any]] | None = None  # the checkpoint to continue from, as a store loads it
    parts: Mapping[str, Any] = field(default_factory=dict)  # parts that the flow brought along
    notes: Sequence[str] = ()  # what `m2flow check` tells of the recipe, told again before the run starts
    done: int = 0
    evaluated: tuple[int, dict[str, float]] = (-1, {})  # step and numbers of the last evaluation
    earlier: float = 0.0  # seconds at work before this session
    env_steps: float = 0.0
    leaving: bool = False  # Ctrl-C was pressed once: the step at work is finished and saved

    def execute(self) -> Outcome:
        """Run, record, report. Raises what made the run fail, after the status file says so."""
        recipe = self.recipe
        self.done, states, meta = self.saved or (0, {}, None)
        self.began_at = self.done
        resumed, states = None if self.saved is None else self.done - 1, dict(states)
        self.saved = None  # the driver hands the states on, and nobody keeps them
        recorder = recipe.observe.build(self.folder.path, dump(recipe), resumed)
        self.recorder, self.store = recorder, build.store(recipe, self.spec, self.folder)
        self.tracer = Tracer(self.folder.trace if recipe.observe.trace else None, resume_step=resumed)
        entries = entries_per_unit(recipe.objective, memory.skeleton(recipe, self.spec).policy)
        # A language model is sure of most of its tokens, also of one that learns well: no floor of its own.
        text = isinstance(recipe.env, TaskConfig)
        floor = -math.inf if text else alarm_rules.automatic_floor(entries, self.spec.action.categories)
        self.alarms = recipe.alarms.build(
            self.folder.alarms, lag=self.plan.lag, floor=floor, resume_step=resumed, coarse=build.coarse(recipe)
        )
        self.stopper = EarlyStop(recipe.early_stop) if recipe.early_stop is not None else None
        if meta is not None:
            self._recall(meta)
        self.progress = Progress(recipe.steps, start=self.done, title=recipe.name)
        self.began = self.stepped = time.monotonic()
        self._status("running")
        for note in () if self.quiet else self.notes:
            self.progress.note(f"note: {note}")
        shown = not self.quiet and recipe.observe.progress
        try:
            with terminable(self._leave), self.progress if shown else nullcontext():
                outcome = self._driver().run(self.done, states)
            if outcome.stop is not None and outcome.stop.reason == LEFT:
                raise KeyboardInterrupt  # noqa: TRY301  as if it had come now, with all saved
        except KeyboardInterrupt as interrupt:
            said = f"{str(interrupt) or LEFT}; {self._way_on()}"
            self._status("stopped", reason=said)
            raise KeyboardInterrupt(said) from None
        except BaseException as error:
            self._status("failed", error=str(error))
            raise
        finally:
            self._close()
        if outcome.stop is None:
            self._status("finished")
        else:
            self._status("stopped", reason=outcome.stop.reason)
        return outcome

    def _driver(self) -> Driver:
        recipe, evaluation = self.recipe, self.recipe.evaluation
        return Driver(
            self.flow,
            self.plan,
            build.parts(recipe, self.spec, self.folder) | dict(self.parts),
            cluster=self.cluster,
            config=DriverConfig(
                steps=recipe.steps,
                evaluate_every=evaluation.every if evaluation is not None else 0,
                evaluate_ends=evaluation is not None,
                save_every=recipe.checkpoint.every,
                stall_limit=recipe.stall_limit,
            ),
            hooks=Hooks(self._on_step, self._on_spans, self._on_evaluation, self._checkpoint_meta),
            store=self.store,
            logs=self.folder.logs,
        )

    # ---- what the driver tells

    def _on_step(self, step: int, said: Said) -> Stop | None:
        """Reduce, record, check. Evaluations are logged under the step they follow."""
        if not self.folder.config.exists():
            raise FileNotFoundError(f"{self.folder.path}: the run's folder was deleted while it trained")
        now = time.monotonic()
        row = reduce(said)
        row["time/step_s"] = now - self.stepped
        row["time/total_s"] = self._worked()
        steps = row.get("rollout/env_steps", 0.0)
        self.env_steps += steps
        row["progress/env_steps"] = self.env_steps
        if now > self.stepped:
            row["throughput/env_steps_per_s"] = steps / (now - self.stepped)
            if "rollout/tokens" in row:
                row["throughput/tokens_per_s"] = row["rollout/tokens"] / (now - self.stepped)
        self.stepped = now
        self.done = step + 1
        fired = self.alarms.check(step, row)
        row |= alarm_rules.as_metrics(fired)
        if step % self.recipe.observe.log_every == 0 or self.done == self.recipe.steps:
            self.recorder.log(step, row)
        self.progress.update(self.done, row)
        self._tell_alarms(fired)
        self.tracer.flush()
        if now - self.stated >= STATUS_EVERY:
            self._status("running")
        return stop_for(fired) or self._left()

    def _on_spans(self, spans: Spans) -> None:
        self.tracer.extend(spans)

    def _on_evaluation(self, step: int, payloads: list[Any]) -> Stop | None:
        """Store the evaluation with its protocol, log its numbers, judge them."""
        from m2flow.roles.evaluation import summarise

        found = summarise(step, self.recipe.evaluation.protocol(self.recipe.env), payloads)
        write_json(self.folder.evaluation(step), found)
        numbers = dict(found.metrics)
        self.evaluated = (step, numbers)
        fired = self.alarms.check(step, numbers)
        self.recorder.log(max(step - 1, 0), numbers | alarm_rules.as_metrics(fired))
        self._tell_alarms(fired)
        self.progress.values.update(numbers)
        if not self.quiet:
            self.progress.note(f"evaluation after step {step}: {evaluation_line(found)}")
        reason = self.stopper.judge(numbers) if self.stopper is not None and step > 0 else None
        self.stepped = time.monotonic()  # an evaluation is not part of the next step
        return stop_for(fired) or (self._left() if reason is None else Stop(reason))

    def _tell_alarms(self, fired: Sequence[alarm_rules.Alarm]) -> None:
        for alarm in fired:
            self.progress.note(f"alarm {alarm.kind} at step {alarm.step}: {alarm.text}")

    # ---- Ctrl-C

    def _leave(self) -> bool:
        """Whether the run ends by itself after Ctrl-C: the first one, with steps done that are not saved."""
        if self.leaving or not self.folder.config.exists():
            return False
        kept = max([self.began_at, *(step for step in self.store.steps() if step <= self.done)])
        if self.done == kept:
            return False
        self.leaving = True
        with suppress(RuntimeError):  # the signal came in the middle of another line
            self.progress.note(
                "interrupted: the step at work is finished and saved; press Ctrl-C again to end now and lose what "
                f"came after step {kept}"
            )
        return True

    def _left(self) -> Stop | None:
        """The wish to end, once Ctrl-C was pressed; of a run that is done anyway there is none."""
        return Stop(LEFT) if self.leaving and self.done < self.recipe.steps else None

    # ---- checkpoints

    def _checkpoint_meta(self, step: int) -> Mapping[str, Any]:
        """`metrics` are those of an evaluation of these very weights; the best checkpoint is chosen by them."""
        return {
            "metrics": self.evaluated[1] if self.evaluated[0] == step else {},
            "seed": self.recipe.seed,
            "alarms": self.alarms.state(),
            "env_steps": self.env_steps,
            "seconds": self._worked(),
            "early_stop": None if self.stopper is None else {"best": self.stopper.best, "waited": self.stopper.waited},
        }

    def _recall(self, meta: Mapping[str, Any]) -> None:
        """Counters of the resumed run. What was found after the step that it goes on from is no longer its own."""
        for step, path in self.folder.evaluation_files():
            if step > self.done:
                path.unlink()
        for kind, first in (("step", self.done), ("eval", self.done + 1)):
            for step, path in sample_files(self.folder.samples, kind):
                if step >= first:
                    path.unlink()
        self.alarms.restore(meta["alarms"])
        self.env_steps, self.earlier = meta["env_steps"], meta["seconds"]
        if self.stopper is not None and meta["early_stop"] is not None:
            self.stopper.best, self.stopper.waited = meta["early_stop"]["best"], meta["early_stop"]["waited"]

    # ---- the folder

    def _status(self, state: str, *, error: str | None = None, reason: str | None = None) -> None:
        self.stated = time.monotonic()
        runinfo.write_status(
            self.folder,
            state,
            step=self.done,
            steps=self.recipe.steps,
            seconds=self._worked(),
            error=error,
            reason=reason,
        )

    def _worked(self) -> float:
        """Seconds that the run has been at work, this session and those before it."""
        return self.earlier + time.monotonic() - self.began

    def _way_on(self) -> str:
        """How an interrupted run is continued, if it can be."""
        if not self.folder.config.exists():
            return f"{self.folder.path} was deleted, so it cannot be resumed"
        own = [step for step in self.store.steps() if step <= self.done]  # a later one is of another past
        if not own:
            return (
                f"{self.folder.path} has no checkpoint yet, so it cannot be resumed, and {self.done} step(s) are lost: "
                "train again in another folder (checkpoint.every says how often a run is saved)"
            )
        latest = build.saved_step(self.store)
        saved, named = (latest, "") if latest in own else (own[-1], f" --step {own[-1]}")
        lost = f"; {self.done - saved} later step(s) are lost" if self.done > saved else ""
        return f"`m2flow resume {self.folder.path}{named}` continues it after step {saved}{lost}"

    def _close(self) -> None:
        """Close every file and tracker. One that fails is named; it neither hides how the run ended nor keeps the
        others open."""
        for close in (self.recorder.close, self.alarms.close, self.tracer.close, self._export):
            try:
                close()
            except Exception as error:  # noqa: BLE001 - a tracker is another package's code
                self.progress.note(f"could not close {close.__qualname__}: {type(error).__name__}: {error}")

    def _export(self) -> None:
        if self.recipe.observe.trace and self.folder.trace.exists():
            export_chrome(self.folder.trace, self.folder.chrome_trace)


def stop_for(fired: Sequence[alarm_rules.Alarm]) -> Stop | None:
    """Whether the run should stop, if one of these alarms says so. Weights behind a number that is none are not
    saved."""
    stops = [alarm for alarm in fired if alarm.action == "stop"]
    if not stops:
        return None
    return Stop(f"alarm {stops[0].kind}: {stops[0].text}", save=all(alarm.kind != "non_finite" for alarm in stops))


def evaluation_line(found: Evaluation) -> str:
    """The headline numbers with their intervals."""
    shown = [name for name in ("eval/success_once", "eval/success_at_end", "eval/return") if name in found.metrics]
    parts = []
    for name in shown:
        value = show_number(found.metrics[name], name)
        pair = found.intervals.get(name)
        parts.append(f"{name} {value}" + (f" {show_interval(pair, name)}" if pair is not None else ""))
    return ", ".join(parts) + f" over {len(found.episodes)} {attempted(found)[0]}"


def open_folder(recipe: Recipe, folder: RunFolder, source: str) -> None:
    """Make the run folder and write what the run is: recipe, resolved config, versions, git, seeds."""
    if folder.status.exists():
        raise FileExistsError(
            f"{folder.path} already holds a run; choose another run_dir, or continue it: m2flow resume {folder.path}"
        )
    folder.create()
    folder.recipe.write_text(source, encoding="utf-8")
    write_json(folder.config, dump(recipe))
    runinfo.write_env(folder, {"run": recipe.seed})
