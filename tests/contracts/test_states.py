"""The contract of states and of residence, asked of everything that has one."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest

from m2flow.comm.channel import Channel
from m2flow.observe.alarms import Alarms
from m2flow.types import Tick
from tests.architecture.source import base_names, classes, modules
from tests.contracts import stages
from tests.contracts.state_suite import CHECKS, Case


def roll(rollout: Any, n: int) -> Any:
    return stages.outputs(rollout.work([Tick(n, 0)]))


def learn(learner: Any, n: int) -> Any:
    return [*stages.outputs(learner.work(stages.trajectories()[n])), *stages.outputs(learner.close_step(n))]


def learn_drawn(learner: Any, n: int) -> Any:
    replay = stages.replay()
    for part in stages.trajectories()[n]:
        replay.put(part)
    return [*stages.outputs(learner.work(replay.ready())), *stages.outputs(learner.close_step(n))]


def train(trainer: Any, n: int) -> Any:
    """One optimiser batch, whole."""
    batch, _ = stages.OBJECTIVE.targets(trainer.model, stages.trajectories()[n][0])
    batch = stages.OBJECTIVE.prepare(batch, batch.size)
    [phase] = stages.OBJECTIVE.phases
    sums = trainer.forward_backward(batch, phase, stages.OBJECTIVE.counts(batch))
    return sums, trainer.step(phase)


def draw(replay: Any, n: int) -> Any:
    """A step goes in; some of what was earned stays inside."""
    for part in stages.trajectories()[n]:
        replay.put(part)
    return replay.get(4)


def pass_on(channel: Any, n: int) -> Any:
    for weight in (1, 3, 2):
        channel.put({"n": n, "weight": weight}, weight=weight)
    return channel.get(2)


def watch(alarms: Any, n: int) -> Any:
    fired = alarms.check(n, {"train/grad_norm": 0.0, "train/policy_loss": float("nan")})
    return [(alarm.step, alarm.kind, alarm.action, alarm.text) for alarm in fired]


CASES = [
    Case("rollout", stages.rollout, roll),
    Case("rollout_with_reward", stages.scored_rollout, roll),
    Case("answers", stages.answers, roll),
    Case("demonstrations", stages.demonstrations, roll),
    Case("learner", stages.learner, learn, resident=True),
    Case("off_policy_learner", stages.off_policy_learner, learn_drawn, resident=True),
    Case("trainer", stages.trainer, train, resident=True),
    Case("replay", stages.replay, draw),
    Case("queue", Channel, pass_on),
    Case("alarms", Alarms, watch),
]
PARTS = {"Ring": "ReplayChannel", "Group": "TorchTrainer"}  # whose state is within that of another


def test_everything_with_a_state_is_here() -> None:
    having = {
        node.name
        for module in modules()
        for node in classes(module)
        if {"state", "restore"} <= {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        and "Protocol" not in base_names(node)
        and not node.name.startswith("_")
    }
    here = {type(case.build()).__name__ for case in CASES}
    assert here | {part for part, whole in PARTS.items() if whole in here} == having


@pytest.mark.parametrize(
    ("case", "check"), [pytest.param(c, k, id=f"{c.name}-{k.__name__[6:]}") for c in CASES for k in CHECKS]
)
def test_state_contract(case: Case, check: Callable[[Case], None]) -> None:
    check(case)
