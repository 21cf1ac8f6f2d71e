"""What every Policy must do. A new policy adds one `Case` to test_policies.py, and all of this is asked of it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from m2flow import seeds
from m2flow.protocols import Policy, Proposer
from m2flow.types import Action, Field, Observation, Spec

PROTOCOLS = ("Scorer", "Policy", "Proposer")
SEED = 5
ROWS = 23
TOLERANCE = 1e-5

STATE = {"state": Field((5,), "float64")}
VECTOR = Spec(STATE, Field((3,), low=-1.0, high=1.0))
TORQUE = Spec(STATE, Field((2,), low=(-2.0, 0.0), high=(2.0, 10.0), unit="Nm"))
DISCRETE = Spec(STATE, Field((), "int64", categories=4))
SWITCHES = Spec(STATE, Field((3,), "int64", categories=2))
MIXED = Spec(
    {"state": Field((2, 3), "float32"), "goal": Field((), "float64"), "mode": Field((), "int64", categories=3)},
    Field((2,), low=-1.0, high=1.0),
)


@dataclass(frozen=True)
class Case:
    """A policy config and the spec it is built for."""

    name: str
    config: Any
    spec: Spec


def build(case: Case, seed: int = SEED, *, trained: bool = True) -> Any:
    """A policy; `trained` moves weights and statistics away from their start: nothing is zero by accident."""
    policy = case.config.build(case.spec, seed)
    if trained:
        policy.observe(observations(case, 64, seed=99))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return policy


def observations(case: Case, rows: int = ROWS, seed: int = 1) -> Observation:
    """As an environment shows them, in the spec's dtypes."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, field in case.spec.observation.items():
        shape = (rows, *field.shape)
        if field.categories is not None:
            out[name] = rng.integers(field.categories, size=shape)
        else:
            out[name] = rng.normal(0.5, 2.0, shape).astype(field.dtype)
    return out


def noise(policy: Policy, rows: int = ROWS, seed: int = 2) -> Any:
    kind, shape = policy.noise
    return seeds.draw(kind, seed, np.arange(rows), np.array([0]), shape)[0].astype(np.float32)


def torched(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(np.array(x)) for name, x in tree.items()}


def rows_of(tree: Mapping[str, Any], index: Any) -> dict[str, Any]:
    return {name: x[index] for name, x in tree.items()}


def act(policy: Policy, obs: Observation, drawn: Any) -> dict[str, Any]:
    return arrays(policy.act(obs, drawn))


def arrays(action: Action) -> dict[str, Any]:
    return {"action": action.action, "logprob": action.logprob} | {f"record.{k}": v for k, v in action.record.items()}


def assert_same(a: Mapping[str, Any], b: Mapping[str, Any], tolerance: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(np.asarray(a[name]), np.asarray(b[name]), rtol=0, atol=tolerance, err_msg=name)


def check_is_a_policy(case: Case) -> None:
    policy = build(case)
    assert isinstance(policy, Policy)
    assert isinstance(policy, torch.nn.Module)
    assert set(policy.spec.observation) == set(case.spec.observation)
    assert policy.spec.action == case.spec.action


def check_shapes(case: Case) -> None:
    policy = build(case)
    got = policy.act(observations(case), noise(policy))
    assert got.action.shape == (ROWS, policy.chunk, *case.spec.action.shape)
    assert got.logprob.ndim == 1 + len(policy.axes)
    assert got.logprob.dtype == np.float32
    assert all(len(x) == ROWS for x in got.record.values())
    score = policy.score(torched(observations(case)), torched(got.record))
    assert tuple(score.logprob.shape) == tuple(score.entropy.shape) == got.logprob.shape
    assert policy.features(torched(observations(case))).shape[0] == ROWS
    assert np.isfinite(got.logprob).all()
    if case.spec.action.categories is not None:
        assert got.action.dtype == np.int64
        assert (got.action >= 0).all()
        assert (got.action < case.spec.action.categories).all()


def check_score_equals_the_recorded_logprob(case: Case) -> None:
    policy = build(case)
    got = policy.act(observations(case), noise(policy))
    again = policy.score(torched(observations(case)), torched(got.record)).logprob
    np.testing.assert_allclose(again.detach().numpy(), got.logprob, rtol=0, atol=TOLERANCE)


def check_score_of_the_mode(case: Case) -> None:
    policy = build(case)
    got = policy.act(observations(case), None)
    assert_same(act(policy, observations(case), None), arrays(got), 0.0)
    again = policy.score(torched(observations(case)), torched(got.record)).logprob
    np.testing.assert_allclose(again.detach().numpy(), got.logprob, rtol=0, atol=TOLERANCE)


def check_ragged_batches(case: Case) -> None:
    """Acting and scoring do not depend on how rows are put together: single rows, uneven cuts, another order."""
    policy = build(case)
    obs, drawn = observations(case), noise(policy)
    whole = act(policy, obs, drawn)
    record = policy.act(obs, drawn).record
    order = np.random.default_rng(0).permutation(ROWS)
    cuts = [np.array([i]) for i in range(3)] + [np.arange(3, 4), np.arange(4, 9), np.arange(9, ROWS), order]
    for index in cuts:
        part = act(policy, rows_of(obs, index), drawn[index])
        assert_same(part, rows_of(whole, index), TOLERANCE)
        score = policy.score(torched(rows_of(obs, index)), torched(rows_of(record, index)))
        np.testing.assert_allclose(score.logprob.detach().numpy(), whole["logprob"][index], rtol=0, atol=TOLERANCE)


def check_large_batches(case: Case) -> None:
    """Large enough that a policy may compute them another way than small ones."""
    policy, rows = build(case), 40_000
    obs, drawn = observations(case, rows), noise(policy, rows)
    got = policy.act(obs, drawn)
    assert all(isinstance(x, np.ndarray) for x in arrays(got).values())
    few = np.arange(0, rows, 4001)
    assert_same(act(policy, rows_of(obs, few), drawn[few]), rows_of(arrays(got), few), TOLERANCE)


def check_torch_acts_like_numpy(case: Case) -> None:
    policy = build(case)
    obs, drawn = observations(case), noise(policy)
    by_numpy, by_torch = policy.act(obs, drawn), policy.act(torched(obs), torch.from_numpy(drawn))
    assert all(isinstance(x, np.ndarray) for x in arrays(by_numpy).values())
    assert all(isinstance(x, torch.Tensor) and not x.requires_grad for x in arrays(by_torch).values())
    assert_same(arrays(by_numpy), arrays(by_torch), TOLERANCE)
    assert_same(act(policy, obs, None), arrays(policy.act(torched(obs), None)), TOLERANCE)


def check_torch_records_can_be_trained_on(case: Case) -> None:
    policy = build(case)
    obs = torched(observations(case))
    got = policy.act(obs, torch.from_numpy(noise(policy)))
    policy.score(obs, got.record).logprob.sum().backward()
    assert any(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in policy.parameters())


def check_acting_changes_nothing(case: Case) -> None:
    """Weights, statistics, inputs, training flags and the global random states (A16)."""
    policy = build(case)
    obs, drawn = observations(case), noise(policy)
    before = copy.deepcopy((policy.state_dict(), obs, drawn))
    for training in (True, False):
        policy.train(training)
        states = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
        got = policy.act(obs, drawn)
        policy.act(torched(obs), torch.from_numpy(drawn))
        policy.act(obs, None)
        policy.score(torched(obs), torched(got.record))
        policy.features(torched(obs))
        assert all(module.training == training for module in policy.modules())
        assert torch.equal(states[0], torch.random.get_rng_state())
        assert np.array_equal(states[1], np.random.get_state()[1])  # noqa: NPY002
    weights, obs_before, drawn_before = before
    assert all(torch.equal(x, policy.state_dict()[name]) for name, x in weights.items())
    assert all(np.array_equal(x, obs[name]) for name, x in obs_before.items())
    assert np.array_equal(drawn_before, drawn)


def check_read_only_observations_are_accepted(case: Case) -> None:
    policy = build(case)
    obs = observations(case)
    for x in obs.values():
        x.flags.writeable = False
    policy.features(obs)
    assert_same(act(policy, obs, noise(policy)), act(policy, observations(case), noise(policy)), 0.0)


def check_every_parameter_gets_a_gradient(case: Case) -> None:
    policy = build(case)
    obs = observations(case)
    score = policy.score(torched(obs), torched(policy.act(obs, noise(policy)).record))
    (score.logprob.sum() + score.entropy.sum()).backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
        assert bool(parameter.grad.abs().sum() > 0), name


def check_gradient_of_the_logprob(case: Case) -> None:
    """Against central differences in float64, along one random direction of all parameters."""
    policy = build(case).to(torch.float64)
    obs = observations(case)
    record = torched(policy.act(obs, noise(policy).astype(np.float64)).record)
    policy.score(torched(obs), record).logprob.sum().backward()
    generator = torch.Generator().manual_seed(0)
    ways = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in policy.parameters()]
    slope = sum(float((p.grad * way).sum()) for p, way in zip(policy.parameters(), ways, strict=True))
    values = []
    for sign in (1.0, -1.0):
        moved = copy.deepcopy(policy)
        with torch.no_grad():
            for p, way in zip(moved.parameters(), ways, strict=True):
                p += sign * 1e-6 * way
            values.append(moved.score(torched(obs), record).logprob.sum().item())
    np.testing.assert_allclose((values[0] - values[1]) / 2e-6, slope, rtol=1e-5, atol=1e-5)


def check_entropy_is_minus_the_mean_logprob(case: Case) -> None:
    """By drawing from one observation many times; five standard errors."""
    policy = build(case)
    draws = 4000
    obs = {name: np.repeat(x, draws, 0) for name, x in observations(case, 1).items()}
    got = policy.act(obs, noise(policy, draws))
    entropy = policy.score(torched(obs), torched(got.record)).entropy.detach().numpy()
    gap = -got.logprob - entropy
    error = gap.std(0) / np.sqrt(draws)
    assert (np.abs(gap.mean(0)) < 5.0 * error + 1e-4).all()


def check_weights_round_trip(case: Case) -> None:
    """A copy acts the same, whichever way it was made: loaded by name, deep-copied, pickled."""
    policy, other = build(case), build(case, SEED + 1)
    obs, drawn = observations(case), noise(policy)
    whole = act(policy, obs, drawn)
    other.act(obs, drawn)  # anything it keeps for speed must notice the new weights
    other.load_state_dict(policy.state_dict(), strict=True)
    assert_same(act(other, obs, drawn), whole, 0.0)
    assert_same(act(copy.deepcopy(policy), obs, drawn), whole, 0.0)
    assert_same(act(pickle.loads(pickle.dumps(policy)), obs, drawn), whole, 0.0)


def check_acting_follows_the_weights(case: Case) -> None:
    """Also when a trainer rebinds a parameter to other memory, and when it changes it in place."""
    policy, other = build(case), build(case, SEED + 1)
    obs, drawn = observations(case), noise(policy)
    policy.act(obs, drawn)
    other.act(obs, drawn)
    for mine, theirs in zip(policy.parameters(), other.parameters(), strict=True):
        mine.data = theirs.data.clone()
    assert_same(act(policy, obs, drawn), act(other, obs, drawn), 0.0)
    assert_same(act(policy, obs, drawn), arrays(policy.act(torched(obs), torch.from_numpy(drawn))), TOLERANCE)
    with torch.no_grad():
        for mine, theirs in zip(policy.parameters(), other.parameters(), strict=True):
            mine += 0.1
            theirs += 0.1
    assert_same(act(policy, obs, drawn), act(other, obs, drawn), 0.0)


def check_weights_depend_on_the_seed_only(case: Case) -> None:
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = build(case, trained=False)
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(2)
    second, third = build(case, trained=False), build(case, SEED + 1, trained=False)
    assert all(torch.equal(x, second.state_dict()[name]) for name, x in first.state_dict().items())
    assert any(not torch.equal(x, third.state_dict()[name]) for name, x in first.state_dict().items())


def check_state_names_are_unique_tensors(case: Case) -> None:
    state = build(case).state_dict()
    addresses = [x.data_ptr() for x in state.values()]
    assert len(set(addresses)) == len(addresses)


def check_float64(case: Case) -> None:
    """A cast policy asks for float64, scores to float64 precision, and keeps its statistics."""
    policy = build(case).to(torch.float64)
    obs, drawn = observations(case), noise(policy).astype(np.float64)
    read = [f.dtype for f in policy.spec.observation.values() if f.categories is None]
    assert set(read) == {"float64"}
    got = policy.act(obs, drawn)
    assert got.logprob.dtype == np.float64
    again = policy.score(torched(obs), torched(got.record)).logprob
    np.testing.assert_allclose(again.detach().numpy(), got.logprob, rtol=0, atol=1e-10)
    assert_same(arrays(got), act(build(case), observations(case), noise(policy)), 1e-3)
    assert_same(act(policy.to(torch.float32), obs, drawn), act(build(case), obs, drawn), TOLERANCE)


def check_observe_only_moves_statistics(case: Case) -> None:
    policy = build(case)
    before = copy.deepcopy(policy.state_dict())
    policy.observe(observations(case, 7, seed=3))
    changed = {name for name, x in policy.state_dict().items() if not torch.equal(x, before[name])}
    assert changed.isdisjoint(dict(policy.named_parameters()))
    if getattr(case.config, "normalize", False) or getattr(case.config, "std_schedule", ()):
        assert changed
    else:
        assert not changed


def check_noise_is_what_it_says(case: Case) -> None:
    """Other noise gives another action; a policy that ignored it would explore nothing."""
    policy = build(case)
    kind, shape = policy.noise
    assert kind in ("normal", "uniform")
    assert all(isinstance(n, int) for n in shape)
    obs = {name: np.repeat(x, 200, 0) for name, x in observations(case, 1).items()}
    got = policy.act(obs, noise(policy, 200)).action
    assert len(np.unique(got.reshape(200, -1), axis=0)) > 1


def check_proposals(case: Case) -> None:
    """A Proposer's action and log-prob are those of `act`, with gradients to every parameter through both."""
    policy = build(case)
    if not isinstance(policy, Proposer):
        assert not hasattr(policy, "propose")
        return
    obs, drawn = observations(case), noise(policy)
    action, logprob = policy.propose(torched(obs), torch.from_numpy(drawn))
    got = policy.act(obs, drawn)
    assert action.shape == (ROWS, *case.spec.action.shape)
    assert logprob.shape == (ROWS,)
    np.testing.assert_allclose(action.detach().numpy()[:, None], got.action, atol=TOLERANCE)
    np.testing.assert_allclose(action.detach().numpy()[:, None], got.record["action"], atol=TOLERANCE)
    np.testing.assert_allclose(logprob.detach().numpy(), got.logprob.reshape(ROWS, -1).sum(1), atol=3e-5)
    for target in (action, logprob):
        grads = torch.autograd.grad(target.sum(), list(policy.parameters()), retain_graph=True)
        assert all(bool(g.abs().sum() > 0) for g in grads)


CHECKS = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
