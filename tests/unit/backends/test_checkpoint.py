"""Checkpoints when things go wrong: kill -9, a full disk, damaged files; and the policy's weights by themselves."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from m2flow.backends import checkpoint
from m2flow.backends.checkpoint import CheckpointConfig, CheckpointStore, read, read_policy
from m2flow.backends.torch.trainer import TorchTrainerConfig
from tests.unit.backends.small import Fit, batch, policy, update

# Imports once, then forks a writer for each line "folder first keep" and prints its process id and every step it saved.
WRITERS = """
import os, signal, sys
from pathlib import Path
import numpy as np
import safetensors.torch
from m2flow.backends.checkpoint import CheckpointConfig, CheckpointStore
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    folder, first, keep = line.rsplit(" ", 2)
    pid = os.fork()
    if pid:
        continue
    print(os.getpid(), flush=True)
    store = CheckpointStore(Path(folder), CheckpointConfig(keep=int(keep)))
    for step in range(int(first), int(first) + 10_000):
        arrays = [np.full(20_000, step, np.int64) for _ in range(6)]
        trainer = {"model": {"policy.w": arrays[0]}, "optimizer": {}}
        # With keep 1 the same step is written over and over.
        store.save(step if keep != "1\\n" else 1000, {"written": step, "arrays": arrays, "trainer": trainer}, {})
        print(step, flush=True)
"""


@pytest.fixture(scope="module")
def writers() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("keep", [2, 1])
def test_a19_kill_9_at_any_moment_leaves_the_previous_checkpoint(
    tmp_path: Path, writers: subprocess.Popen[str], keep: int
) -> None:
    """A writer is killed 15 times at random moments. What it said to be written is there, whole, and the latest."""
    assert writers.stdin is not None
    assert writers.stdout is not None
    rng = random.Random(keep)
    store = CheckpointStore(tmp_path, CheckpointConfig(keep=keep))
    first, cut_short = 0, 0
    for _ in range(15):
        writers.stdin.write(f"{tmp_path} {first} {keep}\n")
        pid = int(writers.stdout.readline())
        said = -1
        for _ in range(rng.randrange(1, 4)):
            said = int(writers.stdout.readline())
        time.sleep(rng.random() * 0.02)
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.001)
        os.set_blocking(writers.stdout.fileno(), False)
        for line in iter(writers.stdout.readline, ""):
            said = int(line)
        os.set_blocking(writers.stdout.fileno(), True)
        cut_short += any(p.name.startswith(".") for p in tmp_path.iterdir())
        for step in store.steps():
            number, state, _ = store.load(step)
            assert number == step
            for array in state["arrays"]:
                assert array.shape == (20_000,)
                assert (array == state["written"]).all()
            assert (read_policy(store.path(step))["w"] == state["written"]).all()
        assert store.load()[1]["written"] in (said, said + 1)
        first = store.load()[1]["written"] + 1
    assert cut_short > 3  # else the kills all fell between saves, and this test shows nothing
    store.save(99_999, {}, {})
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("fails_at", ["arrays", "policy", "state", "manifest", "rename", "point"])
@pytest.mark.parametrize("step", [10, 20])
def test_a19_a_writer_that_raises_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str, step: int
) -> None:
    """Keep 1: step 10 is saved, then writing (step 20, or 10 again) fails half-way with a full disk."""
    store = CheckpointStore(tmp_path, CheckpointConfig(keep=1))
    state: dict[str, Any] = {"model": {"policy.w": np.ones(4)}, "optimizer": {}, "value": 1}
    store.save(10, state, {})
    with monkeypatch.context() as patch:
        full = OSError(28, "No space left on device")

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise full

        if fails_at in ("arrays", "policy"):
            save = safetensors.torch.save_file
            name = f"{fails_at}.safetensors"

            def write_half(tensors: Any, file: Path, *rest: Any) -> None:
                if file.name == name:
                    file.write_bytes(b"half of it")
                    raise full
                save(tensors, file, *rest)

            patch.setattr(safetensors.torch, "save_file", write_half)
        elif fails_at == "rename":
            patch.setattr(Path, "rename", refuse)
        elif fails_at == "point":
            patch.setattr(Path, "replace", refuse)
        else:
            write = checkpoint._write_text

            def write_some(file: Path, text: str) -> None:
                if file.name == f"{fails_at}.json":
                    file.write_text(text[: len(text) // 2])
                    raise full
                write(file, text)

            patch.setattr(checkpoint, "_write_text", write_some)
        with pytest.raises(OSError, match="No space left"):
            store.save(step, state | {"value": 2}, {})
    number, loaded, _ = store.load()
    if fails_at == "point" and step == 10:
        assert loaded["value"] == 2  # the new one is complete, and `latest` already names its step
    else:
        assert (number, loaded["value"]) == (10, 1)
    store.save(30, state | {"value": 3}, {})
    assert store.load()[1]["value"] == 3
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["latest", "step_000030"]


def test_half_written_folders_are_ignored_and_removed_at_the_next_save(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, CheckpointConfig())
    store.save(1, {"a": np.ones(3)}, {})
    for name in (".new-step_000002", ".gone-step_000000", "step_000003", "step_000004", "step_000005"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_000004" / "manifest.json").write_text('{"format": 1, "files": {"arrays.safetensors": {"by')
    short = json.loads((tmp_path / "step_000001" / "manifest.json").read_text())
    (tmp_path / "step_000005" / "manifest.json").write_text(json.dumps(short))
    (tmp_path / "step_000005" / "arrays.safetensors").write_bytes(b"short")
    (tmp_path / "latest").write_text("step_000005\n")
    assert list(store.steps()) == [1]
    assert store.load()[0] == 1
    store.save(6, {}, {})
    assert list(store.steps()) == [1, 6]
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_damage_is_noticed_and_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, CheckpointConfig())
    for step in (1, 2):
        store.save(step, {"a": np.ones(300)}, {})
    file = tmp_path / "step_000002" / "arrays.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"step_000002: arrays\.safetensors is damaged .* load another step"):
        store.load()
    assert store.load(1)[0] == 1


def test_a_write_that_does_not_read_back_equal_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = safetensors.torch.load_file
    monkeypatch.setattr(safetensors.torch, "load_file", lambda file: {name: x + 1e-3 for name, x in load(file).items()})
    store = CheckpointStore(tmp_path, CheckpointConfig())
    with pytest.raises(OSError, match=r"policy\.safetensors read back differs in w"):
        store.save(1, {"trainer": {"model": {"policy.w": torch.ones(2)}, "optimizer": {}}}, {})
    assert list(store.steps()) == []


def test_policy_weights_alone_act_like_the_trained_policy(tmp_path: Path) -> None:
    trainer = TorchTrainerConfig(learning_rate=0.1).build(policy(normalize=True), Fit(), 0)
    update(trainer, batch())
    trainer.model.policy.observe(batch().obs)
    store = CheckpointStore(tmp_path, CheckpointConfig())
    store.save(4, {"learner": [{"trainer": trainer.state(), "updates": 1}], "rollout": [{"turn": 4}]}, {})
    other = policy(seed=3, normalize=True)
    for place in (store.path(), store.path() / "policy.safetensors"):
        other.load_state_dict(read_policy(place))
    obs = {"state": batch().obs["state"].numpy()}
    np.testing.assert_array_equal(other.act(obs, None).action, trainer.model.policy.act(obs, None).action)
    with pytest.raises(FileNotFoundError, match="give a checkpoint folder"):
        read_policy(tmp_path)


def test_law_4_a_trainer_continues_exactly_from_disk(tmp_path: Path) -> None:
    whole = TorchTrainerConfig().build(policy(normalize=True), Fit(), 0)
    store = CheckpointStore(tmp_path, CheckpointConfig())
    for step in range(6):
        if step == 3:
            store.save(step, whole.state(), {})
        update(whole, batch(seed=step))
    other = TorchTrainerConfig().build(policy(seed=1, normalize=True), Fit(), 1)
    other.restore(read(store.path(3))[1])
    for step in range(3, 6):
        update(other, batch(seed=step))
    for name, x in whole.state()["model"].items():
        assert torch.equal(x, other.state()["model"][name]), name


@pytest.mark.parametrize(("every", "saved"), [(3, [3, 6, 7]), (0, [7]), (-1, [7]), (1, [1, 2, 3, 4, 5, 6, 7])])
def test_a20_zero_or_less_saves_the_final_checkpoint_only(every: int, saved: list[int]) -> None:
    config = CheckpointConfig(every=every)
    assert [step for step in range(1, 8) if config.due(step, final=step == 7)] == saved


def test_config_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="keep: must be at least 1, or null to keep all, got 0"):
        CheckpointConfig(keep=0)


def test_nothing_is_pickled(tmp_path: Path) -> None:
    CheckpointStore(tmp_path, CheckpointConfig()).save(1, {"a": np.ones(2), "b": torch.ones(1), "c": "x"}, {})
    names = sorted(p.name for p in (tmp_path / "step_000001").iterdir())
    assert names == ["arrays.safetensors", "manifest.json", "state.json"]
    assert set(safetensors.torch.load_file(tmp_path / "step_000001" / "arrays.safetensors")) == {"state/a", "state/b"}
    json.loads((tmp_path / "step_000001" / "state.json").read_text())


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, CheckpointConfig())
    store.save(1, {}, {})
    file = tmp_path / "step_000001" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))
    with pytest.raises(ValueError, match="format 99 is newer than this m2flow reads"):
        store.load()
