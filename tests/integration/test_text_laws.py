"""The laws of the design for a language model: the same tokens and losses under every plan, cut, and after a resume."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import m2flow
from m2flow.api import Run
from m2flow.observe.samples import read_samples
from tests.integration import small, small_text
from tests.integration.test_laws import assert_same

LORA = {"policy": {**small_text.recipe()["policy"], "lora": {"rank": 4, "alpha": 8}}}
CRITIC = {
    "objective": {"name": "ppo", "level": "action", "gamma": 1.0, "critic_hidden": [8], "kl": "k3", "kl_coef": 0.05},
    "rollout": {"lanes": 12, "length": 1},
    "learner": {"epochs": 2, "minibatch": 6},
}
KINDS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "lora": LORA,
    "ppo with a critic and a reference": CRITIC,
    "dynamic sampling": {"rollout": {"lanes": 12, "length": 1, "group": 4, "resample": 2, "when_dry": "drop"}},
}


def said(run: Run) -> list[tuple[Any, ...]]:
    """Every training sample of a run, replicas joined: step, task, attempt, text, log-prob."""
    found = []
    for file in sorted(run.folder.samples.glob("step_*.parquet")):
        step = int(file.name[5:11])
        found += [(step, row["position"], row["attempt"], row["text"], row["finish"]) for row in read_samples(file)]
    return sorted(found)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The runs that all others are compared to."""
    folder = tmp_path_factory.mktemp("straight")
    return {name: small_text.train(folder, name, **changes) for name, changes in KINDS.items()}


@pytest.mark.parametrize("plan", ["disaggregated", "two rollouts in threads", "two rollouts in processes"])
@pytest.mark.parametrize("kind", KINDS)
def test_law_1_every_plan_gives_the_same_tokens_and_losses(
    straight: dict[str, Run], tmp_path: Path, kind: str, plan: str
) -> None:
    run = small_text.train(tmp_path, "run", **KINDS[kind], plan=small.PLANS[plan])
    assert said(run) == said(straight[kind]) != []
    assert_same(run, straight[kind], 1e-9)


def test_law_1_how_many_decode_together_changes_nothing(straight: dict[str, Run], tmp_path: Path) -> None:
    run = small_text.train(tmp_path, "run", generator={"name": "torch", "dtype": "float64", "slots": 5})
    assert said(run) == said(straight["grpo"])
    assert_same(run, straight["grpo"], 1e-9)


@pytest.mark.parametrize("cut", [{"microbatch": 5}, {"microbatch_tokens": 20}, {"microbatch_tokens": 1}])
def test_law_2_micro_batches_do_not_change_the_run(
    straight: dict[str, Run], tmp_path: Path, cut: dict[str, int]
) -> None:
    run = small_text.train(tmp_path, "run", learner={"epochs": 1, **cut})
    assert_same(run, straight["grpo"], 1e-8)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_law_3_a28_recorded_log_prob_is_the_one_that_is_trained_on(tmp_path: Path, temperature: float) -> None:
    policy = small_text.recipe()["policy"] | {"temperature": temperature}
    run = small_text.train(tmp_path, "run", policy=policy)
    gaps = [row["train/logprob_gap"] for row in run.metrics()]
    assert len(gaps) == 3 and max(gaps) < 1e-9
    assert max(abs(row["train/approx_kl"]) for row in run.metrics()) < 1e-9  # the first update has ratio 1


@pytest.mark.parametrize("kind", KINDS)
def test_law_4_stop_and_resume_is_exact(tmp_path: Path, kind: str) -> None:
    whole = small_text.train(tmp_path, "whole", **KINDS[kind], steps=4, checkpoint={"every": 2})
    first = small_text.train(tmp_path, "parts", **KINDS[kind], steps=2, checkpoint={"every": 2})
    resumed = m2flow.resume(first, steps=4, quiet=True)
    assert said(resumed) == said(whole)
    assert_same(resumed, whole, 0.0)


SCRIPT = """
import sys, m2flow
from tests.integration import small_text
m2flow.train(small_text.recipe(steps=400, checkpoint={"every": 1, "keep": 2}), run_dir=sys.argv[1], quiet=True)
"""


def test_law_4_kill_9_leaves_a_checkpoint_that_continues_exactly(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path / "killed")], cwd=Path(__file__).parents[2])
    folder = tmp_path / "killed" / "checkpoints"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and len(list(folder.glob("step_*"))) < 2:
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.wait(timeout=30)
    done = max(int(path.name[5:]) for path in folder.glob("step_*"))
    resumed = m2flow.resume(tmp_path / "killed", steps=done + 2, quiet=True)
    whole = small_text.train(tmp_path, "whole", steps=done + 2)
    assert_same(resumed, whole, 0.0)
    assert said(resumed) == said(whole)
