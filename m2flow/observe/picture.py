"""One learning curve of runs as an SVG file: for a document, a README, a paper."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from m2flow import registry
from m2flow.observe import report, report_curves
from m2flow.observe.jsonl import replace_text
from m2flow.observe.rundata import RunData, load_runs
from m2flow.observe.svg import COLOURS, HEIGHT, WIDTH

HEAD, ROW = 26, 18  # heights of the title, and of a line of the legend


def write_curve(run_dirs: Sequence[Path | str], metric: str, out: Path | str) -> Path:
    """Write `metric` of all these runs over training steps to `out`.

    Raises:
        ValueError: no run is given, or none of them has this metric.
    """
    if not run_dirs:
        raise ValueError("run_dirs: no run given; pass at least one run folder")
    runs = load_runs(run_dirs)
    names = [name for some in report_curves.metric_names(runs) for name in some]
    if metric not in names:
        raise ValueError(
            f"metric: no run has {metric!r}{registry.suggest(metric, names)}; there are {', '.join(names)}"
        )
    return replace_text(Path(out), picture(metric, runs))


def picture(metric: str, runs: Sequence[RunData]) -> str:
    """The SVG text, with its colours, a title and a legend of several runs."""
    legend = [run.label for run in runs] if len(runs) > 1 else []
    chart = report_curves.curve_chart(metric, runs, report_curves.axes(runs)[0], report_curves.Page())
    height = HEAD + HEIGHT + ROW * len(legend)
    rows = "".join(
        f'<circle class="dot c{i % COLOURS}" cx="30" cy="{HEAD + HEIGHT + ROW * i + 6}" r="4"/>'
        f'<text class="label" x="42" y="{HEAD + HEIGHT + ROW * i + 10}">{escape(label)}</text>'
        for i, label in enumerate(legend)
    )
    inner = re.sub(r"^<svg ", f'<svg y="{HEAD}" width="{WIDTH}" height="{HEIGHT}" ', chart)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{2 * WIDTH}"'
        f' height="{2 * height}"><style>{report.asset("chart.css")}'
        "svg { font-family: system-ui, sans-serif; }</style>"
        f'<rect width="{WIDTH}" height="{height}" fill="var(--card)"/>'
        f'<text class="label" x="12" y="17" style="font-weight:600">{escape(metric)}</text>{inner}{rows}</svg>\n'
    )
