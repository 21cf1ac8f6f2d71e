"""Answers must fit into the context of the model, and what else text recipes are told before they start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from m2flow import api

NETWORK = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TEXT: dict[str, Any] = {
    "env": {"name": "arithmetic", "digits": 1, "max_tokens": 8, "template": "{question}="},
    "reward": "math",
    "policy": {"name": "causal_lm", "config": NETWORK, "tokenizer": {"characters": "0123456789+-*= "}},
    "objective": {"name": "grpo", "level": "action"},
    "rollout": {"lanes": 8, "length": 1, "group": 4},
}


def problems(*overrides: str) -> str:
    report = api.check(TEXT, *overrides)
    assert not report.ok
    return "\n".join(report.problems)


def test_answers_that_fit_are_accepted_without_a_note() -> None:
    report = api.check(TEXT)
    assert report.ok, report.problems
    assert "env.max_tokens" not in str(report)


@pytest.mark.parametrize("given", [64, 65, 1000])
def test_answers_longer_than_the_context_are_refused(given: int) -> None:
    assert f"env.max_tokens: {given} tokens of an answer and a prompt do not fit into 64" in problems(
        f"env.max_tokens={given}"
    )


def test_the_context_of_a_generator_is_at_most_the_models_and_holds_a_prompt() -> None:
    assert "generator.max_context: 65 is more than the model can see, 64" in problems(
        "generator.name=torch", "generator.max_context=65"
    )
    found = problems("generator.name=torch", "generator.max_context=5", "env.max_tokens=2")
    assert "has a prompt of 7 tokens, which leaves no room for an answer in 5 (generator.max_context)" in found


def test_prompts_that_leave_less_room_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "1+1=" + "1" * extra, "answer": "2"} for extra in (0, 1, 2, 55, 56)]
    file.write_text("\n".join(map(json.dumps, rows)))
    recipe = {**TEXT, "env": {"name": "rows", "files": str(file), "max_tokens": 8, "held_out": 0.0}}
    report = api.check(recipe)
    assert report.ok, report.problems
    assert "2 of 5 prompts looked at leave less than env.max_tokens 8 of 64" in str(report)
    assert "no room for an answer" in "\n".join(api.check(recipe, "policy.config.max_position_embeddings=40").problems)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("policy.config.num_attention_heads=3", "policy.config: num_attention_heads 3 must divide hidden_size 32"),
        ("policy.config.num_key_value_heads=3", "policy.config: num_key_value_heads 3 must divide num_attention_heads"),
        ("policy.lora={rank: 64}", "policy.lora.rank: 64 is more than the width 16"),
        ("policy.stop=['é']", "policy.stop: the tokenizer has no token for 'é'; give texts it has"),
    ],
)
def test_a_policy_that_could_not_train_is_refused_by_its_key(override: str, said: str) -> None:
    assert said in problems(override)


def test_a_punishment_of_length_that_no_answer_reaches_is_refused() -> None:
    alone = {**TEXT, "reward": {"name": "overlong", "max_tokens": 8, "cache": 2}}
    assert api.check(alone).ok
    with pytest.raises(ValueError, match="reward.max_tokens .*: 9 tokens, and answers end at 8"):
        api.check(alone, "reward.max_tokens=9")
    mixed = {**TEXT, "reward": {"name": "combined", "parts": {"short": {"reward": alone["reward"]}}}}
    with pytest.raises(ValueError, match="reward.parts.short.reward.max_tokens.*: 8 tokens, and answers end at 4"):
        api.check(mixed, "env.max_tokens=4")


def test_a_fault_is_told_once() -> None:
    for override in ("evaluation.videos=3", "evaluation.horizon=3"):
        assert problems("evaluation={seeds: 4}", override).count("remove it") == 1
    assert problems("policy.tokenizer=/nowhere/at/all").count("is no folder") == 1
