"""A reward computed by a Python function of one sample."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from m2flow import addresses
from m2flow.types import Array

_LOG = logging.getLogger("m2flow.rewards")


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionRewardConfig:
    """A function "package.module:name" that takes one sample and returns its reward, or its components by name.

    With `components` the reward is their weighted sum: {"correct": 1.0, "short": 0.1}. Without, the function returns a
    number, or a mapping that has "reward".
    """

    function: str = field(
        metadata={"example": "my_package.rewards:score"}
    )  # "package.module:name" of it, or "./file.py:name"
    components: Mapping[str, float] = field(default_factory=dict)  # name -> weight in the reward
    errors: Literal["count", "raise"] = "count"  # an exception of the function: counted in "error", or passed on
    # reward of a sample whose function raised; at most the lowest that it returns, or a policy learns to provoke it
    error_reward: float = 0.0

    def __post_init__(self) -> None:
        module, _, name = self.function.partition(":")
        if not module or not name:
            raise ValueError(f"function: must be 'package.module:name', got {self.function!r}")
        if self.errors not in ("count", "raise"):
            raise ValueError(f"errors: must be 'count' or 'raise', got {self.errors!r}")
        if not math.isfinite(self.error_reward):
            raise ValueError(f"error_reward: must be a finite number, got {self.error_reward}")
        wrong = [name for name, weight in self.components.items() if not math.isfinite(weight)]
        if wrong or "error" in self.components or "reward" in self.components:
            raise ValueError(
                f"components: names other than 'reward' and 'error' with finite weights, got {self.components}"
            )

    def build(self) -> FunctionReward:
        """Import the function. Raises ValueError where it does not exist."""
        try:
            function = addresses.find(self.function)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"function: {self.function!r} cannot be imported ({error})") from error
        if not callable(function):
            text = f"function: {self.function!r} is a {type(function).__name__}, not a function"
            raise ValueError(text)  # noqa: TRY004 a user's error, in the form of all of them
        return FunctionReward(self, function)


class FunctionReward:
    """Scores samples one by one with a function. Made by `FunctionRewardConfig.build`."""

    def __init__(self, config: FunctionRewardConfig, function: Callable[[Any], Any]) -> None:
        self.config, self.function = config, function
        self.name = f"function {config.function}"
        self.says_correct = "correct" in config.components  # without components nobody knows yet
        self._told: set[str] = set()
        self._lowest = math.inf  # of what the function returned
        self._failed = False

    def score(self, items: Sequence[Any]) -> Mapping[str, Array]:
        """float32 [len(items)] by name: "reward", "error" (1 where the function raised), and every component (NaN where
        it raised, so that no average takes it for a score).

        Raises:
            ValueError: the function returned None, NaN, infinity, or names other than it should; names the sample.
        """
        rows = [self._one(index, item) for index, item in enumerate(items)]
        self._compare(rows)
        silent = [i for i, row in enumerate(rows) if "correct" not in row and not row["error"]]
        if silent and any("correct" in row for row in rows):  # it would count as no success
            raise ValueError(
                f"reward {self.config.function}: sample {silent[0]} gave no 'correct', others did; it says what "
                "succeeds, so return it always or never"
            )
        names = [*self.config.components] or sorted({name for row in rows for name in row} - {"reward", "error"})
        columns = {name: [row.get(name, math.nan) for row in rows] for name in ("reward", "error", *names)}
        return {name: np.array(values, np.float32) for name, values in columns.items()}

    def _compare(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Warn, once, where failing pays better than something that the function returns: its range is not known."""
        self._failed = self._failed or any(row["error"] for row in rows)
        self._lowest = min([self._lowest, *(row["reward"] for row in rows if not row["error"])])
        pays = self.config.error_reward
        if self._failed and pays > self._lowest and "error_reward" not in self._told:
            self._told.add("error_reward")
            text = "reward %s: an error pays %g (reward.error_reward) and the function has given %g, so failing pays"
            text += " better; set reward.error_reward to at most the lowest reward of the function"
            _LOG.warning(text, self.config.function, pays, self._lowest)

    def _one(self, index: int, item: Any) -> dict[str, float]:
        try:
            answer = self.function(item)
        except Exception as error:
            if self.config.errors == "raise":
                raise ValueError(f"reward {self.config.function}: sample {index} raised {error!r}") from error
            if repr(error) not in self._told:  # each kind once: a step has thousands of samples
                self._told.add(repr(error))
                _LOG.warning("reward %s: sample %d raised %r; counted as an error", self.config.function, index, error)
            return {"reward": self.config.error_reward, "error": 1.0}
        return self._combine(index, answer) | {"error": 0.0}

    def _combine(self, index: int, answer: Any) -> dict[str, float]:
        where = f"reward {self.config.function}: sample {index}"
        weights = self.config.components
        if not isinstance(answer, Mapping):
            if weights:
                raise ValueError(
                    f"{where} gave {answer!r:.80}, expected a mapping that has what reward.components names: "
                    f"{_listed(weights)}"
                )
            return {"reward": number(answer, where)}
        odd = [name for name in answer if not isinstance(name, str)]
        if odd:
            raise ValueError(f"{where}: component {odd[0]!r} is no name; return text as keys")
        parts = {name: number(value, f"{where}, component {name!r}") for name, value in answer.items()}
        self._check_names(where, parts)
        return parts | {"reward": sum(weights[name] * parts[name] for name in weights)} if weights else parts

    def _check_names(self, where: str, parts: Mapping[str, float]) -> None:
        weights = self.config.components
        if "error" in parts:
            raise ValueError(f"{where} gave 'error', which counts its exceptions; use another name")
        if not weights:
            if "reward" not in parts:
                example = ", ".join(f"{name}: 1.0" for name in sorted(parts)) or "right: 1.0"
                raise ValueError(
                    f"{where} gave {_listed(parts)} without 'reward'; return one, or weigh what it gives in "
                    f"reward.components: {{{example}}}"
                )
            return
        if "reward" in parts:
            raise ValueError(f"{where} gave 'reward', which stands for the sum of reward.components; do not return it")
        lacking, more = set(weights) - set(parts), set(parts) - set(weights)
        if lacking:
            raise ValueError(
                f"{where} gave no {_listed(lacking)}, which reward.components names (it gave {_listed(parts)}); return "
                "it or take it out there"
            )
        if more:
            raise ValueError(
                f"{where} gave {_listed(more)}, which reward.components does not name; add it there (weight 0: only "
                "reported)"
            )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names)) or "nothing"


def number(value: Any, where: str) -> float:
    """A bool, int, float, numpy number or 0-d tensor as float; 0 is a value.

    Raises:
        ValueError: anything else, NaN and infinity included; `where` names the sample.
    """
    if value is None or isinstance(value, str | bytes) or getattr(value, "shape", ()) != ():
        raise ValueError(f"{where}: expected one number, got {value!r}")
    try:
        result = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: expected one number, got {value!r}") from error
    if not math.isfinite(result):
        raise ValueError(f"{where}: the reward is {result}")
    return result
