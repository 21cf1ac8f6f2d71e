"""What every Reward must do. A new one adds one `Case` to test_rewards.py, and all of this is asked of it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from m2flow.protocols import Closes

PROTOCOLS = ("Reward",)


@dataclass(frozen=True)
class Case:
    """`build()` makes a reward; `expected` are what `items` score, and 0 is among them. `refused`: items without one.

    `alone`: an item is scored by itself, whatever is scored with it.
    """

    name: str
    build: Callable[[], Any]
    items: tuple[Any, ...]
    expected: tuple[float, ...]
    refused: tuple[Any, ...] = ()
    alone: bool = True


def plain(scores: Mapping[str, Any]) -> dict[str, list[float]]:
    return {name: np.asarray(column).tolist() for name, column in scores.items()}


def check_a_reward_may_be_closed_and_scores_again(case: Case) -> None:
    reward = case.build()
    if not isinstance(reward, Closes):
        return
    reward.close()  # before anything was scored
    first = plain(reward.score(case.items))
    reward.close()
    reward.close()
    assert repr(plain(reward.score(case.items))) == repr(first)
    reward.close()


def check_threads_may_score_at_once(case: Case) -> None:
    reward = case.build()
    expected = repr(plain(reward.score(case.items)))
    with ThreadPoolExecutor(4) as threads:
        assert {repr(plain(scores)) for scores in threads.map(reward.score, [case.items] * 8)} == {expected}


def check_every_component_has_one_number_per_item(case: Case) -> None:
    scores = case.build().score(case.items)
    assert "reward" in scores
    for name, column in scores.items():
        assert np.shape(column) == (len(case.items),), name
        assert np.asarray(column).dtype.kind == "f", name


def check_the_reward_is_what_was_expected_and_zero_is_a_value(case: Case) -> None:
    assert 0.0 in case.expected, "the case has no item of reward 0"
    assert case.build().score(case.items)["reward"].tolist() == pytest.approx(case.expected, rel=1e-6)


def check_nothing_to_score_gives_nothing(case: Case) -> None:
    scores = case.build().score([])
    assert np.shape(scores["reward"]) == (0,)


def check_an_item_scores_the_same_in_any_company(case: Case) -> None:
    if not case.alone:
        return
    reward = case.build()
    whole = plain(reward.score(case.items))
    turned = plain(reward.score(case.items[::-1]))
    assert repr({name: column[::-1] for name, column in turned.items()}) == repr(whole)  # NaN equals NaN here
    for row, item in enumerate(case.items):
        assert repr(plain(reward.score([item]))) == repr(
            {name: column[row : row + 1] for name, column in whole.items()}
        )


def check_an_item_without_a_score_is_an_error_that_names_it(case: Case) -> None:
    for item in case.refused:
        with pytest.raises(ValueError, match=str(len(case.items))):
            case.build().score([*case.items, item])


def check_scoring_changes_nothing(case: Case) -> None:
    items: Sequence[Any] = copy.deepcopy(list(case.items))
    states = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002 - what must not move
    reward = case.build()
    first = plain(reward.score(items))
    assert repr(plain(reward.score(items))) == repr(first)
    assert repr(items) == repr(list(case.items))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states  # noqa: NPY002


CHECKS: list[Callable[[Case], None]] = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
