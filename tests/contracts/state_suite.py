"""What everything must do that a checkpoint holds (Stateful) or that can leave its device (Resident).

Whoever has a state adds one `Case` to test_states.py, and all of this is asked of it.
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from m2flow.backends.checkpoint import CheckpointConfig
from m2flow.protocols import Resident, Stateful
from m2flow.types import Report

PROTOCOLS = ("Stateful", "Resident")


@dataclass(frozen=True)
class Case:
    """`build()`: one as a run makes it. `work(thing, n)`: its n-th piece of work (n < 6), and what came out.

    `resident`: it has a device to leave.
    """

    name: str
    build: Callable[[], Any]
    work: Callable[[Any, int], Any]
    resident: bool = False


def plain(tree: Any) -> Any:
    """Outputs and states as nested lists; what is measured in seconds is left out."""
    if isinstance(tree, Report):
        tree = dataclasses.replace(tree, metrics={k: v for k, v in tree.metrics.items() if not k.startswith("time/")})
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return plain({field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)})
    if isinstance(tree, Mapping):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [plain(value) for value in tree]
    return np.asarray(tree).tolist() if hasattr(tree, "shape") else tree


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit; NaN equals NaN."""
    return repr(plain(a)) == repr(plain(b))


def stored(state: Any) -> Any:
    """The state as a checkpoint gives it back."""
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointConfig().build(Path(folder))
        store.save(1, state, {})
        return store.load(1)[1]


# ---- checks


def check_it_has_the_methods(case: Case) -> None:
    thing = case.build()
    assert isinstance(thing, Stateful)
    assert isinstance(thing, Resident) == case.resident


def check_what_it_does_depends_on_what_it_did(case: Case) -> None:
    """Else the checks below would say nothing."""
    one, other = case.build(), case.build()
    fresh = other.state()
    case.work(one, 0)
    assert not same(one.state(), fresh)
    assert not same([case.work(one, n) for n in (1, 2)], [case.work(other, n) for n in (1, 2)])


def check_restoring_its_own_state_changes_nothing(case: Case) -> None:
    thing, straight = case.build(), case.build()
    for n in range(4):
        thing.restore(thing.state())
        assert same(case.work(thing, n), case.work(straight, n))


def check_a_state_is_safe_to_keep(case: Case) -> None:
    thing = case.build()
    case.work(thing, 0)
    state = thing.state()
    kept = copy.deepcopy(state)
    for n in range(1, 4):
        case.work(thing, n)
    assert same(state, kept)
    assert not same(thing.state(), kept)


def check_another_one_continues_exactly_from_a_checkpoint(case: Case) -> None:
    straight, other = case.build(), case.build()
    for n in (0, 1):
        case.work(straight, n)
    case.work(other, 5)
    other.restore(stored(straight.state()))
    assert same(other.state(), straight.state())
    for n in range(2, 5):
        assert same(case.work(other, n), case.work(straight, n))


def check_a_restored_state_can_be_restored_again(case: Case) -> None:
    """Working on does not write into what it was restored from."""
    thing = case.build()
    case.work(thing, 0)
    state = thing.state()
    results = []
    for _ in range(2):
        thing.restore(state)
        results.append([case.work(thing, n) for n in range(1, 3)])
    assert same(*results)


def check_leaving_the_device_and_coming_back_changes_nothing(case: Case) -> None:
    if not case.resident:
        return
    thing, straight = case.build(), case.build()
    for n in range(3):
        thing.offload()
        thing.onload()
        assert same(case.work(thing, n), case.work(straight, n))
    thing.offload()
    assert same(thing.state(), straight.state())


CHECKS: list[Callable[[Case], None]] = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
