"""The Recorder contract: every recorder takes rows, keeps them, closes once more without harm, and resumes.

JSONL and TensorBoard are read back from disk. wandb and SwanLab are tested twice: against fakes that have the call
signatures of the real packages (so that a wrong keyword fails), and for real, offline, where the package is installed.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from m2flow import registry
from m2flow.observe.jsonl import decode, rows
from m2flow.observe.layout import RunFolder, read_json
from m2flow.observe.sinks import (
    JsonlRecorder,
    MultiRecorder,
    ObserveConfig,
    SwanlabRecorder,
    Target,
    TensorBoardRecorder,
    WandbRecorder,
)
from m2flow.protocols import Recorder

BUILTIN = {name: registry.resolve("recorder", name) for name in registry.BUILTIN["recorder"]}
PROTOCOLS = ("Recorder",)
ROW = {"train/policy_loss": 0.5, "rollout/return": -3.0}


@pytest.fixture(autouse=True)
def strict_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M2FLOW_STRICT_METRICS", "1")


class FakeRun:
    """What `init` of both packages returns, as far as it is used."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.rows, self.finished = settings, [], 0

    def finish(self) -> None:
        self.finished += 1


class FakeWandbRun(FakeRun):
    # wandb 0.31: Run.log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None)
    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self.rows.append((step, data))


class FakeSwanlabRun(FakeRun):
    # swanlab 0.10: Run.log(self, data: Mapping[str, Any], step: int | None = None)
    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        self.rows.append((step, data))


def fake_wandb() -> ModuleType:
    module = ModuleType("wandb")

    # wandb 0.31: the parameters of wandb.init that are used here, by their real names; all are optional there
    def init(
        entity: str | None = None,
        project: str | None = None,
        dir: str | None = None,  # noqa: A002
        id: str | None = None,  # noqa: A002
        name: str | None = None,
        config: dict[str, Any] | None = None,
        mode: str | None = None,
        resume: str | None = None,
        settings: dict[str, Any] | None = None,
    ) -> FakeWandbRun:
        assert mode in (None, "online", "offline", "disabled", "shared")
        assert resume in (None, "allow", "never", "must", "auto")
        json.dumps(config, allow_nan=False)
        module.run = FakeWandbRun(locals())  # type: ignore[attr-defined]
        return module.run  # type: ignore[attr-defined,no-any-return]

    module.init = init  # type: ignore[attr-defined]
    return module


def fake_swanlab() -> ModuleType:
    module = ModuleType("swanlab")

    # swanlab 0.10: keyword-only
    def init(
        *,
        log_dir: str | None = None,
        mode: str | None = None,
        project: str | None = None,
        name: str | None = None,
        id: str | None = None,  # noqa: A002
        resume: str | None = None,
        config: dict[str, Any] | None = None,
    ) -> FakeSwanlabRun:
        assert mode in (None, "disabled", "online", "local", "offline")
        assert resume in (None, "must", "allow", "never")
        assert log_dir is None or Path(log_dir).is_dir()
        json.dumps(config, allow_nan=False)
        module.run = FakeSwanlabRun(locals())  # type: ignore[attr-defined]
        return module.run  # type: ignore[attr-defined,no-any-return]

    module.init = init  # type: ignore[attr-defined]
    return module


FAKES: dict[str, Callable[[], ModuleType]] = {"wandb": fake_wandb, "swanlab": fake_swanlab}
TRACKERS = {"wandb": WandbRecorder, "swanlab": SwanlabRecorder}


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    made = {name: make() for name, make in FAKES.items()}
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


def target(path: Path, **more: Any) -> Target:
    return Target(folder=RunFolder(path), **more)


def tensorboard_events(path: Path) -> list[tuple[int, str, float]]:
    """(step, tag, value) as TensorBoard itself shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(path / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return sorted(
        (event.step, tag, event.value) for tag in accumulator.Tags()["scalars"] for event in accumulator.Scalars(tag)
    )


# ---- what holds for all


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_a_recorder_has_the_methods_of_the_protocol_and_takes_rows(
    name: str, tmp_path: Path, fakes: dict[str, Any]
) -> None:
    recorder: Recorder = BUILTIN[name](target(tmp_path, config={"lr": math.nan}))
    recorder.log(0, ROW)
    recorder.log(1, {"train/policy_loss": math.nan, "rollout/return": math.inf})
    recorder.close()


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_a_recorder_does_not_change_or_keep_the_row(name: str, tmp_path: Path, fakes: dict[str, Any]) -> None:
    recorder = BUILTIN[name](target(tmp_path))
    row = dict(ROW)
    recorder.log(0, row)
    assert row == ROW
    row["train/policy_loss"] = 9.0
    recorder.close()
    if name in TRACKERS:
        assert fakes[name].run.rows == [(0, ROW)]


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_a29_a_recorder_takes_numpy_numbers(name: str, tmp_path: Path, fakes: dict[str, Any]) -> None:
    recorder = BUILTIN[name](target(tmp_path, config={"lr": np.float32(0.5), "sizes": np.arange(2), "n": np.int64(3)}))
    recorder.log(np.int64(2), {"train/policy_loss": np.float32(0.25), "rollout/episodes": np.int64(4)})
    recorder.close()
    if name == "jsonl":
        text = RunFolder(tmp_path).metrics.read_text()
        row = json.loads(text, parse_constant=pytest.fail)
        assert (row["step"], row["train/policy_loss"], row["rollout/episodes"]) == (2, 0.25, 4)
    if name == "tensorboard":
        assert tensorboard_events(tmp_path) == [(2, "rollout/episodes", 4.0), (2, "train/policy_loss", 0.25)]


# ---- JSONL


def test_jsonl_rows_are_on_disk_when_log_returns(tmp_path: Path) -> None:
    recorder = JsonlRecorder(target(tmp_path))
    recorder.log(7, {"train/policy_loss": math.nan, "rollout/return": -math.inf, "train/grad_norm": 0.1})
    [row] = rows(RunFolder(tmp_path).metrics)
    assert (row["step"], row["train/policy_loss"], row["rollout/return"], row["train/grad_norm"]) == (
        7,
        None,
        "-Infinity",
        0.1,
    )
    assert decode(row["rollout/return"]) == -math.inf
    assert row["time"] > 1.7e9
    recorder.close()


def test_jsonl_drops_steps_that_a_resumed_run_does_again(tmp_path: Path) -> None:
    first = JsonlRecorder(target(tmp_path))
    for step in range(5):
        first.log(step, {"train/policy_loss": float(step)})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "train/lo')  # the process was killed inside a row
    second = JsonlRecorder(target(tmp_path, resume_step=2))
    second.log(3, {"train/policy_loss": 33.0})
    second.close()
    assert [(row["step"], row["train/policy_loss"]) for row in rows(tmp_path / "metrics.jsonl")] == [
        (0, 0.0), (1, 1.0), (2, 2.0), (3, 33.0),
    ]  # fmt: skip


def test_a_new_run_does_not_mix_with_an_earlier_one(tmp_path: Path) -> None:
    first = JsonlRecorder(target(tmp_path))
    first.log(0, ROW)
    first.close()
    with pytest.raises(ValueError, match="rows of an earlier run; resume that run"):
        JsonlRecorder(target(tmp_path))


def test_rows_survive_a_kill_of_the_process(tmp_path: Path) -> None:
    code = (
        "import os, signal, pathlib\n"
        "from m2flow.observe.sinks import ObserveConfig\n"
        f"recorder = ObserveConfig().build(pathlib.Path({str(tmp_path)!r}))\n"
        "for step in range(20): recorder.log(step, {'train/policy_loss': float(step)})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == list(range(20))


# ---- TensorBoard


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    recorder = TensorBoardRecorder(target(tmp_path))
    recorder.log(0, ROW)
    recorder.log(3, {"train/policy_loss": 0.25})
    recorder.close()
    assert tensorboard_events(tmp_path) == [
        (0, "rollout/return", -3.0),
        (0, "train/policy_loss", 0.5),
        (3, "train/policy_loss", 0.25),
    ]


def test_tensorboard_forgets_what_came_after_the_resumed_step(tmp_path: Path) -> None:
    first = TensorBoardRecorder(target(tmp_path))
    for step in range(5):
        first.log(step, {"train/policy_loss": float(step)})
    first.close()
    second = TensorBoardRecorder(target(tmp_path, resume_step=2))
    second.log(3, {"train/policy_loss": 33.0})
    second.close()
    assert [(step, value) for step, _, value in tensorboard_events(tmp_path)] == [(0, 0), (1, 1), (2, 2), (3, 33)]


def test_tensorboard_is_written_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from m2flow.observe.sinks import ObserveConfig\n"
        "before = 'tensorboard' in sys.modules\n"
        f"recorder = ObserveConfig().build(pathlib.Path({str(tmp_path)!r}))\n"
        "recorder.log(0, {'train/policy_loss': 1.0}); recorder.close()\n"
        "print(before, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False False"
    assert tensorboard_events(tmp_path) == [(0, "train/policy_loss", 1.0)]


# ---- trackers


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_trackers_get_project_name_config_and_rows(name: str, tmp_path: Path, fakes: dict[str, Any]) -> None:
    recorder = TRACKERS[name](target(tmp_path / "run-3", project="arms", config={"lr": 1e-3, "clip": math.inf}))
    recorder.log(4, ROW)
    recorder.close()
    run = fakes[name].run
    assert (run.settings["project"], run.settings["name"]) == ("arms", "run-3")
    assert run.settings["config"] == {"lr": 1e-3, "clip": "Infinity"}
    assert run.settings["mode"] is None  # WANDB_MODE and its like decide
    assert run.rows == [(4, ROW)]
    assert run.finished == 1


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_trackers_work_offline(name: str, tmp_path: Path, fakes: dict[str, Any]) -> None:
    TRACKERS[name](target(tmp_path, offline=True)).close()
    assert fakes[name].run.settings["mode"] == "offline"


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_a_resumed_run_continues_under_its_id_and_a_new_one_does_not(
    name: str, tmp_path: Path, fakes: dict[str, Any]
) -> None:
    ids, resumes = [], []
    for path, resume_step in ((tmp_path / "a", None), (tmp_path / "a", 3), (tmp_path / "b", None)):
        TRACKERS[name](target(path, resume_step=resume_step)).close()
        ids.append(fakes[name].run.settings["id"])
        resumes.append(fakes[name].run.settings["resume"])
    assert ids[0] == ids[1] == read_json(tmp_path / "a" / "recorders.json")[name]
    assert ids[2] != ids[0]
    assert resumes == [None, "allow", None]


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_a_missing_package_names_the_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=rf"recorders: '{name}' needs .*pip install 'm2flow\[{name}\]'"):
        ObserveConfig(recorders=(name,)).build(tmp_path)


REAL = """
import sys, pathlib
from m2flow.observe.sinks import ObserveConfig
recorder = ObserveConfig(recorders=({name!r},), project="m2flow-test", offline=True).build(
    pathlib.Path({path!r}), {{"lr": 0.001, "note": "kept-in-config"}}, resume_step={resume}
)
for step in range({start}, {start} + 3):
    recorder.log(step, {{"train/policy_loss": 0.5 * step, "rollout/return": float("nan")}})
recorder.close()
"""


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_the_real_package_takes_our_calls_offline(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name)
    for start, resume in ((0, None), (3, 2)):
        code = REAL.format(name=name, path=str(tmp_path), start=start, resume=resume)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
    written = b"".join(path.read_bytes() for path in (tmp_path / name).rglob("*") if path.is_file())
    assert b"train/policy_loss" in written
    assert b"kept-in-config" in written
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == list(range(6))


# ---- together


class Failing:
    def __init__(self, target: Target | None = None) -> None:
        self.closed = False

    def log(self, step: int, metrics: Any) -> None:
        raise ConnectionError("tracker is down")

    def close(self) -> None:
        self.closed = True
        raise ConnectionError("tracker is down")


def test_a_failing_recorder_does_not_keep_rows_from_the_others(tmp_path: Path) -> None:
    failing, jsonl = Failing(), JsonlRecorder(target(tmp_path))
    recorder = MultiRecorder([failing, jsonl])
    with pytest.raises(ConnectionError, match="tracker is down"):
        recorder.log(0, ROW)
    with pytest.raises(ConnectionError):
        recorder.close()
    assert failing.closed
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [0]


def test_an_undeclared_metric_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    recorder = ObserveConfig(recorders=()).build(tmp_path)
    with pytest.raises(ValueError, match="'train/surprise' is not declared"):
        recorder.log(0, {"train/surprise": 1.0})
    assert not (tmp_path / "metrics.jsonl").exists()


def test_jsonl_is_always_there_and_never_twice(tmp_path: Path) -> None:
    for i, names in enumerate(((), ("jsonl",), ("tensorboard", "jsonl"))):
        recorder = ObserveConfig(recorders=names).build(tmp_path / str(i))
        recorder.log(0, ROW)
        recorder.close()
        assert len(list(rows(tmp_path / str(i) / "metrics.jsonl"))) == 1


class Mine:
    """A recorder of somebody else, named by its address."""

    built: list[Any] = []

    def __init__(self, target: Target) -> None:
        self.built.append(target)

    def log(self, step: int, metrics: Any) -> None:
        self.built.append(metrics)

    def close(self) -> None:
        self.built.append(None)


def test_recorders_of_other_packages_are_found_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown recorder 'mine' .known: jsonl, swanlab, tensorboard"):
        ObserveConfig(recorders=("mine",)).build(tmp_path)
    Mine.built.clear()
    recorder = ObserveConfig(recorders=(f"{__name__}:Mine",)).build(tmp_path / "b", {"a": 1})
    recorder.log(1, ROW)
    recorder.close()
    assert Mine.built[0].config == {"a": 1}
    assert Mine.built[1:] == [ROW, None]


class Opened(Failing):
    opened: list[Failing] = []

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.opened.append(self)


def test_recorders_opened_before_a_failure_are_closed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Opened.opened.clear()
    with pytest.raises(ValueError, match="unknown recorder 'second'"):
        ObserveConfig(recorders=(f"{__name__}:Opened", "second")).build(tmp_path)
    assert Opened.opened[0].closed
    assert "tracker is down" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("field", "value"),
    [("recorders", ("",)), ("recorders", ("wandb", "wandb")), ("project", "a/b"), ("project", ""), ("log_every", 0)],
)
def test_a_wrong_setting_is_an_error_that_names_it(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        ObserveConfig(**{field: value})


def test_lists_from_yaml_are_taken() -> None:
    assert ObserveConfig(recorders=["tensorboard", "wandb"]).recorders == ("tensorboard", "wandb")  # type: ignore[arg-type]
