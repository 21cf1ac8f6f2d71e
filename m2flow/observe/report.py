"""The report: one self-contained HTML file about one run or several, readable offline and without JavaScript.

The script in the page only adds values under the pointer and zooming of the timeline. Style and script are inlined from
`page/`, nothing is fetched. It works on runs that are still going or have crashed; what is missing is said.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from m2flow.observe import report_curves, report_sections, report_text, report_timeline
from m2flow.observe.jsonl import replace_text
from m2flow.observe.rundata import RunData, load_runs


def write_report(run_dirs: Sequence[Path | str], out: Path | str) -> Path:
    """Write the report of these runs (several seeds of one recipe are overlaid) to `out`, whole or not at all.

    Raises ValueError for no run and FileNotFoundError for a folder that does not exist.
    """
    if not run_dirs:
        raise ValueError("run_dirs: no run given; pass at least one run folder")
    return replace_text(Path(out), page(load_runs(run_dirs)))


def page(runs: Sequence[RunData]) -> str:
    """The HTML text."""
    collected = report_curves.Page()
    several = len(runs) > 1
    problems = [f"{run.label}: {problem}" if several else problem for run in runs for problem in run.problems]
    timeline, timelines = report_timeline.section(runs, collected)
    curves = report_curves.section(runs, collected)
    body = "".join(
        (
            report_sections.header(runs, problems),
            report_sections.results(runs),
            curves,
            timeline,
            report_sections.episodes(runs),
            report_text.section(runs) or report_sections.videos(runs),
            report_sections.alarms(runs),
            report_sections.setup(runs),
        )
    )
    style = asset("chart.css") + asset("report.css")
    title = escape(", ".join(dict.fromkeys(str(run.config.get("name") or run.name) for run in runs)))
    data = island({"charts": collected.charts, "timelines": timelines})
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}: m2flow report</title><style>{style}</style></head><body><main>{body}</main>"
        f'<script type="application/json" id="data">{data}</script>'
        f"<script>{asset('report.js')}</script></body></html>\n"
    )


def island(value: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever strings it holds."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e").replace("\u2028", "\\u2028")


def asset(name: str) -> str:
    """A file of `page/`."""
    return resources.files("m2flow.observe").joinpath("page", name).read_text(encoding="utf-8")
