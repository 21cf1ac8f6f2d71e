"""What `m2flow show` and `m2flow ls` print."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from m2flow.observe.layout import RunFolder
from m2flow.observe.show import find_runs, ls, show, sparkline
from tests.unit.observe.make_run import make_run


def test_sparklines_show_the_course_and_leave_gaps() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, math.nan, 1.0]) == "▁ ▁"
    assert sparkline([]) == ""
    assert sparkline([math.nan]) == " "
    assert len(sparkline([float(i) for i in range(1000)], 40)) == 40


def test_show_sums_up_a_run(tmp_path: Path) -> None:
    text = show(make_run(tmp_path / "r", seed=4).path, width=160, colour=False)
    for part in (
        "finished", "task: Reach-v1", "seed: 4", "90 %", "[59.6, 98.2] %", "rollout/return", "110", "▁", "█",
        "alarm at step 3 (kl)", "trace.json",
    ):  # fmt: skip
        assert part in text, part
    assert "\x1b" not in text


def test_show_compares_several_runs(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"s{seed}", seed=seed).path for seed in (1, 2)]
    text = show(runs, width=160, colour=False)
    assert "mean of 2" in text
    assert "seed 1: alarm" in text
    with pytest.raises(ValueError, match="none given"):
        show([])


def test_show_says_why_a_run_failed_and_where_its_logs_are(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", done=2, state="failed", error="learner/0: [red]boom[/red]")
    text = show(folder.path, width=160, colour=False)
    assert "failed" in text
    assert "learner/0: [red]boom[/red]" in text
    assert f"logs: {folder.logs}" in text


def test_show_works_on_a_run_that_has_only_begun(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r").create()
    assert "unknown" in show(folder.path)
    folder.metrics.write_text("broken\n{}\n")
    assert "metrics.jsonl:1" in show(folder.path, width=200)


def test_ls_lists_runs_from_old_to_new(tmp_path: Path) -> None:
    make_run(tmp_path / "z" / "first", seed=1)
    make_run(tmp_path / "b", seed=2, done=1, state="failed", error="x")
    (tmp_path / "not_a_run").mkdir()
    text = ls(tmp_path, width=160, colour=False)
    lines = text.splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("z/first")
    assert "success 90 %" in lines[1]
    assert "12/12" in lines[1]
    assert "failed" in lines[2]
    assert "1/12" in lines[2]
    assert find_runs(tmp_path) == [tmp_path / "b", tmp_path / "z" / "first"]


def test_ls_of_nothing_says_so_and_of_no_folder_is_an_error(tmp_path: Path) -> None:
    assert ls(tmp_path) == f"no runs in {tmp_path}"
    with pytest.raises(FileNotFoundError, match="no such folder"):
        ls(tmp_path / "none")


def test_show_of_a_folder_of_runs_says_how_to_list_them(tmp_path: Path) -> None:
    RunFolder(tmp_path / "runs" / "one").create().status.write_text("{}")
    with pytest.raises(FileNotFoundError, match="no run here; `m2flow ls"):
        show([tmp_path / "runs"])
