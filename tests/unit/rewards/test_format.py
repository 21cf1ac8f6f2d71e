from __future__ import annotations

import math
from typing import Any

import pytest

from m2flow.rewards.format import FormatRewardConfig
from m2flow.rewards.overlong import OverlongRewardConfig
from tests.unit.rewards.samples import sample

WHOLE = "<think>a</think><answer>b</answer>"


def fits(text: str, **keys: Any) -> bool:
    [score] = FormatRewardConfig(**keys).build().score([sample(text)])["reward"].tolist()
    assert score in (0.0, 1.0)
    return bool(score)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (WHOLE, True),
        ("  <think>a\nb</think>\n\n<answer>b</answer>\n", True),
        ("<think></think><answer>b</answer>", False),
        ("<think> \n </think><answer>b</answer>", False),
        ("<think>a</think><answer></answer>", False),
        ("<answer>b</answer><think>a</think>", False),
        ("<think>a<answer>b</answer></think>", False),
        ("<think>a</think>b", False),
        ("x" + WHOLE, False),
        (WHOLE + "x", False),
        ("<think>a</think>x<answer>b</answer>", False),
        (WHOLE + WHOLE, False),
        ("<think>a<think>a</think><answer>b</answer>", False),
        ("<think>a</think><answer>b", False),
        ("</think>a<think><answer>b</answer>", False),
        ("", False),
    ],
)
def test_each_tag_once_in_order_with_something_inside(text: str, expected: bool) -> None:
    assert fits(text) is expected


def test_a_thought_with_an_answer_behind_it() -> None:
    keys: dict[str, Any] = {"tags": ("think",), "rest": "required"}
    assert fits("<think>a</think>b", **keys)
    assert not fits("<think></think>b", **keys)
    assert not fits("<think></think>a", **keys)
    assert not fits("<think>a</think>  ", **keys)
    assert fits("<think>a</think>  ", tags=("think",), rest="allowed")


def test_a_tag_that_the_prompt_has_opened() -> None:
    assert fits("a</think><answer>b</answer>", opened=True)
    assert not fits("</think><answer>b</answer>", opened=True)
    assert not fits("<think>a</think><answer>b</answer>", opened=True)


def test_a_pattern_must_match_the_whole_text() -> None:
    keys: dict[str, Any] = {"tags": (), "pattern": r"Answer: \d+\.?"}
    assert fits("Answer: 12.", **keys)
    assert not fits("The Answer: 12.", **keys)
    assert not fits("Answer: 12.\n", **keys)
    assert fits("a\nb", tags=(), pattern="a.b")
    assert fits("a\nb", pattern="a.b")  # a pattern alone means no tags


def test_rewards_are_the_recipe_s() -> None:
    made = FormatRewardConfig(right=0.1, wrong=-0.5).build()
    assert made.score([sample(WHOLE), sample("")])["reward"].tolist() == pytest.approx([0.1, -0.5])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tags": ("a", "a")}, "tags: different names"),
        ({"tags": ("a b",)}, "tags: different names"),
        ({"tags": ()}, "pattern: give either tags or a pattern"),
        ({"tags": ("a",), "pattern": "x"}, "pattern: give either tags or a pattern"),
        ({"tags": (), "pattern": "("}, r"pattern: '\(' is no regular expression"),
        ({"rest": "some"}, "rest: must be none, allowed or required"),
        ({"right": math.inf}, "right: must be a finite number"),
    ],
)
def test_format_config_errors_name_the_key(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        FormatRewardConfig(**keys)


def test_the_overlong_punishment_of_dapo() -> None:
    """Equation 13 with L_max 100 and L_cache 20: 0 up to 80, (80 - n) / 20 between, -1 from 100 on."""
    made = OverlongRewardConfig(max_tokens=100, cache=20).build()
    got = made.score([sample("", length=n) for n in (0, 79, 80, 81, 85, 90, 100, 101, 10**9)])
    assert got["reward"].tolist() == pytest.approx([0, 0, 0, -0.05, -0.25, -0.5, -1, -1, -1], abs=1e-7)
    assert got["overlong"].tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1]
    assert not [x for x in got["reward"].tolist() if str(x) == "-0.0"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"max_tokens": 0, "cache": 1}, "max_tokens: must be at least 1"),
        ({"max_tokens": 10, "cache": 11}, r"cache: must be from 1 to max_tokens \(10\), got 11"),
        ({"max_tokens": 10, "cache": 0}, "cache: must be from 1"),
    ],
)
def test_overlong_config_errors_name_the_key(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        OverlongRewardConfig(**keys)
