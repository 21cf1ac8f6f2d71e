"""The MLP policy beyond the contract: against a network written out by hand, and what its config refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from m2flow.models.mlp import MLPConfig
from m2flow.types import Field, Spec

SPEC = Spec({"a": Field((2,)), "b": Field((3,), "float64")}, Field((2,), low=-1.0, high=1.0))


def test_network_by_hand() -> None:
    policy = MLPConfig(hidden=(4,), log_std_init=-0.5).build(SPEC, 0)
    w, b = policy.trunk.layers[0].weight.detach().numpy(), np.array([0.1, -0.2, 0.3, 0.4], np.float32)
    policy.trunk.layers[0].bias.data = torch.from_numpy(b.copy())
    v = policy.last.weight.detach().numpy()
    obs = {"b": np.array([[3.0, 4.0, 5.0]]), "a": np.array([[1.0, 2.0]], np.float32)}
    flat = np.array([1.0, 2.0, 3.0, 4.0, 5.0])  # in the order of the spec, not of the dict
    mean = np.tanh(w @ flat + b) @ v.T
    got = policy.act(obs, np.array([[[1.0, -1.0]]]))
    np.testing.assert_allclose(got.action[0, 0], mean + math.exp(-0.5) * np.array([1.0, -1.0]), rtol=1e-5)
    np.testing.assert_allclose(got.logprob[0, 0], -0.5 + 0.5 - 0.5 * math.log(2 * math.pi), rtol=1e-5)


def test_initial_weights_are_orthogonal_with_their_gains() -> None:
    policy = MLPConfig(hidden=(8, 8), hidden_gain=1.5, output_gain=0.01).build(SPEC, 0)
    inner = policy.trunk.layers[1].weight.detach()
    torch.testing.assert_close(inner @ inner.T, 2.25 * torch.eye(8), atol=1e-5, rtol=0)
    last = policy.last.weight.detach()
    torch.testing.assert_close(last @ last.T, 1e-4 * torch.eye(2), atol=1e-8, rtol=0)
    assert all(not bias.any() for name, bias in policy.named_parameters() if name.endswith("bias"))


def test_a_category_in_the_observation_is_one_hot() -> None:
    spec = Spec({"x": Field((1,)), "mode": Field((), "int64", categories=3)}, Field((1,)))
    policy = MLPConfig().build(spec, 0)
    features = policy.features({"x": np.array([[0.5], [0.25]], np.float32), "mode": np.array([2, 0])})
    assert features.tolist() == [[0.5, 0.0, 0.0, 1.0], [0.25, 1.0, 0.0, 0.0]]


def test_features_are_the_observation_or_the_trunk() -> None:
    obs = {"a": torch.randn(3, 2), "b": torch.randn(3, 3)}
    apart, shared = (MLPConfig(hidden=(7,), shared_trunk=s).build(SPEC, 0) for s in (False, True))
    torch.testing.assert_close(apart.features(obs), torch.cat([obs["a"], obs["b"]], 1))
    assert shared.features(obs).shape == (3, 7)
    shared.features(obs).sum().backward()
    assert shared.trunk.layers[0].weight.grad.abs().sum() > 0


def test_normalised_observations_are_what_the_network_sees() -> None:
    policy = MLPConfig(normalize=True, clip_obs=2.0).build(SPEC, 0)
    rng = np.random.default_rng(0)
    seen = {"a": rng.normal(3.0, 5.0, (500, 2)).astype(np.float32), "b": rng.normal(-100.0, 0.1, (500, 3))}
    policy.observe({name: x[:200] for name, x in seen.items()})
    policy.observe({name: x[200:] for name, x in seen.items()})
    flat = np.concatenate([seen["a"].astype(np.float64), seen["b"]], 1)
    want = np.clip((flat - flat.mean(0)) / flat.std(0), -2.0, 2.0)
    np.testing.assert_allclose(policy.features(seen).numpy(), want, atol=2e-3)
    np.testing.assert_allclose(policy.encoder.rows(seen, np.float32), want, atol=2e-3)


def test_a_scheduled_deviation_is_log_linear_in_training_steps_and_part_of_the_weights() -> None:
    policy = MLPConfig(hidden=(4,), std_schedule=((2, 1.0), (4, 0.25))).build(SPEC, 0)
    obs = {"a": np.zeros((1, 2), np.float32), "b": np.zeros((1, 3))}
    seen = []
    for _ in range(7):
        seen.append(
            policy.act(obs, np.ones((1, 1, 2))).action.mean().item() - policy.act(obs, None).action.mean().item()
        )
        policy.observe(obs)
    assert seen == pytest.approx([1.0, 1.0, 1.0, 0.5, 0.25, 0.25, 0.25], rel=1e-6)
    assert "distribution.log_std" not in dict(policy.named_parameters())
    again = MLPConfig(hidden=(4,), std_schedule=((2, 1.0), (4, 0.25))).build(SPEC, 1)
    again.load_state_dict(policy.state_dict())
    np.testing.assert_array_equal(again.act(obs, np.ones((1, 1, 2))).action, policy.act(obs, np.ones((1, 1, 2))).action)


def test_min_std_keeps_what_hardly_moves_from_being_blown_up() -> None:
    policy = MLPConfig(normalize=True, min_std=0.1).build(Spec({"a": Field((1,))}, SPEC.action), 0)
    policy.observe({"a": np.array([[1.0 - 1e-3], [1.0 + 1e-3]])})
    assert policy.features({"a": np.array([[1.001]], np.float32)}).item() == pytest.approx(0.01, rel=1e-3)


def test_shapes_of_multi_axis_and_scalar_actions() -> None:
    scalar = MLPConfig(chunk=2).build(Spec({"a": Field((2,))}, Field(())), 0)
    got = scalar.act({"a": np.zeros((3, 2), np.float32)}, np.zeros((3, 2)))
    assert got.action.shape == got.logprob.shape == (3, 2)
    assert scalar.axes == ("chunk",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": (0,)}, "hidden: every width"),
        ({"activation": "swish"}, "activation: 'swish' is unknown; choose one of tanh, relu, elu, silu"),
        ({"temperature": 0.0}, "temperature: must be more than 0"),
        ({"clip_obs": -1.0}, "clip_obs: must be more than 0"),
        ({"chunk": 0}, "chunk: must be at least 1"),
        ({"min_std": 0.0}, "min_std: must be more than 0"),
        ({"std_schedule": ((5, 1.0), (2, 0.1))}, "std_schedule: expected rising steps"),
        ({"std_schedule": ((0, 0.0),)}, "std_schedule: expected rising steps with deviations above 0"),
        ({"std_schedule": ((0, 1.0),), "state_dependent_std": True}, "std_schedule: needs one deviation per"),
        ({"log_std_bounds": (1.0, 0.0)}, "log_std_bounds: the first must be below"),
    ],
)
def test_config_says_what_is_wrong(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MLPConfig(**change)


@pytest.mark.parametrize(
    ("config", "action", "message"),
    [
        (MLPConfig(dist="gaussian"), Field((), "int64", categories=3), "dist: gaussian cannot emit"),
        (MLPConfig(dist="categorical"), Field((2,)), "dist: categorical needs an action with categories"),
        (MLPConfig(dist="squashed"), Field((2,)), "dist: squashed needs finite action bounds"),
        (MLPConfig(temperature=0.7), Field((2,)), "temperature: only a categorical action has one"),
    ],
)
def test_build_says_what_does_not_fit(config: MLPConfig, action: Field, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config.build(Spec({"a": Field((2,))}, action), 0)


def test_only_squashed_policies_propose() -> None:
    assert not hasattr(MLPConfig().build(SPEC, 0), "propose")
    assert hasattr(MLPConfig(dist="squashed").build(SPEC, 0), "propose")
