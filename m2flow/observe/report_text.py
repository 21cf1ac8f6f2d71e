"""Sampled texts in a report: what a language model answered, before and after and on the way, with what it was given.

Everything comes from the tables of samples in the run folder; all of it is text and passes `escape`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from m2flow.observe.rundata import NONE, RunData, show_number
from m2flow.observe.samples import read_samples, sample_files

SHOWN = 8  # rows of a table
LONGEST = 1200  # characters of a text that are shown
Row = Mapping[str, Any]


def section(runs: Sequence[RunData]) -> str:
    """Held-out tasks before and after training side by side, and training samples from its start, middle and end."""
    parts = []
    for run in runs:
        label = f"{run.label}: " if len(runs) > 1 else ""
        parts += [f"<h3>{escape(label + title)}</h3>{table}" for title, table in _tables(run)]
    return f'<section id="samples"><h2>Sampled texts</h2>{"".join(parts)}</section>' if parts else ""


def _tables(run: RunData) -> list[tuple[str, str]]:
    """(title, table) of one run; a file that cannot be read is left out, and named instead."""
    out = []
    examined = sample_files(run.folder.samples, "eval")
    if examined:
        (first, before), (last, after) = examined[0], examined[-1]
        if first == last:
            out.append((f"held-out tasks, step {last:,}", _guard(after, lambda rows: _table(_spread(rows)))))
        else:
            title = f"the same held-out tasks after step {first:,} and step {last:,}"
            out.append((title, _guard(after, lambda rows: _compared(read_samples(before), rows))))
    trained = sample_files(run.folder.samples, "step")
    for at in sorted({0, len(trained) // 2, len(trained) - 1} if trained else ()):
        step, file = trained[at]
        out.append((f"training samples of step {step:,}", _guard(file, lambda rows: _table(_spread(rows)))))
    return out


def _guard(file: Path, show: Any) -> str:
    try:
        return str(show(read_samples(file)))
    except (OSError, ValueError, KeyError) as error:
        return f'<p class="empty">{escape(f"{file.name} could not be read: {error}")}</p>'


def _spread(rows: Sequence[Row]) -> list[Row]:
    """Some rows, evenly from the worst to the best reward."""
    ordered = sorted(rows, key=lambda row: float(row.get("reward/reward") or 0.0))
    count = min(SHOWN, len(ordered))
    return [ordered[round(i * (len(ordered) - 1) / max(1, count - 1))] for i in range(count)]


def _table(rows: Sequence[Row]) -> str:
    """Prompt, text, right answer, finish, length, and every component of the reward."""
    parts = list(dict.fromkeys(name for row in rows for name in row if name.startswith("reward/")))
    heads = "".join(f"<th class='num'>{escape(name.removeprefix('reward/'))}</th>" for name in parts)
    body = "".join(
        f"<tr><td>{_text(row.get('prompt'))}</td><td>{_text(row.get('text'))}</td><td>{_text(row.get('gold'))}</td>"
        f"<td>{escape(str(row.get('finish', '')))}</td><td class='num'>{escape(str(row.get('tokens', NONE)))}</td>"
        + "".join(f"<td class='num'>{_number(row.get(name))}</td>" for name in parts)
        + "</tr>"
        for row in rows
    )
    head = f"<tr><th>asked</th><th>answered</th><th>right</th><th>finish</th><th class='num'>tokens</th>{heads}</tr>"
    return f'<div class="scroll"><table class="top">{head}{body}</table></div>'


def _compared(before: Sequence[Row], after: Sequence[Row]) -> str:
    """The same tasks, before and after."""
    earlier = {row["task"]: row for row in before}
    pairs = [(earlier[row["task"]], row) for row in after if row["task"] in earlier]
    pairs = sorted(pairs, key=lambda pair: float(pair[1].get("reward/reward") or 0.0))
    count = min(SHOWN, len(pairs))
    shown = [pairs[round(i * (len(pairs) - 1) / max(1, count - 1))] for i in range(count)]
    rows = "".join(
        f"<tr><td>{_text(old.get('prompt'))}</td><td>{_text(new.get('gold'))}</td>"
        f"<td>{_text(old.get('text'))}</td><td class='num'>{_number(old.get('reward/reward'))}</td>"
        f"<td>{_text(new.get('text'))}</td><td class='num'>{_number(new.get('reward/reward'))}</td></tr>"
        for old, new in shown
    )
    head = (
        "<tr><th>asked</th><th>right</th><th>answered before</th><th class='num'>reward</th><th>answered after</th>"
        "<th class='num'>reward</th></tr>"
    )
    return f'<div class="scroll"><table class="top">{head}{rows}</table></div>'


def _text(value: Any) -> str:
    text = str(value if value is not None else "")
    cut = text if len(text) <= LONGEST else f"{text[:LONGEST]} ... ({len(text):,} characters)"
    return f"<pre>{escape(cut)}</pre>"


def _number(value: Any) -> str:
    if not isinstance(value, int | float) or math.isnan(value):
        return NONE
    return escape(show_number(float(value)))
