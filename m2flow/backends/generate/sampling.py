"""One token per row: inverse CDF of one uniform number, over the log-probabilities that are recorded.

A row's token depends on its own logits and number only, so it does not matter which rows share a batch.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from m2flow.logits import normalised

NUMBERS = 2**24  # logits that are worked on at once, which bounds the memory for large vocabularies
WIDTH = 256  # of the blocks in which the CDF is searched: their sums first, then one block


def draw(logits: Tensor, uniform: NDArray[np.float64], temperature: NDArray[np.float64]) -> tuple[Tensor, Tensor]:
    """Token int64 [n] and its log-probability [n] (float32, or float64 of float64 logits), from logits [n, V].

    `uniform` [n] lies in (0, 1). Where `temperature` [n] is 0 the token is the most probable one and its
    log-probability is that at temperature 1.

    Raises:
        ValueError: a row's logits are not finite (-inf for single tokens is allowed: they are never drawn).
    """
    different = np.unique(temperature)
    if len(different) == 1:
        return _draw(logits, uniform, float(different[0]))
    token = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    logprob = torch.empty(len(logits), dtype=wide, device=logits.device)
    for one in different:
        rows = np.flatnonzero(temperature == one)
        at = torch.from_numpy(rows).to(logits.device)
        token[at], logprob[at] = _draw(logits[at], uniform[rows], float(one))
    return token, logprob


def _draw(logits: Tensor, uniform: NDArray[np.float64], temperature: float) -> tuple[Tensor, Tensor]:
    most = max(1, NUMBERS // logits.shape[-1])
    if len(logits) > most:
        cuts = range(0, len(logits), most)
        parts = [_draw(logits[i : i + most], uniform[i : i + most], temperature) for i in cuts]
        return torch.cat([token for token, _ in parts]), torch.cat([logprob for _, logprob in parts])
    known = normalised(logits, temperature or 1.0)
    if temperature == 0.0:
        token = known.argmax(-1)
        if not bool(known.gather(-1, token[:, None]).isfinite().all()):
            raise ValueError("the model's logits are not finite; its weights are probably not either")
    else:
        token = inverse_cdf(known.exp(), torch.from_numpy(uniform).to(logits.device))
    return token, known.gather(-1, token[:, None]).squeeze(-1)


def inverse_cdf(weight: Tensor, uniform: Tensor) -> Tensor:
    """The index [n] at which the running sum of `weight` [n, V] (0 or more) first exceeds uniform * total.

    An index of weight 0 is never chosen. The sums run over blocks first: one pass over [n, V] instead of a serial sum.
    """
    rows, size = weight.shape
    if size % WIDTH:
        weight = torch.nn.functional.pad(weight, (0, -size % WIDTH))
    blocks = weight.view(rows, -1, WIDTH)
    sums = blocks.sum(-1).double().cumsum(-1)
    total = sums[:, -1:]
    if not bool((total.isfinite() & (total > 0.0)).all()):
        raise ValueError("the model's logits are not finite; its weights are probably not either")
    # `below` keeps the target under the last sum, so that the comparison is true somewhere.
    target = torch.minimum(uniform[:, None] * total, below(total))
    block = (sums > target).to(torch.uint8).argmax(-1, keepdim=True)
    before = torch.where(block > 0, sums.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks[torch.arange(rows, device=weight.device), block[:, 0]].double().cumsum(-1)
    rest = torch.minimum(target - before, below(inside[:, -1:]))
    return (block * WIDTH).squeeze(-1) + (inside > rest).to(torch.uint8).argmax(-1)


def below(x: Tensor) -> Tensor:
    """The largest number less than each x."""
    return torch.nextafter(x, torch.full_like(x, -torch.inf))
