"""Where a model thinks before it answers."""

from __future__ import annotations

import pytest

from m2flow.rewards.answers import extract


@pytest.mark.parametrize("policy", ["auto", "boxed"])
@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>\\boxed{7}</think>", None),
        ("<think>\\boxed{7}</think> \\boxed{8}", "8"),
        ("\\boxed{8} <think>no, \\boxed{7}</think>", None),
        ("<think>so \\boxed{7}", None),
        ("\\boxed{7} <think>or", None),
        ("<think>a</think> \\boxed{7} <think>", None),
        ("<think>a</think> \\boxed{6} <think>b</think> \\boxed{7}", "7"),
        ("\\boxed{6}</think> \\boxed{7}", "7"),  # the prompt has opened the tag
        ("\\boxed{6}</think>", None),
    ],
)
def test_what_is_thought_is_no_answer(text: str, answer: str | None, policy: str) -> None:
    assert extract(text, policy) == answer  # type: ignore[arg-type]


def test_thoughts_are_left_out_by_every_way_to_extract() -> None:
    assert extract("<think>7</think> it is 8.", "last_number") == "8"
    assert extract("<think>7</think>", "last_number") is None
    assert extract("<think>7</think> 8 ", "whole") == "8"
    assert extract("<think>The answer is 7", "auto") is None
