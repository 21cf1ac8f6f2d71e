"""Sums, means and extremes over named axes and under masks.

What lies under a mask is never read: NaN and infinities there change nothing, in values or in gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LEVELS = ("token", "action", "chunk", "sequence")
AGGREGATIONS = ("token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum")


def expect_shape(name: str, x: Tensor, shape: Sequence[int]) -> None:
    """Raise ValueError unless `x` has exactly this shape."""
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}: shape {tuple(x.shape)}, expected {tuple(shape)}")


def to_level(x: Tensor, *, axes: tuple[str, ...], level: str, mask: Tensor | None = None) -> Tensor:
    """Sum units [S, *axes] to a level: token [S, *axes] (as it is), action [S, C], chunk and sequence [S].

    Log-probabilities of independent parts add up, so the action level is the joint log-prob of one action (all axes but
    "chunk" summed, the denoising axis included) and the chunk level that of the whole decision; the sequence level is
    the chunk level until its log ratio is divided by the number of its entries. Units that `mask` [S, *axes] excludes
    count 0.
    """
    if mask is not None:
        x = torch.where(mask, x, 0.0)
    if level == "token" or x.dim() == 1:
        return x
    if level in ("chunk", "sequence"):
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


def row_sums(x: Tensor) -> Tensor:
    """[S] of [S, ...]."""
    return x if x.dim() == 1 else x.flatten(1).sum(dim=1)


def weighted_sum(x: Tensor, share: Tensor | None) -> Tensor:
    """Sum over all elements of [S, ...], each row times its `share` [S]; None: times 1."""
    return x.sum() if share is None else torch.dot(row_sums(x), share)


def sequence_shares(*, mask: Tensor, sequence: Tensor, how: str, constant: float | None) -> tuple[Tensor, Tensor]:
    """How a unit counts in a mean over sequences, and how much of its sequence a row is: both float64 [S].

    `mask` [S, ...] says which units count, `sequence` int64 [S] which rows are of one sequence (a text answer is one
    row, an episode of a robot many). A loss is the sum of units times the first, divided by the sum of the second: the
    global number of sequences with at least one unit that counts. `sequence-mean-token-mean` is the mean of means of
    sequences (GRPO, 2402.03300), `sequence-mean-token-sum` that of their sums, each divided by `constant` where one is
    given (Dr.GRPO, 2503.20783). Both add up over any cut between rows.
    """
    units = row_sums(mask).to(torch.float64)
    ids, of_row = torch.unique(sequence, return_inverse=True)
    whole = torch.zeros(len(ids), dtype=units.dtype, device=units.device).index_add(0, of_row, units)[of_row]
    part = units / whole.clamp(min=1.0)
    if how == "sequence-mean-token-mean":
        return torch.where(units > 0, 1.0 / whole.clamp(min=1.0), 0.0), part
    return torch.full_like(part, 1.0 / (constant or 1.0)), part
