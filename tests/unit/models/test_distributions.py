"""Densities against torch.distributions and by numerical integration; one temperature everywhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import distributions

from m2flow.models.distributions import Categorical, Gaussian, Squashed, action_range
from m2flow.types import Field


def gaussian(dims: int = 3, chunk: int = 2, init: float = -0.4) -> Gaussian:
    return Gaussian(Field((dims,)), chunk, init, None, state_dependent=False)


def test_gaussian_is_torchs() -> None:
    normal = gaussian()
    out, action = torch.randn(5, 6), torch.randn(5, 2, 3)
    got = normal.score(out, {"action": action})
    want = distributions.Normal(out.view(5, 2, 3), math.exp(-0.4))
    torch.testing.assert_close(got.logprob, want.log_prob(action))
    torch.testing.assert_close(got.entropy, want.entropy())


def test_gaussian_action_is_mean_plus_std_times_noise() -> None:
    normal = gaussian(dims=2, chunk=1, init=math.log(0.5))
    out, noise = torch.tensor([[1.0, -1.0]]), torch.tensor([[[2.0, -4.0]]])
    assert normal.draw(out, noise).action.tolist() == [[[2.0, -3.0]]]
    assert normal.draw(out, None).action.tolist() == [[[1.0, -1.0]]]
    rows = normal.draw_rows(out.numpy(), noise.numpy(), [x.detach().numpy() for x in normal.tensors()])
    assert rows.action.tolist() == [[[2.0, -3.0]]]


def test_state_dependent_std_is_clamped_as_is_its_own() -> None:
    normal = Gaussian(Field((1,)), 1, 0.5, (-1.0, 1.0), state_dependent=True)
    _, log_std = normal.parameters_of(torch.tensor([[0.0, 0.25], [0.0, 9.0], [0.0, -9.0]]))
    assert log_std.flatten().tolist() == [0.75, 1.0, -1.0]
    own = Gaussian(Field((1,)), 1, 3.0, (-1.0, 1.0), state_dependent=False)
    assert own.parameters_of(torch.zeros(1, 1))[1].tolist() == [1.0]


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (1.5, -1.0), (-0.7, 0.6)])
def test_squashed_density_integrates_to_one_on_the_unit_interval(mean: float, log_std: float) -> None:
    squashed = Squashed(Field((1,), low=-2.0, high=6.0), gaussian(1, 1, log_std))
    edges = np.linspace(-1.0, 1.0, 400_001)
    unit = (edges[1:] + edges[:-1]) / 2
    raw = torch.tensor(np.arctanh(unit)).view(-1, 1, 1)
    out = torch.full((len(unit), 1), mean, dtype=torch.float64)
    density = squashed.score(out, {"pre_tanh": raw}).logprob.detach().exp()
    assert float(density.sum()) * (edges[1] - edges[0]) == pytest.approx(1.0, abs=1e-4)


def test_squashed_is_torchs_transformed_distribution() -> None:
    squashed = Squashed(Field((2,), low=-1.0, high=1.0), gaussian(2, 1, 0.0))
    out, raw = torch.randn(7, 2, dtype=torch.float64), torch.randn(7, 1, 2, dtype=torch.float64)
    base = distributions.Normal(out.view(7, 1, 2), 1.0)
    want = distributions.TransformedDistribution(base, distributions.TanhTransform(cache_size=1))
    torch.testing.assert_close(squashed.score(out, {"pre_tanh": raw}).logprob, want.log_prob(raw.tanh()))


@pytest.mark.parametrize("raw", [-60.0, -9.0, 0.0, 9.0, 60.0])
def test_squashed_logprob_is_exact_in_the_tails(raw: float) -> None:
    """log(1 - tanh(60)^2) is -118.6; computed as written it is minus infinity, in float32 already at 9."""
    squashed = Squashed(Field((1,), low=-1.0, high=1.0), gaussian(1, 1, 0.0))
    got = squashed.score(torch.full((1, 1), raw), {"pre_tanh": torch.full((1, 1, 1), raw)}).logprob.item()
    slope = 2.0 * (math.log(2.0) - abs(raw) - math.log1p(math.exp(-2.0 * abs(raw))))
    assert got == pytest.approx(-0.5 * math.log(2 * math.pi) - slope, rel=1e-6)
    rows = squashed.draw_rows(np.full((1, 1), raw), None, [x.detach().numpy() for x in squashed.tensors()])
    assert rows.logprob.item() == pytest.approx(got, rel=1e-6)
    assert np.isfinite(rows.logprob).all()


def test_squashed_action_fills_the_range_and_its_logprob_has_no_unit() -> None:
    ranges = [Field((2,), low=(-1.0, -1.0), high=(1.0, 1.0)), Field((2,), low=(-2.0, 0.0), high=(2.0, 10.0))]
    out, noise = torch.tensor([[50.0, -50.0], [0.0, 0.0]]), torch.zeros(2, 1, 2)
    unit, scaled = (Squashed(field, gaussian(2, 1, 0.0)).draw(out, noise) for field in ranges)
    assert scaled.action.tolist() == [[[2.0, 0.0]], [[0.0, 5.0]]]
    assert torch.equal(unit.logprob, scaled.logprob)


def test_squashed_needs_finite_bounds() -> None:
    for field in (Field((1,)), Field((1,), low=-1.0), Field((1,), low=-math.inf, high=1.0)):
        assert action_range(field) is None
        with pytest.raises(ValueError, match="dist: squashed needs finite action bounds"):
            Squashed(field, gaussian(1, 1))


@pytest.mark.parametrize(("temperature", "want"), [(1.0, -0.126928), (0.5, -0.018150), (2.0, -0.313262)])
def test_a28_one_temperature_for_acting_scoring_and_entropy(temperature: float, want: float) -> None:
    """Logits [2, 0], action 0."""
    dist = Categorical(Field((), "int64", categories=2), 1, temperature)
    out = torch.tensor([[2.0, 0.0]])
    acted = dist.draw(out, torch.tensor([[0.0]]))
    rows = dist.draw_rows(out.numpy(), np.array([[0.0]]), ())
    scored = dist.score(out, acted.record)
    for got in (acted.logprob, rows.logprob, scored.logprob):
        assert got.item() == pytest.approx(want, abs=1e-6)
    p = math.exp(want)
    assert float(scored.entropy) == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), abs=1e-5)
    drawn = dist.draw_rows(np.repeat(out.numpy(), 20_000, 0), np.random.default_rng(0).random((20_000, 1)), ())
    assert (drawn.action == 0).mean() == pytest.approx(p, abs=0.01)


def test_categorical_draws_by_the_inverse_of_the_cumulative_distribution() -> None:
    dist = Categorical(Field((), "int64", categories=3), 1, 1.0)
    logits = np.log(np.array([[0.2, 0.5, 0.3]])).repeat(6, 0)
    noise = np.array([[0.0], [0.199], [0.201], [0.699], [0.701], [1.0]])
    assert dist.draw_rows(logits, noise, ()).action.flatten().tolist() == [0, 0, 1, 1, 2, 2]
    by_torch = dist.draw(torch.from_numpy(logits), torch.from_numpy(noise))
    assert by_torch.action.flatten().tolist() == [0, 0, 1, 1, 2, 2]
    assert dist.draw_rows(logits, None, ()).action.flatten().tolist() == [1] * 6


def test_categorical_logits_may_be_huge() -> None:
    dist = Categorical(Field((), "int64", categories=2), 1, 1.0)
    got = dist.draw_rows(np.array([[1e4, -1e4]], np.float32), np.array([[0.5]], np.float32), ())
    assert got.action.item() == 0
    assert got.logprob.item() == 0.0


def test_matrices_of_actions_are_refused_by_name() -> None:
    for make in (
        lambda f: Gaussian(f, 1, 0.0, None, state_dependent=False),
        lambda f: Categorical(Field(f.shape, "int64", categories=2), 1, 1.0),
    ):
        with pytest.raises(ValueError, match=r"action: shape \(2, 2\)"):
            make(Field((2, 2)))
