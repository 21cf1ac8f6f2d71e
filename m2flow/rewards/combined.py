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
    # the part whose component `correct` says what succeeds and which groups have spread; null: the only one that has it
    correct: str | None = None

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("parts: needs at least one reward")
        odd = [name for name in self.parts if not name or "/" in name or name in _RESERVED]
        if odd:
            raise ValueError(f"parts: names other than {', '.join(_RESERVED)} and without '/', got {odd}")
        if self.correct is not None and self.correct not in self.parts:
            raise ValueError(f"correct: must be one of the parts {', '.join(self.parts)}, got {self.correct!r}")

    def build(self) -> CombinedReward:
        """Build every part. ValueError names the part that cannot be, or those that all say what is correct."""
        built = {}
        for name, part in self.parts.items():
            try:
                built[name] = part.reward.build()
            except ValueError as error:
                raise ValueError(f"parts: {name}: {error}") from error
        _the_judge([name for name, reward in built.items() if getattr(reward, "says_correct", False)], self.correct)
        return CombinedReward({name: part.weight for name, part in self.parts.items()}, built, self.correct)


class CombinedReward:
    """Asks its parts one after the other. Made by `CombinedRewardConfig.build`."""

    def __init__(self, weights: Mapping[str, float], parts: Mapping[str, Reward], correct: str | None = None) -> None:
        self.weights, self.parts, self.correct = weights, parts, correct
        self._asked = ""  # the part that is being asked

    @property
    def name(self) -> str:
        """For messages, with the part that is being asked."""
        part = self.parts.get(self._asked)
        return "combined" if part is None else f"combined, part {self._asked!r}: {name_of(part)}"

    @property
    def says_correct(self) -> bool:
        """Whether a part is known to have a component `correct`."""
        return any(getattr(reward, "says_correct", False) for reward in self.parts.values())

    def score(self, items: Sequence[Any]) -> Mapping[str, Array]:
        """float32 [len(items)] by name: "reward", the weighted sum; "<part>", what a part gave; "<part>/<name>", its
        components; "error" and "timeout", the sums of the parts'. A part that fails on a sample gives what it is told
        to give then, and the sample's other parts count as ever. The columns of the part that says what is correct
        stand first: the first "<part>/correct" is what counts for success.

        Raises:
            ValueError: a part gave no finite number as reward; names part and sample. Several parts say what is
                correct, or the one that should does not; names them.
        """
        total = np.zeros(len(items))
        columns: dict[str, Array] = {}
        sums = {name: np.zeros(len(items), np.float32) for name in _SUMS}
        for part, reward in self.parts.items():
            self._asked = part
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
        judge = _the_judge([name for name in self.parts if _says(columns, name)], self.correct)
        if self.correct is not None and judge is None:
            raise ValueError(f"correct: part {self.correct!r} gives no component 'correct'; name one that does")
        first = {name: column for name, column in columns.items() if judge and name.startswith(f"{judge}/")}
        return {"reward": total.astype(np.float32), **sums, **(first | columns)}

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


def name_of(reward: Reward) -> str:
    """What a message calls a reward."""
    return str(getattr(reward, "name", type(reward).__name__))


def _says(columns: Mapping[str, Array], part: str) -> bool:
    return any(name.startswith(f"{part}/") and name.endswith("/correct") for name in columns)


def _the_judge(saying: Sequence[str], chosen: str | None) -> str | None:
    """Which of these parts counts for success; None where there is none."""
    if chosen is None and len(saying) > 1:
        raise ValueError(
            f"correct: the parts {', '.join(saying)} all have a component 'correct', and only one can say what "
            f"succeeds; name it, for instance correct: {saying[0]}"
        )
    return next((name for name in saying if chosen in (None, name)), None)
