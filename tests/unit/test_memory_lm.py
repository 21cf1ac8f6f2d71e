"""What a language model's nodes hold, counted without reading a weight."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from m2flow import memory
from m2flow.algorithms.onpolicy import GRPO
from m2flow.models.lm.lora import LoRA
from tests.unit.models.lm.small import SPEC, config, policy

LAYERS = 2 * (2 * (32 * 32) + 2 * (32 * 16) + 3 * (32 * 48))  # q, o; k, v; gate, up, down
REST = 2 * 20 * 32 + 2 * (32 + 16 + 16) + 5 * 32  # embedding and output layer, biases of q, k, v, norms
RANK = 4
ADAPTERS = RANK * 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))


@pytest.mark.parametrize(
    ("keys", "learner", "generator"),
    [
        ({}, 16 * (LAYERS + REST), 4 * (LAYERS + REST)),
        ({"lora": LoRA(rank=RANK)}, 16 * ADAPTERS + 4 * (LAYERS + REST), 4 * (ADAPTERS + LAYERS + REST)),
        (
            {"lora": LoRA(rank=RANK), "dtype": "bfloat16"},
            16 * ADAPTERS + 2 * (LAYERS + REST),
            4 * ADAPTERS + 2 * (LAYERS + REST),
        ),
    ],
    ids=["full", "lora", "lora_half"],
)
def test_bytes_by_hand(keys: dict[str, Any], learner: int, generator: int) -> None:
    """float32: weight, gradient and two moments of what is trained; a frozen base once; a copy to sample from."""
    recipe = SimpleNamespace(
        policy=config(**keys),
        objective=GRPO(level="action"),
        trainer=SimpleNamespace(dtype="float32"),
        rollout=SimpleNamespace(lanes=8, group=4, length=1),
        replay=None,
        evaluation=None,
    )
    nodes = SimpleNamespace(nodes=[SimpleNamespace(name=name) for name in ("generator", "learner")])
    model: Any = memory.skeleton(recipe, SPEC)
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in policy().parameters()) == LAYERS + REST
    plan: Any = SimpleNamespace(places={})
    found = memory.estimate(recipe, nodes, plan, model.policy.spec, model)  # type: ignore[arg-type]
    assert found["generator"] == generator
    assert learner <= found["learner"] < learner + 10_000  # what is trained on comes on top
