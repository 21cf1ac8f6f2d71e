"""The Service contract, asked of the policy service with every kind of policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from m2flow.models.flow import FlowConfig
from m2flow.models.mlp import MLPConfig
from m2flow.roles.policy import PolicyService
from m2flow.types import Weights
from tests.contracts import policy_suite
from tests.contracts.policy_suite import DISCRETE, MIXED, VECTOR
from tests.contracts.service_suite import CHECKS, Case


def policy(name: str, config: Any, spec: Any) -> Case:
    """A policy behind its service; weights come as a trainer sends them."""
    made = policy_suite.Case(name, config, spec)

    def weights(version: int, seed: int) -> Weights:
        state = policy_suite.build(made, seed).state_dict()
        return Weights(version, {f"policy.{key}": x.numpy().copy() for key, x in state.items()})

    return Case(
        name,
        build=lambda seed: PolicyService(policy_suite.build(made, seed)),
        weights=weights,
        method="act",
        question=lambda rows: (policy_suite.observations(made, rows), policy_suite.noise(config.build(spec, 0), rows)),
        answer=lambda action: {key: np.asarray(x) for key, x in policy_suite.arrays(action).items()},
        version=lambda action: action.version,
    )


CASES = [
    policy("gaussian", MLPConfig(hidden=(8,), chunk=2), VECTOR),
    policy("normalized", MLPConfig(hidden=(8,), normalize=True), MIXED),
    policy("squashed", MLPConfig(hidden=(8,), dist="squashed"), VECTOR),
    policy("categorical", MLPConfig(hidden=(8,)), DISCRETE),
    policy("flow", FlowConfig(hidden=(8,), steps=2), VECTOR),
]


@pytest.mark.parametrize(
    ("case", "check"), [pytest.param(c, k, id=f"{c.name}-{k.__name__[6:]}") for c in CASES for k in CHECKS]
)
def test_service_contract(case: Case, check: Callable[[Case], None]) -> None:
    check(case)
