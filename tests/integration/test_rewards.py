"""A recipe's own reward: it scores whole episodes, and what it says is what is trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import m2flow
from m2flow.runtime.failures import RunFailed
from m2flow.types import EpisodeResult
from tests.integration import small

SUCCESS = {"name": "function", "function": "m2flow.rewards.episode:success"}
REACH: dict[str, Any] = {"env": {"name": "point_reach", "horizon": 10, "dtype": "float64", "radius": 0.6}}


def by_lane(episode: EpisodeResult) -> float:
    """Tells what the score was given for."""
    return episode.lane + episode.length / 100 + episode.seed / 1000


def test_a_reward_of_its_own_is_logged_beside_the_environments_return(tmp_path: Path) -> None:
    rows = small.train(tmp_path, "run", **REACH, reward=SUCCESS, steps=6).metrics()
    ended = [row for row in rows if "rollout/success" in row]
    assert ended and any(row["rollout/success"] > 0 for row in ended)
    for row in ended:
        assert row["reward/reward"] == row["rollout/success"]
        assert row["reward/error"] == 0
        assert row["rollout/return"] < 0, "the environment's own rewards are distances"


def test_the_score_is_the_return_that_is_trained_on(tmp_path: Path) -> None:
    """Without discount and critic the return of every step of a whole episode is its score."""
    how: dict[str, Any] = {
        "objective": {"name": "grpo", "std": "none"},
        "rollout": {"lanes": 4, "length": 20, "group": 2},
        "learner": {},
        "reward": {"name": "function", "function": f"{__name__}:by_lane"},
    }
    [row] = small.train(tmp_path, "run", **REACH, **how, steps=1).metrics()
    # lanes 0 and 1 are a group, 2 and 3 another: each pair differs by 1, so advantages are -1/2 and 1/2 in every step
    assert row["train/advantage_min"] == pytest.approx(-0.5, abs=1e-6)
    assert row["train/advantage_max"] == pytest.approx(0.5, abs=1e-6)
    assert row["train/advantage_std"] == pytest.approx(0.5, abs=1e-6)
    # two episodes on each of four lanes, ten steps long
    assert row["reward/reward"] == pytest.approx(1.5 + 0.1 + 0.0005, abs=1e-6)


@pytest.mark.parametrize("plan", ["two rollouts in processes", "two sub-batches"])
def test_law_1_holds_with_a_reward_of_its_own(tmp_path: Path, plan: str) -> None:
    ours = small.train(tmp_path, "ours", **REACH, reward=SUCCESS, plan=small.PLANS[plan])
    theirs = small.train(tmp_path, "theirs", **REACH, reward=SUCCESS)
    for a, b in zip(small.numbers(ours), small.numbers(theirs), strict=True):
        assert a == pytest.approx(b, rel=1e-9, abs=1e-9)


def test_a_function_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    recipe = small.recipe(**REACH, reward={"name": "function", "function": "m2flow.rewards.episode:sucess"})
    report = m2flow.check(recipe)
    assert not report.ok
    assert "reward.function" in str(report)
    with pytest.raises(ValueError, match=r"reward\.function"):
        m2flow.train(recipe, run_dir=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def broken(episode: EpisodeResult) -> float:
    """Asks for what an episode does not have."""
    return float(episode.steps["reward"][0])


def test_a_reward_that_fails_on_every_sample_stops_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reward = {"name": "function", "function": f"{__name__}:broken"}
    run = small.train(tmp_path, "run", **REACH, reward=reward, steps=50)
    assert run.alarmed
    assert len(run.metrics()) == 1
    assert run.metrics()[0]["reward/error_share"] == 1.0
    assert [record.name for record in caplog.records if record.name == "m2flow.rewards"] == ["m2flow.rewards"]
    with pytest.raises(RunFailed, match="KeyError"):
        small.train(tmp_path, "other", **REACH, reward=reward | {"errors": "raise"})
