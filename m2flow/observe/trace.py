"""Who ran when on which device: spans, collected at next to no cost and written as JSON lines.

Times are seconds of `time.monotonic` while a process records them, and Unix seconds in files: each process adds the
offset between its two clocks, taken once, so that a wall clock that is set in the middle of a run bends nothing.
Recording a span appends a tuple to a ring buffer; writing happens at `flush`, in one system call.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from m2flow.observe.jsonl import Appender, keep_until, rows

IDLE_KINDS = frozenset({"wait", "idle"})
CLOCK = time.monotonic


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
        before, wall, after = CLOCK(), time.time(), CLOCK()
        readings.append((after - before, wall - 0.5 * (before + after)))
    return min(readings)[1]


class Tracer:
    """Collects the spans of one process. `path` None: keep them for `drain` (a worker that sends them to the driver).

    The ring buffer holds `capacity` spans between two flushes; older ones are lost first, and counted in `dropped`.
    Several processes of a host may write to one path.
    """

    def __init__(self, path: Path | None = None, capacity: int = 65536, resume_step: int | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: {capacity}; allowed: 1 or more")
        if path is not None and resume_step is not None:
            keep_until(path, resume_step)
        self.offset = clock_offset()
        self.dropped = 0
        self.capacity = capacity
        self._spans: deque[tuple[str, int, str, int, float, float, str]] = deque(maxlen=capacity)
        self._file = Appender(path) if path is not None else None
        self._lock = threading.Lock()

    def record(
        self, stage: str, replica: int, device: str, step: int, start: float, end: float, kind: str = "work"
    ) -> None:
        """Keep one span; times by `time.monotonic` of this process. Costs well below 3 us."""
        if len(self._spans) == self.capacity:
            self.dropped += 1
        self._spans.append((stage, replica, device, step, start, end, kind))

    def span(self, stage: str, replica: int, device: str, step: int, kind: str = "work") -> Timed:
        """`with tracer.span(...):` records what runs inside, also when it raises."""
        return Timed(self, stage, replica, device, step, kind)

    def extend(self, spans: Iterable[Sequence[Any]], offset: float | None = None) -> None:
        """Take in spans of another process: its monotonic clock and its `clock_offset()`, or None where it runs on this
        host and shares this clock."""
        shift = 0.0 if offset is None else offset - self.offset
        for stage, replica, device, step, start, end, kind in spans:
            self.record(stage, replica, device, step, start + shift, end + shift, kind)

    def drain(self) -> list[Span]:
        """Spans since the last drain or flush, times by this process's monotonic clock. Empties the buffer."""
        with self._lock:
            return [Span(*self._spans.popleft()) for _ in range(len(self._spans))]

    def flush(self) -> list[Span]:
        """Write what was collected to `path` and return it, with Unix times."""
        spans = [s._replace(start=s.start + self.offset, end=s.end + self.offset) for s in self.drain()]
        if self._file is not None:
            self._file.write(*(_row(span) for span in spans))
        return spans

    def close(self) -> None:
        """Flush and close the file."""
        self.flush()
        if self._file is not None:
            self._file.close()


@dataclass(slots=True)
class Timed:
    """A span being measured."""

    tracer: Tracer
    stage: str
    replica: int
    device: str
    step: int
    kind: str
    start: float = field(default=0.0)

    def __enter__(self) -> Self:
        self.start = CLOCK()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.tracer.record(self.stage, self.replica, self.device, self.step, self.start, CLOCK(), self.kind)


def _row(span: Span) -> dict[str, Any]:
    row = span._asdict()
    row["start"], row["end"] = round(span.start, 6), round(span.end, 6)
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
