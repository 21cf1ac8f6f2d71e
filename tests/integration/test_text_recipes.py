"""The recipes for GPUs take a step here with a tiny model, and the commands that a user gives after a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import m2flow
from m2flow import config
from m2flow.observe.samples import read_samples, sample_files
from tests.architecture import lm_files
from tests.architecture.test_shipped import FOR_GPUS
from tests.integration import small_text

TIED = {**small_text.NETWORK, "tie_word_embeddings": True}
HEAD = {"rank": 2, "targets": ["lm_head"]}
SMALL = [
    "trainer.device=cpu", "trainer.autocast=none", "generator={name: torch}", "env.max_tokens=4", "rollout.lanes=8",
    "rollout.group=4", "learner.minibatch=4", "learner.microbatch_tokens=200", "steps=1", "evaluation.seeds=3",
    "evaluation.every=0", "observe.recorders=[]",
]  # fmt: skip


@pytest.mark.parametrize("path", FOR_GPUS, ids=lambda path: path.stem)
def test_a_recipe_for_gpus_takes_a_step_with_a_tiny_model(tmp_path: Path, path: Path) -> None:
    changes = lm_files.stand_ins(config.load(path), tmp_path) + SMALL
    if config.load(path).rollout.resample:
        changes += ["rollout.resample=1", "rollout.when_dry=keep"]  # a random model is never right
    if "overlong" in path.read_text():
        changes += [f"reward.parts.overlong.reward.{key}" for key in ("max_tokens=4", "cache=2")]
    run = m2flow.train(path, *changes, run_dir=tmp_path / "run", quiet=True)
    [row] = [row for row in run.metrics() if "train/samples" in row]
    assert row["train/samples"] == 8 and row["rollout/length_max"] == 4 and row["train/logprob_gap"] < 1e-3
    assert [found.step for found in run.evaluations()] == [0, 1]


def test_a_run_is_evaluated_again_reported_and_opened_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    changes: dict[str, Any] = {
        "evaluation": {"seeds": 6},
        "reward": {"name": "combined", "parts": {
            "correct": {"reward": {"name": "math", "extract": "last_number"}},
            "share": {"weight": 0.5, "reward": {"name": "function", "function": "tests.integration.small_text:digits"}},
        }},
    }  # fmt: skip
    run = small_text.train(tmp_path, "run", **changes, observe={"recorders": []})
    stored = run.evaluations()[-1]
    again = m2flow.evaluate(run)
    assert again.metrics == stored.metrics and again.protocol == stored.protocol

    tables = sample_files(run.folder.samples, "step")
    assert [step for step, _ in tables] == [0, 1, 2]
    row = read_samples(tables[0][1])[0]
    parts = {name.removeprefix("reward/") for name in row if name.startswith("reward/")}
    assert {"reward", "correct", "correct/correct", "correct/extracted", "share", "error", "timeout"} <= parts
    assert row["reward/reward"] == pytest.approx(row["reward/correct"] + 0.5 * row["reward/share"])
    page = run.folder.report.read_text()
    assert "Sampled texts" in page and "the same held-out tasks after step 0 and step 3" in page
    assert "paired over 6 episodes" in page

    place = run.recipe.checkpoint.build(run.folder.checkpoints).path() / "hf"
    opened = AutoModelForCausalLM.from_pretrained(place).double().eval()
    policy = run.policy()
    for name, x in policy.hf_weights():
        np.testing.assert_allclose(opened.state_dict()[name].numpy(), x.detach().double().numpy(), atol=1e-6)
    follow = small_text.train(tmp_path, "next", policy={"name": "causal_lm", "path": str(place)}, steps=1)
    assert follow.metrics()[0]["train/logprob_gap"] < 1e-9


def test_wrong_recipes_of_language_models_are_refused_before_anything_starts() -> None:
    for changes, message in (
        ({"reward": None}, "reward: text tasks are judged by a reward"),
        ({"policy": {"name": "mlp"}}, "policy: MLP is no language model"),
        ({"rollout": {"lanes": 12, "length": 4, "group": 4}}, "rollout.length: 4, and a conversation is one decision"),
        ({"objective": {"name": "ppo"}}, "objective.level: 'chunk' with a critic"),
        ({"flow": "supervised"}, "learns from its own attempts"),
        ({"objective": {"name": "sft"}}, "flow: SFT learns demonstrations"),
        ({"evaluation": {"seeds": 5000}}, "tasks are held out, and evaluation.seeds asks for 5000"),
        ({"env": {**small_text.recipe()["env"], "template": "{question}\u20ac"}}, "characters"),
        ({"env": {**small_text.recipe()["env"], "max_turns": 3}}, "env.max_turns: 3, and without tools"),
        ({"learner": {"microbatch": 4, "microbatch_tokens": 20}}, "microbatch_tokens: counts tokens"),
        ({"generator": {"name": "torch", "slots": 0}}, "generator.slots"),
        ({"policy": {**small_text.recipe()["policy"], "config": TIED, "lora": HEAD}}, "lora.targets"),
    ):
        try:
            problems = m2flow.check(small_text.recipe(**changes)).problems
        except ValueError as error:
            problems = (str(error),)
        assert any(message in problem for problem in problems), (changes, problems)
