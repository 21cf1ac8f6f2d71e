"""What a user sees while a run is going: a bar on a terminal, one plain line every few seconds anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from m2flow.observe.rundata import (
    NONE,
    RunData,
    headline,
    interval,
    show_gain,
    show_interval,
    show_number,
    show_seconds,
)

SHOWN = (  # (metric, label); the first of each label that a run has is shown
    ("rollout/return", "return"),
    ("eval/success_once", "eval success"),
    ("rollout/success", "success"),
    ("train/policy_loss", "loss"),
    ("train/critic_loss", "loss"),
)


class Progress:
    """Progress of one run from step `start` to `steps`. Shown inside of its `with` only; outside it just counts.

    `console` is a `rich.console.Console` (default: standard error); without a terminal there is no bar but a line every
    `every_s` seconds, and one at the end, so that log files stay readable.
    """

    def __init__(
        self,
        steps: int,
        *,
        start: int = 0,
        title: str = "train",
        console: Any = None,
        every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.console import Console

        self.console = Console(stderr=True) if console is None else console
        self.steps, self.start, self.title, self.every_s, self.clock = steps, start, title, every_s, clock
        self.done = start
        self.values: dict[str, float] = {}
        self._env_steps = 0.0
        self._began = self._printed = clock()
        self._shown = False  # until entered, nothing is printed but notes
        self._bar: Any = None
        self._task: Any = None

    @property
    def live(self) -> bool:
        """Whether there is a terminal to draw a bar on."""
        return bool(self.console.is_terminal) and not self.console.is_dumb_terminal

    def __enter__(self) -> Self:
        self._began = self._printed = self.clock()
        self._shown = True
        if self.live:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                console=self.console,
            )
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.steps, completed=self.start, numbers="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def update(self, done: int, metrics: Mapping[str, float]) -> None:
        """`done` steps are finished; `metrics` are the reduced ones of the last. Missing ones keep their last value."""
        self.done = done
        self.values.update(metrics)
        self._env_steps += metrics.get("rollout/env_steps", 0.0)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, numbers=self.numbers())
        elif self._shown and self.clock() - self._printed >= self.every_s:
            self._print_line()

    def note(self, text: str) -> None:
        """A line above the bar: an evaluation, a checkpoint, an alarm. Printed as it is, without markup."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def numbers(self) -> str:
        """The part behind the bar: rate, return, success, time left."""
        acts = "answers" if "rollout/tokens" in self.values else "env steps"
        parts = [f"{rate:,.0f} {acts}/s"] if (rate := self._rate()) > 0 else []
        labels: dict[str, str] = {}
        for name, label in SHOWN:
            if name in self.values and (label != "loss" or not labels):
                labels.setdefault(label, show_number(self.values[name], name))
        parts += [f"{label} {value}" for label, value in labels.items()]
        elapsed, finished = self.clock() - self._began, self.done - self.start
        if finished > 0 and self.done < self.steps:
            parts.append(f"ETA {show_seconds(elapsed / finished * (self.steps - self.done))}")
        return "  ".join(parts)

    def _rate(self) -> float:
        stated = self.values.get("throughput/env_steps_per_s")
        elapsed = self.clock() - self._began
        return stated if stated is not None else (self._env_steps / elapsed if elapsed > 0 else 0.0)

    def _print_line(self) -> None:
        self._printed = self.clock()
        self.note(f"{self.title}: step {self.done}/{self.steps}  {self.numbers()}".rstrip())

    def close(self) -> None:
        """Stop drawing; without a terminal print where the run ended."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        elif self._shown and self.done > self.start:
            self._print_line()


def result_table(runs: Sequence[RunData]) -> Any:
    """A `rich.table.Table` of evaluations before and after training, one row per run, with 95 % intervals and the
    mean."""
    from rich.table import Table
    from rich.text import Text

    metrics = [metric for metric in headline(runs) if metric != "eval/length"]
    gains = [(run.label, show_gain(run, next(iter(metrics), ""))) for run in runs]
    told = "\n".join(f"{label}: {text}" for label, text in gains if text)
    title = "Evaluation before and after training (95 % intervals)"
    table = Table(title=title, title_justify="left", caption=told or None, caption_justify="left")
    table.add_column("run")
    for metric in metrics:
        table.add_column(Text(f"{metric.removeprefix('eval/')}\nbefore"), justify="right")
        table.add_column(Text("\nafter"), justify="right", style="bold")
    table.add_column("wall time", justify="right")
    for run in runs:
        cells = [_cell(evaluation, metric) for metric in metrics for evaluation in (run.before, run.after)]
        table.add_row(Text(run.label), *map(Text, cells), show_seconds(run.seconds), end_section=run is runs[-1])
    if len(runs) > 1:
        means = [_mean([getattr(r, which) for r in runs], m) for m in metrics for which in ("before", "after")]
        table.add_row(f"mean of {len(runs)}", *map(Text, means), "")
    return table


def _cell(evaluation: Any, metric: str) -> str:
    if evaluation is None or metric not in evaluation.metrics:
        return NONE
    number = show_number(evaluation.metrics[metric], metric)
    return f"{number}\n{show_interval(interval(evaluation, metric), metric)}".rstrip()


def _mean(evaluations: Sequence[Any], metric: str) -> str:
    values = [e.metrics[metric] for e in evaluations if e is not None and metric in e.metrics]
    return show_number(sum(values) / len(values), metric) if values else NONE
