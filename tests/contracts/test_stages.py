"""The Stage contract, asked of every stage of the built-in flows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from m2flow.types import Batch, Tick, Trajectory
from tests.contracts import stages
from tests.contracts.stage_suite import CHECKS, Case


def drawn(n: int) -> list[Batch]:
    """What a replay channel hands out after step n."""
    replay = stages.replay()
    for part in stages.trajectories()[n]:
        replay.put(part)
    return replay.ready()


CASES = [
    Case("rollout", stages.rollout, lambda n: [Tick(n, 0)], (Trajectory,), source=True),
    Case("rollout_with_reward", stages.scored_rollout, lambda n: [Tick(n, 0)], (Trajectory,), source=True),
    Case("answers", stages.answers, lambda n: [Tick(n, 0)], (Trajectory,), source=True),
    Case("demonstrations", stages.demonstrations, lambda n: [Tick(n, 0)], (Trajectory,), source=True),
    Case("learner", stages.learner, lambda n: stages.trajectories()[n], sends=True),
    Case("learner_replay", stages.off_policy_learner, drawn, inserted=lambda n: stages.trajectories()[n], sends=True),
    Case("evaluator", stages.evaluator, lambda n: [Tick(n, n, "evaluate")], source=True),
]


@pytest.mark.parametrize(
    ("case", "check"), [pytest.param(c, k, id=f"{c.name}-{k.__name__[6:]}") for c in CASES for k in CHECKS]
)
def test_stage_contract(case: Case, check: Callable[[Case], None]) -> None:
    check(case)
