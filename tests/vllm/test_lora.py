"""Adapters: in the weights of the engine, or beside them. Both must say what transformers says of the merged model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from m2flow.backends.vllm import VLLMGenerator
from m2flow.models.lm.lora import LoRA
from m2flow.models.lm.policy import CausalLMPolicy
from m2flow.types import Answer
from tests.vllm.tiny import asked, engine, expected_logprob, finish, published, tiny

ADAPTED = LoRA(rank=3, alpha=12.0, targets=("q_proj", "v_proj", "down_proj"))


def trained(seed: int) -> CausalLMPolicy:
    """As if training had moved the adapters, which start as zeros."""
    policy = tiny("qwen2", lora=ADAPTED)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, x in policy.named_parameters():
            if "lora_B" in name:
                x.normal_(0.0, 0.1, generator=draw)
    return policy


@pytest.fixture(scope="module", params=["merged", "adapter"])
def served(request: pytest.FixtureRequest) -> Iterator[VLLMGenerator]:
    made = engine(tiny("qwen2", lora=ADAPTED), dtype="float32", lora=request.param)
    yield made
    made.close()


def test_adapters_are_served_and_replaced(served: VLLMGenerator) -> None:
    answers = []
    for version, policy in enumerate([trained(1), trained(2), tiny("qwen2", lora=ADAPTED)]):
        weights = published(policy, version)
        assert all(".lora_" in name for name in weights.arrays)  # the base is not sent
        served.load(weights)
        answers.append(finish(served, asked(temperature=0.0)))
        for answer, request in zip(answers[-1], asked(), strict=True):
            right = expected_logprob(policy, request, answer.tokens, 1.0)
            assert np.abs(answer.logprob - right).max() < 1e-4
            assert (answer.version == version).all()
    texts = [[answer.tokens.tolist() for answer in some] for some in answers]
    assert texts[0] != texts[1] != texts[2] != texts[0]


def test_requests_in_flight_go_on_with_the_new_adapter(served: VLLMGenerator) -> None:
    before, after = trained(3), trained(4)
    served.load(published(before, 1))
    [request] = asked(1)
    served.submit([request])
    for _ in range(4):
        served.step()
    served.load(published(after, 2))
    done: list[Answer] = []
    while not done:
        done = served.step()
    [answer] = done
    count = int((answer.version == 1).sum())
    assert 0 < count < len(answer.tokens)
    old = expected_logprob(before, request, answer.tokens, 1.0)[:count]
    new = expected_logprob(after, request, answer.tokens, 1.0)[count:]
    assert np.abs(answer.logprob - np.concatenate([old, new])).max() < 1e-4
