"""One forward pass over conversations: the hidden state that predicts each sampled token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from m2flow.models.lm import attention, network
from m2flow.models.lm.pack import Pack, pack
from m2flow.types import Observation


@dataclass(frozen=True, slots=True)
class Read:
    """Of K sampled tokens: the hidden state before each, the token, and its cell in `at`, flattened."""

    hidden: Tensor  # [K, F]
    action: Tensor  # int64 [K]
    cell: Tensor  # int64 [K]
    logits: Tensor | None = None  # [K, V], where they are more than the output layer's


def read(model: Any, obs: Observation, config: Any) -> Read | None:
    """What `config` (a `config.CausalLMConfig`) asks for; None where no row has a sampled token.

    Raises:
        ValueError: `logits_chunk` is set and this architecture changes logits behind its output layer.
    """
    tokens, at = obs["tokens"].long(), obs["at"].long()
    ends = at.amax(1)
    longest = int(ends.max()) if at.numel() else 0
    if longest == 0:
        return None
    simple = network.packable(model)
    width = network.window(model)
    if config.pack and simple and (width is None or width >= longest):
        layout = pack(tokens, at, share=config.share_prompts)
        assert layout is not None
        return Read(_packed(model, layout), layout.action, layout.cell)
    # Causal layers never look at what is behind, so right padding needs no mask; token 0 stands there, whatever was.
    ids = torch.where(torch.arange(longest, device=at.device) < ends[:, None], tokens[:, :longest], 0)
    cell = at.reshape(-1).nonzero().squeeze(1)
    row, seen = cell // at.shape[1], at.reshape(-1)[cell] - 1
    action = tokens[row, seen + 1]
    if simple:
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        return Read(hidden[row, seen], action, cell)
    if config.logits_chunk is not None:
        raise ValueError(f"logits_chunk: {model.config.model_type} changes what its output layer gives; set it to null")
    kept, index = seen.unique(return_inverse=True)
    hidden, logits = _whole(model, ids, kept)
    return Read(hidden[row, index], action, cell, logits[row, index])


def _packed(model: Any, layout: Pack) -> Tensor:
    out = model.get_decoder()(
        input_ids=layout.ids[None],
        position_ids=layout.position[None],
        # Four axes: transformers takes it as made already, and makes no mask of its own. Nobody reads it.
        attention_mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=layout.ids.device),
        use_cache=False,
        **{attention.PACK: layout},
    )
    hidden: Tensor = out.last_hidden_state
    return hidden[0].index_select(0, layout.read)


def _whole(model: Any, ids: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Input [R, P, F] of the output layer at positions `kept` [P], and the model's logits there."""
    caught: list[Tensor] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    try:
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits
    finally:
        handle.remove()
    return caught[0], logits
