"""The Policy contract, asked of every policy."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from m2flow.models.flow import FlowConfig
from m2flow.models.mlp import MLPConfig
from tests.contracts.policy_suite import CHECKS, DISCRETE, MIXED, SWITCHES, TORQUE, VECTOR, Case

SMALL = (16, 12)
CASES = [
    Case("gaussian", MLPConfig(hidden=SMALL), VECTOR),
    Case("gaussian_no_hidden_layer", MLPConfig(hidden=()), VECTOR),
    Case("gaussian_chunk", MLPConfig(hidden=SMALL, chunk=4, activation="silu"), VECTOR),
    Case("gaussian_state_std", MLPConfig(hidden=SMALL, state_dependent_std=True, log_std_init=-0.5), VECTOR),
    Case("gaussian_bounds", MLPConfig(hidden=SMALL, log_std_init=-1.0, log_std_bounds=(-2.5, 0.5)), VECTOR),
    Case("gaussian_scheduled", MLPConfig(hidden=SMALL, std_schedule=((0, 1.0), (3, 0.2))), VECTOR),
    Case("gaussian_shared", MLPConfig(hidden=SMALL, shared_trunk=True, activation="elu"), TORQUE),
    Case("gaussian_normalized", MLPConfig(hidden=SMALL, normalize=True, clip_obs=3.0), MIXED),
    Case("squashed", MLPConfig(hidden=SMALL, dist="squashed", activation="relu"), TORQUE),
    Case("squashed_own_std", MLPConfig(hidden=SMALL, dist="squashed", state_dependent_std=False), TORQUE),
    Case("squashed_normalized", MLPConfig(hidden=SMALL, dist="squashed", normalize=True), MIXED),
    Case("categorical", MLPConfig(hidden=SMALL), DISCRETE),
    Case("categorical_cold", MLPConfig(hidden=SMALL, temperature=0.5), DISCRETE),
    Case("categorical_switches", MLPConfig(hidden=SMALL, chunk=2, normalize=True), SWITCHES),
    Case("flow", FlowConfig(hidden=SMALL), VECTOR),
    Case("flow_one_step", FlowConfig(hidden=SMALL[:1], steps=1, activation="relu"), VECTOR),
    Case("flow_fixed_std", FlowConfig(hidden=SMALL, steps=3, learn_std=False, std=0.1), TORQUE),
    Case("flow_chunk", FlowConfig(hidden=SMALL, chunk=3, normalize=True), MIXED),
]


@pytest.mark.parametrize(
    ("case", "check"), [pytest.param(c, k, id=f"{c.name}-{k.__name__[6:]}") for c in CASES for k in CHECKS]
)
def test_policy_contract(case: Case, check: Callable[[Case], None]) -> None:
    check(case)
