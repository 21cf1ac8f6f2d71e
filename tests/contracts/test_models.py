"""The Model contract, asked of the trainer's model, and of the one that stands for it in the tests of algorithms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from m2flow.backends.torch.trainer import TorchTrainerConfig
from m2flow.models.mlp import MLPConfig
from m2flow.types import Head
from tests.contracts.model_suite import CHECKS, Asks, Case
from tests.unit.algorithms import tiny_model
from tests.unit.backends.small import SPEC


def trained(objective: Any, **options: Any) -> Any:
    """What the trainer makes of an objective."""
    policy = MLPConfig(hidden=(6,), **options).build(SPEC, 0)
    return TorchTrainerConfig(dtype="float64").build(policy, objective, 0).model


CASES = [
    Case("torch", trained),
    Case("torch_shared_trunk_chunk", lambda objective: trained(objective, chunk=3, shared_trunk=True, normalize=True)),
    Case("tiny_model", tiny_model.make),
]


@pytest.mark.parametrize(
    ("case", "check"), [pytest.param(c, k, id=f"{c.name}-{k.__name__[6:]}") for c in CASES for k in CHECKS]
)
def test_model_contract(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


@pytest.mark.parametrize("name", ["values", "type", "policy", "a.b"])
@pytest.mark.parametrize("head", [Head(), 0.5], ids=["head", "scalar"])
def test_a_name_that_cannot_be_kept_is_refused_with_what_to_do(name: str, head: Any) -> None:
    """`values` and `type` are methods of torch's own containers."""
    with pytest.raises(ValueError, match=f"head '{name}': this name is taken or has .*; choose another"):
        trained(Asks(networks={name: head}))
