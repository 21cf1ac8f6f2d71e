"""The Objective contract, asked of every shipped objective with several sets of options."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from m2flow.algorithms.actor_critic import SAC
from m2flow.algorithms.onpolicy import GRPO, PPO
from m2flow.models.flow import FlowConfig
from m2flow.models.mlp import MLPConfig
from m2flow.registry import BUILTIN
from tests.contracts.objective_suite import CHECKS, Case

MLP, CHUNK = MLPConfig(hidden=(6,)), MLPConfig(hidden=(6,), chunk=3)
FLOW = FlowConfig(hidden=(6,), chunk=3, steps=2)
SQUASHED = MLPConfig(hidden=(6,), dist="squashed")
SMALL = {"critic_hidden": (6,)}
EVERYTHING = {"dual_clip": 1.5, "clip_high": 0.28, "value_clip": 0.2, "huber": 0.5, "entropy_coef": 0.05}

CASES = [
    Case("ppo", PPO(**SMALL), MLP),
    Case("ppo_everything", PPO(**SMALL, **EVERYTHING, kl="k3", kl_coef=0.3, reward_scale=0.5, target_kl=0.1), CHUNK),
    Case("ppo_action", PPO(**SMALL, level="action", kl="k2", kl_coef=0.2, whiten="batch"), CHUNK),
    Case("ppo_token", PPO(**SMALL, level="token", whiten="none"), CHUNK, mask=True),
    Case("ppo_flow", PPO(**SMALL, entropy_coef=0.01), FLOW),
    Case("ppo_flow_kl_in_reward", PPO(**SMALL, level="token", kl="k1", kl_coef=0.2, kl_in="reward"), FLOW),
    Case("ppo_decoupled", PPO(**SMALL, decoupled=True, behaviour_threshold=1.3), CHUNK),
    Case("grpo", GRPO(), MLP),
    Case("grpo_whitened", GRPO(whiten="minibatch", std="none", entropy_coef=0.1), CHUNK),
    Case("grpo_kl", GRPO(kl="k3", kl_coef=0.1, level="token", std="population"), FLOW),
    Case("sac", SAC(**SMALL), SQUASHED, replay=True),
    Case("sac_fixed_alpha", SAC(**SMALL, temperature=0.2, critics=3, backup_entropy=False), SQUASHED, replay=True),
]


def test_every_shipped_objective_is_here() -> None:
    shipped = {address.partition(":")[2] for address in BUILTIN["objective"].values()}
    assert {type(case.objective).__name__ for case in CASES} == shipped


@pytest.mark.parametrize(
    ("case", "check"), [pytest.param(c, k, id=f"{c.name}-{k.__name__[6:]}") for c in CASES for k in CHECKS]
)
def test_objective_contract(case: Case, check: Callable[[Case], None]) -> None:
    check(case)
