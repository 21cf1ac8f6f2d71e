"""A lean forward pass for networks of the llama family: fused matrices, and a cache that is written in place.

RMSNorm (1910.07467), rotary positions (2104.09864), grouped queries (2305.13245), SwiGLU (2002.05202); biases of
queries, keys and values (Qwen2) and norms of queries and keys (Qwen3) where the network has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from m2flow.backends.generate.cache import Cache
from m2flow.backends.generate.family import Network
from m2flow.backends.generate.fused import Fused

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class LeanDecoder:
    """See `decoder.Decoder`. Raises ValueError where the policy's weights are not those of the llama family."""

    def __init__(self, policy: Any, network: Network, dtype: torch.dtype, slots: int, prefill_tokens: int) -> None:
        self.network, self.prefill_tokens, self.device = network, prefill_tokens, network.device
        self.dtype = torch.float32 if dtype == torch.bfloat16 and not computes_bfloat16(network.device) else dtype
        self.weights = Fused(policy, network, dtype, self.dtype)
        self.queries, self.keys, self.size = network.heads
        self.eps = float(network.config.rms_norm_eps)
        self.scale = float(getattr(network.plain.model.layers[0].self_attn, "scaling", self.size**-0.5))
        # networks normalise and rotate in float32, or exactly where they are in float64 (models/lm/exact.py)
        self.inner = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.cache = Cache(len(self.weights.layers), self.keys, self.size, self.dtype, self.device, slots)
        self.turns = network.rotary(0, self.inner)

    # ---- Decoder

    def refresh(self) -> None:
        self.weights.refresh()

    def prefill(self, rows: Sequence[NDArray[np.int64]], slots: Sequence[int]) -> Tensor:
        users: dict[bytes, list[int]] = {}  # a context -> the rows that ask for it; it is computed once
        for i, row in enumerate(rows):
            users.setdefault(row.tobytes(), []).append(i)
        asked = sorted(users.values(), key=lambda some: -len(rows[some[0]]))
        self._reserve(max(slots) + 1, len(rows[asked[0][0]]) + 1)
        logits = None
        for part in packs([len(rows[some[0]]) for some in asked], self.prefill_tokens):
            found = self._contexts(rows, asked[part], slots)
            if logits is None:
                logits = found.new_empty(len(rows), found.shape[1])
            for one, some in zip(found, asked[part], strict=True):
                logits[some] = one
        assert logits is not None
        return logits

    def decode(self, tokens: Tensor, lengths: NDArray[np.int64]) -> Tensor:
        rows, longest = len(lengths), int(lengths.max()) + 1
        self._reserve(rows, longest)
        at = torch.from_numpy(lengths).to(self.device)
        places, unequal = self.cache.places(at), int(lengths.min()) + 1 < longest
        bias = torch.zeros(0)
        if unequal:
            behind = torch.arange(longest, device=self.device) > at[:, None]
            bias = torch.zeros(rows, longest, dtype=self.dtype, device=self.device).masked_fill_(behind, -torch.inf)
            bias = bias.repeat_interleave(self.keys, 0)[:, None]
        shape = (rows * self.keys, -1, self.size)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.cache.append(layer, places, k, v, longest)
            q, keys = q.view(shape), keys.transpose(1, 2)
            if unequal:
                score = torch.baddbmm(bias, q, keys, alpha=self.scale)
            else:
                score = torch.bmm(q, keys).mul_(self.scale)
            return torch.bmm(torch.softmax(score, -1), values)

        return self._run(tokens, self.turns[at, None], attend)

    def move(self, source: int, target: int, length: int) -> None:
        self.cache.move(source, target, length)

    def forget(self, slots: int) -> None:
        self.cache.used = slots

    # ---- pieces

    def _contexts(self, rows: Sequence[NDArray[np.int64]], asked: Sequence[list[int]], slots: Sequence[int]) -> Tensor:
        """Different contexts, the longest first, as rows padded on the right: nothing looks at what is right of it.
        Keys and values go to the slots of all who asked. Logits [contexts, V] of what follows each."""
        texts = [rows[some[0]] for some in asked]
        count, length = len(texts), len(texts[0])
        ids = np.zeros((count, length), np.int64)
        for i, text in enumerate(texts):
            ids[i, : len(text)] = text
        target = torch.tensor([slots[row] for some in asked for row in some], device=self.device)
        source = torch.tensor([i for i, some in enumerate(asked) for _ in some], device=self.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.view(count, length, -1, self.size).transpose(1, 2) for x in (q, k, v))
            self.cache.fill(layer, target, k[source], v[source])
            mixed = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=self.queries != self.keys
            )
            return mixed.transpose(1, 2).reshape(count * length, -1)

        turns = self.turns[:length].repeat(count, 1)[:, None]
        last = torch.tensor([i * length + len(text) - 1 for i, text in enumerate(texts)], device=self.device)
        return self._run(torch.from_numpy(ids).view(-1).to(self.device), turns, attend, last)

    def _run(self, tokens: Tensor, turns: Tensor, attend: Attend, last: Tensor | None = None) -> Tensor:
        """Logits [N, V] of tokens [N], or of the rows `last` of them."""
        weights = self.weights
        x = functional.embedding(tokens, weights.embed)
        both = self.queries + self.keys
        for i, layer in enumerate(weights.layers):
            qkv = functional.linear(self._norm(x, layer.before), layer.qkv, layer.bias)
            qkv = qkv.view(len(qkv), both + self.keys, self.size)
            qk = qkv[:, :both] if layer.heads is None else self._norm(qkv[:, :both], layer.heads)
            q, k = self._turned(qk[:, : self.queries], turns), self._turned(qk[:, self.queries :], turns)
            mixed = attend(i, q, k, qkv[:, both:].contiguous()).view(len(x), -1)
            x = torch.addmm(x, mixed, layer.out.t())
            gate, up = functional.linear(self._norm(x, layer.after), layer.gate_up).chunk(2, -1)
            x = torch.addmm(x, functional.silu(gate).mul_(up), layer.down.t())
        x = x if last is None else x[last]
        return functional.linear(self._norm(x, weights.final), weights.head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last axis, in the dtype that the network does it in."""
        wide = functional.rms_norm(x.to(self.inner), x.shape[-1:], None, self.eps)
        return wide.to(x.dtype).mul_(weight)

    def _turned(self, x: Tensor, turns: Tensor) -> Tensor:
        """Rotated [N, heads, D], contiguous."""
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        pairs = torch.view_as_complex(wide.view(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)

    def _reserve(self, rows: int, length: int) -> None:
        self.cache.reserve(rows, length)
        if len(self.turns) < self.cache.length:
            self.turns = self.network.rotary(self.cache.length, self.inner)


def packs(lengths: Sequence[int], budget: int) -> Iterator[slice]:
    """Cuts of contexts sorted by length, the longest first: each of at most `budget` tokens, padding counted, or of one
    context; and so that padding is at most half."""
    start = 0
    while start < len(lengths):
        most = max(1, budget // lengths[start])
        stop = start + 1
        while stop < len(lengths) and stop - start < most and 2 * lengths[stop] >= lengths[start]:
            stop += 1
        yield slice(start, stop)
        start = stop


def computes_bfloat16(device: torch.device) -> bool:
    """Whether products of bfloat16 matrices are quick: on accelerators, and on processors with instructions for them.
    Elsewhere they are more than ten times slower than float32."""
    return device.type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
