"""The learner's turn at the end of a step."""

from __future__ import annotations

from m2flow import build, config
from m2flow.runtime.worker import Context
from m2flow.types import Report, Weights


def test_a_step_without_trajectories_is_closed_and_publishes() -> None:
    recipe = config.load({"env": "point_reach", "policy": {"name": "mlp", "normalize": True}, "objective": "ppo"})
    learner = build.LearnerPart(recipe, recipe.env.spec())(Context("learner", 0, 1, ("cpu:0",), {}))
    weights, report = learner.close_step(0)
    assert isinstance(weights, Weights)
    assert weights.version == 1
    assert isinstance(report, Report)
    assert report.step == 0
