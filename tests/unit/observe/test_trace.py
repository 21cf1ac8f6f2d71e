"""Spans: cheap to record, safe to merge, right in the Chrome trace."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2flow.observe.timeline import Busy, chrome_trace, export_chrome, lanes, natural, utilisation
from m2flow.observe.trace import Span, Tracer, clock_offset, read_spans


def span(stage: str, start: float, end: float, *, device: str = "cpu:0", step: int = 0, kind: str = "work") -> Span:
    return Span(stage, 0, device, step, start, end, kind)


def test_written_times_are_unix_time(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "trace.jsonl")
    before, start = time.time(), time.monotonic()
    time.sleep(0.01)
    end, after = time.monotonic(), time.time()
    tracer.extend([("learner", 1, "cpu:1", 7, start, end, "sync")])
    tracer.close()
    [got] = read_spans(tmp_path / "trace.jsonl")
    assert got[:4] == ("learner", 1, "cpu:1", 7)
    assert got.kind == "sync"
    assert before - 0.005 <= got.start <= got.end <= after + 0.005
    assert got.end - got.start == pytest.approx(end - start, abs=1e-5)


def test_a_run_without_a_trace_writes_and_keeps_none() -> None:
    tracer = Tracer(None)
    tracer.extend([span("a", 0.0, 1.0)])
    assert tracer._spans == []
    tracer.close()


def test_the_offset_of_the_clocks_is_stable() -> None:
    assert abs(clock_offset() - clock_offset()) < 0.01


def test_resume_drops_spans_of_steps_that_will_be_done_again(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    tracer = Tracer(path)
    tracer.extend(span("a", float(step), step + 1.0, step=step) for step in range(4))
    tracer.close()
    again = Tracer(path, resume_step=1)
    again.extend([span("a", 9.0, 10.0, step=2)])
    again.close()
    assert [s.step for s in read_spans(path)] == [0, 1, 2]


def test_a_span_with_a_missing_field_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "t").write_text('{"stage": "a", "replica": 0, "device": "", "step": 0, "start": 1, "kind": "work"}\n')
    with pytest.raises(ValueError, match="span without end"):
        read_spans(tmp_path / "t")


intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda p: (p[0], p[0] + p[1])), max_size=15)


@given(intervals, st.integers(0, 45), st.integers(0, 45))
def test_busy_time_is_the_measure_of_the_union(pairs: list[tuple[int, int]], a: int, b: int) -> None:
    low, high = min(a, b), max(a, b)
    seconds = {t for start, end in pairs for t in range(start, end)}
    assert Busy(pairs).within(low, high) == len([t for t in seconds if low <= t < high])


@given(intervals)
def test_spans_in_one_row_are_apart_or_nested(pairs: list[tuple[int, int]]) -> None:
    spans = [span("a", float(s), float(e)) for s, e in pairs]
    rows = lanes(spans)
    for i, j in itertools.combinations(range(len(spans)), 2):
        if rows[i] == rows[j]:
            first, second = sorted((spans[i], spans[j]), key=lambda s: (s.start, -s.end))
            assert second.start >= first.end or second.end <= first.end, "overlap without nesting in one row"


def test_rows_are_few_when_spans_do_not_overlap() -> None:
    assert lanes([span("a", float(i), i + 1.0) for i in range(100)]) == [0] * 100
    assert lanes([span("a", 0.0, 2.0), span("a", 1.0, 3.0), span("a", 2.0, 4.0)]) == [0, 1, 0]


def test_the_chrome_trace_has_a_process_per_device_and_a_thread_per_replica(tmp_path: Path) -> None:
    spans = [
        Span("rollout", 0, "cpu:2", 5, 100.0, 100.5, "step"),
        Span("rollout", 1, "cpu:10", 5, 100.25, 101.0, "step"),
        Span("learner", 0, "cpu:2,cpu:10", 5, 101.0, 101.5, "work"),
    ]
    trace = chrome_trace(spans)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    devices = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert devices == {1: "cpu:2", 2: "cpu:10"}
    assert sorted((devices[e["pid"]], names[e["pid"], e["tid"]], e["ts"], e["dur"]) for e in events) == [
        ("cpu:10", "learner/0", 1_000_000.0, 500_000.0),
        ("cpu:10", "rollout/1", 250_000.0, 750_000.0),
        ("cpu:2", "learner/0", 1_000_000.0, 500_000.0),
        ("cpu:2", "rollout/0", 0.0, 500_000.0),
    ]
    assert trace["otherData"] == {"start_unix_s": 100.0}
    assert events[0]["args"]["step"] == 5

    tracer = Tracer(tmp_path / "trace.jsonl")
    tracer.extend(spans)
    tracer.close()
    assert export_chrome(tmp_path / "trace.jsonl", tmp_path / "trace.json") == 3
    written = json.loads((tmp_path / "trace.json").read_text())
    durations = [e["dur"] for e in written["traceEvents"] if e["ph"] == "X"]
    assert sorted(durations) == pytest.approx([500_000.0] * 3 + [750_000.0], abs=2.0)


def test_overlapping_coroutines_get_rows_of_their_own() -> None:
    trace = chrome_trace([span("agent", 0.0, 2.0), span("agent", 1.0, 3.0)])
    names = sorted(e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name")
    assert names == ["agent/0", "agent/0 #2"]


def test_an_empty_trace_is_valid() -> None:
    assert chrome_trace([])["traceEvents"] == []


def test_utilisation_counts_busy_devices_once_and_waiting_not_at_all() -> None:
    spans = [
        span("rollout", 0.0, 6.0, device="cpu:0"),
        span("rollout", 0.0, 4.0, device="cpu:0", kind="sync"),  # inside the first
        span("learner", 6.0, 10.0, device="cpu:1"),
        span("learner", 0.0, 6.0, device="cpu:1", kind="wait"),
    ]
    [got] = utilisation(spans)
    assert got.seconds == 10.0
    assert got.devices == {"cpu:0": 0.6, "cpu:1": 0.4}
    assert got.stages == {"rollout": 0.6, "learner": 0.4}


def test_utilisation_averages_replicas_and_counts_neighbouring_steps() -> None:
    spans = [
        Span("rollout", 0, "cpu:0", 0, 0.0, 10.0),
        Span("rollout", 1, "cpu:1", 0, 0.0, 5.0),
        Span("rollout", 1, "cpu:1", 1, 5.0, 15.0),  # the next step began early
        Span("evaluator", 0, "cpu:0", 1, 20.0, 90.0, "evaluate"),
    ]
    first, second = utilisation(spans)
    assert first.stages["rollout"] == pytest.approx((1.0 + 1.0) / 2)
    assert (second.start, second.seconds) == (5.0, 10.0)  # the evaluation opens no window
    assert second.stages["rollout"] == pytest.approx((0.5 + 1.0) / 2)
    assert second.stages["evaluator"] == 0.0


def test_device_names_sort_by_number() -> None:
    assert sorted(["cpu:10", "cpu:2", "gpu:0"], key=natural) == ["cpu:2", "cpu:10", "gpu:0"]
