"""A running batch: requests join as others end, every step adds a token to each answer.

What a request gets depends on its own tokens, its seed and the weights only. Keys and values are computed with one set
of weights: after `load` those of running requests are computed again, from their tokens.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from m2flow.backends.generate import decoder
from m2flow.backends.generate.family import Network
from m2flow.backends.generate.sampling import draw
from m2flow.backends.generate.slots import Slots, complete, finish_of
from m2flow.types import Answer, Request, Weights

PREFIX = "policy."


class TorchGenerator:
    """See `protocols.Generator`. It owns `policy` (`decoder.LanguageModel`) from now on; for the rest see
    `TorchGeneratorConfig`."""

    def __init__(
        self, policy: Any, *, slots: int, dtype: str, block: int, max_context: int | None, prefill_tokens: int
    ) -> None:
        self.policy, self.version = policy, 0
        self.most, self.block = slots, block
        if dtype == "float64":  # weights of a wider dtype than the network's would lose digits on loading
            policy.to(torch.float64)
        self.network = Network(policy.network)
        self.context = max_context or self.network.positions
        self.decoder = decoder.build(policy, self.network, dtype, slots, prefill_tokens)
        double = dtype == "float64" or (dtype == "auto" and self.network.wide == torch.float64)
        self.slots = Slots(np.float64 if double else np.float32)
        self.waiting: deque[Request] = deque()
        self.done: list[Answer] = []
        self.flying: set[int] = set()  # ids of all that run, wait or are done and not handed out
        self.stale = False  # new weights: what the decoder holds is void

    # ---- Generator

    def submit(self, requests: Sequence[Request]) -> None:
        """See the protocol.

        Raises:
            ValueError: a request is not one, or its id is in flight; then none of these is taken.
        """
        fresh: set[int] = set()
        for request in requests:
            if request.id in self.flying or request.id in fresh:
                raise ValueError(f"request {request.id}: this id is in flight; ids must be unique")
            fresh.add(request.id)
            check(request, self.network.vocabulary, self.context)
        self.flying |= fresh
        for request in requests:
            if request.begun is not None and complete(request):
                self.done.append(_renamed(request, finish_of(request, request.begun.tokens)))
            else:
                self.waiting.append(request)

    @torch.inference_mode()
    def step(self) -> list[Answer]:
        for _ in range(self.block):
            if not self.slots and not self.waiting:
                break
            self._join()
            if self.slots:
                self._decode()
        done, self.done = self.done, []
        self.flying.difference_update(answer.id for answer in done)
        return done

    @torch.inference_mode()
    def abort(self, ids: Sequence[int] | None = None) -> list[Answer]:
        """See the protocol. Ids that are not in flight (any more) are passed over."""
        chosen = None if ids is None else set(ids)
        out = [a for a in self.done if chosen is None or a.id in chosen]
        self.done = [a for a in self.done if chosen is not None and a.id not in chosen]
        running = [i for i, r in enumerate(self.slots.requests) if chosen is None or r.id in chosen]
        out += [self.slots.answer(i, aborted=True) for i in running]
        self._vacate(running)
        out += [self._begun(r) for r in self.waiting if chosen is None or r.id in chosen]
        self.waiting = deque(r for r in self.waiting if chosen is not None and r.id not in chosen)
        self.flying.difference_update(answer.id for answer in out)
        return out

    def load(self, weights: Weights) -> None:
        """Take the weights named "policy.<name>"; others are not for a generator. Names in `policy.constant` may lack.

        Raises:
            ValueError: they are of another policy; this one goes on with its old weights.
        """
        arrays = {n.removeprefix(PREFIX): torch.as_tensor(x) for n, x in weights.arrays.items() if n.startswith(PREFIX)}
        own = self.policy.state_dict()
        wrong = sorted((own.keys() - self.policy.constant - arrays.keys()) | (arrays.keys() - own.keys()))
        wrong = wrong or [name for name, x in arrays.items() if x.shape != own[name].shape]
        if wrong:
            raise ValueError(f"weights of version {weights.version}: {', '.join(wrong[:5])} do not fit this policy")
        self.policy.load_state_dict(arrays, strict=True)
        self.decoder.refresh()
        self.version, self.stale = weights.version, True

    def close(self) -> None:
        self.slots, self.done = Slots(np.float32), []
        self.waiting.clear()
        self.flying.clear()
        del self.decoder  # with its cache and its weights

    # ---- pieces

    def _join(self) -> None:
        """Compute the contexts of requests that can join, in small groups, and of all where weights are new; draw the
        next token of each."""
        fresh: list[int] = list(range(len(self.slots))) if self.stale else []
        free = self.most - len(self.slots)
        few = min(len(self.waiting), max(1, self.most // 16))
        if self.waiting and (free >= few or not self.slots):
            fresh += [self.slots.add(self.waiting.popleft()) for _ in range(min(free, len(self.waiting)))]
        self.stale = False
        if fresh:
            logits = self.decoder.prefill([self.slots.context(i) for i in fresh], fresh)
            self._draw(logits, np.array(fresh))

    def _decode(self) -> None:
        last = torch.from_numpy(self.slots.last()).to(self.network.device)
        logits = self.decoder.decode(last, self.slots.lengths - 1)
        self._draw(logits, np.arange(len(self.slots)))

    def _draw(self, logits: Tensor, slots: NDArray[np.int64]) -> None:
        try:
            token, logprob = draw(logits, self.slots.uniform(slots), self.slots.temperature[slots])
        except ValueError as error:
            raise ValueError(f"weights of version {self.version}: {error}") from error
        ended = self.slots.record(slots, token.cpu().numpy(), logprob.cpu().numpy(), self.version)
        self.done += [self.slots.answer(int(i)) for i in ended]
        self._vacate([int(i) for i in ended])

    def _vacate(self, slots: Sequence[int]) -> None:
        """Take requests out, the highest slot first, so that what fills a gap is never one of them."""
        for slot in sorted(slots, reverse=True):
            source = self.slots.move_last(slot)
            if source != slot:
                self.decoder.move(source, slot, int(self.slots.lengths[slot]))
        if slots:
            self.decoder.forget(len(self.slots))

    def _begun(self, request: Request) -> Answer:
        if request.begun is not None:
            return _renamed(request, "abort")
        nothing = np.zeros(0, np.int64)
        return Answer(request.id, nothing, np.zeros(0, self.slots.wide), nothing.copy(), "abort")


def check(request: Request, vocabulary: int, context: int | None) -> None:
    """ValueError naming what is wrong with a request."""
    name = f"request {request.id}"
    prompt = np.asarray(request.prompt)
    if prompt.ndim != 1 or not len(prompt) or not np.issubdtype(prompt.dtype, np.integer):
        raise ValueError(f"{name}: prompt must be a row of at least one token id, got shape {prompt.shape}")
    if int(prompt.min()) < 0 or int(prompt.max()) >= vocabulary:
        raise ValueError(
            f"{name}: prompt has ids from {prompt.min()} to {prompt.max()}; the model knows 0 to {vocabulary - 1}"
        )
    if request.max_tokens < 1:
        raise ValueError(f"{name}: max_tokens must be at least 1, got {request.max_tokens}")
    if not 0.0 <= request.temperature < math.inf:
        raise ValueError(f"{name}: temperature must be 0 or more and finite, got {request.temperature}")
    if context is not None and len(prompt) + request.max_tokens > context:
        raise ValueError(
            f"{name}: {len(prompt)} tokens of prompt and {request.max_tokens} of answer are more than the {context} "
            "of a context; ask for fewer (max_tokens), shorten the prompt, or raise generator.max_context"
        )
    if request.begun is not None and len(request.begun.tokens) > request.max_tokens:
        raise ValueError(
            f"{name}: it had begun with {len(request.begun.tokens)} tokens, and max_tokens, which counts them, is "
            f"{request.max_tokens}"
        )


def _renamed(request: Request, finish: Literal["stop", "length", "abort"]) -> Answer:
    """What a request had begun, as its answer."""
    begun = request.begun
    assert begun is not None
    token, logprob, version = (np.array(x) for x in (begun.tokens, begun.logprob, begun.version))
    return Answer(request.id, tokens=token, logprob=logprob, version=version, finish=finish)
