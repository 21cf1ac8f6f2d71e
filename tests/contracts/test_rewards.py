"""The Reward contract, asked of every reward that is shipped."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from m2flow.registry import BUILTIN
from m2flow.rewards.function import FunctionReward, FunctionRewardConfig
from m2flow.types import EpisodeResult
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
]


def test_every_shipped_reward_is_here() -> None:
    shipped = {address.partition(":")[2] for address in BUILTIN["reward"].values()}
    assert {f"{type(case.build()).__name__}Config" for case in CASES} == shipped


@pytest.mark.parametrize(
    ("case", "check"), [pytest.param(c, k, id=f"{c.name}-{k.__name__[6:]}") for c in CASES for k in CHECKS]
)
def test_reward_contract(case: Case, check: Callable[[Case], None]) -> None:
    check(case)
