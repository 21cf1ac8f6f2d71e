"""Scores of whole episodes, for a recipe's `reward: {name: function, function: "m2flow.rewards.episode:success"}`.

Each takes an `EpisodeResult`: what an episode of training was, as the environment tells it.
"""

from __future__ import annotations

from m2flow.types import EpisodeResult


def success(episode: EpisodeResult) -> float:
    """1 where the episode succeeded at any step, else 0: the sparse reward of most robot fine-tuning.

    Raises:
        ValueError: the environment does not say whether an episode succeeds.
    """
    if episode.success_once is None:
        raise ValueError("reward: this environment does not say whether an episode succeeds")
    return float(episode.success_once)


def quick_success(episode: EpisodeResult) -> dict[str, float]:
    """Two components for `reward.components`: "success", and "speed", 1 / steps where it succeeded."""
    won = success(episode)
    return {"success": won, "speed": won / max(episode.length, 1)}
