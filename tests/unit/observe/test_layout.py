"""The run folder: where files are, evaluations, status, run information."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from m2flow.intervals import mean_interval, wilson
from m2flow.observe import runinfo
from m2flow.observe.layout import RunFolder, read_evaluation, read_json, write_json
from m2flow.observe.rundata import boot_id, interval, load_run, show_interval, show_number, show_seconds
from m2flow.types import Evaluation


def test_every_path_is_inside_the_folder_and_distinct(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run").create()
    names = ["recipe", "config", "env", "status", "metrics", "trace", "chrome_trace", "alarms", "report", "recorders"]
    paths = [getattr(folder, name) for name in names]
    paths += [folder.evaluation(3), folder.no_videos]
    assert len(set(paths)) == len(paths)
    assert all(path.is_relative_to(folder.path) for path in paths)
    assert folder.evaluation(3).name == "step_000003.json"
    assert all(path.is_dir() for path in (folder.evaluations, folder.videos, folder.checkpoints, folder.logs))


def test_evaluations_come_back_in_the_order_of_steps(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (1_000_000, 0, 30):
        found = Evaluation(
            step, {"eval/return": math.nan}, {"suite": "x"}, {"eval/return": (-math.inf, 1.0)}, [{"seed": step}]
        )
        write_json(folder.evaluation(step), found)
    (folder.evaluations / "notes.txt").write_text("not an evaluation")
    files = folder.evaluation_files()
    assert [step for step, _ in files] == [0, 30, 1_000_000]
    again = read_evaluation(files[1][1])
    assert (again.step, again.protocol, again.episodes) == (30, {"suite": "x"}, [{"seed": 30}])
    assert math.isnan(again.metrics["eval/return"])
    assert again.intervals == {"eval/return": (-math.inf, 1.0)}


def test_a_broken_json_file_is_an_error_that_names_it_and_a_missing_one_is_none(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert read_json(path) is None
    path.write_text('{"a": ')
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        read_json(path)
    path.write_text("[1, 2]")
    with pytest.raises(ValueError, match="not an evaluation"):
        read_evaluation(path)


def test_json_is_replaced_at_once(tmp_path: Path) -> None:
    path = write_json(tmp_path / "new" / "x.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": 1}
    write_json(path, {"a": 2})
    assert read_json(path) == {"a": 2}


def test_status_keeps_its_start_and_says_how_it_ended(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    first = runinfo.write_status(folder, "running", step=0, steps=10)
    assert first["ended"] is None
    last = runinfo.write_status(folder, "failed", step=4, steps=10, error="learner/0: ValueError: no")
    assert read_json(folder.status) == last
    assert last["started"] == first["started"]
    assert last["ended"] >= last["started"]
    assert (last["state"], last["step"], last["steps"], last["error"]) == ("failed", 4, 10, "learner/0: ValueError: no")
    with pytest.raises(ValueError, match="state: 'broken'; allowed: running"):
        runinfo.write_status(folder, "broken", step=0, steps=1)


def test_a_run_whose_process_is_gone_has_died(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    runinfo.write_status(folder, "running", step=1, steps=10)
    assert load_run(tmp_path).state == "running"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    status = read_json(folder.status) | {"pid": ended.pid}
    write_json(folder.status, status)
    assert load_run(tmp_path).state == ("died" if boot_id() else "running")
    write_json(folder.status, status | {"boot": "another host"})
    assert load_run(tmp_path).state == "running"


def test_run_information_says_versions_machine_command_and_seeds(tmp_path: Path) -> None:
    info = runinfo.collect({"run": 3, "env": 17}, ["m2flow", "train", "x.yaml"])
    assert info["seeds"] == {"run": 3, "env": 17}
    assert info["command"] == ["m2flow", "train", "x.yaml"]
    assert info["packages"]["numpy"] == np.__version__
    assert info["machine"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert info["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert info["machine"]["memory_bytes"] > 2**26
    json.dumps(info)


def test_collecting_versions_imports_nothing_heavy() -> None:
    code = "import sys, m2flow.observe.runinfo as r; r.collect({'run': 0}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_git_state_names_the_commit_and_what_is_changed(tmp_path: Path) -> None:
    assert runinfo.git_state(tmp_path / "missing") == {}

    def git(*args: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", *who, *args], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    git("init", "-q")
    assert runinfo.git_state(tmp_path) == {}  # no commit yet
    (tmp_path / "a.py").write_text("1")
    git("add", "a.py")
    git("commit", "-q", "-m", "first")
    clean = runinfo.git_state(tmp_path)
    assert clean == {"commit": git("rev-parse", "HEAD"), "dirty": False, "changed": []}
    (tmp_path / "a.py").write_text("2")
    assert runinfo.git_state(tmp_path) == clean | {"dirty": True, "changed": ["a.py"]}


def test_a_resumed_run_keeps_what_it_started_with(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for seed in (1, 2, 3):
        runinfo.write_env(folder, {"run": seed}, ["train"])
    env = read_json(folder.env)
    assert env["seeds"] == {"run": 3}
    assert [earlier["seeds"]["run"] for earlier in env["resumed_from"]] == [1, 2]


def test_a_run_folder_with_broken_files_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path).create()
    folder.config.write_text("{")
    folder.metrics.write_text('{"step": 1, "time": 5.0, "train/policy_loss": null}\nbroken\n{"step": 2}\n')
    folder.evaluation(0).write_text("[]")
    write_json(folder.evaluation(5), Evaluation(5, {"eval/return": 1.0}))
    run = load_run(tmp_path)
    assert [e.step for e in run.evaluations] == [5]
    assert len(run.problems) == 3
    assert any("config.json" in p for p in run.problems)
    assert any("metrics.jsonl:2" in p for p in run.problems)
    assert run.state == "unknown"
    with pytest.raises(FileNotFoundError, match="no such run folder"):
        load_run(tmp_path / "other")


def test_curves_merge_rows_of_one_step_and_read_special_numbers(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path).create()
    folder.metrics.write_text(
        '{"step": 2, "time": 7.0, "a/x": "Infinity"}\n{"step": 1, "time": 6.0, "a/x": 1}\n'
        '{"step": 2, "time": 8.0, "a/y": null}\n'
    )
    run = load_run(tmp_path)
    assert (run.curves["a/x"].steps, run.curves["a/x"].values) == ([1, 2], [1.0, math.inf])
    assert math.isnan(run.curves["a/y"].last)
    assert run.times.values == [6.0, 8.0]
    assert run.step == 2
    assert run.seconds == 2.0


def test_intervals_are_the_stored_ones_else_those_of_the_episodes() -> None:
    episodes = [{"ret": float(i), "success_once": i < 3, "length": 5} for i in range(4)]
    plain = Evaluation(1, {"eval/success_once": 0.75}, episodes=episodes)
    assert interval(plain, "eval/success_once") == pytest.approx(wilson(successes=3, trials=4))
    assert interval(plain, "eval/return") == pytest.approx(mean_interval([0.0, 1.0, 2.0, 3.0])[1:])
    assert all(math.isnan(end) for end in interval(plain, "eval/other"))
    stored = Evaluation(1, {}, intervals={"eval/success_once": (0.1, 0.2)}, episodes=episodes)
    assert interval(stored, "eval/success_once") == (0.1, 0.2)


@pytest.mark.parametrize(
    ("value", "metric", "text"),
    [
        (0.98, "eval/success_once", "98 %"),
        (0.925, "rollout/success", "92.5 %"),
        (1234567.0, "", "1,234,567"),
        (812.44, "", "812.4"),
        (0.0123412, "", "0.01234"),
        (math.nan, "", "\u2013"),
        (-math.inf, "", "-\u221e"),
    ],
)
def test_numbers_for_people(value: float, metric: str, text: str) -> None:
    assert show_number(value, metric) == text


def test_intervals_and_times_for_people() -> None:
    assert show_interval((0.929, 1.0), "eval/success_once") == "[92.9, 100] %"
    assert show_interval((-1.5, 2.0)) == "[-1.5, 2]"
    assert show_interval((math.nan, 1.0)) == ""
    assert [show_seconds(s) for s in (3.21, 75, 3700, math.nan)] == ["3.2 s", "1 min 15 s", "1 h 01 min", "\u2013"]
