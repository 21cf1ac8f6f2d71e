"""What of a text goes to the scorers of reasoning-gym; the scorers themselves: tests/unit/tasks/test_gym.py."""

from __future__ import annotations

from typing import Any

import pytest

from m2flow.rewards import gym
from m2flow.rewards.math_pool import Outcome
from m2flow.types import Sample, Task

PAYLOAD: dict[str, Any] = {
    "dataset": "d", "options": "{}", "seed": 1, "index": 0, "question": "q", "entry": {"question": "q"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3 <answer>4</answer> or <answer> 5 </answer>.", "5"),
        ("<answer>5</answer> <answer>6", "5"),  # the last one that is closed
        (" 5 ", "5"),
        ("<think><answer>4</answer></think> 5", "5"),
        ("<think>4</think> <answer>5</answer>", "5"),
        ("<think><answer>5</answer>", None),
    ],
)
def test_the_last_answer_that_is_not_a_thought_is_scored(
    text: str, answer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def pool(questions: list[Any]) -> list[Outcome]:
        asked.extend(question["answer"] for question in questions)
        return [Outcome("scored", score=0.75)]

    monkeypatch.setattr(gym, "_pool", lambda: pool)
    got = gym.score(Sample(Task(1, PAYLOAD), 0, text, "stop", 3))
    assert (asked, got) == (([], 0.0) if answer is None else ([answer], 0.75))
