"""The weights of a network of the llama family in fused matrices, read from a policy by the names of transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from m2flow.backends.generate.family import Network

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Layer:
    """The matrices of one layer. E: width, H and KV: heads of queries and of keys, D: size of a head, I: inner width.

    Rotary pairs (i, i + D/2) of queries and keys are stored side by side, so that a rotation is one complex product.
    Both are permuted alike, which leaves their products as they are.
    """

    before: Tensor  # [E] norm
    qkv: Tensor  # [(H + 2 KV) D, E]
    bias: Tensor | None  # [(H + 2 KV) D]
    heads: Tensor | None  # [H + KV, D] norm of queries and keys
    out: Tensor  # [E, H D]
    after: Tensor  # [E] norm
    gate_up: Tensor  # [2 I, E]
    down: Tensor  # [E, I]


class Fused:
    """Weights of `policy`, rounded to `rounded` and held in `dtype`.

    Raises:
        ValueError: they are not those of the llama family.
    """

    def __init__(self, policy: Any, network: Network, rounded: torch.dtype, dtype: torch.dtype) -> None:
        self.policy, self.network, self.rounded, self.dtype = policy, network, rounded, dtype
        self.tied = bool(getattr(network.config, "tie_word_embeddings", False))
        self._places: dict[str, tuple[Tensor, tuple[int, ...]]] = {}  # name -> where it goes, and seen in which shape
        given = {name: tuple(x.shape) for name, x in policy.hf_weights()}
        rows, width = given.get("model.embed_tokens.weight", (0, 0))
        self.embed = self._new("model.embed_tokens.weight", rows, width)
        self.final = self._new("model.norm.weight", width)
        if self.tied:
            self.head = self.embed
            self._places["lm_head.weight"] = (self.head, (rows, width))
        else:
            self.head = self._new("lm_head.weight", rows, width)
        self.layers = [self._layer(f"model.layers.{i}.", width, given) for i in range(network.config.num_hidden_layers)]
        wrong = given.keys() ^ self._places.keys()
        if wrong - ({"lm_head.weight"} if self.tied else set()):
            raise ValueError(f"its weights {', '.join(sorted(wrong)[:3])} are missing or unknown to the llama family")
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the weights that the policy has now. Raises ValueError where one has another shape."""
        for name, given in self.policy.hf_weights():
            place, shape = self._places[name]
            if given.numel() != math.prod(shape):
                raise ValueError(f"its weight {name} has shape {tuple(given.shape)}")
            place.copy_(given.to(self.rounded).reshape(shape))

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.network.device)

    def _new(self, name: str, *shape: int) -> Tensor:
        made = self._empty(*shape)
        self._places[name] = (made, shape)
        return made

    def _layer(self, name: str, width: int, given: Shapes) -> Layer:
        queries, keys, size = self.network.heads
        inner = given.get(f"{name}mlp.gate_proj.weight", (0,))[0]
        qkv, gate_up = self._empty((queries + 2 * keys) * size, width), self._empty(2 * inner, width)
        self._heads(f"{name}self_attn.", "weight", qkv)
        for part, where in (("gate", gate_up[:inner]), ("up", gate_up[inner:])):
            self._places[f"{name}mlp.{part}_proj.weight"] = (where, (inner, width))
        bias = heads = None
        if f"{name}self_attn.q_proj.bias" in given:
            bias = self._empty(len(qkv))
            self._heads(f"{name}self_attn.", "bias", bias)
        if f"{name}self_attn.q_norm.weight" in given:
            heads = self._empty(queries + keys, size)
            for part, where in (("q_norm", heads[:queries]), ("k_norm", heads[queries:])):
                self._places[f"{name}self_attn.{part}.weight"] = (_paired(where), (2, size // 2))
        return Layer(
            before=self._new(f"{name}input_layernorm.weight", width),
            qkv=qkv,
            bias=bias,
            heads=heads,
            out=self._new(f"{name}self_attn.o_proj.weight", width, queries * size),
            after=self._new(f"{name}post_attention_layernorm.weight", width),
            gate_up=gate_up,
            down=self._new(f"{name}mlp.down_proj.weight", width, inner),
        )

    def _heads(self, name: str, kind: str, whole: Tensor) -> None:
        """Places of the projections to queries, keys and values below each other, [rows, E] or [rows]."""
        queries, keys, size = self.network.heads
        start = 0
        for part, count in (("q", queries), ("k", keys), ("v", keys)):
            where = whole[start : start + count * size].view(count, size, *whole.shape[1:])
            where = where if part == "v" else _paired(where)
            self._places[f"{name}{part}_proj.{kind}"] = (where, tuple(where.shape))
            start += count * size


def _paired(x: Tensor) -> Tensor:
    """[heads, D, ...] whose D holds pairs side by side, seen as [heads, 2, D/2, ...]: all firsts, then all seconds."""
    return x.view(len(x), -1, 2, *x.shape[2:]).transpose(1, 2)
