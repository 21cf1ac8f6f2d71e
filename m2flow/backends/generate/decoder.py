"""What the engine asks of a decoder and of a policy, and which decoder a policy gets."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from m2flow.backends.generate.family import LEAN, Network, unsuitable
from m2flow.backends.generate.lean import LeanDecoder
from m2flow.backends.generate.module import ModuleDecoder

LOG = logging.getLogger(__name__)
# How far the logits of the lean forward may be from the module's, as a share of the largest of them.
BOUNDS = {torch.float64: 1e-6, torch.float32: 2e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}


class LanguageModel(Protocol):
    """What a generator reads of its policy; a torch module besides."""

    network: Any  # a causal LM of transformers, perhaps with adapters of peft
    constant: frozenset[str]  # names of `state_dict` that `load` need not bring

    def hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by the name that the plain network gives it, adapters merged in, unrounded. Read at once."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """Weights by name."""

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> Any:
        """Take weights."""


class Decoder(Protocol):
    """Keys and values of many contexts, each in a slot; slots 0..n-1 are in use."""

    def prefill(self, rows: Sequence[NDArray[np.int64]], slots: Sequence[int]) -> Tensor:
        """Put these contexts into these slots, whatever was there; logits [len(rows), V] of what follows each."""

    def decode(self, tokens: Tensor, lengths: NDArray[np.int64]) -> Tensor:
        """Append a token [n] to slots 0..n-1, whose contexts had `lengths` [n] before; logits [n, V]."""

    def move(self, source: int, target: int, length: int) -> None:
        """The context in slot `source`, of `length` tokens, is in slot `target` from now on."""

    def forget(self, slots: int) -> None:
        """Only slots 0..slots-1 are in use from now on."""

    def refresh(self) -> None:
        """The policy has new weights; all contexts are void."""


def build(policy: LanguageModel, network: Network, dtype: str, slots: int, prefill_tokens: int) -> Decoder:
    """The lean decoder where it gives the logits of the policy's own network, else one that calls the network."""
    wanted = network.wide if dtype == "auto" else getattr(torch, dtype)
    why = unsuitable(network)
    if not why:
        try:
            lean = LeanDecoder(policy, network, network.dtype, slots, prefill_tokens)
        except ValueError as error:
            why = str(error)
        else:
            why = disagreement(lean, network)
            if not why and (wanted != network.dtype or wanted == torch.bfloat16):
                lean = LeanDecoder(policy, network, wanted, slots, prefill_tokens)
            if not why:
                return lean
    LOG.info(
        "decoding by the network's own forward pass, which is slower: %s. The quick one is for %s", why, ", ".join(LEAN)
    )
    # its own forward pass adds the adapters' products, not their weights: nothing is lost in the base's dtype
    return ModuleDecoder(network, network.dtype if dtype == "auto" else wanted, prefill_tokens)


@torch.inference_mode()
def disagreement(lean: LeanDecoder, network: Network) -> str:
    """Why the lean forward cannot be trusted: its logits after a prompt, or after one more token, are not those of the
    network. Empty: it can."""
    ids = np.arange(26, dtype=np.int64).reshape(2, 13) * 7919 % network.vocabulary
    rows = torch.from_numpy(ids).to(network.device)
    wanted = network(rows, use_cache=False).logits[:, -2:].double()
    got = [lean.prefill(list(ids[:, :-1]), [0, 1]), lean.decode(rows[:, -1], np.full(2, ids.shape[1] - 1))]
    lean.forget(0)
    gap = float((torch.stack(got, 1).double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
    bound = BOUNDS[network.dtype]
    return "" if gap <= bound else f"the quick forward pass differs from it by {gap:.1e} of the largest logit"
