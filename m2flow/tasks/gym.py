"""Tasks of reasoning-gym (arXiv 2505.24760): generated puzzles, each with a scorer of its own."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

from m2flow import seeds
from m2flow.protocols import TaskSource
from m2flow.tasks.base import Side, Source, TextTasks, fill

_STEPS = 1000  # positions tried for a question that is not held out
_REACH = 2**20  # seeds of one run of a dataset, which numbers them by seed + index


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningGymConfig(TextTasks):
    """One dataset of reasoning-gym. Fields of a task: question, prompt, answer, entry (all that the dataset says).

    The questions that are held out never occur in training: where one is drawn there, the next that is not is taken.
    The reward is `m2flow.rewards.gym:score`.
    """

    offers: ClassVar[tuple[str, ...]] = ("question", "dataset")
    judge: ClassVar[Mapping[str, str]] = {"name": "function", "function": "m2flow.rewards.gym:score"}

    dataset: str = field(metadata={"example": "chain_sum"})  # its name in reasoning-gym
    options: Mapping[str, Any] = field(default_factory=dict)  # keys of its own config, for instance {min_terms: 2}
    held_out: int = 200  # questions for evaluation only, all different

    def __post_init__(self) -> None:
        TextTasks.__post_init__(self)
        if self.held_out < 1:
            raise ValueError(f"held_out: at least 1, got {self.held_out}")
        wrong = {"seed", "size"} & {*self.options}
        if wrong:
            raise ValueError(f"options: {', '.join(sorted(wrong))} is set by the run, leave it out")

    def tasks(self, split: Side, seed: int) -> TaskSource:
        """`train`: without end, decided by seed and position. `held_out`: the same for every seed.

        Raises:
            ValueError: reasoning-gym is not installed, has no such dataset, or refuses the options.
        """
        options = json.dumps(dict(self.options), sort_keys=True)
        kept = _held_out(self.dataset, options, self.held_out)
        if split == "held_out":
            made = _make(self.dataset, options, _held_seed(self.dataset))
            return Source(len(kept), lambda index: self._payload(options, made, kept[index][0]))
        asked = frozenset(question for _, question in kept)
        key = seeds.derive(seed, "reasoning_gym", self.dataset)
        return Source(None, lambda index: self._payload(options, *self._train(options, asked, key, index)))

    def _train(self, options: str, asked: frozenset[str], key: int, index: int) -> tuple[Any, int]:
        """(dataset, index of an entry) at this position."""
        for turn in range(_STEPS):
            made = _make(self.dataset, options, seeds.derive(key, index // _REACH, turn))
            if made[index % _REACH]["question"] not in asked:
                return made, index % _REACH
        raise ValueError(
            f"held_out: {self.dataset} with these options has hardly any question beyond the {self.held_out} held out; "
            "lower it, or make the dataset larger by its options"
        )

    def _payload(self, options: str, made: Any, index: int) -> Mapping[str, Any]:
        entry = made[index]
        question = str(entry["question"]).strip()
        row = {"question": question, "dataset": self.dataset}
        known = {"answer": entry["answer"], "entry": entry, "options": options, "seed": made.seed, "index": index}
        return {**row, "prompt": fill(self.template or "{question}", row), **known}


def _held_seed(dataset: str) -> int:
    return seeds.derive(0, "held_out", dataset)


@lru_cache(maxsize=8)
def _held_out(dataset: str, options: str, count: int) -> tuple[tuple[int, str], ...]:
    """(index, question) of the first `count` different questions of the dataset that is for evaluation."""
    made, found = _make(dataset, options, _held_seed(dataset)), dict[str, int]()
    for index in range(20 * count):
        found.setdefault(made[index]["question"], index)
        if len(found) == count:
            return tuple((index, question) for question, index in found.items())
    raise ValueError(
        f"held_out: {dataset} with these options has only {len(found)} different questions in {20 * count}; lower it"
    )


@lru_cache(maxsize=64)
def _make(dataset: str, options: str, seed: int) -> Any:
    """A dataset of reasoning-gym. `options` as JSON."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise ValueError(
            f"env: reasoning_gym needs the package {error.name!r}, which is not installed: "
            "pip install 'm2flow[reasoning-gym]'"
        ) from error
    if dataset not in DATASETS:
        near = difflib.get_close_matches(dataset, DATASETS, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; known: {', '.join(sorted(DATASETS))}"
        raise ValueError(f"dataset: reasoning-gym has no {dataset!r}{hint}")
    try:
        return reasoning_gym.create_dataset(dataset, seed=seed, size=_REACH, **json.loads(options))
    except (TypeError, AssertionError, ValueError) as error:
        raise ValueError(f"options: {dataset} refuses {options} ({error})") from error
