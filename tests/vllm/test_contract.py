"""The Generator contract, the same checks as of our own decoder, asked of vLLM."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from m2flow.backends.vllm import VLLMGenerator
from m2flow.models.lm.lora import LoRA
from tests.contracts.generator_suite import CHECKS, Case
from tests.vllm.tiny import engine, published, tiny

ADAPTED = LoRA(rank=2)
SETTINGS: dict[str, tuple[str, LoRA | None, dict[str, Any]]] = {
    "qwen2": ("qwen2", None, {}),
    "qwen3": ("qwen3", None, {}),
    "llama": ("llama", None, {}),
    "merged": ("qwen2", ADAPTED, {}),
    "adapter": ("qwen2", ADAPTED, {"lora": "adapter"}),
}
running: dict[str, VLLMGenerator] = {}  # an engine a case: to start one takes seconds


@pytest.fixture(scope="module", autouse=True)
def _closed_afterwards() -> Iterator[None]:
    yield
    while running:
        running.popitem()[1].close()


def build(name: str) -> tuple[Any, Any]:
    family, lora, settings = SETTINGS[name]
    policy = tiny(family, lora=lora)
    if name not in running:
        running[name] = engine(copy.deepcopy(policy), dtype="float32", max_sequences=3, **settings)
    running[name].abort()
    running[name].load(published(policy, 0))
    return running[name], policy


CASES = [Case(name, lambda name=name: build(name), 1e-4, exact=False) for name in SETTINGS]


@pytest.mark.parametrize(
    ("case", "check"), [pytest.param(c, k, id=f"{c.name}-{k.__name__[6:]}") for c in CASES for k in CHECKS]
)
def test_generator_contract(case: Case, check: Callable[[Case], None]) -> None:
    check(case)
    if check.__name__ == "check_closing_frees_it":
        del running[case.name]
