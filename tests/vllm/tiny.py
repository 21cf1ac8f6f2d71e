"""Language models small enough to start in no time, requests to ask of them, and transformers to compare."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from m2flow.backends.vllm import VLLMGenerator, VLLMGeneratorConfig
from m2flow.models.lm.config import CausalLMConfig
from m2flow.models.lm.policy import CausalLMPolicy
from m2flow.models.lm.tokenizer import CharacterTokenizer
from m2flow.types import Answer, Field, Request, Spec, Weights

VOCABULARY = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # far from uniform, so that a wrong tensor shows
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 32},
}


def tiny(family: str, seed: int = 0, **settings: Any) -> CausalLMPolicy:
    """Random weights; embeddings are tied but for Qwen3."""
    tokenizer = CharacterTokenizer(characters="0123456789+=")
    config = CausalLMConfig(config=SIZES | FAMILIES[family], tokenizer=tokenizer, **settings)
    return config.build(Spec({}, Field((), "int64")), seed)


def published(policy: CausalLMPolicy, version: int) -> Weights:
    state = {name: x for name, x in policy.state_dict().items() if name not in policy.constant}
    return Weights(version, {f"policy.{name}": x.detach().clone() for name, x in state.items()})


def engine(policy: CausalLMPolicy, **settings: Any) -> VLLMGenerator:
    small = {"max_context": 128, "max_sequences": 16, "kv_cache_gb": 0.125}
    return VLLMGeneratorConfig(**{**small, **settings}).build(policy)


def finish(generator: VLLMGenerator, requests: list[Request]) -> list[Answer]:
    """All answers, in the order of the requests."""
    generator.submit(requests)
    done: dict[int, Answer] = {}
    while len(done) < len(requests):
        done |= {answer.id: answer for answer in generator.step()}
    assert generator.step() == []
    return [done[request.id] for request in requests]


def prompt(seed: int, size: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).integers(VOCABULARY, size=size)


def asked(count: int = 6, **settings: Any) -> list[Request]:
    """Requests with prompts of several lengths, and a seed of their own each."""
    defaults: dict[str, Any] = {"max_tokens": 12, "stop": frozenset()}
    return [Request(i, prompt(i, 3 + i), seed=100 + i, **{**defaults, **settings}) for i in range(count)]


@torch.no_grad()
def logits(policy: CausalLMPolicy, request: Request, tokens: np.ndarray) -> torch.Tensor:
    """Of each token of an answer, [n, V], by plain transformers in float64."""
    settings = policy.network.config.__class__.from_dict(policy.network.config.to_dict())
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float64, attn_implementation="eager").eval()
    model.load_state_dict(dict(policy.hf_weights()), strict=True)
    ids = torch.from_numpy(np.concatenate([request.prompt, tokens]))[None]
    return model(input_ids=ids).logits[0, len(request.prompt) - 1 : -1]


def expected_logprob(policy: CausalLMPolicy, request: Request, tokens: np.ndarray, temperature: float) -> np.ndarray:
    """Of an answer's tokens, [n]."""
    given = (logits(policy, request, tokens) / temperature).log_softmax(-1)
    return given.gather(-1, torch.from_numpy(tokens)[:, None])[:, 0].numpy()
