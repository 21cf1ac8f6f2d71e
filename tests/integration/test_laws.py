"""The laws of the design: plan invariance, cut invariance, log-prob parity, resume exactness."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import m2flow
from m2flow.api import Run
from m2flow.backends.checkpoint import read_policy
from tests.integration import small


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that all plans are compared to."""
    return small.train(tmp_path_factory.mktemp("straight"), "run")


def assert_same(ours: Run, theirs: Run, tolerance: float) -> None:
    left, right = small.numbers(ours), small.numbers(theirs)
    assert [row["step"] for row in left] == [row["step"] for row in right]
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name] == pytest.approx(b[name], rel=tolerance, abs=tolerance), name
    for name, array in weights(ours).items():
        np.testing.assert_allclose(array, weights(theirs)[name], rtol=tolerance, atol=tolerance)


def weights(run: Run) -> dict[str, np.ndarray[Any, Any]]:
    place = run.recipe.checkpoint.build(run.folder.checkpoints).path()
    return {name: np.asarray(array) for name, array in read_policy(place).items()}


@pytest.mark.parametrize("plan", [name for name in small.PLANS if name != "collocated"])
def test_law_1_every_plan_trains_the_same(straight: Run, tmp_path: Path, plan: str) -> None:
    assert_same(small.train(tmp_path, "run", plan=small.PLANS[plan]), straight, 1e-9)


def test_law_1_the_shipped_plan_of_two_rollouts_trains_and_evaluates_the_same(tmp_path: Path) -> None:
    ours = small.train(tmp_path, "ours", plan="plans/two_rollouts.yaml", evaluation={"seeds": 5, "every": 2})
    theirs = small.train(tmp_path, "theirs", evaluation={"seeds": 5, "every": 2})
    assert_same(ours, theirs, 1e-9)
    assert [found.step for found in ours.evaluations()] == [0, 2, 4]
    for mine, other in zip(ours.evaluations(), theirs.evaluations(), strict=True):
        assert mine.metrics == pytest.approx(other.metrics, rel=1e-9)
        assert [episode["seed"] for episode in mine.episodes] == [episode["seed"] for episode in other.episodes]


OTHERS: dict[str, dict[str, Any]] = {
    "SAC": {
        "flow": "offpolicy",
        "policy": {"name": "mlp", "hidden": [8], "dist": "squashed"},
        "objective": {"name": "sac", "critic_hidden": [8]},
        "learner": {},
        "replay": {"batch": 16, "capacity": 400, "start": 16},
    },
    "flow policy in chunks": {"policy": {"name": "flow", "hidden": [8], "chunk": 3, "steps": 2}},
    "GRPO on categories": {
        "env": {"name": "bandit", "dtype": "float64"},
        "policy": {"name": "mlp", "hidden": [8]},
        "objective": {"name": "grpo"},
        "rollout": {"lanes": 4, "length": 4, "group": 2},
        "learner": {"epochs": 2},
    },
}


@pytest.mark.parametrize("plan", ["two rollouts in processes", "two sub-batches"])
@pytest.mark.parametrize("what", OTHERS)
def test_law_1_holds_for_every_algorithm(tmp_path: Path, what: str, plan: str) -> None:
    ours = small.train(tmp_path, "ours", **OTHERS[what], plan=small.PLANS[plan])
    assert_same(ours, small.train(tmp_path, "theirs", **OTHERS[what]), 1e-9)


def test_law_1_same_plan_twice_is_bit_equal(straight: Run, tmp_path: Path) -> None:
    again = small.train(tmp_path, "run")
    for name, array in weights(again).items():
        np.testing.assert_array_equal(array, weights(straight)[name])


def test_other_seed_trains_differently(straight: Run, tmp_path: Path) -> None:
    other = small.train(tmp_path, "run", seed=4)
    assert any(not np.array_equal(array, weights(straight)[name]) for name, array in weights(other).items())


@pytest.mark.parametrize("micro", [1, 7, 16])
def test_law_2_micro_batches_do_not_change_the_run(straight: Run, tmp_path: Path, micro: int) -> None:
    cut = small.train(tmp_path, "run", learner={"epochs": 2, "minibatch": 32, "microbatch": micro})
    assert_same(cut, straight, 1e-8)


@pytest.mark.parametrize("policy", [{"name": "mlp", "hidden": [8], "normalize": True}, {"name": "flow", "hidden": [8]}])
def test_law_3_recorded_log_prob_is_the_one_that_is_trained_on(tmp_path: Path, policy: dict[str, Any]) -> None:
    run = small.train(tmp_path, "run", policy=policy)
    gaps = [row["train/logprob_gap"] for row in run.metrics()]
    assert len(gaps) == 4 and max(gaps) < 1e-9


@pytest.mark.parametrize(
    "env",
    [
        {"name": "point_reach", "horizon": 10, "dtype": "float64"},
        {"name": "gymnasium", "id": "HalfCheetah-v5", "max_episode_steps": 25},
        {"name": "envpool", "task": "HalfCheetah-v4", "max_episode_steps": 25},
    ],
)
def test_law_4_stop_and_resume_is_exact(tmp_path: Path, env: dict[str, Any]) -> None:
    whole = small.train(tmp_path, "whole", env=env, steps=4, checkpoint={"every": 2})
    first = small.train(tmp_path, "parts", env=env, steps=2, checkpoint={"every": 2})
    resumed = m2flow.resume(first, steps=4, quiet=True)
    assert_same(resumed, whole, 0.0)


SCRIPT = """
import sys, m2flow
from tests.integration import small
recipe = small.recipe(steps=400, checkpoint={"every": 1, "keep": 2}, plan=small.PLANS["disaggregated"])
m2flow.train(recipe, run_dir=sys.argv[1], quiet=True)
"""


def test_law_4_kill_9_leaves_a_checkpoint_that_continues_exactly(tmp_path: Path) -> None:
    """The driver is killed at an arbitrary moment; no worker survives it, and the resumed run equals a straight one."""
    child = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path / "killed")], cwd=Path(__file__).parents[2])
    folder = tmp_path / "killed" / "checkpoints"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and len(list(folder.glob("step_*"))) < 2:
        time.sleep(0.02)
    workers = _children(child.pid)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert workers, "the plan runs workers in processes"
    assert _gone(workers), "workers survived their driver"
    killed = Run(tmp_path / "killed")
    done = max(killed.recipe.checkpoint.build(folder).steps())
    resumed = m2flow.resume(killed, steps=done + 2, quiet=True)
    straight = small.train(tmp_path, "straight", steps=done + 2, checkpoint={"every": 1, "keep": 2})
    assert_same(resumed, straight, 1e-9)


def _children(pid: int) -> list[int]:
    import psutil

    children = psutil.Process(pid).children(recursive=True)
    return [child.pid for child in children if "m2flow.runtime.child" in " ".join(child.cmdline())]


def _gone(pids: list[int]) -> bool:
    import psutil

    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("workers", [0, 2])
def test_a18_position_after_resume(tmp_path: Path, workers: int) -> None:
    """12 steps at once, and 7 + 5: the same episodes, rows and minibatch orders; a save after step 9 holds position
    9."""
    settings: dict[str, Any] = {
        "env": {"name": "gymnasium", "id": "Pendulum-v1", "max_episode_steps": 12, "workers": workers},
        "rollout": {"lanes": 2, "length": 8},
        "learner": {"epochs": 1, "minibatch": 8},
        "checkpoint": {"every": 1, "keep": None},
    }
    whole = small.train(tmp_path, "whole", **settings, steps=12)
    first = small.train(tmp_path, "parts", **settings, steps=7)
    resumed = m2flow.resume(first, steps=12, quiet=True)
    assert_same(resumed, whole, 0.0)
    states = [rollout_state(run, 9) for run in (whole, resumed)]
    for state in states:
        assert state["turn"] == 9 * 8
        np.testing.assert_array_equal(state["lanes"][0]["episode"], [9 * 8 // 12] * 2)


def rollout_state(run: Run, step: int) -> dict[str, Any]:
    _, state, _ = run.recipe.checkpoint.build(run.folder.checkpoints).load(step)
    rollout: dict[str, Any] = state["rollout/0"]
    return rollout
