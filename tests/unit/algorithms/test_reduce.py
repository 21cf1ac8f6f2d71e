from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.algorithms import reduce

HOWS = ("token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum")


def padded(*rows, fill=math.nan):
    long = max(map(len, rows))
    loss = torch.tensor([[*row, *[fill] * (long - len(row))] for row in rows], dtype=torch.float64)
    return loss, torch.tensor([[i < len(row) for i in range(long)] for row in rows])


def share(loss, mask, how, denominator):
    return float(reduce.aggregate(loss=loss, mask=mask, how=how, denominator=denominator))


def test_a09_token_mean_does_not_depend_on_the_cut():
    loss, mask = padded([1, 1, 1, 1], [3, 3])
    for how, expected in zip(HOWS, (10 / 6, 2.0, 5.0), strict=True):
        n = reduce.count(mask=mask, how=how)
        assert share(loss, mask, how, n) == pytest.approx(expected, abs=1e-12)
        parts = [share(loss[i : i + 1], mask[i : i + 1], how, n) for i in (1, 0)]  # two micro-batches, or two ranks
        assert sum(parts) == pytest.approx(expected, abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.integers(1, 6), st.integers(0, 2**31), st.sets(st.integers(1, 8)), st.sampled_from(HOWS))
def test_law2_any_cut_of_rows_gives_the_same_loss_and_gradient(rows, width, seed, cuts, how):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=rng, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(rows, width, generator=rng) > 0.4
    n = reduce.count(mask=mask, how=how)
    whole = reduce.aggregate(loss=x.square(), mask=mask, how=how, denominator=n)
    (expected,) = torch.autograd.grad(whole, x)
    edges = [0, *sorted(c for c in cuts if c < rows), rows]
    spans = list(pairwise(edges))
    assert sum(int(reduce.count(mask=mask[a:b], how=how)) for a, b in spans) == int(n)
    parts = [reduce.aggregate(loss=x[a:b].square(), mask=mask[a:b], how=how, denominator=int(n)) for a, b in spans]
    torch.testing.assert_close(sum(parts), whole, atol=1e-12, rtol=1e-12)
    (found,) = torch.autograd.grad(sum(parts), x)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


def test_a10_truncated_answers_leave_numerator_and_denominator():
    loss, raw = padded([1] * 4, [1] * 8)
    finished = torch.tensor([True, False])
    mask = raw & finished[:, None]
    n = reduce.count(mask=mask, how="token-mean")
    assert share(loss, mask, "token-mean", n) == 1.0
    lengths = raw.sum(-1).double()
    every = torch.ones(2, dtype=torch.bool)
    found = [float(f(lengths, mask=every)) for f in (reduce.masked_mean, reduce.masked_min, reduce.masked_max)]
    assert found == [6.0, 4.0, 8.0]
    assert float(reduce.masked_mean((~finished).double(), mask=every)) == 0.5
    for how in HOWS:
        nothing = torch.zeros_like(raw)
        assert share(loss, nothing, how, reduce.count(mask=nothing, how=how)) == 0.0


def test_a11_padded_action_chunks_do_not_dilute_the_loss():
    loss, mask = padded([2.0] * 4 + [math.nan] * 6)
    mask[0, 4:] = False
    assert share(loss, mask, "token-mean", reduce.count(mask=mask, how="token-mean")) == 2.0
    full = torch.full((1, 10), 2.0), torch.ones(1, 10, dtype=torch.bool)
    assert share(*full, "token-mean", 10) == 2.0


def test_the_denominator_is_a_required_argument_and_names_are_checked():
    loss, mask = padded([1.0])
    with pytest.raises(TypeError, match="denominator"):
        reduce.aggregate(loss=loss, mask=mask, how="token-mean")
    with pytest.raises(TypeError, match="mask"):
        reduce.aggregate(loss=loss, how="token-mean", denominator=1)
    with pytest.raises(ValueError, match="seq-mean"):
        reduce.aggregate(loss=loss, mask=mask, how="seq-mean", denominator=1)
    with pytest.raises(ValueError, match="mask"):
        reduce.aggregate(loss=loss, mask=mask[:, :0], how="token-mean", denominator=1)


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


def test_a25_several_stop_ids():
    tokens = torch.tensor([[5, 6, 9, 0, 0, 0], [5, 6, 5, 6, 5, 6], [7, 9, 7, 0, 0, 0]])
    mask, finished = reduce.stop_mask(tokens=tokens, stop_ids=[7, 9])
    assert mask.int().tolist() == [[1, 1, 1, 0, 0, 0], [1] * 6, [1, 0, 0, 0, 0, 0]]
    assert finished.tolist() == [True, False, True]
    assert float((~finished[:2]).double().mean()) == 0.5
    with pytest.raises(ValueError, match="stop_ids"):
        reduce.stop_mask(tokens=tokens, stop_ids=[])
