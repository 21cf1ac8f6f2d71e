"""The flow policy beyond the contract: its chain by hand, its likelihood, its deterministic end, what it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from m2flow import seeds
from m2flow.models.flow import FlowConfig
from m2flow.types import Field, Spec

SPEC = Spec({"s": Field((3,))}, Field((2,), low=(-1.0, 0.0), high=(1.0, 4.0)))
OBS = {"s": np.array([[0.3, -1.0, 2.0], [1.0, 0.5, -0.5]], np.float32)}


def trained(config: FlowConfig, spec: Spec = SPEC):
    policy = config.build(spec, 1).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return policy


def velocity(policy, obs: np.ndarray, x: np.ndarray, t: float) -> np.ndarray:
    """Written out: two hidden layers of tanh on [obs, x, cos(pi j t)]."""
    get = {name: p.detach().numpy() for name, p in policy.named_parameters()}
    time = np.cos(np.pi * t * np.arange(1, 5))
    inner = obs @ get["seen.weight"].T + get["seen.bias"]
    inner = inner + np.concatenate([x, time]) @ get["moved.weight"].T + get["moved.bias"]
    h = np.tanh(np.tanh(inner) @ get["trunk.layers.0.weight"].T + get["trunk.layers.0.bias"])
    return h @ get["velocity.weight"].T + get["velocity.bias"]


@pytest.mark.parametrize("learn", [True, False])
def test_chain_and_likelihood_by_hand(learn: bool) -> None:
    policy = trained(FlowConfig(hidden=(6, 5), steps=3, learn_std=learn, std=0.2))
    noise = np.random.default_rng(0).normal(size=(2, 4, 1, 2))
    got = policy.act({"s": OBS["s"].astype(np.float64)}, noise)
    std = np.full((3, 2), 0.2)
    if learn:
        raw = dict(policy.named_parameters())["raw_std"].detach().numpy()[:, 0]
        std = 0.05 + 0.45 / (1.0 + np.exp(-raw))
    for b in range(2):
        x = noise[b, 0, 0]
        logs = [-0.5 * x**2 - 0.5 * math.log(2 * math.pi)]
        for k in range(3):
            mean = x + velocity(policy, OBS["s"][b].astype(np.float64), x, k / 3) / 3
            x = mean + std[k] * noise[b, k + 1, 0]
            logs.append(-0.5 * ((x - mean) / std[k]) ** 2 - np.log(std[k]) - 0.5 * math.log(2 * math.pi))
            np.testing.assert_allclose(got.record["trace"][b, k + 1, 0], x, atol=1e-6)
        np.testing.assert_allclose(got.logprob[b, :, 0], logs, atol=1e-6)
        np.testing.assert_allclose(got.action[b, 0], np.array([0.0, 2.0]) + np.array([1.0, 2.0]) * x, atol=1e-6)


def test_joint_density_of_the_chain_integrates_to_one() -> None:
    """K = 1 and one dimension: a plane of (A_0, A_1), summed on a grid."""
    policy = trained(FlowConfig(hidden=(6,), steps=1, std=0.3), Spec(SPEC.observation, Field((1,))))
    side = np.linspace(-6.0, 6.0, 481)
    a0, a1 = (x.reshape(-1) for x in np.meshgrid(side, side))
    trace = torch.tensor(np.stack([a0, a1], 1)[:, :, None, None])
    obs = {"s": torch.tensor(OBS["s"][:1]).expand(len(trace), -1)}
    total = float(policy.score(obs, {"trace": trace}).logprob.detach().sum((1, 2, 3)).exp().sum())
    assert total * (side[1] - side[0]) ** 2 == pytest.approx(1.0, abs=1e-3)


def test_without_noise_the_flow_is_followed_from_zero() -> None:
    policy = trained(FlowConfig(hidden=(6, 5), steps=4))
    got = policy.act({"s": OBS["s"].astype(np.float64)}, None)
    for b in range(2):
        x = np.zeros(2)
        for k in range(4):
            x = x + velocity(policy, OBS["s"][b].astype(np.float64), x, k / 4) / 4
        np.testing.assert_allclose(got.record["trace"][b, 4, 0], x, atol=1e-6)


def test_the_start_is_a_unit_without_gradient() -> None:
    policy = FlowConfig(hidden=(6,)).build(SPEC, 0)
    got = policy.act(OBS, np.random.default_rng(0).normal(size=(2, 5, 1, 2)))
    score = policy.score(OBS, {"trace": got.record["trace"]})
    assert score.logprob.shape == (2, 5, 1, 2)
    start = got.record["trace"][:, 0]
    np.testing.assert_allclose(score.logprob[:, 0].detach().numpy(), -0.5 * start**2 - 0.9189385, atol=1e-5)
    grads = torch.autograd.grad(score.logprob[:, 0].sum(), list(policy.parameters()), allow_unused=True)
    assert all(g is None or not g.any() for g in grads)


def test_actions_of_a_chunk_and_dims_depend_on_each_other() -> None:
    """What a flow is for: one velocity for the whole chunk, so its entries are correlated."""
    policy = trained(FlowConfig(hidden=(6, 5), steps=4, chunk=2))
    noise = seeds.normal(0, np.array([0]), np.array([0]), (5, 2, 2))[0]
    moved = noise.copy()
    moved[0, 0, 0, 0] += 1.0
    obs = {"s": OBS["s"][:1].astype(np.float64)}
    change = policy.act(obs, moved).action - policy.act(obs, noise).action
    assert (np.abs(change) > 1e-4).all()


def test_learnt_deviations_stay_within_their_range() -> None:
    policy = FlowConfig(std=0.2, std_min=0.1, std_max=0.3).build(SPEC, 0)
    torch.testing.assert_close(policy._std(), torch.full((4, 1, 2), 0.2))
    with torch.no_grad():
        policy.raw_std[0] = 90.0
        policy.raw_std[1] = -90.0
    assert policy._std()[0].max() <= 0.3
    assert policy._std()[1].min() >= 0.1
    got = policy.act(OBS, np.ones((2, 5, 1, 2)))
    assert np.isfinite(got.logprob).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": ()}, "hidden: a velocity network needs"),
        ({"steps": 0}, "steps: must be at least 1"),
        ({"std": 0.6}, "std: a learnt 0.6 must lie between std_min 0.05 and std_max 0.5"),
        ({"std": -0.1, "learn_std": False}, "std: must be more than 0"),
    ],
)
def test_config_says_what_is_wrong(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlowConfig(**change)


def test_discrete_actions_are_refused() -> None:
    with pytest.raises(ValueError, match="a flow policy emits vectors of numbers"):
        FlowConfig().build(Spec(SPEC.observation, Field((), "int64", categories=2)), 0)
