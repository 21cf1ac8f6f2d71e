"""Runs in the terminal: `show` sums up one or several, `ls` lists all below a folder. Both return text and print
nothing."""

from __future__ import annotations

import io
import math
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from m2flow.observe.layout import RunFolder
from m2flow.observe.progress import result_table
from m2flow.observe.report_curves import metric_names
from m2flow.observe.report_sections import what_ran
from m2flow.observe.rundata import NONE, Curve, RunData, load_run, load_runs, show_number, show_seconds

TAIL = 65536  # bytes of metrics that `ls` reads of each run
BLOCKS = "▁▂▃▄▅▆▇█"
STYLES = {"finished": "green", "running": "blue", "failed": "red", "died": "red", "stopped": "yellow"}


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Values as a row of block characters, at most `width` of them, each the mean of a stretch; gaps are spaces."""
    n = min(width, len(values))
    means = []
    for i in range(n):
        part = [v for v in values[i * len(values) // n : (i + 1) * len(values) // n] if math.isfinite(v)]
        means.append(sum(part) / len(part) if part else math.nan)
    known = [v for v in means if math.isfinite(v)]
    if not known:
        return " " * n
    low, span = min(known), (max(known) - min(known)) or 1.0
    return "".join(" " if math.isnan(v) else BLOCKS[min(7, int((v - low) / span * 8))] for v in means)


def show(runs: Path | str | Sequence[Path | str], *, width: int | None = None, colour: bool | None = None) -> str:
    """Text for a terminal: state, results, curves, alarms and where the report is; for several runs one table of
    results.

    `width` in characters and `colour` default to those of standard output. Raises FileNotFoundError for a folder that
    is none, ValueError for no run.
    """
    folders = [runs] if isinstance(runs, str | Path) else list(runs)
    if not folders:
        raise ValueError("runs: none given; pass at least one run folder")
    for folder in folders:
        if Path(folder).is_dir() and not is_run(Path(folder)) and find_runs(folder):
            raise FileNotFoundError(f"{folder}: no run here; `m2flow ls {folder}` lists the runs below it")
    loaded = load_runs(folders, spans=False)
    console, text = _console(width, colour)
    for run in loaded:
        _head(run, console)
    if any(run.evaluations for run in loaded):
        console.print(result_table(loaded))
    if len(loaded) == 1 and loaded[0].curves:
        console.print(_curves(loaded[0]))
    for run in loaded:
        _alarms(run, console, f"{run.label}: " if len(loaded) > 1 else "")
        _where(run, console)
    return text.getvalue().rstrip()


def _console(width: int | None, colour: bool | None) -> tuple[Any, io.StringIO]:
    """A console that writes to a string, as wide and colourful as standard output."""
    from rich.console import Console

    text = io.StringIO()
    colourful = sys.stdout.isatty() if colour is None else colour
    columns = width or max(shutil.get_terminal_size((120, 24)).columns, 60)
    return Console(file=text, force_terminal=colourful, width=columns, highlight=False), text


def _head(run: RunData, console: Any) -> None:
    """Name, state, what ran, and what went wrong."""
    from rich.text import Text

    console.print(Text.assemble((str(run.folder.path), "bold"), "  ", (run.state, STYLES.get(run.state, ""))))
    facts = what_ran(run) + ([("seed", str(run.seed))] if run.seed is not None else [])
    console.print(Text("  ".join(f"{name}: {value}" for name, value in facts)))
    error = run.status.get("error") or run.status.get("reason")
    if error:
        console.print(Text(str(error), style="red" if run.state in ("failed", "died") else "yellow"))
    for problem in run.problems:
        console.print(Text(f"could not be read: {problem}", style="yellow"))


def _curves(run: RunData) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading, side in (
        ("metric", "left"),
        ("first", "right"),
        ("last", "right"),
        ("unit", "left"),
        ("over steps", "left"),
    ):
        table.add_column(heading, justify=side)  # type: ignore[arg-type]
    first, rest = metric_names([run])
    speed = [name for name in run.curves if name.startswith(("throughput/", "time/step_s"))]
    for name in [*first, *rest, *speed]:
        curve = run.curves.get(name) or Curve(
            [e.step for e in run.evaluations if name in e.metrics],
            [e.metrics[name] for e in run.evaluations if name in e.metrics],
        )
        if not curve.values:
            continue
        unit = "" if "success" in name else run.unit(name)
        ends = (show_number(curve.values[0], name), show_number(curve.last, name))
        table.add_row(Text(name), *ends, unit, Text(sparkline(curve.values)))
    return table


def _alarms(run: RunData, console: Any, who: str) -> None:
    from rich.text import Text

    for alarm in run.alarms[-5:]:
        style = "red" if alarm.get("action") == "stop" else "yellow"
        where = f"{who}alarm at step {alarm.get('step')} ({alarm.get('kind')})"
        console.print(Text(f"{where}: {alarm.get('text')}", style=style))
    if len(run.alarms) > 5:
        console.print(Text(f"{len(run.alarms) - 5} earlier alarms: {run.folder.alarms}"))


def _where(run: RunData, console: Any) -> None:
    from rich.text import Text

    folder = run.folder
    videos = run.videos()
    for what, path in (
        ("report", folder.report if folder.report.exists() else None),
        ("timeline", folder.chrome_trace if folder.chrome_trace.exists() else None),
        ("videos", folder.videos if videos else None),
        ("logs", folder.logs if run.state in ("failed", "died") and folder.logs.is_dir() else None),
        *(("evaluated afterwards", path) for path in folder.later_evaluations()),
    ):
        if path is not None:
            console.print(Text(f"{what}: {path}"), soft_wrap=True)


def find_runs(root: Path | str) -> list[Path]:
    """Run folders at or below `root` (at most three levels down), by name. A run folder has a status, a resolved
    configuration or metrics."""
    base = Path(root)
    if not base.is_dir():
        raise FileNotFoundError(f"{base}: no such folder")
    return list(_walk(base, 3))


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run, whatever is left of it."""
    files = RunFolder(folder)
    return any(file.exists() for file in (files.status, files.config, files.metrics))


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    elif depth:
        for child in sorted(folder.iterdir()):
            if child.is_dir() and not child.name.startswith("."):
                yield from _walk(child, depth - 1)


def _started(run: RunData) -> float:
    """Unix time of the start; of the folder where no status says it."""
    started = run.status.get("started")
    return float(started) if isinstance(started, (int, float)) else run.folder.path.stat().st_mtime


def ls(root: Path | str = "runs", *, width: int | None = None, colour: bool | None = None) -> str:
    """A table of the runs below `root`, oldest first. Raises FileNotFoundError for a folder that does not exist."""
    from rich.table import Table
    from rich.text import Text

    console, text = _console(width, colour)
    runs = sorted((load_run(path, spans=False, tail=TAIL) for path in find_runs(root)), key=_started)
    if not runs:
        return f"no runs in {root}"
    table = Table(box=None, pad_edge=False)
    for heading in ("run", "state", "step", "seed", "task", "result", "wall time", "started"):
        table.add_column(
            heading,
            justify="right" if heading in ("step", "seed", "wall time") else "left",
            no_wrap=heading != "task",
            overflow="fold" if heading == "task" else "ellipsis",
        )
    for run in runs:
        steps = run.status.get("steps", run.config.get("steps"))
        path = run.folder.path
        started = run.status.get("started")
        table.add_row(
            Text(str(path.relative_to(root) if path != Path(root) else path)),
            Text(run.state, style=STYLES.get(run.state, "")),
            f"{NONE if run.step is None else run.step}/{steps if isinstance(steps, int) else '?'}",
            NONE if run.seed is None else str(run.seed),
            Text(dict(what_ran(run)).get("task", NONE)),
            Text(_result(run)),
            show_seconds(run.seconds),
            time.strftime("%m-%d %H:%M", time.localtime(started)) if isinstance(started, (int, float)) else NONE,
        )
    console.print(table)
    return text.getvalue().rstrip()


def _result(run: RunData) -> str:
    """The one number of a run: its latest evaluation, else its latest training return."""
    if run.evaluations:
        latest = run.evaluations[-1]
        for metric, word in (("eval/success_once", "success"), ("eval/return", "return")):
            if metric in latest.metrics:
                return f"{word} {show_number(latest.metrics[metric], metric)}"
    for metric, word in (("rollout/success", "training success"), ("rollout/return", "training return")):
        if metric in run.curves:
            return f"{word} {show_number(run.curves[metric].last, metric)}"
    return NONE
