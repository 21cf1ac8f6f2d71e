"""The Reward contract, asked of every reward that is shipped."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from m2flow.registry import BUILTIN
from m2flow.rewards.combined import CombinedRewardConfig, PartConfig
from m2flow.rewards.format import FormatRewardConfig
from m2flow.rewards.function import FunctionReward, FunctionRewardConfig
from m2flow.rewards.math import MathRewardConfig
from m2flow.rewards.overlong import OverlongRewardConfig
from m2flow.types import EpisodeResult, Sample, Task
from tests.contracts.reward_suite import CHECKS, Case


def number(sample: Any) -> Any:
    """The sample is its own reward."""
    return sample


def words(sample: dict[str, Any]) -> dict[str, Any]:
    """Right, and short."""
    return {"right": sample["right"], "short": 1.0 / len(sample["text"])}


def function(name: str, **options: Any) -> Callable[[], FunctionReward]:
    return FunctionRewardConfig(function=f"tests.contracts.test_rewards:{name}", **options).build


def episode(length: int, won: bool | None) -> EpisodeResult:
    return EpisodeResult(seed=length, lane=0, length=length, ret=-1.0, success_once=won, success_at_end=False)


EPISODES = (episode(4, won=True), episode(9, won=False), episode(10, won=True))


def attempt(text: str, answer: object = "3/4", length: float | None = 10) -> Sample:
    return Sample(Task(5, {"answer": answer}), 0, text, "stop", length)  # type: ignore[arg-type]


TAGGED = "<think>a</think><answer>\\boxed{3/4}</answer>"

CASES = [
    Case("function", function("number"), (0, 1.5, True, -2), (0.0, 1.5, 1.0, -2.0), (None, math.nan, "1")),
    Case(
        "function_components",
        function("words", components={"right": 1.0, "short": 0.5}),
        ({"right": 1, "text": "ab"}, {"right": 0, "text": "abcde"}, {"right": -0.25, "text": "ab"}),
        (1.25, 0.1, 0.0),
        ({"right": None, "text": "a"}, {"right": math.inf, "text": "a"}),
    ),
    Case(
        "episode_success",
        FunctionRewardConfig(function="m2flow.rewards.episode:success", errors="raise").build,
        EPISODES,
        (1.0, 0.0, 1.0),
        (episode(5, None),),
    ),
    Case(
        "episode_quick_success",
        FunctionRewardConfig(
            function="m2flow.rewards.episode:quick_success", components={"success": 1.0, "speed": 2.0}
        ).build,
        EPISODES,
        (1.5, 0.0, 1.2),
    ),
    Case(
        "function_errors",
        function("words", components={"right": 1.0, "short": 0.0}, error_reward=-1.0),
        ({"right": 1, "text": "ab"}, {"right": 1, "text": ""}, {"right": 0, "text": "a"}),
        (1.0, -1.0, 0.0),
    ),
    Case(
        "math",
        MathRewardConfig(workers=1).build,
        (attempt("\\boxed{0.75}"), attempt("0.7"), attempt(""), attempt("\\boxed{\\frac34}"), attempt("no idea")),
        (1.0, 0.0, 0.0, 1.0, 0.0),
        (attempt("3", None), attempt("3", math.nan), "text", None),
    ),
    Case(
        "math_algebra",
        MathRewardConfig(workers=1, seconds=60.0).build,
        (attempt("\\boxed{(x+1)^2}", "x^2+2x+1"), attempt("\\boxed{x+1}", "x+2"), attempt("\\boxed{\\sin}", "x")),
        (1.0, 0.0, 0.0),
    ),
    Case(
        "format",
        FormatRewardConfig(right=0.5).build,
        (attempt(TAGGED), attempt("<think></think><answer>a</answer>"), attempt("")),
        (0.5, 0.0, 0.0),
        (None, EPISODES[0]),
    ),
    Case(
        "overlong",
        OverlongRewardConfig(max_tokens=100, cache=40).build,
        tuple(attempt("", length=n) for n in (10, 60, 70, 100, 300)),
        (0.0, 0.0, -0.25, -1.0, -1.0),
        (attempt("", length=None), attempt("", length=math.nan)),
    ),
    Case(
        "combined",
        CombinedRewardConfig(
            parts={
                "math": PartConfig(reward=MathRewardConfig(workers=1)),
                "form": PartConfig(reward=FormatRewardConfig(), weight=0.25),
                "short": PartConfig(reward=OverlongRewardConfig(max_tokens=100, cache=40), weight=2.0),
            }
        ).build,
        (attempt(TAGGED), attempt(TAGGED, "2"), attempt(TAGGED, length=70), attempt("")),
        (1.25, 0.25, 0.75, 0.0),
        (attempt(TAGGED, None), attempt(TAGGED, length=None)),
    ),
]


def test_every_shipped_reward_is_here() -> None:
    shipped = {address.partition(":")[2] for address in BUILTIN["reward"].values()}
    assert {f"{type(case.build()).__name__}Config" for case in CASES} == shipped


@pytest.mark.parametrize(
    ("case", "check"), [pytest.param(c, k, id=f"{c.name}-{k.__name__[6:]}") for c in CASES for k in CHECKS]
)
def test_reward_contract(case: Case, check: Callable[[Case], None]) -> None:
    check(case)
