"""What every Stage must do. A new one adds one `Case` to test_stages.py, and all of this is asked of it.

A stage that has a state, or a device to leave, is also a case of test_states.py.
"""

from __future__ import annotations

import ast
import copy
import inspect
import random
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from m2flow.protocols import Closes, ClosesSteps, Opens, SeesInserted
from m2flow.types import Report, Trajectory, Weights
from tests.contracts.stages import outputs
from tests.contracts.state_suite import same

PROTOCOLS = ("Stage", "Opens", "ClosesSteps", "SeesInserted", "Closes")


@dataclass(frozen=True)
class Case:
    """A stage as a plan's part would build it, what it gets in step n (n < 3), and the items it may yield.

    `inserted`: what went into the replay channel before it in that step. `sends`: it yields Weights.
    `source`: it is woken by ticks, so a step without items is none.
    """

    name: str
    build: Callable[[], Any]
    items: Callable[[int], Sequence[Any]]
    yields: tuple[type, ...] = ()
    inserted: Callable[[int], Sequence[Trajectory]] | None = None
    sends: bool = False
    source: bool = False


def step(case: Case, stage: Any, n: int, *calls: Sequence[Any]) -> list[Any]:
    """One step as the loop drives it: what is in `calls`, else all items of the step in one."""
    if case.inserted is not None:
        assert isinstance(stage, SeesInserted)
        stage.inserted(case.inserted(n))
    made = [output for items in calls or (case.items(n),) for output in outputs(stage.work(items))]
    return made + (outputs(stage.close_step(n)) if isinstance(stage, ClosesSteps) else [])


def begin(stage: Any) -> list[Any]:
    """What it has to say before the first step."""
    return outputs(stage.start()) if isinstance(stage, Opens) else []


# ---- checks


def check_work_is_an_iterator_sync_or_async(case: Case) -> None:
    made = case.build().work(case.items(0))
    assert isinstance(made, Iterator | AsyncIterator)
    outputs(made)


def check_it_yields_its_items_weights_and_reports_and_nothing_else(case: Case) -> None:
    stage = case.build()
    made = begin(stage) + [output for n in range(3) for output in step(case, stage, n)]
    kinds = {type(output) for output in made}
    assert kinds == {*case.yields, Report, *([Weights] if case.sends else [])}


def check_every_step_ends_with_a_report_of_that_step(case: Case) -> None:
    stage = case.build()
    begin(stage)
    for n in range(3):
        made = step(case, stage, n)
        assert isinstance(made[-1], Report)
        assert {output.step for output in made if hasattr(output, "step")} == {n}


def check_weights_carry_a_version_that_grows_by_step(case: Case) -> None:
    """Version s acts in step s: the first is there before any step, the next when the step closes."""
    if not case.sends:
        return
    stage = case.build()
    made = begin(stage) + [output for n in range(3) for output in step(case, stage, n)]
    assert [output.version for output in made if isinstance(output, Weights)] == [0, 1, 2, 3]


def check_a_step_without_items_ends_like_any_other(case: Case) -> None:
    if case.source:
        return
    stage = case.build()
    begin(stage)
    assert isinstance(step(case, stage, 0, [])[-1], Report)
    assert isinstance(step(case, stage, 1)[-1], Report)


def check_what_was_inserted_is_heeded(case: Case) -> None:
    if case.inserted is None:
        return
    told, untold = case.build(), case.build()
    assert not same(step(case, told, 0), step(replace(case, inserted=None), untold, 0))


def check_it_can_be_closed_before_and_after_work(case: Case) -> None:
    for steps in (0, 2):
        stage = case.build()
        for n in range(steps):
            step(case, stage, n)
        if isinstance(stage, Closes):
            stage.close()


def check_what_comes_out_depends_on_what_went_in_alone(case: Case) -> None:
    """Also with another global random state, and however items were cut into calls."""
    results = []
    for seed in (1, 2):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)  # noqa: NPY002 - these must not matter
        stage = case.build()
        made = begin(stage)
        for n in range(3):
            one_by_one = seed == 2 and not case.source
            made += step(case, stage, n, *([item] for item in case.items(n) if one_by_one))
        results.append(made)
    assert same(*results)


def check_global_random_states_and_items_are_left_alone(case: Case) -> None:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()  # noqa: NPY002
    stage, items = case.build(), list(case.items(0))
    kept = copy.deepcopy(items)
    begin(stage)
    step(case, stage, 0, items)
    assert same(items, kept)
    now = random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()  # noqa: NPY002
    assert now == states


def check_it_names_no_device_and_starts_nothing(case: Case) -> None:
    """It is told nothing of where it runs: its module spells no device, and makes no thread, process or queue."""
    tree = ast.parse(Path(inspect.getfile(type(case.build()))).read_text(encoding="utf-8"))
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    assert not [text for text in texts if re.fullmatch(r"(cpu|cuda|gpu|mps)(:\d+)?", text)]
    imported = {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    imported |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    tools = {"threading", "multiprocessing", "subprocess", "queue", "concurrent", "socket", "ray"}
    assert not {name.partition(".")[0] for name in imported} & tools


CHECKS: list[Callable[[Case], None]] = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
