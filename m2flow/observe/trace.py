"""Who ran when on which device: spans, written as JSON lines.

Times are seconds of `time.monotonic` while a run goes on, which is one clock for all processes of a host, and Unix
seconds in files: the offset between the two clocks is taken once, so that a wall clock that is set in the middle of a
run bends nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from m2flow.observe.jsonl import Appender, keep_until, rows

IDLE_KINDS = frozenset({"wait", "idle"})


class Span(NamedTuple):
    """`replica` of `stage` was busy with `kind` for training step `step` on `device` from `start` to `end`.

    `device` names one device or several, joined by commas. Kinds are free words ("work", "close", "step", "evaluate",
    "onload", "sync", "save", ...); "wait" and "idle" do not count as busy.
    """

    stage: str
    replica: int
    device: str
    step: int
    start: float
    end: float
    kind: str = "work"

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices used."""
        return tuple(part.strip() for part in self.device.split(",") if part.strip())

    @property
    def idle(self) -> bool:
        """A span that stands for waiting."""
        return self.kind in IDLE_KINDS


def clock_offset() -> float:
    """Seconds to add to `time.monotonic` to get Unix time: the best of five readings."""
    readings = []
    for _ in range(5):
        before, wall, after = time.monotonic(), time.time(), time.monotonic()
        readings.append((after - before, wall - 0.5 * (before + after)))
    return min(readings)[1]


class Tracer:
    """Writes the spans that workers of this host send. `path` None: forgets them (the run has no trace)."""

    def __init__(self, path: Path | None = None, resume_step: int | None = None) -> None:
        if path is not None and resume_step is not None:
            keep_until(path, resume_step)
        self.offset = clock_offset()
        self._spans: list[Span] = []
        self._file = Appender(path) if path is not None else None

    def extend(self, spans: Iterable[Sequence[Any]]) -> None:
        """Take in spans as a stage's host kept them: the fields of `Span`, times by `time.monotonic`."""
        if self._file is not None:
            self._spans += [Span(*span) for span in spans]

    def flush(self) -> None:
        """Write what was taken in, with Unix times."""
        if self._file is not None:
            self._file.write(*(_row(span, self.offset) for span in self._spans))
        self._spans = []

    def close(self) -> None:
        """Flush and close the file."""
        self.flush()
        if self._file is not None:
            self._file.close()


def _row(span: Span, offset: float) -> dict[str, Any]:
    row = span._asdict()
    row["start"], row["end"] = round(span.start + offset, 6), round(span.end + offset, 6)
    return row


def read_spans(path: Path) -> list[Span]:
    """Spans of a trace.jsonl, in order of their start; none if there is no file."""
    names = Span._fields
    spans = []
    for row in rows(path):
        missing = [name for name in names if name not in row]
        if missing:
            raise ValueError(f"{path}: span without {', '.join(missing)}: {row}")
        spans.append(Span(*(row[name] for name in names)))
    return sorted(spans, key=lambda span: (span.start, span.end))
