"""JSON lines: always valid, torn ends tolerated, truncated on resume."""

from __future__ import annotations

import json
import math
import multiprocessing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2flow.observe.jsonl import Appender, decode, dumps, encode, keep_until, rows


def strict(text: str) -> object:
    """Parse as a reader would that knows only JSON."""

    def refuse(word: str) -> object:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_every_float_comes_back(value: float) -> None:
    again = decode(strict(dumps(value)))
    assert again == value or (math.isnan(again) and math.isnan(value))


def test_the_rule_for_numbers_that_json_lacks() -> None:
    assert dumps({"a": math.nan, "b": [math.inf, -math.inf]}) == '{"a": null, "b": ["Infinity", "-Infinity"]}'


def test_values_of_other_libraries_and_dataclasses_are_taken() -> None:
    @dataclass
    class Point:
        x: float
        where: Path

    given_ = {"a": np.float32(0.5), "b": np.array([1, 2]), "c": Point(math.nan, Path("p/q")), "d": (1, {2})}
    assert encode(given_) == {"a": 0.5, "b": [1, 2], "c": {"x": None, "where": "p/q"}, "d": [1, [2]]}
    with pytest.raises(TypeError, match="cannot write a object"):
        encode(object())


def test_a_last_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "tr')
    assert [row["step"] for row in rows(path)] == [1, 2]


def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl:2"):
        list(rows(path))
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match=r"x\.jsonl:1: expected an object, got list"):
        list(rows(path))


def test_no_file_has_no_rows(tmp_path: Path) -> None:
    assert list(rows(tmp_path / "none")) == []
    assert keep_until(tmp_path / "none", 3) == 0
    assert not (tmp_path / "none").exists()


def test_resume_drops_later_steps_and_the_torn_end_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    kept = ['{"step": 0, "v": null}', '{"step": 4, "v": "Infinity"}', '{"step": 2, "v": 0.1}']
    path.write_text("\n".join([*kept[:2], '{"step": 5}', kept[2], '{"step": 6}', '{"st']))
    assert keep_until(path, 4) == 2
    assert path.read_text() == "\n".join(kept) + "\n"
    assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl"]


def test_an_appender_writes_whole_lines_that_are_readable_at_once(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.jsonl"
    file = Appender(path)
    assert not path.exists()
    file.write({"step": 1}, {"step": 2})
    assert [row["step"] for row in rows(path)] == [1, 2]
    file.close()
    file.write({"step": 3})
    file.close()
    assert [row["step"] for row in rows(path)] == [1, 2, 3]


def _append(path: Path, who: int) -> None:
    file = Appender(path)
    for i in range(200):
        file.write({"step": i, "who": who, "text": "x" * 50})


def test_two_processes_can_append_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_append, args=(path, who)) for who in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    found = list(rows(path))
    for who in range(2):
        assert [row["step"] for row in found if row["who"] == who] == list(range(200))


def test_the_tail_of_a_file_holds_only_whole_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    file = Appender(path)
    file.write(*({"step": i} for i in range(100)))
    for tail, first in ((38, 98), (39, 97), (40, 97)):  # a row has 13 bytes
        assert [row["step"] for row in rows(path, tail=tail)] == list(range(first, 100))
    assert [row["step"] for row in rows(path, tail=10_000)] == list(range(100))
