"""Soft punishment of long answers, as in DAPO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from m2flow.rewards.function import number
from m2flow.types import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlongRewardConfig:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13): 0 up to `max_tokens - cache` sampled tokens, then
    falling in a line to -1 at `max_tokens`, and -1 beyond. To be added to a reward for being right (`combined`).

    Example: with 100 and 20 an answer of 90 tokens has -0.5.
    """

    max_tokens: int = field(metadata={"example": 1024})  # sampled tokens from which on the punishment is -1
    cache: int = field(metadata={"example": 256})  # tokens below that over which it sets in

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: must be at least 1, got {self.max_tokens}")
        if not 1 <= self.cache <= self.max_tokens:
            raise ValueError(f"cache: must be from 1 to max_tokens ({self.max_tokens}), got {self.cache}")

    def build(self) -> OverlongReward:
        """A reward without state."""
        return OverlongReward(self)


class OverlongReward:
    """Scores `Sample`s by their `length`. Made by `OverlongRewardConfig.build`."""

    def __init__(self, config: OverlongRewardConfig) -> None:
        self.config = config

    def score(self, items: Sequence[Any]) -> Mapping[str, Array]:
        """float32 [len(items)]: "reward", from -1 to 0, and "overlong", 1 where it is below 0.

        Raises:
            ValueError: an item without a length; names it.
        """
        lengths = [
            number(getattr(item, "length", None), f"reward overlong: length of sample {index}")
            for index, item in enumerate(items)
        ]
        free = self.config.max_tokens - self.config.cache
        reward = np.clip((free - np.array(lengths, np.float64)) / self.config.cache, -1.0, 0.0) + 0.0  # no -0.0
        return {"reward": reward.astype(np.float32), "overlong": (reward < 0).astype(np.float32)}
