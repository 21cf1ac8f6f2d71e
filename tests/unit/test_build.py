"""What a recipe's objective says of itself reaches the flow, and the plan's rules heed it."""

from __future__ import annotations

from typing import Any

import pytest

from m2flow import api, build, config
from m2flow.flow.cluster import Cluster, Device

PPO: dict[str, Any] = {"env": "point_reach", "policy": "mlp", "objective": {"name": "ppo", "whiten": "none"}}
GRPO: dict[str, Any] = {
    "env": "point_reach",
    "policy": "mlp",
    "objective": "grpo",
    "rollout": {"lanes": 8, "group": 2, "length": 50},
}


def plan(**more: Any) -> dict[str, Any]:
    """Rollout and learner apart."""
    places = {"rollout": "cpu:0", "policy": "cpu:0", "learner": "cpu:1"} | more.pop("places", {})
    return {"places": places, **more}


@pytest.mark.parametrize(("recipe", "unknown"), [(PPO, 2), (GRPO, 1)])
def test_the_learner_has_as_many_unknown_denominators_as_its_objective(recipe: dict[str, Any], unknown: int) -> None:
    assert build.onpolicy(config.load(recipe)).node("learner").unknown_denominators == unknown


def test_a_step_with_two_unknown_denominators_is_not_cut() -> None:
    report = api.check({**PPO, "plan": plan(chunks={"rollout->learner": 2})})
    assert "because it has 2 denominators that are unknown before the batch is complete" in str(report)


def test_a_policy_is_not_off_loaded_and_a_learner_is() -> None:
    report = api.check({**PPO, "plan": plan(places={"policy": {"devices": "cpu:0", "offload": True}})})
    assert "policy: cannot leave its devices, so remove offload; nodes of this flow that can: learner" in str(report)
    assert api.check({**PPO, "plan": plan(places={"learner": {"devices": "cpu:1", "offload": True}})}).ok


def test_hybrid_cuts_the_lanes_of_a_robot_and_no_answers() -> None:
    text = {
        "env": {"name": "arithmetic", "digits": 1},
        "reward": {"name": "math"},
        "policy": {"name": "causal_lm", "config": {"model_type": "llama"}, "tokenizer": {"characters": "0123456789"}},
        "objective": {"name": "grpo", "level": "action"},
        "rollout": {"lanes": 2, "length": 1, "group": 2},
    }
    cluster = Cluster((Device("cpu:0"), Device("cpu:1")))
    for recipe, cuts in ((PPO, 2), (text, 1)):
        loaded = config.load({**recipe, "plan": "hybrid"})
        assert build.make_plan(loaded, build.onpolicy(loaded), cluster).sub_batches == {"rollout->policy": cuts}
