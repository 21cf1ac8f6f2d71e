"""Keys and values of running contexts: one block of memory a layer, written in place, grown by doubling."""

from __future__ import annotations

import torch
from torch import Tensor

STEP = 64  # a context's memory is a multiple of this many tokens


class Cache:
    """Per layer keys and values [rows, heads, length, D], of which slots 0..used-1 hold contexts.

    What lies behind the end of a context is finite and never counts: its weight in the softmax is 0.
    """

    def __init__(self, layers: int, heads: int, size: int, dtype: torch.dtype, device: torch.device, most: int) -> None:
        self.layers, self.heads, self.size, self.dtype, self.device, self.most = (
            layers,
            heads,
            size,
            dtype,
            device,
            most,
        )
        self.used = self.rows = self.length = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def reserve(self, rows: int, length: int) -> None:
        """Room for `rows` contexts of `length` tokens; those that are there are kept."""
        if rows > self.rows or length > self.length:
            kept = (min(self.used, self.rows), self.length)
            if rows > self.rows:
                self.rows = max(rows, min(2 * self.rows, self.most))
            if length > self.length:
                self.length = -(-max(length, 2 * self.length if kept[0] else 0) // STEP) * STEP
            for side in (self.keys, self.values):
                old: list[Tensor | None] = [*side] or [None] * self.layers
                side[:] = [self._grown(x, *kept) for x in old]
        self.used = max(self.used, rows)

    def _grown(self, old: Tensor | None, rows: int, length: int) -> Tensor:
        new = torch.zeros(self.rows, self.heads, self.length, self.size, dtype=self.dtype, device=self.device)
        if old is not None and rows:
            new[:rows, :, :length] = old[:rows]
        return new

    def fill(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Contexts [n, heads, L, D] into slots [n], from their first token on."""
        length = keys.shape[2]
        self.keys[layer][slots, :, :length] = keys
        self.values[layer][slots, :, :length] = values

    def places(self, at: Tensor) -> Tensor:
        """Where token at[i] of slot i stands, for `append`: int64 [n * heads]."""
        row = torch.arange(len(at) * self.heads, device=self.device) * self.length
        return row + at.repeat_interleave(self.heads)

    def append(self, layer: int, places: Tensor, keys: Tensor, values: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Write one token [n, heads, D] a slot. All that slots 0..n-1 hold then, up to `length` tokens: [n * heads,
        length, D] of keys and values (views)."""
        out = []
        for side, new in ((self.keys, keys), (self.values, values)):
            whole = side[layer]
            whole.view(-1, self.size).index_copy_(0, places, new.view(-1, self.size))
            out.append(whole.view(-1, self.length, self.size)[: len(places), :length])
        return out[0], out[1]

    def move(self, source: int, target: int, length: int) -> None:
        """The first `length` tokens of a slot into another."""
        for side in (self.keys, self.values):
            for x in side:
                x[target, :, :length] = x[source, :, :length]
