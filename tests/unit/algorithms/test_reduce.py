from __future__ import annotations

import math

import pytest
import torch

from m2flow.algorithms import reduce


def test_a30_metrics_over_valid_tokens_only():
    x = torch.tensor([[1.0, -1.0, 50.0], [2.0, math.nan, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    assert float(reduce.masked_mean(x, mask=mask)) == pytest.approx(0.666667, abs=1e-6)
    assert float(reduce.masked_min(x, mask=mask)) == -1.0
    assert float(reduce.masked_max(x, mask=mask)) == 2.0
    assert float(reduce.masked_sum(x, mask=mask)) == 2.0
    nothing = torch.zeros_like(mask)
    for f in (reduce.masked_mean, reduce.masked_min, reduce.masked_max):
        assert math.isnan(float(f(x, mask=nothing)))
    assert float(reduce.masked_sum(x, mask=nothing)) == 0.0


def test_levels_are_sums_over_named_axes():
    x = torch.arange(24.0).reshape(1, 2, 3, 4)  # denoise 2, chunk 3, dim 4
    axes = ("denoise", "chunk", "dim")
    assert torch.equal(reduce.to_level(x, axes=axes, level="token"), x)
    assert reduce.to_level(x, axes=axes, level="action").tolist() == [[60.0, 92.0, 124.0]]
    assert reduce.to_level(x, axes=axes, level="chunk").tolist() == [276.0]
    mask = torch.ones_like(x, dtype=torch.bool)
    mask[0, :, 2] = False
    x[0, :, 2] = math.nan
    assert reduce.to_level(x, axes=axes, level="action", mask=mask).tolist() == [[60.0, 92.0, 0.0]]
    assert reduce.to_level(x, axes=axes, level="chunk", mask=mask).tolist() == [152.0]
    joint = torch.tensor([1.0, 2.0])
    assert torch.equal(reduce.to_level(joint, axes=(), level="chunk"), joint)
    per_action = torch.tensor([[1.0, 2.0]])
    assert torch.equal(reduce.to_level(per_action, axes=("chunk",), level="action"), per_action)


def test_inner_is_the_sum_of_products():
    a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    assert float(reduce.inner(a, b)) == 70.0
    assert float(reduce.inner(a[0], b[0])) == 17.0


def test_a09_sequence_shares_add_up_over_any_cut():
    """Two answers of 4 and 2 tokens, and an episode of three rows: 1, 2 and no unit."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    sequence = torch.tensor([7, 3, 5, 5, 5])
    share, part = reduce.sequence_shares(mask=mask, sequence=sequence, how="sequence-mean-token-mean", constant=None)
    assert share.tolist() == [1 / 4, 1 / 2, 1 / 3, 1 / 3, 0.0]
    assert part.tolist() == [1.0, 1.0, 1 / 3, 2 / 3, 0.0]
    share, part = reduce.sequence_shares(mask=mask, sequence=sequence, how="sequence-mean-token-sum", constant=8.0)
    assert share.tolist() == [1 / 8] * 5
    assert float(part.sum()) == 3.0
    nothing, none = reduce.sequence_shares(
        mask=torch.zeros_like(mask), sequence=sequence, how="sequence-mean-token-mean", constant=None
    )
    assert nothing.tolist() == none.tolist() == [0.0] * 5


def test_weighted_sums_count_rows_by_their_share():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert float(reduce.weighted_sum(x, None)) == 10.0
    assert float(reduce.weighted_sum(x, torch.tensor([0.5, 2.0]))) == 15.5
    assert float(reduce.weighted_sum(x[0], torch.tensor([0.5, 2.0]))) == 4.5
