"""A causal language model as a policy: it scores sampled tokens, and hands out hidden states for heads to stand on.

An observation row is a whole conversation:

    tokens  int64 [S, W]   prompt, answers and tool texts, right-padded; behind the last sampled token nothing is read
    length  int64 [S]      how many are real
    at      int64 [S, C]   position in `tokens` of each sampled token, valid ones first; 0: none

So a text of a tool is context and nothing else, and the record of an action is its token ids.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from m2flow.logits import categorical_score
from m2flow.models.lm import forward, lora
from m2flow.models.lm.names import Aliases
from m2flow.types import Array, Field, Observation, Score, Spec

LOG = logging.getLogger(__name__)


AT_ONCE = 16384  # tokens of a forward pass without gradients (a reference, values of a whole step)


class CausalLMPolicy(nn.Module):
    """See `protocols.Scorer`. `config` is the `config.CausalLMConfig` that builds it. `network` is the module of
    transformers; its logits are divided by `temperature`.

    `constant` names what training never changes and the config builds again (the weights under LoRA): `state_dict`
    holds it, and `load_state_dict` does without. A tied weight has one name.
    """

    axes = ("chunk",)
    noise: tuple[str, tuple[int, ...]] = ("uniform", ())
    chunk = 1  # actions are tokens of one chunk, as many as there are; every head has one output for each

    def __init__(self, spec: Spec, config: Any, network: Any) -> None:
        super().__init__()
        self.network = network
        self.config, self.temperature = config, config.temperature
        self.vocabulary = int(network.get_input_embeddings().weight.shape[0])
        self.spec = language_spec(spec, self.vocabulary)
        self.feature_size = int(network.get_output_embeddings().weight.shape[1])
        self.aliases = Aliases(self)
        self.constant = self._constant()
        self.autocast: torch.dtype | None = None  # of products; a trainer sets it
        self._shared: _Shared | None = None

    # ---- Scorer

    def score(self, obs: Observation, record: Mapping[str, Array] | None = None) -> Score:  # noqa: ARG002
        """Log-prob and entropy of the sampled tokens, [S, C]; 0 where there is none. The record is in `obs`."""
        parts = self._parts(obs)
        if len(parts) > 1:
            scores = [self.score(part) for part in parts]
            return Score(torch.cat([x.logprob for x in scores]), torch.cat([x.entropy for x in scores]))
        at = obs["at"]
        read = self._hidden(obs)
        if read is None:
            zero = self._nothing().expand(at.shape)
            return Score(zero, zero)
        logprob, entropy = self._logprob(read)
        return Score(_spread(logprob, read.cell, at), _spread(entropy, read.cell, at))

    def features(self, obs: Observation) -> Tensor:
        """[S, C, F]: the last hidden state, from which each sampled token was predicted; 0 where there is none."""
        parts = self._parts(obs)
        if len(parts) > 1:
            return torch.cat([self.features(part) for part in parts])
        at: Tensor = obs["at"]
        wide = self._like().dtype
        read = self._hidden(obs)
        if read is None:
            nothing: Tensor = self._nothing().expand(*at.shape, self.feature_size)
            return nothing
        spread: Tensor = _spread(read.hidden.to(wide), read.cell, at)
        return spread

    def observe(self, obs: Observation) -> None:
        """Nothing is kept of what was seen."""

    # ---- what trainers and generators ask for

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Within it `score` and `features` of the same observation share one forward pass. Weights must not change."""
        self._shared = _Shared()
        try:
            yield
        finally:
            self._shared = None

    def casts(self) -> bool:
        """Whether `autocast` is of use where the weights are; if not, it is passed over, for heads as well."""
        return self.autocast != torch.bfloat16 or computes_bfloat16(self._like().device.type)

    def sizes(self, obs: Observation) -> Tensor:
        """int64 [S]: tokens that each row is computed for, at most (shared prompts count once for every row)."""
        at: Tensor = obs["at"]
        return at.amax(1).clamp(min=1)

    def reference(self) -> Any:
        """What scores like this policy did at its start: itself without adapters, or a frozen copy."""
        if self.config.lora is not None:
            return Reference(self)
        return copy.deepcopy(self).requires_grad_(False).eval()

    def hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(HF name, tensor), adapters added in, every tied name. Lazy, and of the weights at the time of reading. A sum
        is in the adapters' dtype, see `lora.merged`."""
        yield from lora.merged(self.network)

    def save_pretrained(self, folder: Path) -> None:
        """See `models.lm.export.save`."""
        from m2flow.models.lm.export import save

        save(self, folder)

    # ---- pieces

    def _parts(self, obs: Observation) -> list[Observation]:
        """All rows with gradients, whose micro-batches the trainer cuts; else runs of at most `AT_ONCE` tokens."""
        if torch.is_grad_enabled():
            return [obs]
        cuts, held = [0], 0
        for row, size in enumerate(self.sizes(obs).tolist()):
            if row > cuts[-1] and held + size > AT_ONCE:
                cuts.append(row)
                held = 0
            held += size
        cuts.append(len(obs["at"]))
        return [{name: x[start:stop] for name, x in obs.items()} for start, stop in pairwise(cuts)]

    def _hidden(self, obs: Observation) -> forward.Read | None:
        shared = self._shared
        found = None if shared is None else shared.get(obs)
        if found is None:
            with self._cast():
                found = (forward.read(self.network, obs, self.config),)
            if shared is not None:
                shared.put(obs, found)
        return found[0]

    def _logprob(self, read: forward.Read) -> tuple[Tensor, Tensor]:
        chunk = self.config.logits_chunk
        if read.logits is not None:
            return categorical_score(logits=read.logits, action=read.action, temperature=self.temperature)
        if chunk is None:
            return self._last(read.hidden, read.action)
        parts = [
            checkpoint(self._last, hidden, action, use_reentrant=False)
            for hidden, action in zip(torch.split(read.hidden, chunk), torch.split(read.action, chunk), strict=True)
        ]
        logprob, entropy = zip(*parts, strict=True)
        return torch.cat(logprob), torch.cat(entropy)

    def _last(self, hidden: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        with self._cast():
            logits = self.network.get_output_embeddings()(hidden)
        return categorical_score(logits=logits, action=action, temperature=self.temperature)

    def _cast(self) -> AbstractContextManager[Any]:
        if self.autocast is None or not self.casts():
            return nullcontext()
        return torch.autocast(self._like().device.type, self.autocast)

    def _like(self) -> Tensor:
        """A parameter that is trained, if any: its dtype is that of heads and log-probs."""
        return next((p for p in self.parameters() if p.requires_grad), next(self.parameters()))

    def _nothing(self) -> Tensor:
        """0 with a gradient of 0: a micro-batch without a sampled token is no mistake."""
        return self._like().reshape(-1)[0] * 0.0

    def _constant(self) -> frozenset[str]:
        if self.config.lora is None:
            return frozenset()
        trained = {name for name, p in self.named_parameters() if p.requires_grad}
        return frozenset(self.state_dict().keys() - trained)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Casts and moves. Frozen weights with a dtype of their own keep it."""
        if self.config.dtype is None:
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        kept = {id(p) for name, p in self.named_parameters() if name in self.constant}
        return super()._apply(lambda x: fn(x).to(x.dtype) if id(x) in kept else fn(x), recurse)  # type: ignore[no-untyped-call]


class Reference:
    """A policy without its adapters: what it was before training. It holds no weights of its own."""

    def __init__(self, policy: CausalLMPolicy) -> None:
        self.policy = policy

    @torch.no_grad()
    def score(self, obs: Observation, record: Mapping[str, Array] | None = None) -> Score:
        """Like `CausalLMPolicy.score`, without gradients."""
        kept, self.policy._shared = self.policy._shared, None
        try:
            with lora.disabled(self.policy.network):
                return self.policy.score(obs, record)
        finally:
            self.policy._shared = kept


@dataclass(slots=True)
class _Shared:
    """The forward pass of the last observation, for whoever asks about the same one in the same gradient mode."""

    key: Any = None
    found: tuple[forward.Read | None] | None = None

    def get(self, obs: Observation) -> tuple[forward.Read | None] | None:
        """None where it is of another observation."""
        if self.key is None:
            return None
        tokens, at, grad = self.key
        same = tokens() is obs["tokens"] and at() is obs["at"] and grad == torch.is_grad_enabled()
        return self.found if same else None

    def put(self, obs: Observation, found: tuple[forward.Read | None]) -> None:
        """Keep it in place of the one before."""
        self.key = weakref.ref(obs["tokens"]), weakref.ref(obs["at"]), torch.is_grad_enabled()
        self.found = found


@cache
def computes_bfloat16(kind: str) -> bool:
    """Whether products in bfloat16 are worth it on this kind of device: on accelerators, and on processors with
    instructions for them. Elsewhere they are emulated, more than ten times slower than in float32, and the log says
    once that float32 is used."""
    if kind != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return True
    LOG.warning("autocast: this processor has no instructions for bfloat16; the language model computes in float32")
    return False


def language_spec(spec: Spec, vocabulary: int) -> Spec:
    """What tasks show, with the number of tokens that only the policy knows."""
    observation = dict(spec.observation) or {"tokens": Field((1,), "int64")}
    return Spec(observation, Field((), "int64", categories=vocabulary))


def _spread(values: Tensor, cell: Tensor, at: Tensor) -> Tensor:
    """[S, C, ...] with `values` [K, ...] in their cells and 0 elsewhere."""
    flat = values.new_zeros((at.numel(), *values.shape[1:]))
    return flat.index_copy(0, cell, values).view(*at.shape, *values.shape[1:])
