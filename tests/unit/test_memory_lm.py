"""What a language model's nodes hold, counted without reading a weight."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from m2flow import build, memory
from m2flow.algorithms.onpolicy import GRPO
from m2flow.backends.generate.config import TorchGeneratorConfig
from m2flow.models.lm.lora import LoRA
from tests.unit.models.lm.small import SPEC, config, policy

LAYERS = 2 * (2 * (32 * 32) + 2 * (32 * 16) + 3 * (32 * 48))  # q, o; k, v; gate, up, down
REST = 2 * 20 * 32 + 2 * (32 + 16 + 16) + 5 * 32  # embedding and output layer, biases of q, k, v, norms
RANK = 4
ADAPTERS = RANK * 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))


@pytest.mark.parametrize(
    ("keys", "engine", "learner", "sampling"),
    [
        ({}, None, 16 * (LAYERS + REST), (4 + 4) * (LAYERS + REST)),
        (
            {"lora": LoRA(rank=RANK)},
            TorchGeneratorConfig(),
            16 * ADAPTERS + 4 * (LAYERS + REST),
            4 * ADAPTERS + (4 + 4) * (LAYERS + REST),
        ),
        (
            {"lora": LoRA(rank=RANK), "dtype": "bfloat16"},
            TorchGeneratorConfig(dtype="bfloat16"),
            16 * ADAPTERS + 2 * (LAYERS + REST),
            4 * ADAPTERS + (2 + 4) * (LAYERS + REST),
        ),
        (
            {"lora": LoRA(rank=RANK), "dtype": "bfloat16"},
            TorchGeneratorConfig(dtype="bfloat16", device="cuda"),
            16 * ADAPTERS + 2 * (LAYERS + REST),
            4 * ADAPTERS + (2 + 2) * (LAYERS + REST),
        ),
    ],
    ids=["full", "lora", "lora_half", "lora_half_on_a_gpu"],
)
def test_bytes_by_hand(keys: dict[str, Any], engine: Any, learner: int, sampling: int) -> None:
    """float32: weight, gradient and two moments of what is trained; a frozen base once. The node that samples holds the
    policy and the decoder's copy; the names are those of the flow that runs."""
    recipe = SimpleNamespace(
        policy=config(**keys),
        generator=engine,
        objective=GRPO(level="action"),
        trainer=SimpleNamespace(dtype="float32"),
        rollout=SimpleNamespace(lanes=8, group=4, length=1),
        replay=None,
        evaluation=None,
    )
    nodes = build.onpolicy(recipe)  # type: ignore[arg-type]
    model: Any = memory.skeleton(recipe, SPEC)
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in policy().parameters()) == LAYERS + REST
    plan: Any = SimpleNamespace(places={})
    found = memory.estimate(recipe, nodes, plan, model.policy.spec, model)  # type: ignore[arg-type]
    assert found.keys() == {"rollout", "policy", "learner"}
    assert found["policy"] == sampling
    assert learner <= found["learner"] < learner + 10_000  # what is trained on comes on top
