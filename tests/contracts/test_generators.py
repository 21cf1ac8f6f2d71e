"""The Generator contract, asked of our decoder with networks that its lean forward pass knows, and with others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch

from m2flow.backends.generate.config import TorchGeneratorConfig
from m2flow.backends.generate.lean import LeanDecoder
from m2flow.models.lm.config import CausalLMConfig
from m2flow.models.lm.lora import LoRA
from m2flow.models.lm.tokenizer import CharacterTokenizer
from m2flow.types import Field, Spec
from tests.contracts.generator_suite import CHECKS, Case

SIZES: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
WINDOW = {"model_type": "mistral", "sliding_window": 6, **SIZES}
TOKENIZER = CharacterTokenizer(characters="0123456789+-*/=()abcdefghijklmnop ")


def build(
    config: Mapping[str, Any], dtype: str = "float64", lean: bool = True, lora: LoRA | None = None
) -> tuple[Any, Any]:
    """Three slots, two tokens a step, and prompts computed in small groups. Weights are large, so that logits depend on
    every part of the network."""
    spec = Spec({"tokens": Field((8,), "int64")}, Field((), "int64"))
    policy = CausalLMConfig(config=config, tokenizer=TOKENIZER, lora=lora).build(spec, 0)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, x in policy.named_parameters():
            x.copy_(1.0 + 0.3 * torch.randn_like(x) if "norm" in name else 0.25 * torch.randn_like(x))
    twin = copy.deepcopy(policy).to(torch.float64 if dtype == "float64" else torch.float32).eval()
    generator = TorchGeneratorConfig(slots=3, block=2, dtype=dtype, prefill_tokens=24).build(policy)
    assert isinstance(generator.decoder, LeanDecoder) == lean
    return generator, twin


CASES = [
    Case("qwen2", partial(build, {"model_type": "qwen2", **SIZES}), 1e-10),
    Case("qwen3", partial(build, {"model_type": "qwen3", "head_dim": 16, **SIZES}), 1e-10),
    Case("llama", partial(build, {"model_type": "llama", "tie_word_embeddings": False, **SIZES}), 1e-10),
    Case("llama3_rope", partial(build, {"model_type": "llama", "rope_parameters": LLAMA3, **SIZES}), 1e-10),
    Case("mistral", partial(build, {"model_type": "mistral", "sliding_window": None, **SIZES}), 1e-10),
    Case("lora", partial(build, {"model_type": "qwen2", **SIZES}, lora=LoRA(rank=2)), 1e-10),
    Case("float32", partial(build, {"model_type": "qwen2", **SIZES}, "float32"), 1e-4, exact=False),
    Case("bfloat16", partial(build, {"model_type": "qwen3", **SIZES}, "bfloat16"), 0.5, exact=False),
    Case("gpt2", partial(build, GPT2, lean=False), 1e-10),
    Case("window", partial(build, WINDOW, lean=False), 1e-10),
]


@pytest.mark.parametrize(
    ("case", "check"), [pytest.param(c, k, id=f"{c.name}-{k.__name__[6:]}") for c in CASES for k in CHECKS]
)
def test_generator_contract(case: Case, check: Callable[[Case], None]) -> None:
    check(case)
