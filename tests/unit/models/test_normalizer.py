"""Running statistics: against numpy on all rows at once, whatever the cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.models.normalizer import Normalizer


def rows(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_worked_example() -> None:
    norm = Normalizer(1, clip=10.0)
    norm.update(rows([[1.0], [3.0]]))
    assert norm.count == 2.0
    assert norm.mean.tolist() == [2.0]
    assert (norm.m2 / norm.count).tolist() == [1.0]
    np.testing.assert_allclose(norm(torch.tensor([[3.0], [0.0]])).numpy(), [[1.0], [-2.0]], rtol=1e-6)


def test_identity_before_the_first_update_and_after_an_empty_one() -> None:
    norm = Normalizer(2, clip=1e9)
    norm.update(rows(np.zeros((0, 2))))
    x = torch.tensor([[3.0, -700.0]])
    assert torch.equal(norm(x), x)
    assert x.tolist() == [[3.0, -700.0]]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    offset=st.sampled_from([0.0, 1e6, -3.5]),
)
def test_any_cut_gives_the_statistics_of_all_rows(sizes: list[int], seed: int, offset: float) -> None:
    data = np.random.default_rng(seed).normal(offset, 2.0, (sum(sizes), 3))
    norm = Normalizer(3, clip=10.0)
    start = 0
    for size in sizes:
        norm.update(rows(data[start : start + size]))
        start += size
    assert norm.count == len(data)
    if len(data):
        np.testing.assert_allclose(norm.mean.numpy(), data.mean(0), rtol=1e-12)
        np.testing.assert_allclose((norm.m2 / norm.count).numpy(), data.var(0), rtol=1e-7, atol=1e-12)
        np.testing.assert_allclose(norm.scale.numpy(), 1.0 / np.sqrt(data.var(0) + 1e-8), rtol=1e-6)


def test_a_million_rows_of_a_large_offset_keep_their_variance() -> None:
    """In float32, or with a sum of squares, the variance of 1e4 +- 0.01 would be lost."""
    norm = Normalizer(1, clip=10.0)
    rng = np.random.default_rng(0)
    for _ in range(20):
        norm.update(rows(rng.normal(1e4, 0.01, (5000, 1))))
    assert float(norm.m2 / norm.count) == pytest.approx(1e-4, rel=0.02)


def test_outliers_are_clipped_and_constants_stay_finite() -> None:
    norm = Normalizer(2, clip=5.0)
    norm.update(rows([[0.0, 7.0], [1.0, 7.0]]))
    out = norm(torch.tensor([[1e9, 7.0], [-1e9, 8.0]]))
    assert out.tolist() == [[5.0, 0.0], [-5.0, 5.0]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_and_leaves_no_trace(bad: float) -> None:
    norm = Normalizer(2, clip=5.0)
    norm.update(rows([[0.0, 1.0], [1.0, 2.0]]))
    before = {name: x.clone() for name, x in norm.state_dict().items()}
    with pytest.raises(ValueError, match=r"column 1 .* NaN or infinity"):
        norm.update(rows([[0.0, bad]]))
    assert all(torch.equal(x, before[name]) for name, x in norm.state_dict().items())


def test_casts_keep_the_statistics_in_float64() -> None:
    norm = Normalizer(1, clip=5.0)
    norm.update(rows([[1.0], [1.0 + 1e-12]]))
    norm.to(torch.float32)
    assert norm.mean.dtype == norm.m2.dtype == norm.count.dtype == torch.float64
    assert norm.mean.item() == 1.0 + 5e-13
    assert norm.shift.dtype == torch.float32
    norm.to(torch.float64)
    assert norm.shift.item() == norm.mean.item()
