from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.algorithms.actor_critic import SAC
from m2flow.types import Batch
from tests.unit.algorithms.tiny_model import Gaussian, Model, collect, gradient, make, poison


def squashed(objective, *, dtype=torch.float64, seed=0, hidden=8):
    """A policy over one action of two dimensions, which `propose` squashes."""
    policy = Gaussian(("dim",), (2,), seed, dtype)
    return Model(policy, dict(objective.heads(policy.spec, policy.chunk)), hidden=hidden)


def drawn(objective, model, *, seed=0, rows=12, dtype=torch.float64):
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=rng, dtype=dtype)

    batch = Batch(
        obs={"state": normal(rows, 3)},
        record={"action": torch.tanh(normal(rows, 1, 2))},
        columns={
            "reward": normal(rows, 1),
            "valid": torch.ones(rows, 1, dtype=torch.bool),
            "terminated": torch.arange(rows) % 3 == 0,
        },
        next_obs={"state": normal(rows, 3)},
    )
    return batch, normal(rows, 2, 2)


def test_targets_are_the_valid_transitions_in_order():
    objective = SAC(reward_scale=2.0)
    model = make(SAC(), kind="gaussian", chunk=1)
    trajectory = collect(model, seed=1, steps=8, lanes=3)
    kept = np.nonzero(trajectory.valid[..., 0].reshape(-1))[0]
    assert 0 < len(kept) < trajectory.valid.size
    batch, metrics = objective.targets(model, poison(trajectory, math.nan))
    assert metrics == {}
    assert batch.size == len(kept)
    t, b = np.unravel_index(kept, (8, 3))
    ready = objective.prepare(batch, batch.size)
    np.testing.assert_allclose(ready.columns["reward"], 2.0 * trajectory.reward[t, b, 0])
    np.testing.assert_array_equal(batch.columns["terminated"], trajectory.terminated[t, b])
    np.testing.assert_array_equal(ready.columns["action"], trajectory.units.record["action"][kept].reshape(-1, 2))
    np.testing.assert_array_equal(batch.obs["state"], trajectory.obs["state"][trajectory.obs_at[t, b]])
    np.testing.assert_array_equal(batch.next_obs["state"], trajectory.obs["state"][trajectory.next_at[t, b]])
    ends = trajectory.truncated[t, b]
    assert ends.any()  # their successor is the true final observation, which lies behind the regular rows
    assert (trajectory.next_at[t, b][ends] >= 27).all()
    assert not batch.columns["terminated"][torch.from_numpy(ends)].any()


def test_targets_need_no_model():
    trajectory = collect(make(SAC()), seed=1)
    batch, _ = SAC().targets(None, trajectory)
    full, _ = SAC().targets(make(SAC()), trajectory)
    assert batch.columns["reward"].dtype == torch.float32
    assert torch.equal(batch.columns["reward"], full.columns["reward"].float())


def test_chunk_rewards_are_summed_over_executed_actions():
    model = make(SAC(), kind="gaussian", chunk=3)
    trajectory = collect(model, seed=2)
    batch = SAC().targets(model, poison(trajectory, math.nan))[0]
    batch = SAC().prepare(batch, batch.size)
    step = trajectory.valid.any(-1)
    expected = np.where(trajectory.valid, trajectory.reward, 0).sum(-1)[step]
    np.testing.assert_allclose(batch.columns["reward"], expected)
    assert batch.columns["action"].shape == (step.sum(), 6)


@pytest.mark.parametrize("backup", [True, False])
@pytest.mark.parametrize("fixed", [None, 0.3])
def test_three_phases_equal_the_formulas_of_the_papers(backup, fixed):
    objective = SAC(gamma=0.9, backup_entropy=backup, temperature=fixed, initial_temperature=0.5)
    model = squashed(objective)
    batch, noise = drawn(objective, model)
    alpha = torch.tensor(0.5 if fixed is None else fixed, dtype=torch.float64)
    columns, n = objective.prepare(batch, batch.size).columns, batch.size
    with torch.no_grad():
        after, logp = model.policy.propose(batch.next_obs, noise[:, 0])
        slow = model.value("q", batch.next_obs, after, slow=True)[..., 0]
        soft = torch.minimum(slow[0], slow[1]) - (alpha * logp if backup else 0.0)
        y = columns["reward"] + 0.9 * (~columns["terminated"]).double() * soft
    q = model.value("q", batch.obs, columns["action"])[..., 0]
    action, logp = model.policy.propose(batch.obs, noise[:, 1])
    both = model.value("q", batch.obs, action)[..., 0]
    expected = {
        "critic": ((q[0] - y) ** 2 + (q[1] - y) ** 2).mean(),
        "actor": (alpha * logp - torch.minimum(both[0], both[1])).mean(),
    }
    if fixed is None:
        expected["temperature"] = (-model.scalar("log_alpha").exp() * (logp.detach() - 2.0)).mean()
    assert [phase.name for phase in objective.phases] == list(expected)
    for phase in objective.phases:
        model.zero_grad()
        expected[phase.name].backward(retain_graph=True)
        hand = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])
        found, loss = gradient(objective, model, batch, [], phase.name, noise)
        assert loss == pytest.approx(expected[phase.name].item(), rel=1e-12)
        torch.testing.assert_close(found, hand, atol=1e-12, rtol=1e-12)
        assert hand.abs().max() > 1e-3
    assert objective.counts(batch) == {"steps": float(n)}


def test_a_terminated_step_stops_the_bootstrap_and_nothing_else_does():
    objective = SAC()
    model = squashed(objective)
    batch, noise = drawn(objective, model)
    batch = objective.prepare(batch, batch.size)
    ended = batch.columns["terminated"]

    def target(b):
        return float(objective.losses(model, b, "critic", noise).metrics["q_target"][0])

    moved = {"state": torch.where(ended[:, None], 1e6, batch.next_obs["state"])}
    assert target(dataclasses.replace(batch, next_obs=moved)) == target(batch)
    rewards = dataclasses.replace(batch, columns=batch.columns | {"terminated": torch.ones_like(ended)})
    assert target(rewards) == pytest.approx(float(batch.columns["reward"].sum()))


@settings(max_examples=30, deadline=None)
@given(st.sets(st.integers(1, 11)), st.sampled_from(["critic", "actor", "temperature"]), st.booleans())
def test_law2_any_cut_gives_the_same_gradient_in_every_phase(cuts, phase, single):
    objective, dtype = SAC(), torch.float32 if single else torch.float64
    model = squashed(objective, dtype=dtype)
    batch, noise = drawn(objective, model, dtype=dtype)
    whole, _ = gradient(objective, model, batch, [], phase, noise)
    parts, _ = gradient(objective, model, batch, cuts, phase, noise)
    tolerance = 2e-6 if single else 1e-12
    torch.testing.assert_close(parts, whole, atol=tolerance, rtol=tolerance)


def test_the_actor_and_temperature_phases_see_the_same_action():
    objective = SAC(initial_temperature=1.0, target_entropy=-3.0)
    model = squashed(objective)
    batch, noise = drawn(objective, model)
    batch = objective.prepare(batch, batch.size)
    entropy = float(objective.losses(model, batch, "actor", noise).metrics["entropy"][0])
    term = objective.losses(model, batch, "temperature", noise).terms[0]
    assert term.total.item() == pytest.approx(entropy - (-3.0) * batch.size)  # alpha 1: sum of entropy minus target
    metric = objective.losses(model, batch, "temperature", noise).metrics["alpha"]
    assert float(metric[0]) / batch.size == pytest.approx(1.0)


def test_the_critic_phase_sends_no_gradient_to_the_policy_and_the_temperature_phase_none_to_anything_else():
    objective = SAC()
    model = squashed(objective)
    batch, noise = drawn(objective, model)
    for phase, moving in (("critic", "params.q"), ("temperature", "params.log_alpha")):
        gradient(objective, model, batch, [], phase, noise)
        touched = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
        assert touched
        assert all(name.startswith(moving) for name in touched)


def test_heads_and_phases_follow_the_fields():
    objective = SAC(tau=0.01, critics=5, critic_hidden=(32,), actor_every=2, initial_temperature=0.1)
    spec = squashed(SAC()).policy.spec
    heads = objective.heads(spec, 1)
    assert heads["log_alpha"] == pytest.approx(math.log(0.1))  # A19: log_alpha -2.302585 is temperature 0.1
    q = heads["q"]
    assert (q.copies, q.ema, q.hidden, q.takes_action, q.outputs) == (5, 0.01, (32,), True, 1)
    assert [(p.name, p.group, p.every) for p in objective.phases] == [
        ("critic", "q", 1),
        ("actor", "policy", 2),
        ("temperature", "log_alpha", 2),
    ]
    assert set(SAC(temperature=0.2).heads(spec, 1)) == {"q"}


def test_what_is_missing_is_named():
    objective = SAC()
    model = squashed(objective)
    batch, noise = drawn(objective, model)
    with pytest.raises(ValueError, match="noise"):
        objective.losses(model, batch, "critic")
    with pytest.raises(ValueError, match="next_obs"):
        objective.losses(model, dataclasses.replace(batch, next_obs=None), "critic", noise)
    with pytest.raises(ValueError, match="phase: 'update', expected one of critic, actor, temperature"):
        objective.losses(model, batch, "update", noise)
    with pytest.raises(ValueError, match=r"record: no 'action' among \['tokens'\]"):
        objective.prepare(dataclasses.replace(batch, record={"tokens": batch.record["action"]}), batch.size)


@pytest.mark.parametrize(
    "options",
    [
        {"gamma": 2.0},
        {"tau": 0.0},
        {"temperature": -1.0},
        {"initial_temperature": 0.0},
        {"actor_every": 0},
        {"reward_scale": 0.0},
        {"critics": 0},
        {"target_entropy": -1.0, "temperature": 0.1},
    ],
)
def test_a20_fields_out_of_range_are_errors_that_name_the_field(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        SAC(**options)


def test_sac_finds_the_best_action_and_its_target_entropy():
    """One-step task with reward -4 |a - goal|^2: the mean goes to the goal, the entropy to its target."""
    objective = SAC(gamma=0.0, initial_temperature=0.5, target_entropy=-1.0)
    model = squashed(objective, dtype=torch.float32, hidden=32)
    groups = {
        "q": [model.params["q1"], model.params["q2"]],
        "policy": list(model.policy.parameters()),
        "log_alpha": [model.params["log_alpha"]],
    }
    optimisers = {name: torch.optim.Adam(parameters, lr=0.02) for name, parameters in groups.items()}
    rng, goal = torch.Generator().manual_seed(0), torch.tensor([0.4, -0.4])
    for _ in range(600):
        obs = {"state": torch.tensor([1.0, 0.0, 0.0]).expand(64, 3)}
        action = 2 * torch.rand(64, 2, generator=rng) - 1
        reward = -4 * (action - goal).square().sum(1)
        yes = torch.ones(64, dtype=torch.bool)
        columns = {"reward": reward[:, None], "valid": yes[:, None], "terminated": yes}
        batch = Batch(obs, {"action": action[:, None]}, columns, obs)
        noise = torch.randn(64, 2, 2, generator=rng)
        for phase in objective.phases:
            gradient(objective, model, batch, [], phase.name, noise)
            optimisers[phase.group].step()
    batch = objective.prepare(batch, batch.size)
    entropy = float(objective.losses(model, batch, "actor", noise).metrics["entropy"][0]) / 64
    mode = torch.tanh(model.policy.mean(batch.obs))[0]
    assert (mode - goal).abs().max() < 0.2
    assert entropy == pytest.approx(-1.0, abs=0.4)
