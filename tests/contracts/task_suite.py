"""What every origin of tasks must do: its sources of tasks and its dialogues. A new one adds one `Case` to
test_tasks.py, and all of this is asked of it."""

from __future__ import annotations

import asyncio
import copy
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from m2flow.sections import TaskConfig
from m2flow.types import Task

PROTOCOLS = ("TaskSource", "Dialogue")
SIDES = ("train", "held_out")
SEED, OTHER = 11, 12
MANY = 25  # tasks that are looked at


@dataclass(frozen=True)
class Case:
    """`build()` makes a config. `answers`: what a model might say, one after the other, in a conversation about it."""

    name: str
    build: Callable[[], Any]
    answers: tuple[str, ...] = ("", "42")
    replies: tuple[int, ...] = (0, 0)  # messages that follow each of them
    counted: tuple[str, ...] = ()  # names of `info`


def first(source: Any, many: int = MANY) -> list[Task]:
    return [source.task(i) for i in range(min(many, source.size or many))]


def prompts(config: Any, side: str, seed: int, many: int = 400) -> set[str]:
    return {repr(config.dialogue(task).open()) for task in first(config.tasks(side, seed), many)}


def check_it_is_a_task_config(case: Case) -> None:
    config = case.build()
    assert isinstance(config, TaskConfig)
    assert config.max_tokens >= 1
    assert config.max_turns >= 1
    spec = config.spec()
    assert (set(spec.observation), spec.action.dtype, spec.action.shape) == ({"tokens"}, "int64", ())
    assert pickle.loads(pickle.dumps(config)) == config


def check_a_position_always_has_the_same_task(case: Case) -> None:
    for side in SIDES:
        source, again = case.build().tasks(side, SEED), case.build().tasks(side, SEED)
        tasks = first(source)
        assert tasks
        assert [task.id for task in tasks] == list(range(len(tasks)))
        backwards = [again.task(i) for i in reversed(range(len(tasks)))][::-1]
        assert repr(tasks) == repr(backwards)
        assert repr(source.task(0)) == repr(tasks[0])


def check_positions_outside_are_refused(case: Case) -> None:
    for side in SIDES:
        source = case.build().tasks(side, SEED)
        wrong = [-1] if source.size is None else [-1, source.size, source.size + 7]
        for index in wrong:
            with pytest.raises(ValueError, match="^index: "):
                source.task(index)


def check_held_out_tasks_can_be_counted(case: Case) -> None:
    assert case.build().tasks("held_out", SEED).size >= 1


def check_no_task_is_on_both_sides(case: Case) -> None:
    config = case.build()
    held = prompts(config, "held_out", SEED)
    assert held
    for seed in (SEED, OTHER):
        assert not prompts(config, "train", seed) & held


def check_what_is_held_out_does_not_depend_on_the_seed(case: Case) -> None:
    config = case.build()
    assert prompts(config, "held_out", SEED) == prompts(config, "held_out", OTHER)


def check_nothing_is_drawn_from_the_global_random_state(case: Case) -> None:
    states = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002 - what must not move
    config = case.build()
    for side in SIDES:
        for task in first(config.tasks(side, SEED)):
            config.dialogue(task).open()
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states  # noqa: NPY002


def check_a_conversation_begins_with_something_to_answer(case: Case) -> None:
    config = case.build()
    for side in SIDES:
        for task in first(config.tasks(side, SEED)):
            messages = config.dialogue(task).open()
            assert messages[-1]["role"] in ("user", "tool")
            assert all(isinstance(m["content"], str) for m in messages)
            assert messages[-1]["content"].strip()
            assert str(task.payload.get("completion")) != messages[-1]["content"]


def check_a_conversation_goes_on_as_expected(case: Case) -> None:
    config = case.build()
    task = config.tasks("train", SEED).task(0)
    before = copy.deepcopy(task)
    dialogue = config.dialogue(task)
    dialogue.open()
    counted = dict(dialogue.info())
    assert set(counted) == set(case.counted)
    assert not any(counted.values())
    for answer, many in zip(case.answers, case.replies, strict=True):
        said = asyncio.run(dialogue.reply(answer))
        assert len(said) == many
        assert all(m["role"] in ("user", "tool") and isinstance(m["content"], str) for m in said)
    assert set(dialogue.info()) == set(case.counted)
    assert all(np.isfinite(value) for value in dialogue.info().values())
    assert repr(task) == repr(before), "a conversation changed its task"


def check_conversations_do_not_know_of_each_other(case: Case) -> None:
    config = case.build()
    task = config.tasks("train", SEED).task(0)
    one = config.dialogue(task)
    opened = copy.deepcopy(list(one.open()))
    for answer in case.answers:
        asyncio.run(one.reply(answer))
    other = config.dialogue(task)
    assert list(other.open()) == opened == list(one.open())
    assert not any(other.info().values())


CHECKS: list[Callable[[Case], None]] = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
