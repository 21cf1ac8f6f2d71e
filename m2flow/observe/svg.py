"""Small charts as SVG text: readable without JavaScript, a few kilobytes each, coloured by the page's style sheet.

Classes: `c0`..`c7` are series colours, `axis`, `grid`, `tick`, `label` the rest. A chart's points are also returned as
plain numbers, which the page's script uses to show values under the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, TypeAlias

WIDTH, HEIGHT = 360, 215
LEFT, RIGHT, TOP, BOTTOM = 66, 12, 8, 40
COLOURS = 8
MAX_POINTS = 300
MINUS = "\u2212"  # as wide as a plus, unlike a hyphen


Ends: TypeAlias = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line: points by ascending x, its colour number, and an interval per point where there is one."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """SVG text, and the numbers behind it for the page's script."""

    svg: str
    data: dict[str, Any] = field(default_factory=dict)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that lie within [low, high]: multiples of 1, 2, 2.5 or 5 times a power of ten."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    rough = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1.0, 2.0, 2.5, 5.0, 10.0) if m * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def tick_texts(ticks: Sequence[float], percent: bool = False) -> list[str]:
    """Labels of an axis: all with the same unit (k, M, G, a power of ten, or percent) and just the digits that tell
    neighbours apart. `[0.0125, 0.015]` is "0.0125", "0.0150"; `[-2e-6, -1e-6]` is "−2e-6", "−1e-6"."""
    if not ticks:
        return []
    size = max(map(abs, ticks))
    step = ticks[1] - ticks[0] if len(ticks) > 1 else (size or 1.0)
    scale, suffix = 1.0, ""
    if percent:
        scale, suffix = 0.01, " %"
    elif size >= 1e4:
        scale, suffix = next((s, t) for s, t in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if size >= s)
    elif 0 < size < 1e-3:
        power = math.floor(math.log10(size) + 1e-9)
        scale, suffix = 10.0**power, f"e{power}"
    digits = _decimals(step / scale)
    return [
        "0" if value == 0 and not percent else f"{MINUS if value < 0 else ''}{abs(value) / scale:.{digits}f}{suffix}"
        for value in ticks
    ]


def _decimals(step: float) -> int:
    """Digits behind the point that `step` needs: 0.25 -> 2, 10 -> 0."""
    step = abs(step)
    for digits in range(10):
        scaled = step * 10**digits
        if scaled >= 0.999 and abs(scaled - round(scaled)) < 1e-6 * scaled:
            return digits
    return 10


def thin(x: Sequence[float], y: Sequence[float], limit: int = MAX_POINTS) -> tuple[list[float], list[float]]:
    """At most about `limit` points that keep every peak: of each stretch its smallest and its largest value, in
    order."""
    n = len(x)
    if n <= limit:
        return list(x), list(y)
    out_x, out_y, buckets = [], [], limit // 2
    for bucket in range(buckets):
        stretch = range(bucket * n // buckets, (bucket + 1) * n // buckets)
        known = [i for i in stretch if math.isfinite(y[i])] or [stretch[0]]
        for i in sorted({min(known, key=lambda i: y[i]), max(known, key=lambda i: y[i])}):
            out_x.append(x[i])
            out_y.append(y[i])
    return out_x, out_y


def smooth(y: Sequence[float], half: int) -> list[float]:
    """Centred moving average over `half` points to each side, as far as there are any; NaN points are left out and
    stay.

    Centred, because a trailing average would draw every change later than it happened.
    """
    import numpy as np

    values = np.asarray(y, dtype=np.float64)
    known = np.isfinite(values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(known, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(known)))
    at = np.arange(len(values))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    means = (sums[high] - sums[low]) / np.maximum(counts[high] - counts[low], 1)
    return [float(v) for v in np.where(known, means, np.nan)]


def short(value: float) -> float | None:
    """Five significant digits; None where JSON has no number."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


class Frame:
    """Maps data to pixels within the axes of one chart."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.x, self.y = _widen(x), _widen(y)

    def px(self, value: float) -> float:
        """Pixels from the left."""
        low, high = self.x
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def py(self, value: float) -> float:
        """Pixels from the top."""
        low, high = self.y
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def path(self, x: Sequence[float], y: Sequence[float]) -> str:
        """Path data of a line; it is interrupted where y is no number."""
        parts, pen = [], "M"
        for a, b in zip(x, y, strict=True):
            if math.isfinite(b) and math.isfinite(a):
                parts.append(f"{pen}{self.px(a):.1f} {self.py(b):.1f}")
                pen = "L"
            else:
                pen = "M"
        return "".join(parts)

    def axes(self, x_label: str, y_label: str, percent: bool) -> str:
        """Grid, ticks and axis titles."""
        out = []
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        ticks = nice_ticks(*self.y)
        for value, text in zip(ticks, tick_texts(ticks, percent), strict=True):
            y = self.py(value)
            out.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            out.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>')
        ticks = nice_ticks(*self.x)
        for value, text in zip(ticks, tick_texts(ticks), strict=True):
            x = self.px(value)
            out.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
            out.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>')
        out.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
        middle = (LEFT + right) / 2
        out.append(f'<text class="label" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
        spot = f"translate(13 {(TOP + bottom) / 2}) rotate(-90)"
        out.append(f'<text class="label" transform="{spot}" text-anchor="middle">{escape(y_label)}</text>')
        return "".join(out)


def _widen(pair: tuple[float, float]) -> tuple[float, float]:
    low, high = pair
    if not (math.isfinite(low) and math.isfinite(high)):
        return 0.0, 1.0
    if high - low > 1e-12 * max(abs(low), abs(high)):
        return low, high
    pad = 0.5 * abs(low) if low else 0.5
    return low - pad, high + pad


def line_chart(
    series: Sequence[Series],
    *,
    key: str,
    x_label: str,
    y_label: str,
    percent: bool = False,
    whole: bool = False,
    markers: bool = False,
    span: Ends | None = None,
) -> Chart:
    """A chart of one or more lines, with error bars where a series has intervals.

    A series of more than 40 points is drawn faint with its moving average on top. `percent` writes shares in percent;
    `whole` then fixes the axis to 0 to 100 %. `span` is the range of x (default: that of the points). `key` names the
    chart in the page.
    """
    thinned = [(s, *thin(s.x, s.y)) for s in series]
    frame = _frame(thinned, whole, span)
    lines, data = [], []
    for s, x, y in thinned:
        colour = f"c{s.colour % COLOURS}"
        many = len(s.x) > 40 and not markers
        lines.append(f'<path class="line {colour}{" faint" if many else ""}" d="{frame.path(x, y)}"/>')
        if many:
            lines.append(
                f'<path class="line {colour}" d="{frame.path(*thin(s.x, smooth(s.y, max(1, len(s.x) // 50))))}"/>'
            )
        if markers or len(x) == 1:
            lines.append(_marks(frame, s, colour))
        data.append({"label": s.label, "c": s.colour % COLOURS, "x": list(map(short, x)), "y": list(map(short, y))})
    title = f"{key}, over {x_label}"
    svg = (
        f'<svg class="chart" data-key="{escape(key, quote=True)}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-label="{escape(title, quote=True)}">{frame.axes(x_label, y_label, percent)}{"".join(lines)}</svg>'
    )
    return Chart(svg, {"x": frame.x, "y": frame.y, "percent": percent, "xLabel": x_label, "series": data})


def _frame(thinned: Sequence[tuple[Series, list[float], list[float]]], whole: bool, span: Ends | None) -> Frame:
    xs = [v for _, x, _ in thinned for v in x if math.isfinite(v)]
    ys = [v for s, _, y in thinned for v in (*y, *s.low, *s.high) if math.isfinite(v)]
    x_range = span or ((min(xs), max(xs)) if xs else (0.0, 1.0))
    if whole:
        return Frame(x_range, (0.0, 1.04))
    low, high = (min(ys), max(ys)) if ys else (0.0, 1.0)
    if low > 0 and low < 0.4 * high:
        low = 0.0  # near enough to zero to show it
    pad = 0.04 * (high - low)
    return Frame(x_range, (low - (pad if low else 0.0), high + pad))


def _marks(frame: Frame, s: Series, colour: str) -> str:
    out = []
    for i, (a, b) in enumerate(zip(s.x, s.y, strict=True)):
        if not (math.isfinite(a) and math.isfinite(b)):
            continue
        x = frame.px(a)
        if i < len(s.low) and math.isfinite(s.low[i]) and math.isfinite(s.high[i]):
            ends = f'y1="{frame.py(s.low[i]):.1f}" y2="{frame.py(s.high[i]):.1f}"'
            out.append(f'<line class="bar {colour}" x1="{x:.1f}" x2="{x:.1f}" {ends}/>')
        out.append(f'<circle class="dot {colour}" cx="{x:.1f}" cy="{frame.py(b):.1f}" r="3"/>')
    return "".join(out)


def spark(values: Sequence[float], colour: int = 0, width: int = 150, height: int = 30) -> str:
    """A line without axes, for a table cell; its range is in the tooltip."""
    _, y = thin(range(len(values)), values, 150)
    known = [v for v in y if math.isfinite(v)]
    if not known:
        return ""
    low, high = min(known), max(known)
    span = (high - low) or 1.0
    parts, pen = [], "M"
    for i, v in enumerate(y):
        if math.isfinite(v):
            x = 1 + i / max(1, len(y) - 1) * (width - 2)
            parts.append(f"{pen}{x:.1f} {height - 2 - (v - low) / span * (height - 4):.1f}")
            pen = "L"
        else:
            pen = "M"
    return (
        f'<svg class="spark" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"<title>{low:.4g} to {high:.4g}, {len(values)} steps</title>"
        f'<path class="line c{colour % COLOURS}" d="{"".join(parts)}"/></svg>'
    )
