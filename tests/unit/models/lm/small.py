"""Small language models with random weights, conversations for them, and what they mean, one row at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from m2flow.models.lm.config import CausalLMConfig
from m2flow.models.lm.tokenizer import CharacterTokenizer
from m2flow.types import Field, Spec

SPEC = Spec({"tokens": Field((1,), "int64")}, Field((), "int64"))
LETTERS = CharacterTokenizer(characters="0123456789+=ab cd")
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,  # far from uniform, so that errors show
}
EXTRA: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0},
    "phi3": {"pad_token_id": 0},
    "mistral": {"sliding_window": None},
}
POISON = 10**6


def config(kind: str = "qwen2", sizes: dict[str, Any] | None = None, **keys: Any) -> CausalLMConfig:
    settings = {"model_type": kind, **SIZES, **EXTRA.get(kind, {}), **(sizes or {})}
    return CausalLMConfig(**({"config": settings, "tokenizer": LETTERS} | keys))


def policy(kind: str = "qwen2", *, seed: int = 3, sizes: dict[str, Any] | None = None, **keys: Any) -> Any:
    return config(kind, sizes, **keys).build(SPEC, seed)


def conversations(dtype: torch.dtype = torch.int64) -> dict[str, Tensor]:
    """Seven rows: three share a prompt (one of them is a dialogue with 4 tool tokens between its answers), two share
    another, one is alone, one has nothing sampled. Behind what counts stands poison."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 20, (7, 14), generator=generator)
    tokens[2, :4] = tokens[5, :4] = tokens[0, :4]
    tokens[3, :6] = tokens[1, :6]
    at = torch.zeros(7, 5, dtype=dtype)
    spans = ([4, 5, 6], [6], [4, 5, 10, 11, 12], [6, 7, 8, 9], [1, 2], [4], [])
    for row, span in enumerate(spans):
        at[row, : len(span)] = torch.tensor(span, dtype=dtype)
        tokens[row, max(span, default=0) + 1 :] = POISON
    return {"tokens": tokens, "length": at.amax(1) + 1, "at": at}


def one_by_one(network: Any, obs: dict[str, Tensor], temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob, entropy [S, C] and hidden states [S, C, F] by plain forward passes of single rows, and torch's own
    Categorical."""
    at = obs["at"]
    logprob, entropy = (torch.zeros(at.shape, dtype=torch.float64) for _ in range(2))
    hidden = torch.zeros((*at.shape, network.config.hidden_size), dtype=torch.float64)
    kind, network.config._attn_implementation = network.config._attn_implementation, "eager"
    for row in range(len(at)):
        real = [int(p) for p in at[row] if p]
        if not real:
            continue
        ids = obs["tokens"][row, : max(real) + 1]
        out = network(input_ids=ids[None], use_cache=False, output_hidden_states=True)
        drawn = torch.distributions.Categorical(logits=out.logits[0] / temperature)
        for c, position in enumerate(real):
            logprob[row, c] = torch.distributions.Categorical(logits=drawn.logits[position - 1]).log_prob(ids[position])
            entropy[row, c] = drawn.entropy()[position - 1]
            hidden[row, c] = out.hidden_states[-1][0, position - 1]
    network.config._attn_implementation = kind
    return logprob, entropy, hidden


def gradients(module: Any) -> dict[str, Tensor]:
    out = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return out


def move(module: Any, size: float = 0.1, seed: int = 0) -> Any:
    """Every trained weight away from where it starts."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            if p.requires_grad:
                p += size * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
    return module
