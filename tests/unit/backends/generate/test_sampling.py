"""One token per row, by inverse CDF."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from m2flow.backends.generate import sampling
from m2flow.backends.generate.sampling import draw, inverse_cdf


def test_the_token_is_where_the_running_sum_passes_the_number() -> None:
    """p = 1/8, 1/2, 1/4, 1/8: sums 0.125, 0.625, 0.875, 1."""
    logits = torch.tensor([0.125, 0.5, 0.25, 0.125]).log().double()
    numbers = np.array([0.01, 0.1249, 0.1251, 0.62, 0.63, 0.87, 0.88, 0.999])
    token, logprob = draw(logits.expand(8, 4), numbers, np.ones(8))
    assert token.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    np.testing.assert_allclose(logprob.exp(), [0.125, 0.125, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125])
    assert logprob.dtype == torch.float64


def test_a28_the_temperature_divides_logits_and_the_record_says_so() -> None:
    """At T = 0.5 weights are squared: 1/9 and 4/9 of 1, 2, 2 become 1, 4, 4."""
    logits = torch.tensor([[1.0, 2.0, 2.0]]).log()
    for number, token in ((0.11, 0), (0.12, 1), (0.55, 1), (0.56, 2)):
        got, logprob = draw(logits, np.array([number]), np.array([0.5]))
        assert got.item() == token
        assert math.isclose(logprob.exp().item(), (1 / 9, 4 / 9, 4 / 9)[token], rel_tol=1e-6)
    assert logprob.dtype == torch.float32


def test_temperature_0_takes_the_most_probable_and_records_temperature_1() -> None:
    logits = torch.tensor([[1.0, 6.0, 2.0]]).log()
    token, logprob = draw(logits, np.array([0.99]), np.zeros(1))
    assert token.item() == 1
    assert math.isclose(logprob.exp().item(), 6 / 9, rel_tol=1e-6)


def test_rows_of_different_temperatures_do_not_disturb_each_other() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(30, 700)) * 4)
    numbers, temperature = rng.uniform(size=30), np.array([0.0, 0.7, 1.3] * 10)
    token, logprob = draw(logits, numbers, temperature)
    for i in range(30):
        one = draw(logits[i : i + 1], numbers[i : i + 1], temperature[i : i + 1])
        assert (token[i], logprob[i]) == (one[0].item(), one[1].item())


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 1000])
def test_blocks_find_what_a_plain_search_finds(size: int) -> None:
    rng = np.random.default_rng(size)
    weight = rng.uniform(size=(50, size)) * (rng.uniform(size=(50, size)) > 0.5)
    weight[:, -1] += 1e-3
    numbers = rng.uniform(size=50)
    got = inverse_cdf(torch.from_numpy(weight), torch.from_numpy(numbers))
    wanted = [np.searchsorted(np.cumsum(w), u * w.sum(), side="right") for w, u in zip(weight, numbers, strict=True)]
    assert got.tolist() == wanted


def test_rows_are_cut_where_there_are_many_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    logits, numbers = torch.from_numpy(rng.normal(size=(7, 40))), rng.uniform(size=7)
    whole = draw(logits, numbers, np.ones(7))
    monkeypatch.setattr(sampling, "NUMBERS", 80)
    cut = draw(logits, numbers, np.ones(7))
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


def test_what_cannot_be_is_never_drawn() -> None:
    """Not at the ends of the unit interval either, where sums round."""
    edges = np.array([2.0**-54, 2.0**-53, 0.5, 1 - 2.0**-53, 1 - 2.0**-54])
    for size in (5, 600):
        logits = torch.full((5, size), -torch.inf)
        logits[:, 1], logits[:, 3] = 0.0, -20.0
        token, logprob = draw(logits, edges, np.ones(5))
        assert set(token.tolist()) <= {1, 3}
        assert bool(logprob.isfinite().all())


def test_many_draws_have_the_frequencies_of_the_softmax() -> None:
    """Within five standard errors."""
    logits, n = torch.tensor([0.3, -1.0, 2.0, 0.0]), 20_000
    numbers = np.random.default_rng(3).uniform(size=n)
    token, _ = draw(logits.expand(n, 4), numbers, np.full(n, 1.5))
    p = torch.softmax(logits / 1.5, -1).numpy()
    seen = np.bincount(token.numpy(), minlength=4) / n
    assert (np.abs(seen - p) < 5 * np.sqrt(p * (1 - p) / n)).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error(bad: float, temperature: float) -> None:
    logits = torch.zeros(2, 5)
    logits[1, 2] = bad
    with pytest.raises(ValueError, match="not finite"):
        draw(logits, np.full(2, 0.5), np.full(2, temperature))
