"""What a list of spans says: rows for a viewer, a Chrome trace that Perfetto opens, and how busy everybody was."""

from __future__ import annotations

import bisect
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m2flow.observe.jsonl import replace_text
from m2flow.observe.trace import Span, read_spans


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key by which cpu:2 comes before cpu:10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def lanes(spans: Sequence[Span]) -> list[int]:
    """Row of each span so that spans in one row are apart or nested, as viewers of Chrome traces need; fewest rows
    first.

    Coroutines of one process overlap without nesting; they get rows of their own. `spans` are sorted by start here, and
    the answer is in the order given.
    """
    order = sorted(range(len(spans)), key=lambda i: (spans[i].start, -spans[i].end))
    out = [0] * len(spans)
    open_ends: list[list[float]] = []  # per row: ends of the spans that are open, outermost first
    for i in order:
        span = spans[i]
        for row, ends in enumerate(open_ends):
            while ends and ends[-1] <= span.start:
                ends.pop()
            if not ends or span.end <= ends[-1]:
                ends.append(span.end)
                out[i] = row
                break
        else:
            open_ends.append([span.end])
            out[i] = len(open_ends) - 1
    return out


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """A Chrome trace object: a process row per device, a thread row per stage and replica on it. Times in microseconds
    since the first span, whose Unix time is in `otherData`."""
    origin = min((span.start for span in spans), default=0.0)
    rows_of: dict[tuple[str, str, int], list[Span]] = {}
    for span in spans:
        for device in span.devices or ("",):
            rows_of.setdefault((device, span.stage, span.replica), []).append(span)
    devices = sorted({key[0] for key in rows_of}, key=natural)
    events: list[dict[str, Any]] = []
    for pid, device in enumerate(devices, 1):
        events.append(
            {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": device or "no device"}}
        )
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        tid = 0
        for key in sorted(key for key in rows_of if key[0] == device):
            members = rows_of[key]
            row = lanes(members)
            for extra in range(max(row) + 1):
                label = f"{key[1]}/{key[2]}" + (f" #{extra + 1}" if extra else "")
                events.append(
                    {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid + extra + 1, "args": {"name": label}}
                )
            for span, extra in zip(members, row, strict=True):
                events.append(_event(span, pid, tid + extra + 1, origin))
            tid += max(row) + 1
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"start_unix_s": origin}}


def _event(span: Span, pid: int, tid: int, origin: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": f"{span.stage} {span.kind}",
        "cat": span.kind,
        "pid": pid,
        "tid": tid,
        "ts": round((span.start - origin) * 1e6, 1),
        "dur": round(max(0.0, span.end - span.start) * 1e6, 1),
        "args": {"step": span.step, "stage": span.stage, "replica": span.replica},
    }


def export_chrome(source: Path, target: Path) -> int:
    """Write trace.json from trace.jsonl, whole or not at all. Number of spans."""
    spans = read_spans(source)
    replace_text(target, json.dumps(chrome_trace(spans), separators=(",", ":")))
    return len(spans)


class Busy:
    """The union of intervals: overlaps count once. `within(low, high)` is the busy time inside a window."""

    def __init__(self, intervals: Iterable[tuple[float, float]]) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []
        for start, end in sorted(intervals):
            if self.ends and start <= self.ends[-1]:
                self.ends[-1] = max(self.ends[-1], end)
            elif end > start:
                self.starts.append(start)
                self.ends.append(end)
        self._before = [0.0, *itertools.accumulate(e - s for s, e in zip(self.starts, self.ends, strict=True))]

    def _until(self, time: float) -> float:
        """Busy time before `time`."""
        i = bisect.bisect_right(self.starts, time)
        return self._before[i] - (max(0.0, self.ends[i - 1] - time) if i else 0.0)

    def within(self, low: float, high: float) -> float:
        """Busy time between `low` and `high`."""
        return max(0.0, self._until(high) - self._until(low))


@dataclass(frozen=True, slots=True)
class Utilisation:
    """How a step's wall time was used, as shares of `seconds`: how long each of `stages` worked, and how long each of
    `devices` was taken, which is while a stage placed on it worked (how many of its cores it used is not known)."""

    step: int
    start: float
    seconds: float
    devices: Mapping[str, float]
    stages: Mapping[str, float]


def utilisation(spans: Sequence[Span]) -> list[Utilisation]:
    """Per training step, over the window from its first to its last span; work for other steps inside it counts too.

    Evaluations open no window. A stage with several replicas is busy by the mean over them. Shares are in [0, 1].
    """
    windows: dict[int, tuple[float, float]] = {}
    by_device: dict[str, list[tuple[float, float]]] = {}
    by_replica: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for span in spans:
        if span.kind != "evaluate":
            low, high = windows.get(span.step, (span.start, span.end))
            windows[span.step] = (min(low, span.start), max(high, span.end))
        by_replica.setdefault((span.stage, span.replica), [])
        for device in span.devices:
            by_device.setdefault(device, [])
        if not span.idle:
            by_replica[span.stage, span.replica].append((span.start, span.end))
            for device in span.devices:
                by_device[device].append((span.start, span.end))
    device_busy = {name: Busy(parts) for name, parts in by_device.items()}
    replica_busy = {key: Busy(parts) for key, parts in by_replica.items()}
    out = []
    for step, window in sorted(windows.items()):
        seconds = window[1] - window[0]
        if seconds <= 0:
            continue
        devices = {name: sweep.within(*window) / seconds for name, sweep in device_busy.items()}
        stages: dict[str, list[float]] = {}
        for (stage, _), sweep in replica_busy.items():
            stages.setdefault(stage, []).append(sweep.within(*window) / seconds)
        means = {stage: sum(shares) / len(shares) for stage, shares in stages.items()}
        out.append(
            Utilisation(step, window[0], seconds, dict(sorted(devices.items(), key=lambda kv: natural(kv[0]))), means)
        )
    return out
