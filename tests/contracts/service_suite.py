"""What every Service must do. A new one adds one `Case` to test_services.py, and all of this is asked of it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from m2flow.runtime.worker import LocalHandle
from m2flow.types import Weights

PROTOCOLS = ("Service",)


@dataclass(frozen=True)
class Case:
    """A service, weights for it, and a question.

    `build(seed)` makes one whose weights depend on the seed; `weights(version, seed)` are those that a trainer would
    send; `question` gives the arguments for so many rows, as arrays of rows; `answer` turns the reply into arrays of
    rows by name; `version` reads from a reply which weights it was made with, where a reply says so.
    """

    name: str
    build: Callable[[int], Any]
    weights: Callable[[int, int], Weights]
    method: str
    question: Callable[[int], tuple[Any, ...]]
    answer: Callable[[Any], dict[str, np.ndarray[Any, Any]]]
    version: Callable[[Any], int] | None = None


def ask(case: Case, service: Any, *arguments: Any) -> dict[str, Any]:
    return case.answer(getattr(service, case.method)(*arguments))


def rows(tree: Any, index: Any) -> Any:
    """These rows of every array."""
    if isinstance(tree, dict):
        return {name: rows(x, index) for name, x in tree.items()}
    return None if tree is None else tree[index]


def same(a: dict[str, Any], b: dict[str, Any], tolerance: float = 0.0) -> bool:
    assert a.keys() == b.keys()
    return all(np.allclose(x, b[name], rtol=0, atol=tolerance) for name, x in a.items())


def check_after_a_load_it_answers_with_the_new_weights(case: Case) -> None:
    service, other, question = case.build(0), case.build(1), case.question(5)
    old, new = ask(case, service, *question), ask(case, other, *question)
    assert not same(old, new)
    service.load(case.weights(7, 1))
    assert same(ask(case, service, *question), new)
    service.load(case.weights(8, 0))
    assert same(ask(case, service, *question), old)


def check_answers_say_which_weights_they_are_of(case: Case) -> None:
    if case.version is None:
        return
    service, question = case.build(0), case.question(5)
    for version in (3, 9):
        service.load(case.weights(version, version))
        assert case.version(getattr(service, case.method)(*question)) == version


def check_every_name_is_taken_or_the_load_is_refused(case: Case) -> None:
    """A name too few, a name too many, another shape."""
    weights = case.weights(2, 1)
    first, *others = weights.arrays
    faults = {
        "one less": {name: weights.arrays[name] for name in others},
        "one more": {**weights.arrays, f"{first}_of_another_model": weights.arrays[first]},
        "another shape": {**weights.arrays, first: np.zeros((9, 9, 9), np.float32)},
    }
    for what, arrays in faults.items():
        service, question = case.build(0), case.question(5)
        before = ask(case, service, *question)
        with pytest.raises(ValueError, match=first.rpartition(".")[2]):
            service.load(replace(weights, arrays=arrays))
        assert same(ask(case, service, *question), before), f"{what}: part of the refused weights is in use"
        if case.version is not None:
            assert case.version(getattr(service, case.method)(*case.question(2))) == 0, what


def check_loaded_weights_are_its_own(case: Case) -> None:
    """Who sent them may go on training in the same memory."""
    service, question, weights = case.build(0), case.question(5), case.weights(1, 1)
    sent = copy.deepcopy(dict(weights.arrays))
    service.load(replace(weights, arrays=sent))
    before = ask(case, service, *question)
    for array in sent.values():
        array[...] = 0.0
    assert same(ask(case, service, *question), before)


def check_answers_do_not_depend_on_the_batch(case: Case) -> None:
    service, question = case.build(0), case.question(9)
    whole = ask(case, service, *question)
    for index in ([4], [0, 1, 2], [8, 3, 5, 0]):
        part = ask(case, service, *(rows(argument, index) for argument in question))
        assert same(part, {name: x[index] for name, x in whole.items()}, 1e-6)


def check_asking_changes_nothing(case: Case) -> None:
    service, question = case.build(0), case.question(5)
    kept = copy.deepcopy(question)
    first = ask(case, service, *question)
    ask(case, service, *case.question(3))
    assert same(ask(case, service, *question), first)
    assert repr(kept) == repr(question)


def check_it_can_be_awaited_behind_a_handle(case: Case) -> None:
    service, question = case.build(0), case.question(5)

    async def call() -> Any:
        return await getattr(LocalHandle(service), case.method)(*question)

    assert same(case.answer(asyncio.run(call())), ask(case, service, *question))


CHECKS: list[Callable[[Case], None]] = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
