"""Several rewards in one, each with a weight and its own columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from m2flow.capabilities import ChecksTasks
from m2flow.protocols import Closes, Reward
from m2flow.rewards.function import number
from m2flow.types import Array, Task

_SUMS = ("error", "timeout")
_RESERVED = ("reward", *_SUMS)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartConfig:
    """One of the rewards, and what it counts."""

    reward: Any = field(metadata={"kind": "reward", "example": {"name": "math"}})  # any reward, with its keys
    weight: float = 1.0  # factor of it in the sum; 0: only reported

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"weight: must be a finite number, got {self.weight}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CombinedRewardConfig:
    """The weighted sum of rewards that have names: `parts: {correct: {weight: 1.0, reward: {name: math}}}`."""

    # name -> weight and reward
    parts: Mapping[str, PartConfig] = field(
        metadata={"example": {"correct": {"reward": {"name": "math"}}, "format": {"reward": {"name": "format"}}}}
    )

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("parts: needs at least one reward")
        odd = [name for name in self.parts if not name or "/" in name or name in _RESERVED]
        if odd:
            raise ValueError(f"parts: names other than {', '.join(_RESERVED)} and without '/', got {odd}")

    def build(self) -> CombinedReward:
        """Build every part. ValueError names the part that cannot be."""
        built = {}
        for name, part in self.parts.items():
            try:
                built[name] = part.reward.build()
            except ValueError as error:
                raise ValueError(f"parts: {name}: {error}") from error
        return CombinedReward({name: part.weight for name, part in self.parts.items()}, built)


class CombinedReward:
    """Asks its parts one after the other. Made by `CombinedRewardConfig.build`."""

    def __init__(self, weights: Mapping[str, float], parts: Mapping[str, Reward]) -> None:
        self.weights, self.parts = weights, parts

    def score(self, items: Sequence[Any]) -> Mapping[str, Array]:
        """float32 [len(items)] by name: "reward", the weighted sum; "<part>", what a part gave; "<part>/<name>", its
        components; "error" and "timeout", the sums of the parts'. A part that fails on a sample gives what it is told
        to give then, and the sample's other parts count as ever.

        Raises:
            ValueError: a part gave no finite number as reward; names part and sample.
        """
        total = np.zeros(len(items))
        columns: dict[str, Array] = {}
        sums = {name: np.zeros(len(items), np.float32) for name in _SUMS}
        for part, reward in self.parts.items():
            scores = reward.score(items)
            if "reward" not in scores or len(scores["reward"]) != len(items):
                raise ValueError(
                    f"reward combined: part {part!r} did not give one 'reward' for each of {len(items)} samples"
                )
            given = [
                number(score, f"reward combined: part {part!r}, sample {i}") for i, score in enumerate(scores["reward"])
            ]
            total += self.weights[part] * np.array(given, np.float64)
            columns[part] = np.array(given, np.float32)
            for name, column in scores.items():
                if name != "reward":
                    columns[f"{part}/{name}"] = np.asarray(column, np.float32)
                if name in sums:
                    sums[name] += np.asarray(column, np.float32)
        return {"reward": total.astype(np.float32), **sums, **columns}

    def check_task(self, task: Task) -> None:
        """Ask the parts that look at tasks. Raises ValueError with the part's name before the key."""
        for name, reward in self.parts.items():
            if isinstance(reward, ChecksTasks):
                try:
                    reward.check_task(task)
                except ValueError as error:
                    raise ValueError(f"parts.{name}.reward.{error}") from error

    def close(self) -> None:
        """Close the parts that hold something."""
        for reward in self.parts.values():
            if isinstance(reward, Closes):
                reward.close()
