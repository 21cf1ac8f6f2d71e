"""Tasks of reasoning-gym: its own questions, its own scorer, and nothing held out in training."""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path

import pytest

from m2flow.rewards.function import FunctionRewardConfig
from m2flow.rewards.gym import _pool, score
from m2flow.rewards.gym_worker import plain
from m2flow.tasks import gym
from m2flow.tasks.gym import ReasoningGymConfig
from m2flow.types import Sample, Task

SMALL = ReasoningGymConfig(dataset="chain_sum", options={"max_terms": 2, "max_digits": 1}, held_out=60)


def attempt(task: Task, text: str) -> Sample:
    return Sample(task, 0, text, "stop", 1)


def test_what_is_held_out_is_fixed_all_different_and_never_trained_on() -> None:
    held, other = SMALL.tasks("held_out", 0), SMALL.tasks("held_out", 7)
    questions = [held.task(i).payload["question"] for i in range(held.size)]
    assert (held.size, len(set(questions))) == (60, 60)
    assert questions == [other.task(i).payload["question"] for i in range(60)]
    train = SMALL.tasks("train", 0)
    assert train.size is None
    drawn = [train.task(i).payload["question"] for i in range(300)]
    assert not {*drawn} & {*questions}
    raw = gym._make("chain_sum", '{"max_digits": 1, "max_terms": 2}', gym.seeds.derive(0, "reasoning_gym", "chain_sum"))
    assert {raw[i]["question"] for i in range(300)} & {*questions}, "a plain draw would have met some of them"


def test_a_task_is_decided_by_seed_and_position() -> None:
    one, again, other = (SMALL.tasks("train", seed) for seed in (1, 1, 2))
    positions = [0, 3, 2**20 + 3, 10**7]
    tasks = [one.task(p) for p in positions]
    assert tasks == [again.task(p) for p in reversed(positions)][::-1]
    assert tasks != [other.task(p) for p in positions]
    assert len({task.payload["question"] for task in tasks}) > 1
    assert [task.id for task in tasks] == positions


def test_answers_are_scored_by_the_dataset_itself() -> None:
    task = SMALL.tasks("train", 0).task(0)
    right = task.payload["answer"]
    assert score(attempt(task, right)) == 1.0
    assert score(attempt(task, f"so <answer>0</answer>, no: <answer> {right} </answer> yes")) == 1.0
    assert score(attempt(task, "")) == 0.0
    assert score(attempt(task, "<answer></answer>")) == 0.0
    assert 0 < score(attempt(task, f"it is {right}")) < 1  # chain_sum pays for an answer with words around it
    reward = FunctionRewardConfig(function="m2flow.rewards.gym:score", errors="raise").build()
    assert reward.score([attempt(task, right), attempt(task, "x")])["reward"].tolist() == [1.0, 0.0]


def test_a_puzzle_with_many_right_answers_is_judged_by_its_rules() -> None:
    options = {"min_numbers": 3, "max_numbers": 3}
    config = ReasoningGymConfig(dataset="countdown", options=options, held_out=5)
    task = config.tasks("held_out", 0).task(0)
    solution = task.payload["entry"]["metadata"]["expression"]
    assert score(attempt(task, solution)) == 1.0
    assert score(attempt(task, "1 +")) < 1.0


@pytest.mark.parametrize(
    "dataset", ["string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "countdown", "puzzle24"]
)
def test_no_scorer_evaluates_what_a_model_wrote(dataset: str, tmp_path: Path) -> None:
    """Upstream's scorers of these datasets call `eval` or sympy's `parse_expr` on the answer."""
    task = ReasoningGymConfig(dataset=dataset, held_out=2).tasks("held_out", 0).task(0)
    right = task.payload["answer"] or task.payload["entry"]["metadata"].get("expression") or ""
    attack = f"__import__('pathlib').Path({str(tmp_path / 'x')!r}).write_text('x')"
    reward = FunctionRewardConfig(function="m2flow.rewards.gym:score").build()
    texts = [right, attack, f"[{attack}]", f"1 + len([{attack}])", "9**9**9", "(" * 3000]
    found = reward.score([attempt(task, f"<answer>{text}</answer>") for text in texts])["reward"]
    assert not (tmp_path / "x").exists()
    assert max(found[1:]) < 1.0
    assert found[0] == 1.0 or not right


def test_a_scorer_that_does_not_end_is_counted_as_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2flow.rewards.gym.SECONDS", 0.0)
    monkeypatch.setattr("m2flow.rewards.gym._pool", lru_cache(_pool.__wrapped__))
    task = SMALL.tasks("train", 0).task(0)
    reward = FunctionRewardConfig(function="m2flow.rewards.gym:score").build()
    scores = reward.score([attempt(task, "1")])
    assert scores["reward"].tolist() == [0.0] and scores["error"].tolist() == [1.0]


def test_what_stands_in_place_of_eval_reads_literals_and_bounded_arithmetic() -> None:
    assert plain("[['a', 1], (2, -3.5)]") == [["a", 1], (2, -3.5)]
    assert plain("(0x10 + 2) * 3 // 2 % 7 | 8") == ((0x10 + 2) * 3 // 2 % 7 | 8)
    for text in (
        "9**9**9",
        "1 << 10**9",
        "'x' * 10**9",
        "x",
        "f(1)",
        "().__class__",
        "[i for i in range(9)]",
        "lambda: 1",
    ):
        with pytest.raises((ValueError, KeyError)):
            plain(text)


def test_a_template_and_the_payload() -> None:
    config = ReasoningGymConfig(dataset="chain_sum", held_out=3, template="{question}\nIn <answer> tags.")
    payload = config.tasks("held_out", 0).task(1).payload
    assert payload["prompt"] == payload["question"] + "\nIn <answer> tags."
    assert payload["entry"]["answer"] == payload["answer"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dataset": "chain_sums"}, "dataset: reasoning-gym has no 'chain_sums'; did you mean chain_sum"),
        ({"dataset": "zzzzzzzz"}, "dataset: reasoning-gym has no 'zzzzzzzz'; known: "),
        ({"dataset": "chain_sum", "options": {"foo": 1}}, "options: chain_sum refuses"),
        ({"dataset": "chain_sum", "options": {"min_digits": 0}}, "min_digits must be positive"),
        (
            {"dataset": "chain_sum", "options": {"max_terms": 2, "max_digits": 1}, "held_out": 5000},
            "held_out: chain_sum with these options has only",
        ),
    ],
)
def test_what_reasoning_gym_has_not_is_said_before_anything_starts(options, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        ReasoningGymConfig(**options).tasks("train", 0)
    assert words in str(caught.value)


def test_training_without_questions_of_its_own_ends_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym, "_STEPS", 20)
    options = {"max_terms": 2, "max_digits": 1, "min_digits": 1, "allow_negation": False}
    made = gym._make("chain_sum", gym.json.dumps(options, sort_keys=True), 1)
    size = len({made[i]["question"] for i in range(20_000)})
    train = ReasoningGymConfig(dataset="chain_sum", options=options, held_out=size).tasks("train", 0)
    with pytest.raises(ValueError, match="hardly any question beyond"):
        train.task(0)


def test_without_the_package_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    gym._make.cache_clear()
    gym._held_out.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"pip install 'm2flow\[reasoning-gym\]'"):
        SMALL.tasks("train", 0)


@pytest.mark.parametrize(("options", "key"), [({"held_out": 0}, "held_out"), ({"options": {"seed": 3}}, "options")])
def test_wrong_keys_are_refused(options, key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}: "):
        ReasoningGymConfig(dataset="chain_sum", **options)
