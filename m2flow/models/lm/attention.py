"""Attention over packed rows, registered with transformers under the name `m2flow`.

Where a forward pass brings a `Pack`, queries, keys and values are gathered into padded blocks, attended to by torch's
`scaled_dot_product_attention`, and put back; without one it is transformers' own `sdpa` (a generator's cache, padded
rows). Whatever an architecture asks of attention that this does not know is an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from m2flow.models.lm.pack import Pack

NAME = "m2flow"
PACK = "m2flow_pack"  # the keyword that carries the layout through a model to its layers
HARMLESS = frozenset({"position_ids", "is_causal", "use_cache", "output_attentions", "output_hidden_states", "cache"})


def register() -> None:
    """Tell transformers of it; doing so again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """Output [1, N, H, D] of queries [1, H, N, D], keys and values [1, Hkv, N, D]; batch 1 where rows are packed."""
    layout: Pack | None = given.pop(PACK, None)
    if layout is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        plain: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **given)
        return plain
    scaling, dropout = given.pop("scaling", None), given.pop("dropout", 0.0)
    window = given.pop("sliding_window", None)
    odd = sorted(k for k, v in given.items() if k not in HARMLESS and v is not None and v is not False)
    if odd or dropout or (window is not None and window < layout.longest):
        what = ", ".join(odd) or ("dropout" if dropout else f"a sliding window of {window}")
        raise ValueError(f"pack: {type(module).__name__} asks for {what}, which packed rows lack; set pack: false")
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]  # [N, H, D]
    if len({x.dtype for x in rows}) > 1:  # under autocast rotary embeddings come back wider than values
        rows = [x.to(value.dtype) for x in rows]
    q, k, v = rows
    repeats = q.shape[1] // k.shape[1]
    parts = []
    for block in layout.blocks:
        count, length = block.query.shape
        heads = [_gather(x, block.query if x is q else block.key) for x in (q, k, v)]
        if repeats > 1:
            heads[1:] = [x.repeat_interleave(repeats, 1) for x in heads[1:]]
        out = functional.scaled_dot_product_attention(
            heads[0], heads[1], heads[2], attn_mask=block.mask, is_causal=block.mask is None, scale=scaling
        )
        parts.append(out.transpose(1, 2).reshape(count * length, *out.shape[1::2]))
    flat = parts[0] if len(parts) == 1 else torch.cat(parts)
    return flat.index_select(0, layout.back).unsqueeze(0), None


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """[r, H, L, D] of [N, H, D] at positions [r, L]."""
    return x.index_select(0, index.reshape(-1)).view(*index.shape, *x.shape[1:]).transpose(1, 2)
