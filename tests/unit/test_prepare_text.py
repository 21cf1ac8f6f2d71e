"""Answers must fit into the context of the model, and what else text recipes are told before they start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from m2flow import api, config

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


def rows(path: Path, *answers: Any) -> tuple[str, ...]:
    """Overrides for a file of good rows with these answers behind them."""
    lines = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]
    lines += [{"prompt": f"{i}-1=", "answer": answer} for i, answer in enumerate(answers)]
    (path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    env = {"name": "rows", "files": str(path / "rows.jsonl"), "held_out": 0, "max_tokens": 8}
    return (f"env={json.dumps(env)}", "evaluation=null")


@pytest.mark.parametrize("answer", [["4"], True, "\\boxed{}", "7" * 50_000])
@pytest.mark.parametrize("nested", [False, True])
def test_right_answers_that_cannot_be_compared_are_refused_with_file_row_and_field(
    tmp_path: Path, answer: Any, nested: bool
) -> None:
    given = rows(tmp_path, "5", answer, answer)
    key = "reward.answer"
    if nested:
        given += ('reward={"name": "combined", "parts": {"it": {"reward": {"name": "math"}}}}',)
        key = "reward.parts.it.reward.answer"
    found = problems(*given)
    assert found.startswith(f"{key}: field 'answer': ")
    assert f"({tmp_path / 'rows.jsonl'} row 6 (line 6)); 2 tasks are like that, this is the first" in found
    assert found.endswith('; a valid row: {"prompt": "0+1=", "answer": "1"}')


def test_a_reward_that_asks_for_a_key_that_the_rows_do_not_have_is_refused(tmp_path: Path) -> None:
    found = problems(*rows(tmp_path), 'reward={"name": "math", "answer": "gold"}')
    assert found.startswith("reward.answer: tasks have no 'gold' (keys: prompt, answer); name the key of theirs")


def test_rows_of_chats_have_no_right_answer_for_the_math_reward(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    given = rows(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    found = problems(*given)
    assert "reward.answer: tasks have no 'answer' (keys: messages, completion)" in found
    assert found.endswith('; a valid row: {"prompt": "2 + 2 =", "answer": "4"}'), "of these rows none is"


def test_the_tasks_of_the_package_are_ones_that_the_reward_can_score(tmp_path: Path) -> None:
    assert api.check(TEXT, *rows(tmp_path, 5, 2.5, "so \\boxed{3}")).ok


@pytest.mark.parametrize("objective", ["grpo", {"name": "grpo", "clip_high": 0.28}])
def test_text_tasks_need_a_level_that_somebody_wrote(objective: Any, tmp_path: Path) -> None:
    written = tmp_path / "recipe.json"  # JSON is YAML
    written.write_text(json.dumps({**TEXT, "objective": objective}))
    for source in ({**TEXT, "objective": objective}, written):
        with pytest.raises(
            ValueError, match="objective.level.*: is required for text tasks: action is a prob"
        ) as caught:
            api.check(source)
        assert "level: action" in str(caught.value)
    for level in ("action", "chunk", "sequence", "token"):
        assert api.check({**TEXT, "objective": objective}, f"objective.level={level}").ok


def test_the_level_is_asked_for_once_and_only_of_objectives_that_have_one() -> None:
    with pytest.raises(ValueError, match="with a critic") as caught:
        api.check({**TEXT, "objective": "ppo"})
    assert "is required" not in str(caught.value)
    sft = {**TEXT, "objective": "sft", "flow": "supervised", "rollout": {"lanes": 8, "length": 1}}
    assert "objective.level" not in str(api.check(sft).problems)
    stored = config.dump(config.load(TEXT, "objective.level=chunk"))
    assert config.load(stored).objective.level == "chunk"


def test_one_ratio_for_an_answer_is_noted() -> None:
    (note,) = api.check(TEXT, "objective.level=chunk").notes
    assert note.startswith("objective.level is chunk: one probability ratio for a whole answer")
    assert not api.check(TEXT).notes


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("decoupled", [True, False])
def test_rounded_log_probs_as_the_old_ones_are_noted(dtype: str, decoupled: bool) -> None:
    found = api.check(
        TEXT, f"generator={{name: torch, dtype: {dtype}}}", f"objective.decoupled={str(decoupled).lower()}"
    )
    assert found.ok, found.problems
    said = [note for note in found.notes if note.startswith("generator.dtype is bfloat16 and objective.decoupled fals")]
    assert len(said) == (dtype == "bfloat16" and not decoupled)
