from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from m2flow.rewards.function import FunctionRewardConfig

HERE = "tests.unit.rewards.test_function:"


def plain(sample: Any) -> Any:
    return sample


def parts(sample: dict[str, Any]) -> dict[str, Any]:
    return {"scores": sample["scores"], "rewards": sample["rewards"]}


def failing(sample: Any) -> float:
    if sample == "bad":
        raise RuntimeError("the verifier crashed")
    return 1.0


def named(sample: Any) -> dict[str, float]:
    return {"reward": sample, "length": 3.0}


NOT_A_FUNCTION = 3


def score(function: str, items: list[Any], **kwargs: Any) -> Any:
    return FunctionRewardConfig(function=HERE + function, **kwargs).build().score(items)


@pytest.mark.parametrize(
    "value",
    [1, True, 1.0, np.float32(1.0), np.int64(1), np.bool_(True), np.array(1.0), torch.tensor(1.0), torch.tensor(1)],
)
def test_a05_every_kind_of_number_is_a_reward(value: Any) -> None:
    got = score("plain", [value])["reward"]
    assert got.dtype == np.float32
    assert got.tolist() == [1.0]


@pytest.mark.parametrize("zero", [0, 0.0, False, np.float64(0), torch.tensor(0)])
def test_a05_zero_is_a_value(zero: Any) -> None:
    assert score("plain", [zero, 1.0])["reward"].tolist() == [0.0, 1.0]
    got = score("parts", [{"rewards": 1.0, "scores": zero}], components={"scores": 1.0, "rewards": 0.0})
    assert got["reward"].tolist() == [0.0]


@pytest.mark.parametrize(
    "wrong", [None, math.nan, math.inf, "1.0", [1.0], np.zeros(1), torch.tensor(math.nan), object()]
)
def test_a05_what_is_no_number_is_an_error_that_names_the_sample(wrong: Any) -> None:
    with pytest.raises(ValueError, match="sample 2"):
        score("plain", [0.0, 1.0, wrong])


def test_exceptions_are_counted_and_never_a_silent_zero() -> None:
    got = score("failing", ["good", "bad"], error_reward=-1.0)
    assert got["reward"].tolist() == [1.0, -1.0]
    assert got["error"].tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match=r"sample 1 raised RuntimeError\('the verifier crashed'\)"):
        score("failing", ["good", "bad"], errors="raise")


def minus(sample: Any) -> float:
    if sample == "bad":
        raise RuntimeError("the verifier crashed")
    return -1.0


def test_an_error_that_pays_better_than_being_wrong_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    made = FunctionRewardConfig(function=HERE + "minus").build()
    made.score(["good"])
    assert not caplog.records
    made.score(["bad"])
    made.score(["bad", "good"])
    [found] = [record.getMessage() for record in caplog.records if "error_reward" in record.getMessage()]
    assert "minus: an error pays 0 (reward.error_reward) and the function has given -1" in found
    caplog.clear()
    score("minus", ["good", "bad"], error_reward=-1.0)
    assert not [record for record in caplog.records if "error_reward" in record.getMessage()]


def test_components_are_weighted_and_reported() -> None:
    got = score("parts", [{"scores": 2.0, "rewards": 3.0}], components={"scores": 1.0, "rewards": 0.5})
    assert {name: column.tolist() for name, column in got.items()} == {
        "reward": [3.5],
        "error": [0.0],
        "scores": [2.0],
        "rewards": [3.0],
    }
    got = score("named", [1.0, 2.0])
    assert got["reward"].tolist() == [1.0, 2.0]
    assert got["length"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("function", "item", "components", "message"),
    [
        (
            "parts",
            {"scores": 1.0, "rewards": 1.0},
            {"scores": 1.0},
            r"gave 'rewards', which reward.components does not name; add it there \(weight 0: only reported\)",
        ),
        (
            "parts",
            {"scores": 1.0, "rewards": 1.0},
            {"scores": 1.0, "rewards": 1.0, "style": 1.0},
            r"gave no 'style', which reward.components names \(it gave 'rewards', 'scores'\); return it or take it out",
        ),
        (
            "parts",
            {"scores": 1.0, "rewards": 1.0},
            {},
            r"gave 'rewards', 'scores' without 'reward'; .*reward.components: \{rewards: 1.0, scores: 1.0\}",
        ),
        ("plain", 1.0, {"x": 1.0}, r"gave 1.0, .*reward.components names: 'x'"),
        ("named", 1.0, {"length": 1.0}, r"gave 'reward', which stands for the sum"),
        ("plain", {1: 2.0}, {}, r"component 1 is no name"),
        ("plain", {"reward": 1.0, "error": 1.0}, {}, r"gave 'error', which counts"),
        ("plain", {}, {}, r"gave nothing without 'reward'"),
    ],
)
def test_components_that_do_not_match_name_function_sample_component_and_key(
    function: str, item: Any, components: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"^reward {HERE}{function}: sample 0.*{message}"):
        score(function, [item], components=components)


def test_a_component_of_some_samples_only_is_an_average_over_these_but_for_what_says_what_succeeds() -> None:
    made = FunctionRewardConfig(function=HERE + "plain").build()
    got = made.score([{"reward": 1.0, "style": 0.5}, {"reward": 1.0}])
    assert got["style"][0] == 0.5 and math.isnan(got["style"][1])
    with pytest.raises(ValueError, match=rf"^reward {HERE}plain: sample 1 gave no 'correct', others did"):
        made.score([{"reward": 1.0, "correct": 1.0}, {"reward": 1.0}])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"function": "no_colon"}, "function: must be 'package.module:name'"),
        ({"function": "a:b", "errors": "hide"}, "errors: must be"),
        ({"function": "a:b", "error_reward": math.nan}, "error_reward: must be a finite number"),
        ({"function": "a:b", "components": {"reward": 1.0}}, "components: names other than"),
    ],
)
def test_config_errors_name_the_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FunctionRewardConfig(**config)


@pytest.mark.parametrize("name", ["no_such_package:score", HERE + "no_such_name", HERE + "NOT_A_FUNCTION"])
def test_functions_that_do_not_exist_are_errors_at_build(name: str) -> None:
    with pytest.raises(ValueError, match=r"^function: "):
        FunctionRewardConfig(function=name).build()
