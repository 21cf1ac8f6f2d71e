"""Every registered reward on texts that a policy may find: no exception, no run code, and never more than for being
right. A reward that is new in the registry is asked too; the examples beside its required keys make it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m2flow import registry
from m2flow.config.typed import construct
from m2flow.rewards.answers import extract
from m2flow.types import Sample
from tests.unit.rewards.samples import ADVERSARIAL, INJECTED, RIGHT, sample

# keys that the tests need besides the examples
KEYS: dict[str, dict[str, Any]] = {
    "function": {"function": f"{__name__}:says_seven"},
    "math": {"seconds": 1.0},
    "combined": {
        "parts": {"math": {"reward": {"name": "math", "seconds": 1.0}}, "form": {"weight": 0.1, "reward": "format"}}
    },
}

# whose last number is the 7 that was asked for
LUCKY = {"last_number": {"deep", "import, as a symbol", "write18", "megabyte"}, "auto": {"megabyte"}}


def says_seven(item: Sample) -> float:
    """A reward function as users write them."""
    return float(extract(item.text, "boxed") == "7")


@pytest.fixture(scope="module", params=registry.names("reward"))
def reward(request: pytest.FixtureRequest) -> Iterator[Any]:
    cls = registry.resolve("reward", request.param)
    examples = {f.name: f.metadata["example"] for f in dataclasses.fields(cls) if "example" in f.metadata}
    problems: list[Any] = []
    made = construct(cls, examples | KEYS.get(request.param, {}), ("reward",), problems)
    assert not problems
    built = made.build()
    yield built
    if hasattr(built, "close"):
        built.close()


@pytest.mark.slow
def test_no_text_breaks_a_reward_or_beats_the_right_answer(
    reward: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    best = float(reward.score([sample(RIGHT)])["reward"][0])
    got = reward.score([sample(text) for text in ADVERSARIAL.values()])
    assert not list(tmp_path.rglob(INJECTED)), "a text was run"
    for name, column in got.items():
        assert np.shape(column) == (len(ADVERSARIAL),), name
    scores = dict(zip(ADVERSARIAL, got["reward"].tolist(), strict=True))
    assert all(np.isfinite(list(scores.values())))
    assert not [name for name, score in scores.items() if score > best]


@pytest.mark.slow
def test_each_of_them_is_judged_alone_as_among_the_others(reward: Any) -> None:
    names = ["all listed", "import", "power bomb", "megabyte of digits", "surrogates", "null"]
    together = reward.score([sample(ADVERSARIAL[name]) for name in names])
    for row, name in enumerate(names):
        alone = reward.score([sample(ADVERSARIAL[name])])
        for key in alone:
            np.testing.assert_array_equal(alone[key][0], together[key][row], err_msg=f"{name} {key}")


@pytest.mark.parametrize("name", sorted(ADVERSARIAL))
def test_math_gives_nothing_for_any_of_them(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By numbers and text alone, so that none is 0 only because a verifier gave up."""
    monkeypatch.chdir(tmp_path)
    for policy in ("auto", "boxed", "last_number", "whole"):
        made = registry.resolve("reward", "math")(verifier="none", extract=policy).build()
        right_by_luck = name in LUCKY.get(policy, ())
        assert made.score([sample(ADVERSARIAL[name])])["reward"].tolist() == [float(right_by_luck)], policy
    assert not list(tmp_path.rglob(INJECTED))
