"""Sums, means and extremes over named axes and under masks.

What lies under a mask is never read: NaN and infinities there change nothing, in values or in gradients. `count`,
`aggregate` and `stop_mask` are for language models (GRPO, DAPO, Reinforce++ on text); no objective uses them yet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Level: TypeAlias = Literal["token", "action", "chunk"]
Aggregation: TypeAlias = Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum"]
LEVELS = ("token", "action", "chunk")
AGGREGATIONS = ("token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum")


def expect_shape(name: str, x: Tensor, shape: Sequence[int]) -> None:
    """Raise ValueError unless `x` has exactly this shape."""
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}: shape {tuple(x.shape)}, expected {tuple(shape)}")


def to_level(x: Tensor, *, axes: tuple[str, ...], level: str, mask: Tensor | None = None) -> Tensor:
    """Sum units [S, *axes] to a level: token [S, *axes] (as it is), action [S, C], chunk [S].

    Log-probabilities of independent parts add up, so the action level is the joint log-prob of one action (all axes but
    "chunk" summed, the denoising axis included) and the chunk level that of the whole decision. Units that `mask`
    [S, *axes] excludes count 0.
    """
    if mask is not None:
        x = torch.where(mask, x, 0.0)
    if level == "token" or x.dim() == 1:
        return x
    if level == "chunk":
        return x.sum(dim=tuple(range(1, x.dim())))
    rest = tuple(i for i, name in enumerate(axes, start=1) if name != "chunk")
    return x.sum(dim=rest) if rest else x


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Sum of products over all elements (one kernel where both are flat)."""
    return torch.dot(a, b) if a.dim() == 1 else (a * b).sum()


def masked_sum(x: Tensor, *, mask: Tensor) -> Tensor:
    """Sum over valid elements; 0 if there are none."""
    expect_shape("mask", mask, x.shape)
    return torch.where(mask, x, 0.0).sum()


def masked_mean(x: Tensor, *, mask: Tensor) -> Tensor:
    """Mean over valid elements; NaN if there are none."""
    return masked_sum(x, mask=mask) / mask.sum()


def masked_min(x: Tensor, *, mask: Tensor) -> Tensor:
    """Smallest valid element; NaN if there are none."""
    expect_shape("mask", mask, x.shape)
    return torch.where(mask.any(), torch.where(mask, x, math.inf).amin(), math.nan)


def masked_max(x: Tensor, *, mask: Tensor) -> Tensor:
    """Largest valid element; NaN if there are none."""
    expect_shape("mask", mask, x.shape)
    return torch.where(mask.any(), torch.where(mask, x, -math.inf).amax(), math.nan)


def count(*, mask: Tensor, how: Aggregation) -> Tensor:
    """The denominator that rows `mask` [R, L] add: valid tokens, or sequences with at least one valid token.

    Additive over any cut between rows; the sum over all micro-batches and ranks is the global denominator.
    """
    _check_aggregation(how)
    return mask.sum() if how == "token-mean" else mask.any(dim=-1).sum()


def aggregate(*, loss: Tensor, mask: Tensor, how: Aggregation, denominator: Tensor | float) -> Tensor:
    """Share of these rows in a loss: a sum over a global denominator, so that shares of any cut add up to one loss.

    `loss`, `mask` [R, L]: one sequence a row. `token-mean` (DAPO, 2503.14476) divides the sum of tokens by the global
    number of tokens; `sequence-mean-token-mean` (GRPO, 2402.03300) and `sequence-mean-token-sum` (Dr.GRPO, 2503.20783)
    divide per-sequence means or sums by the global number of sequences. `denominator` is the sum of `count` over the
    whole optimiser batch. With nothing valid anywhere the loss is 0, not NaN.
    """
    _check_aggregation(how)
    expect_shape("mask", mask, loss.shape)
    kept = torch.where(mask, loss, 0.0)
    if how == "sequence-mean-token-mean":
        kept = kept / mask.sum(dim=-1, keepdim=True).clamp(min=1)
    total = kept.sum()
    bound = torch.as_tensor(denominator, dtype=total.dtype, device=total.device)
    return total / torch.where(bound > 0, bound, 1.0)


def _check_aggregation(how: str) -> None:
    if how not in AGGREGATIONS:
        raise ValueError(f"how: {how!r}, expected one of {', '.join(AGGREGATIONS)}")


def stop_mask(*, tokens: Tensor, stop_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Which tokens of answers [R, L] count, and which answers finished.

    Returns `mask` bool [R, L], true up to and including the first stop id of a row, and `finished` bool [R], false
    where the row has no stop id and was therefore cut at the length limit.
    """
    if not stop_ids:
        raise ValueError("stop_ids: empty, expected at least one token id that ends an answer")
    stop = torch.isin(tokens, torch.as_tensor(list(stop_ids), dtype=tokens.dtype, device=tokens.device))
    before = stop.cumsum(dim=-1) - stop.long()  # stop ids strictly before this token
    return before == 0, stop.any(dim=-1)
