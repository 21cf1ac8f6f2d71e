"""The timeline of a report: who ran when on which device, how busy everybody was, and where the time of a step went."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from m2flow.observe.report_curves import Axis, Page, axes, curve_chart, legend
from m2flow.observe.rundata import NONE, RunData, show_number, show_seconds
from m2flow.observe.svg import nice_ticks, tick_texts
from m2flow.observe.timeline import Utilisation, lanes, natural, utilisation
from m2flow.observe.trace import Span

GANTT_WIDTH, ROW, LABELS = 1080, 20, 150
MAX_BARS = 20000  # per run, in the page's data
KEEP_STEPS = 5  # newest steps that are never merged
WORDS = {"device": "device taken", "stage": "stage busy"}
TAKEN = "A device is taken while a stage that is placed on it works; with several cores, the stage may use only some."


@dataclass(frozen=True, slots=True)
class Bar:
    """One rectangle: row number, start and length in seconds since the first span, step, stage number, kind."""

    row: int
    start: float
    length: float
    step: int
    stage: int
    kind: str


@dataclass(frozen=True, slots=True)
class Gantt:
    """All rectangles of a run, sorted by row and start. `rows` are (device, label); bars closer than `merged_s` are
    one."""

    rows: list[tuple[str, str]]
    stages: list[str]
    bars: list[Bar]
    merged_s: float

    def data(self) -> dict[str, Any]:
        """Numbers for the page's script: times in milliseconds."""
        kinds = sorted({bar.kind for bar in self.bars})
        return {
            "rows": self.rows,
            "stages": self.stages,
            "kinds": kinds,
            "bars": [
                [b.row, round(b.start * 1e3, 1), round(b.length * 1e3, 1), b.step, b.stage, kinds.index(b.kind)]
                for b in self.bars
            ],
        }


def gantt(spans: Sequence[Span], limit: int = MAX_BARS) -> Gantt:
    """Rows by device, then stage and replica. Where there are more than `limit` bars, neighbours in a row are merged,
    first those close together; the newest steps keep every bar."""
    origin = min((span.start for span in spans), default=0.0)
    stages = list(dict.fromkeys(span.stage for span in sorted(spans, key=lambda s: (s.start, s.stage))))
    members: dict[tuple[str, str, int], list[Span]] = {}
    for span in spans:
        for device in span.devices or ("no device",):
            members.setdefault((device, span.stage, span.replica), []).append(span)
    rows: list[tuple[str, str]] = []
    bars: list[Bar] = []
    for key in sorted(members, key=lambda k: (natural(k[0]), stages.index(k[1]), k[2])):
        device, stage, replica = key
        lane = lanes(members[key])
        for span, extra in zip(members[key], lane, strict=True):
            bars.append(
                Bar(
                    len(rows) + extra,
                    span.start - origin,
                    span.end - span.start,
                    span.step,
                    stages.index(stage),
                    span.kind,
                )
            )
        rows += [(device, f"{stage}/{replica}" + (f" #{i + 1}" if i else "")) for i in range(max(lane) + 1)]
    bars.sort(key=lambda bar: (bar.row, bar.start))
    keep_from = max((bar.step for bar in bars), default=0) - KEEP_STEPS
    excess = len(bars) - limit
    if excess <= 0:
        return Gantt(rows, stages, bars, 0.0)
    gaps = sorted(gap for a, b in itertools.pairwise(bars) if (gap := _gap(a, b, keep_from)) is not None)
    tolerance = max(0.0, gaps[min(excess, len(gaps)) - 1]) if gaps else 0.0
    return Gantt(rows, stages, _merge(bars, tolerance, keep_from), tolerance)


def _gap(bar: Bar, following: Bar, keep_from: int) -> float | None:
    """Seconds between two bars that may be merged, None for two that may not."""
    alike = (bar.row, bar.stage) == (following.row, following.stage)
    return following.start - (bar.start + bar.length) if alike and following.step <= keep_from else None


def _merge(bars: Sequence[Bar], gap: float, keep_from: int) -> list[Bar]:
    out: list[Bar] = []
    for bar in bars:
        between = _gap(out[-1], bar, keep_from) if out else None
        if between is not None and between <= gap:
            last = out[-1]
            end = max(last.start + last.length, bar.start + bar.length)
            out[-1] = Bar(last.row, last.start, end - last.start, last.step, last.stage, last.kind)
        else:
            out.append(bar)
    return out


def gantt_svg(chart: Gantt, window: tuple[float, float]) -> str:
    """The bars inside a window of seconds. Bars below half a pixel are joined with their neighbour."""
    low, high = window
    scale = (GANTT_WIDTH - LABELS - 10) / max(1e-9, high - low)
    tops, height = _row_tops(chart.rows)
    out = []
    for (device, label), top in zip(chart.rows, tops, strict=True):
        out.append(f'<text class="tick" x="{LABELS - 8}" y="{top + 14}" text-anchor="end">{escape(label)}</text>')
        out.append(f'<line class="grid" x1="{LABELS}" x2="{GANTT_WIDTH - 10}" y1="{top + ROW}" y2="{top + ROW}"/>')
        del device
    for device, top in _headings(chart.rows, tops):
        out.append(f'<text class="label" x="4" y="{top - 5}">{escape(device)}</text>')
    last: tuple[int, float, int] | None = None
    for bar in chart.bars:
        start, end = max(bar.start, low), min(bar.start + bar.length, high)
        if end < start:
            continue
        x, wide = LABELS + (start - low) * scale, (end - start) * scale
        if last is not None and last[0] == bar.row and last[2] == bar.stage and wide < 0.5 and x - last[1] < 0.5:
            continue
        wide = max(wide, 0.5)
        tip = f"{chart.stages[bar.stage]} {bar.kind}, step {bar.step}: {show_seconds(bar.length)}"
        out.append(
            f'<rect class="span c{bar.stage % 8} k-{_word(bar.kind)}" x="{x:.1f}" y="{tops[bar.row] + 2}"'
            f' width="{wide:.1f}" height="{ROW - 4}"><title>{escape(tip)}</title></rect>'
        )
        last = (bar.row, x + wide, bar.stage)
    out.append(_time_axis(low, high, height))
    return f'<svg class="gantt" viewBox="0 0 {GANTT_WIDTH} {height + 40}">{"".join(out)}</svg>'


def _row_tops(rows: Sequence[tuple[str, str]]) -> tuple[list[int], int]:
    tops, y, before = [], 0, None
    for device, _ in rows:
        if device != before:
            y += 20
        tops.append(y)
        y += ROW
        before = device
    return tops, y


def _headings(rows: Sequence[tuple[str, str]], tops: Sequence[int]) -> list[tuple[str, int]]:
    return [(rows[i][0], tops[i]) for i in range(len(rows)) if i == 0 or rows[i][0] != rows[i - 1][0]]


def _time_axis(low: float, high: float, height: int) -> str:
    ticks = nice_ticks(low, high, 8)
    out = [f'<line class="axis" x1="{LABELS}" x2="{GANTT_WIDTH - 10}" y1="{height}" y2="{height}"/>']
    for value, text in zip(ticks, tick_texts(ticks), strict=True):
        x = LABELS + (value - low) / max(1e-9, high - low) * (GANTT_WIDTH - LABELS - 10)
        out.append(f'<text class="tick" x="{x:.1f}" y="{height + 15}" text-anchor="middle">{text}</text>')
        out.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{height}" y2="{height + 4}"/>')
    middle = (LABELS + GANTT_WIDTH) / 2
    out.append(
        f'<text class="label" x="{middle}" y="{height + 33}" text-anchor="middle">time since the first span (s)</text>'
    )
    return "".join(out)


def _word(kind: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in kind.lower())


def typical(usage: Sequence[Utilisation]) -> tuple[int, int] | None:
    """Two neighbouring steps to open the timeline at: the one of median length in the newer half, and the next."""
    if not usage:
        return None
    newer = sorted(usage[len(usage) // 2 :], key=lambda u: u.seconds)
    middle = newer[(len(newer) - 1) // 2].step
    steps = [u.step for u in usage]
    after = [s for s in steps if s > middle]
    return (
        (middle, after[0])
        if after
        else ((max(s for s in steps if s < middle), middle) if len(steps) > 1 else (middle, middle))
    )


def section(runs: Sequence[RunData], page: Page) -> tuple[str, list[dict[str, Any]]]:
    """HTML of the timelines of all runs that have a trace, and the data for the page's script, one entry per
    timeline."""
    parts: list[str] = []
    data: list[dict[str, Any]] = []
    traced = [run for run in runs if run.spans]
    for run in traced:
        body, numbers = _timeline(run, len(data))
        data.append(numbers)
        if len(traced) > 1:
            opened = " open" if not parts else ""
            body = f"<details{opened}><summary>{escape(run.label)}</summary>{body}</details>"
        parts.append(body)
    if not parts:
        parts = ['<p class="empty">No trace was recorded (observe.trace: false), or no step has finished yet.</p>']
    speed = _speed(runs, page)
    return f'<section id="timeline"><h2>Who ran when</h2>{"".join(parts)}</section>{speed}', data


def _timeline(run: RunData, index: int) -> tuple[str, dict[str, Any]]:
    usage = utilisation(run.spans)
    chart = gantt(run.spans)
    end = max(bar.start + bar.length for bar in chart.bars)
    shown = typical(usage)
    window = (0.0, end)
    origin = run.spans[0].start
    if shown is not None:
        spans = [s for s in run.spans if shown[0] <= s.step <= shown[1] and s.kind != "evaluate"]
        window = (min(s.start for s in spans) - origin, max(s.end for s in spans) - origin)
    names = "".join(f'<span><i class="swatch c{i % 8}"></i>{escape(s)}</span>' for i, s in enumerate(chart.stages))
    merged = (
        f" Bars closer than {show_seconds(chart.merged_s)} are drawn as one, except in the newest {KEEP_STEPS} steps."
        if chart.merged_s > 0
        else ""
    )
    what = f"steps {shown[0]} to {shown[1]}" if shown else "the whole run"
    steps = {u.step: [round((u.start - origin) * 1e3, 1), round(u.seconds * 1e3, 1)] for u in usage}
    body = (
        f'<p class="legend">{names}</p>'
        f'<div class="gantt-box" data-timeline="{index}" data-first="{shown[0] if shown else 0}">'
        f'<div class="gantt-controls"></div><div class="gantt-view">{gantt_svg(chart, window)}</div></div>'
        f'<p class="note">Opened at {what}.<span class="js"> Scroll with Ctrl to zoom, drag to move.</span>{merged}'
        f" <code>trace.json</code> in the run folder opens in ui.perfetto.dev.</p>{_strip(usage)}"
    )
    return body, {**chart.data(), "steps": steps, "window": [w * 1e3 for w in window], "end": end * 1e3}


def _strip(usage: Sequence[Utilisation]) -> str:
    """One line per device and stage: how long it was taken or busy over the steps of the run, and its mean."""
    if not usage:
        return ""
    names = [("device", n) for n in usage[0].devices] + [("stage", n) for n in usage[0].stages]
    total = sum(u.seconds for u in usage)
    rows = []
    for kind, name in names:
        shares = [(u.devices if kind == "device" else u.stages).get(name, 0.0) for u in usage]
        if not any(shares):
            continue  # an evaluator works between steps only
        mean = sum(s * u.seconds for s, u in zip(shares, usage, strict=True)) / total
        rows.append(
            f"<tr><td>{escape(name)}</td><td class='dim'>{WORDS[kind]}</td><td class='num'>{100 * mean:.0f} %</td>"
            f"<td class='num'>{show_number(mean * total / len(usage))} s</td>"
            f"<td class='wide'>{_cells(shares, [u.step for u in usage])}</td></tr>"
        )
    head = (
        "<tr><th>who</th><th></th><th class='num'>of the step</th><th class='num'>mean</th>"
        "<th>share per step, first to last</th></tr>"
    )
    return f'<table class="strip">{head}{"".join(rows)}</table><p class="note">{TAKEN}</p>'


def _cells(shares: Sequence[float], steps: Sequence[int], limit: int = 120) -> str:
    n = min(limit, len(shares))
    cells = []
    for i in range(n):
        part = range(i * len(shares) // n, (i + 1) * len(shares) // n)
        share = sum(shares[j] for j in part) / len(part)
        where = f"step {steps[part[0]]}" if len(part) == 1 else f"steps {steps[part[0]]} to {steps[part[-1]]}"
        cells.append(
            f'<rect x="{i * 1000 / n:.2f}" y="0" width="{1000 / n:.2f}" height="14"'
            f' fill-opacity="{0.06 + 0.94 * share:.2f}">'
            f"<title>{where}: {100 * share:.0f} %</title></rect>"
        )
    return f'<svg class="heat" viewBox="0 0 1000 14" preserveAspectRatio="none">{"".join(cells)}</svg>'


def _speed(runs: Sequence[RunData], page: Page) -> str:
    """Throughput curves, and a table of where the time of a step went."""
    names = sorted({n for run in runs for n in run.curves if n.startswith(("throughput/", "time/"))})
    if not names:
        return ""
    rates = [n for n in names if n.startswith("throughput/")] + [n for n in names if n == "time/step_s"]
    axis: Axis = axes(runs)[0]
    cards = "".join(
        f'<figure class="card single"><figcaption>{escape(n)}</figcaption>'
        f'<div class="x-step">{curve_chart(n, runs, axis, page)}</div></figure>'
        for n in rates
    )
    parts = [n for n in names if n.startswith("time/") and n not in ("time/step_s", "time/total_s")]
    rows = []
    for run in runs:
        step_s = _mean(run, "time/step_s")
        for name in parts:
            seconds = _mean(run, name)
            if math.isnan(seconds):
                continue
            share = seconds / step_s if step_s > 0 else math.nan
            bar = (
                f'<div class="meter"><div style="width:{100 * min(1.0, share):.1f}%"></div></div>'
                if not math.isnan(share)
                else ""
            )
            percent = NONE if math.isnan(share) else f"{100 * share:.0f} %"
            rows.append(
                f"<tr><td>{escape(run.label)}</td><td>{escape(name[5:].removesuffix('_s'))}</td>"
                f"<td class='num'>{show_number(seconds)} s</td>"
                f"<td class='num'>{percent}</td><td class='wide'>{bar}</td></tr>"
            )
    head = (
        "<tr><th>run</th><th>stage</th><th class='num'>mean per step</th><th class='num'>of the step</th><th></th></tr>"
    )
    table = f"<table>{head}{''.join(rows)}</table>" if rows else ""
    return f'<section id="speed"><h2>Speed</h2>{legend(runs)}<div class="grid">{cards}</div>{table}</section>'


def _mean(run: RunData, name: str) -> float:
    values = [v for v in run.curves[name].values if math.isfinite(v)] if name in run.curves else []
    return sum(values) / len(values) if values else math.nan
