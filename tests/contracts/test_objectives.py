"""The Objective contract, asked of every shipped objective with several sets of options."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from m2flow.algorithms.actor_critic import SAC
from m2flow.algorithms.imitation import SFT
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
COUNTED = {"level": "token", "kl": "k2", "kl_coef": 0.2, "entropy_coef": 0.05}
REWARDED = {"kl_coef": 0.2, "kl_in": "reward", "whiten": "batch"}
MIS = {"behaviour_threshold": 1.3, "behaviour_rule": "mask", "behaviour_level": "sequence"}

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
    Case("grpo_token_sum", GRPO(aggregation="sequence-mean-token-sum", aggregation_constant=9, level="action"), CHUNK),
    Case("grpo_sequence_mean", GRPO(aggregation="sequence-mean-token-mean", **COUNTED), FLOW, mask=True),
    Case("rloo", GRPO(baseline="leave_one_out", std="none", aggregation="sequence-mean-token-mean"), CHUNK),
    Case("reinforce", GRPO(baseline="none", std="none", credit="to_go", gamma=0.9, whiten="batch"), MLP),
    Case("reinforce_tokens", GRPO(std="none", credit="to_go", level="action", kl="k1", **REWARDED), CHUNK),
    Case("gspo", GRPO(level="sequence", clip_low=3e-2, clip_high=4e-2, kl="k3", kl_coef=0.1, entropy_coef=0.1), CHUNK),
    Case("cispo", GRPO(surrogate="cispo", level="token", clip_low=1.0, clip_high=0.1), CHUNK, mask=True),
    Case("ppo_tis", PPO(**SMALL, decoupled=True, behaviour_threshold=1.1, behaviour_rule="truncate"), CHUNK),
    Case("ppo_mis", PPO(**SMALL, decoupled=True, level="action", **MIS), CHUNK),
    Case("gspo_mis", GRPO(decoupled=True, level="sequence", **MIS), FLOW, mask=True),
    Case("sft", SFT(), CHUNK),
    Case("sft_entropy", SFT(entropy_coef=0.1), FLOW, mask=True),
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
