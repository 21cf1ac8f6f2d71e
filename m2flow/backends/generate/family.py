"""Reading a causal LM of transformers: what the decoders need to know of it, without importing transformers."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor

LEAN = ("llama", "qwen2", "qwen3", "mistral")  # kinds of network (`model_type`) that the lean decoder knows
FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # rotary tables that do not depend on how long a context is


class Network:
    """A causal LM, adapters or not, and the facts of its config."""

    def __init__(self, network: Any) -> None:
        self.module = network
        self.plain = network.get_base_model() if hasattr(network, "get_base_model") else network
        self.config: Any = self.plain.config
        parameter = next(network.parameters())
        self.dtype: torch.dtype = parameter.dtype
        # of all weights together: under adapters on a base in half precision, the adapters'
        self.wide = reduce(torch.promote_types, {p.dtype for p in network.parameters()})
        self.device: torch.device = parameter.device
        self.vocabulary = int(self.config.vocab_size)
        self.positions: int | None = getattr(self.config, "max_position_embeddings", None)
        network.eval()  # dropout is for training

    def __call__(self, ids: Tensor, **options: Any) -> Any:
        """The network's own forward pass."""
        return self.module(input_ids=ids, **options)

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, key heads, and the size of a head."""
        config = self.config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(config.num_attention_heads), int(config.num_key_value_heads), int(size)

    def rotary(self, positions: int, dtype: torch.dtype) -> Tensor:
        """cos + i sin of the rotary angles, complex [positions, D / 2], from the network's own frequencies; computed in
        `dtype`, as the network does."""
        rope = self.plain.model.rotary_emb
        at = torch.arange(positions, device=self.device, dtype=dtype)
        angle = at[:, None] * rope.inv_freq.to(dtype)
        scale = float(getattr(rope, "attention_scaling", 1.0))
        return torch.complex(angle.cos() * scale, angle.sin() * scale)


def unsuitable(network: Network) -> str:
    """Why the lean decoder cannot compute this network; empty: nothing is known against it."""
    config = network.config
    kind = getattr(config, "model_type", "")
    if kind not in LEAN:
        return f"its kind is {kind!r}"
    if getattr(config, "sliding_window", None) is not None:
        return f"it attends to the last {config.sliding_window} tokens only"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act!r}"
    rope = getattr(network.plain.model.rotary_emb, "rope_type", "default")
    if rope not in FIXED_ROPE:
        return f"its rotary angles ({rope}) depend on the length of the context"
    if network.plain.model.rotary_emb.inv_freq.numel() * 2 != network.heads[2]:
        return "it rotates a part of each head only"
    return ""
