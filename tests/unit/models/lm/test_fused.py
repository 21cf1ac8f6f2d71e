"""Fused norms, gated layers and attention against the modules' own code, weights and gradients alike."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from m2flow.models.lm.config import CausalLMConfig
from m2flow.models.lm.tokenizer import CharacterTokenizer
from m2flow.types import Field, Spec

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def made(kind: str, dtype: torch.dtype) -> Any:
    config = CausalLMConfig(
        config={"model_type": kind, **SMALL}, tokenizer=CharacterTokenizer(characters="0123456789+=")
    )
    return config.build(Spec({}, Field((), "int64")), 0).to(dtype)


def plain(policy: Any) -> Any:
    """With every module's own forward."""
    for module in policy.network.modules():
        if isinstance(module.__dict__.get("forward"), partial):
            del module.forward
    return policy


def rows() -> dict[str, torch.Tensor]:
    """Two groups that share prompts of 3 and 6 tokens; answers of 0 to 9 tokens, poison behind them."""
    torch.manual_seed(1)
    tokens, at = torch.randint(3, 15, (8, 20)), torch.zeros(8, 9, dtype=torch.int64)
    for row, count in enumerate([9, 7, 0, 1, 9, 2, 9, 5]):
        prompt = 3 if row < 4 else 6
        tokens[row, :prompt] = tokens[row // 4 * 4, :prompt]
        at[row, :count] = torch.arange(prompt, prompt + count)
        tokens[row, prompt + count :] = 10**6
    return {"tokens": tokens, "length": torch.full((8,), 20), "at": at}


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_scores_and_gradients_are_those_of_the_modules(kind: str, dtype: torch.dtype, bound: float) -> None:
    fast, own = made(kind, dtype), plain(made(kind, dtype))
    for policy in (fast, own):  # norms whose weight is 1 and biases of 0 would hide a mistake
        for i, p in enumerate(policy.parameters()):
            p.data += 0.1 * torch.sin(torch.arange(p.numel(), dtype=dtype) + i).view(p.shape)
    obs = rows()
    weight = torch.linspace(-1.0, 2.0, obs["at"].numel(), dtype=dtype).view(obs["at"].shape)
    found = [policy.score(obs).logprob for policy in (fast, own)]
    assert torch.allclose(*found, rtol=0, atol=bound * 10)
    for logprob in found:
        (logprob * weight).sum().backward()
    for (name, a), b in zip(fast.named_parameters(), own.parameters(), strict=True):
        assert float((a.grad - b.grad).abs().max()) <= bound * float(b.grad.abs().max().clamp(min=1.0)), name
    used = [m for m in fast.network.modules() if isinstance(m.__dict__.get("forward"), partial)]
    assert len(used) >= 2 * 4 + 1  # two norms, MLP and attention a layer, and the last norm


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_under_autocast_it_is_as_near_to_float32_as_the_modules_are(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2flow.models.lm.policy.computes_bfloat16", lambda _: True)  # emulated if need be
    exact, fast, own = made(kind, torch.float32), made(kind, torch.float32), plain(made(kind, torch.float32))
    fast.autocast = own.autocast = torch.bfloat16
    obs, found = rows(), []
    weight = torch.linspace(-1.0, 2.0, obs["at"].numel()).view(obs["at"].shape)
    for policy in (exact, fast, own):
        for i, p in enumerate(policy.parameters()):
            p.data += 0.1 * torch.sin(torch.arange(p.numel()) + i).view(p.shape)
        logprob = policy.score(obs).logprob
        (logprob * weight).sum().backward()
        found.append((logprob.detach(), torch.cat([p.grad.flatten() for p in policy.parameters()])))
    for right, ours, theirs in zip(*found, strict=True):
        assert ours.dtype == right.dtype
        assert 0 < float((ours - right).norm()) <= 2.0 * float((theirs - right).norm())


def test_other_classes_keep_their_own_code() -> None:
    policy = made("gemma", torch.float32)
    assert not any(isinstance(m.__dict__.get("forward"), partial) for m in policy.network.modules())
