"""Decoding by the network's own forward pass: for every architecture that the lean decoder does not know.

Contexts of one length make a cohort with one cache of transformers, so there is neither padding nor a mask, and what a
network does with positions, windows or states is its own affair.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from m2flow.backends.generate.family import Network


@dataclass(slots=True)
class Cohort:
    """Contexts of one length: row i of the cache is that of slot slots[i]; -1: nobody's any more."""

    slots: NDArray[np.int64]
    cache: Any  # as transformers made it


class ModuleDecoder:
    """See `decoder.Decoder`. Where `dtype` is not the network's, a copy of it is cast and decodes."""

    def __init__(self, network: Network, dtype: torch.dtype, prefill_tokens: int) -> None:
        self.source, self.prefill_tokens, self.device = network.module, prefill_tokens, network.device
        self.module = self.source if dtype == network.dtype else copy.deepcopy(self.source).to(dtype)
        # later versions of transformers renamed the cache's keyword
        known = inspect.signature(self.module.forward).parameters
        self.keyword = "cache" if "cache" in known else "past_key_values"
        self.cohorts: list[Cohort] = []

    def refresh(self) -> None:
        self.cohorts.clear()
        if self.module is not self.source:
            self.module.load_state_dict(self.source.state_dict())

    def prefill(self, rows: Sequence[NDArray[np.int64]], slots: Sequence[int]) -> Tensor:
        users: dict[tuple[int, bytes], list[int]] = {}  # a context is computed once for all who ask for it
        for i, row in enumerate(rows):
            users.setdefault((len(row), row.tobytes()), []).append(i)
        lengths: dict[int, list[list[int]]] = {}
        for (length, _), some in users.items():
            lengths.setdefault(length, []).append(some)
        self._leave(slots)
        out: list[Tensor | None] = [None] * len(rows)
        for length, asked in sorted(lengths.items()):
            most = max(1, self.prefill_tokens // length)
            for part in (asked[i : i + most] for i in range(0, len(asked), most)):
                found = self._call(np.stack([rows[some[0]] for some in part]), None)
                each = [(i, asker) for i, some in enumerate(part) for asker in some]
                cache = selected(found[self.keyword], [i for i, _ in each], len(part), self.device)
                self.cohorts.append(Cohort(np.array([slots[asker] for _, asker in each]), cache))
                for i, asker in each:
                    out[asker] = found.logits[i, -1]
        return torch.stack([x for x in out if x is not None])

    def decode(self, tokens: Tensor, lengths: NDArray[np.int64]) -> Tensor:
        self.forget(len(lengths))
        logits: Tensor | None = None
        for cohort in self.cohorts:
            at = torch.from_numpy(cohort.slots).to(self.device)
            found = self._call(tokens[at][:, None], cohort.cache)
            cohort.cache = found[self.keyword]
            if logits is None:
                logits = found.logits.new_empty(len(lengths), found.logits.shape[-1])
            logits[at] = found.logits[:, -1]
        assert logits is not None
        return logits

    def move(self, source: int, target: int, length: int) -> None:  # noqa: ARG002
        self._leave([target])
        for cohort in self.cohorts:
            cohort.slots[cohort.slots == source] = target

    def forget(self, slots: int) -> None:
        """Rows that nobody needs leave their caches here."""
        for cohort in self.cohorts:
            kept = np.flatnonzero((cohort.slots >= 0) & (cohort.slots < slots))
            if len(kept) and len(kept) < len(cohort.slots):
                cohort.cache = selected(cohort.cache, kept.tolist(), len(cohort.slots), self.device)
            cohort.slots = cohort.slots[kept]
        self.cohorts = [cohort for cohort in self.cohorts if len(cohort.slots)]

    def _leave(self, slots: Sequence[int]) -> None:
        for cohort in self.cohorts:
            cohort.slots[np.isin(cohort.slots, slots)] = -1

    def _call(self, ids: Any, cache: Any) -> Any:
        given = {} if cache is None else {self.keyword: cache}
        return self.module(input_ids=torch.as_tensor(ids).to(self.device), use_cache=True, logits_to_keep=1, **given)


def selected(cache: Any, rows: list[int], size: int, device: torch.device) -> Any:
    """The cache with these rows of its `size`, some of them perhaps more than once."""
    if rows != list(range(size)):
        cache.batch_select_indices(torch.tensor(rows, device=device))
    return cache
