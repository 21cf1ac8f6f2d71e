"""The learning curves of a report: all runs overlaid, against training step, environment steps or time."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from m2flow.observe.metrics import METRICS
from m2flow.observe.rundata import Curve, RunData, interval
from m2flow.observe.svg import Chart, Series, line_chart

FIRST = (
    "eval/success_once",
    "eval/return",
    "rollout/success",
    "rollout/return",
    "rollout/length",
    "train/policy_loss",
    "train/value_loss",
    "train/actor_loss",
    "train/critic_loss",
    "train/entropy",
    "train/approx_kl",
    "train/clip_fraction",
    "train/explained_variance",
    "train/grad_norm",
    "train/alpha",
    "train/logprob_gap",
)
ELSEWHERE = ("alarm/", "time/", "throughput/", "progress/")  # shown in other sections


@dataclass(slots=True)
class Page:
    """What sections add to: charts by key, for the script."""

    charts: dict[str, Any] = field(default_factory=dict)

    def add(self, key: str, chart: Chart) -> str:
        """Keep the numbers, return the SVG."""
        self.charts[key] = chart.data
        return chart.svg


@dataclass(frozen=True, slots=True)
class Axis:
    """One choice of x: its key, its title, and for every run a step -> x function by interpolation points."""

    key: str
    title: str
    points: Sequence[Curve]

    def at(self, run: int, steps: Sequence[int]) -> list[float]:
        """x of each step: the value at the last known step not after it."""
        curve = self.points[run]
        if curve.steps == steps:
            return curve.values
        places = (bisect.bisect_right(curve.steps, step) for step in steps)
        return [curve.values[i - 1] if i else 0.0 for i in places]

    @property
    def span(self) -> tuple[float, float]:
        """From 0 to the furthest any run got, so that all charts of a page line up."""
        return 0.0, max([curve.values[-1] for curve in self.points if curve.values] + [0.0]) or 1.0


def axes(runs: Sequence[RunData]) -> list[Axis]:
    """Training step always; environment steps and minutes where every run has them."""
    every = [
        sorted({s for c in run.curves.values() for s in c.steps} | {e.step for e in run.evaluations}) for run in runs
    ]
    found = [Axis("step", "training step", [Curve(steps, [float(s) for s in steps]) for steps in every])]
    env_steps = [_env_steps(run) for run in runs]
    if all(curve.steps for curve in env_steps):
        found.append(Axis("env", runs[0].acts, env_steps))
    if all(len(run.times.steps) > 1 for run in runs):
        minutes = [_minutes(run) for run in runs]
        if max(curve.values[-1] for curve in minutes) > 0.05:
            found.append(Axis("time", "minutes", minutes))
    return found


def _minutes(run: RunData) -> Curve:
    """Minutes at work by step; the time between a stop and a resume is not counted where the run says so itself."""
    worked = run.curves.get("time/total_s")
    if worked is not None:
        return Curve(worked.steps, [value / 60 for value in worked.values])
    started = run.status.get("started")
    origin = float(started) if isinstance(started, (int, float)) else run.times.values[0]
    return Curve(run.times.steps, [max(0.0, (t - origin) / 60) for t in run.times.values])


def _env_steps(run: RunData) -> Curve:
    if "progress/env_steps" in run.curves:
        return run.curves["progress/env_steps"]
    taken = run.curves.get("rollout/env_steps", Curve([], []))
    counted = (v if math.isfinite(v) else 0.0 for v in taken.values)
    return Curve(taken.steps, list(itertools.accumulate(counted)))


def metric_names(runs: Sequence[RunData]) -> tuple[list[str], list[str]]:
    """(shown first, the rest): names of all curves that belong into this section."""
    have = {name for run in runs for name in run.curves} | {
        n for run in runs for e in run.evaluations for n in e.metrics
    }
    have = {name for name in have if not name.startswith(ELSEWHERE)}
    first = [name for name in FIRST if name in have]
    return first, sorted(have - set(first))


def section(runs: Sequence[RunData], page: Page) -> str:
    """The section's HTML: a legend, a choice of x axis, a grid of charts, and the remaining metrics folded away."""
    first, rest = metric_names(runs)
    if not first and not rest:
        nothing = '<p class="empty">No metrics have been written yet.</p>'
        return f'<section id="curves"><h2>Learning curves</h2>{nothing}</section>'
    choices = axes(runs)
    radios = "".join(
        f'<input type="radio" name="x" id="x-{axis.key}"{" checked" if i == 0 else ""}>'
        f'<label for="x-{axis.key}">{escape(axis.title)}</label>'
        for i, axis in enumerate(choices)
    )
    cards = "".join(_card(name, runs, choices, page) for name in first)
    more = "".join(_card(name, runs, choices[:1], page) for name in rest)
    folded = (
        f'<details><summary>{len(rest)} more metrics</summary><div class="grid">{more}</div></details>' if more else ""
    )
    note = '<p class="note">Faint: every step. Bold: moving average. Bars: 95 % intervals of evaluations.</p>'
    return (
        f'<section id="curves"><h2>Learning curves</h2>{legend(runs)}<div class="axes">{radios}'
        f'<div class="grid">{cards}</div></div>{note}{folded}</section>'
    )


def legend(runs: Sequence[RunData]) -> str:
    """Colour of each run; nothing for a single one."""
    if len(runs) < 2:
        return ""
    items = "".join(f'<span><i class="swatch c{i % 8}"></i>{escape(run.label)}</span>' for i, run in enumerate(runs))
    return f'<p class="legend">{items}</p>'


def _card(name: str, runs: Sequence[RunData], choices: Sequence[Axis], page: Page) -> str:
    info = METRICS.find(name)
    about = f' title="{escape(info.about, quote=True)}"' if info else ""
    drawn = "".join(f'<div class="x-{axis.key}">{curve_chart(name, runs, axis, page)}</div>' for axis in choices)
    single = " single" if len(choices) == 1 else ""
    return f'<figure class="card{single}"><figcaption{about}>{escape(name)}</figcaption>{drawn}</figure>'


def curve_chart(name: str, runs: Sequence[RunData], axis: Axis, page: Page) -> str:
    """One metric of all runs against one axis, as SVG. The y axis is titled with the unit; the name is in the
    caption."""
    series = [s for i, run in enumerate(runs) if (s := _series(name, run, i, axis)) is not None]
    unit = runs[0].unit(name) if runs else ""
    percent = unit == "share"
    chart = line_chart(
        series,
        key=f"{name} {axis.key}",
        x_label=axis.title,
        y_label="" if percent else unit,
        percent=percent,
        whole=percent and "success" in name,
        markers=name.startswith("eval/"),
        span=axis.span,
    )
    return page.add(f"{name} {axis.key}", chart)


def _series(name: str, run: RunData, index: int, axis: Axis) -> Series | None:
    points: Mapping[int, float] = {e.step: e.metrics[name] for e in run.evaluations if name in e.metrics}
    if points:
        pairs = [interval(e, name) for e in run.evaluations if name in e.metrics]
        low, high = [p[0] for p in pairs], [p[1] for p in pairs]
        return Series(
            label=run.label, x=axis.at(index, list(points)), y=list(points.values()), colour=index, low=low, high=high
        )
    curve = run.curves.get(name)
    if curve is None:
        return None
    return Series(label=run.label, x=axis.at(index, curve.steps), y=curve.values, colour=index)
