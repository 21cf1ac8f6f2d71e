from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from m2flow.config import ConfigError, dump, load
from m2flow.rewards.combined import CombinedReward, CombinedRewardConfig, PartConfig
from m2flow.rewards.format import FormatRewardConfig
from m2flow.rewards.function import FunctionRewardConfig
from m2flow.rewards.math import MathRewardConfig
from m2flow.rewards.overlong import OverlongRewardConfig
from m2flow.roles.results import succeeded
from m2flow.scaffold import commented
from tests.unit.rewards.samples import RIGHT, sample

RECIPE: dict[str, Any] = {
    "env": "point_reach",
    "policy": "mlp",
    "objective": "ppo",
    "reward": {
        "name": "combined",
        "parts": {
            "correct": {"reward": {"name": "math", "extract": "last_number"}},
            "format": {"weight": 0.2, "reward": "format"},
            "length": {"weight": 0.5, "reward": {"name": "overlong", "max_tokens": 100, "cache": 20}},
        },
    },
}


def refuses(item: Any) -> float:
    """A function that fails on some."""
    if "bad" in item.text:
        raise RuntimeError("no verdict")
    return 1.0


def three() -> CombinedReward:
    return CombinedRewardConfig(
        parts={
            "correct": PartConfig(reward=MathRewardConfig(verifier="none")),
            "format": PartConfig(weight=0.25, reward=FormatRewardConfig()),
            "length": PartConfig(weight=0.5, reward=OverlongRewardConfig(max_tokens=100, cache=20)),
        }
    ).build()


def test_the_reward_is_the_weighted_sum_and_every_part_has_its_columns() -> None:
    got = three().score([sample(RIGHT), sample("7", length=90), sample("", length=200)])
    assert {name: column.tolist() for name, column in got.items()} == {
        "reward": [1.25, 0.75, -0.5],
        "error": [0, 0, 0],
        "timeout": [0, 0, 0],
        "correct": [1, 1, 0],
        "correct/correct": [1, 1, 0],
        "correct/extracted": [1, 1, 0],
        "correct/error": [0, 0, 0],
        "correct/timeout": [0, 0, 0],
        "format": [1, 0, 0],
        "length": [0, -0.5, -1],
        "length/overlong": [0, 1, 1],
    }
    assert {column.dtype for column in got.values()} == {np.dtype(np.float32)}


def test_what_fails_in_one_part_leaves_the_others_counted() -> None:
    function = FunctionRewardConfig(function=f"{__name__}:refuses", error_reward=-0.5)
    slow = MathRewardConfig(workers=1, seconds=1.0)
    parts = {"a": PartConfig(reward=function), "b": PartConfig(weight=2.0, reward=function)}
    parts |= {"form": PartConfig(reward=FormatRewardConfig(tags=("x",)), weight=0.25), "math": PartConfig(reward=slow)}
    made = CombinedRewardConfig(parts=parts).build()
    got = made.score([sample("<x>\\boxed{7}</x>"), sample("<x>bad \\boxed{10^{10^{10}}}</x>")])
    made.close()
    assert got["reward"].tolist() == [1 + 2 + 0.25 + 1, -0.5 - 1 + 0.25 + 0]
    assert got["error"].tolist() == [0, 2]
    assert got["timeout"].tolist() == [0, 1]
    assert got["form"].tolist() == [1, 1]
    assert got["math/correct"][0] == 1 and math.isnan(got["math/correct"][1])
    assert made.parts["math"].pool.pids() == []  # type: ignore[attr-defined]


def judged(item: Any) -> dict[str, float]:
    """A function with a component of its own choice."""
    return {"reward": 0.5, "correct": float(item.text == "\\boxed{8}")}


def two(correct: str | None) -> CombinedReward:
    function = FunctionRewardConfig(function=f"{__name__}:judged")
    parts = {"a": PartConfig(reward=MathRewardConfig(verifier="none")), "b": PartConfig(reward=function)}
    return CombinedRewardConfig(parts=parts, correct=correct).build()


def test_the_part_that_says_what_succeeds_is_named_where_several_could() -> None:
    items = [sample("\\boxed{7}"), sample("\\boxed{8}")]
    assert succeeded(two("a").score(items)).tolist() == [True, False]
    assert succeeded(two("b").score(items)).tolist() == [False, True]
    assert two("a").score(items)["reward"].tolist() == two("b").score(items)["reward"].tolist() == [1.5, 0.5]
    with pytest.raises(ValueError, match=r"^correct: the parts a, b all have a component 'correct'.*correct: a"):
        two(None).score(items)


def test_two_parts_that_are_known_to_say_what_succeeds_are_refused_at_build() -> None:
    parts = {name: PartConfig(reward=MathRewardConfig(verifier="none")) for name in ("x", "y")}
    with pytest.raises(ValueError, match=r"^correct: the parts x, y all have a component 'correct'"):
        CombinedRewardConfig(parts=parts).build()
    CombinedRewardConfig(parts=parts, correct="y").build()
    with pytest.raises(ValueError, match=r"^correct: must be one of the parts x, y, got 'z'"):
        CombinedRewardConfig(parts=parts, correct="z")
    parts = {"x": parts["x"], "form": PartConfig(reward=FormatRewardConfig())}
    with pytest.raises(ValueError, match=r"^correct: part 'form' gives no component 'correct'"):
        CombinedRewardConfig(parts=parts, correct="form").build().score([sample("7")])


class Given:
    """A reward that says what it was made with."""

    def __init__(self, column: Any) -> None:
        self.column = column

    def score(self, items: Any) -> dict[str, Any]:
        return {"reward": self.column}


@pytest.mark.parametrize("zero", [0, 0.0, False, np.float64(0), np.bool_(False), torch.tensor(0.0)])
def test_a05_zero_is_a_value_of_any_type(zero: Any) -> None:
    made = CombinedReward({"rewards": 0.0, "scores": 1.0}, {"rewards": Given([1.0]), "scores": Given([zero])})
    assert made.score([sample("")])["reward"].tolist() == [0.0]
    made = CombinedReward({"rewards": 1.0}, {"rewards": Given([torch.tensor(1)])})
    assert made.score([sample("")])["reward"].tolist() == [1.0]


@pytest.mark.parametrize("wrong", [None, math.nan, "1", torch.tensor(math.nan)])
def test_a05_a_part_without_a_number_is_an_error_that_names_part_and_sample(wrong: Any) -> None:
    made = CombinedReward({"a": 1.0}, {"a": Given([0.0, wrong])})
    with pytest.raises(ValueError, match="part 'a', sample 1"):
        made.score([sample(""), sample("")])
    with pytest.raises(ValueError, match="part 'a' did not give one 'reward' for each of 1"):
        CombinedReward({"a": 1.0}, {"a": Given([0.0, 1.0])}).score([sample("")])


def test_a_recipe_names_parts_which_come_back_from_what_is_stored(tmp_path: Path) -> None:
    recipe = load(RECIPE)
    assert recipe.reward.parts["correct"].reward == MathRewardConfig(extract="last_number")
    assert recipe.reward.parts["format"] == PartConfig(weight=0.2, reward=FormatRewardConfig())
    stored = dump(recipe)["reward"]["parts"]["length"]
    assert stored == {"reward": {"name": "overlong", "max_tokens": 100, "cache": 20}, "weight": 0.5}
    assert load(dump(recipe)) == recipe
    path = tmp_path / "recipe.yaml"
    path.write_text(commented(recipe), encoding="utf-8")
    assert load(path) == recipe
    changed = load(path, "reward.parts.format.weight=0.75", "reward.parts.length.reward.cache=10")
    assert changed.reward.parts["format"].weight == 0.75
    assert changed.reward.parts["length"].reward.cache == 10
    assert changed.reward.parts["correct"] == recipe.reward.parts["correct"]
    changed = load(path, 'reward.parts.more={"reward":"format"}')
    assert [*changed.reward.parts] == ["correct", "format", "length", "more"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reward.parts.correct.reward.name=maths", "reward.parts.correct.reward.name"),
        ("reward.parts.correct.reward.workers=0", "reward.parts.correct.reward.workers"),
        ("reward.parts.length.reward.cash=1", "cash"),
        ("reward.parts.correct.weight=heavy", "reward.parts.correct.weight"),
        ("reward.parts.error={reward: format}", "reward.parts"),
        ("reward.parts.bare={weight: 1}", "reward.parts.bare.reward"),
    ],
)
def test_a_wrong_key_of_a_part_is_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        load(RECIPE, override)


def test_a_part_that_cannot_be_built_is_named() -> None:
    part = PartConfig(reward=FunctionRewardConfig(function="no_such_package:f"))
    with pytest.raises(ValueError, match=r"^parts: mine: function: 'no_such_package:f' cannot be imported"):
        CombinedRewardConfig(parts={"mine": part}).build()
    with pytest.raises(ValueError, match=r"^parts: needs at least one"):
        CombinedRewardConfig(parts={})
    with pytest.raises(ValueError, match=r"^weight: must be a finite number"):
        PartConfig(reward=FormatRewardConfig(), weight=math.nan)
