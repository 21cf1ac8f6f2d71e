from __future__ import annotations

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from m2flow.algorithms.onpolicy import PPO
from m2flow.types import Score, Trajectory, Units
from tests.unit.algorithms import by_hand
from tests.unit.algorithms.tiny_model import collect, gradient, make, poison

VARIANTS = {
    "plain": (PPO(), "gaussian", 1),
    "joint": (PPO(entropy_coef=0.1), "joint", 1),
    "everything": (
        PPO(
            dual_clip=1.5,
            clip_high=0.28,
            value_clip=0.2,
            huber=0.5,
            entropy_coef=0.05,
            kl="k3",
            kl_coef=0.3,
            reward_scale=0.5,
            whiten="batch",
        ),
        "gaussian",
        3,
    ),
    "action": (PPO(level="action", kl="k2", kl_coef=0.2, entropy_coef=0.1), "gaussian", 3),
    "action, chunk rewards": (PPO(level="action", reward_level="chunk", whiten="none"), "gaussian", 3),
    "token": (PPO(level="token", value_clip=0.3), "gaussian", 3),
    "token, action rewards": (PPO(level="token", reward_level="action", kl="k3", kl_coef=0.1), "flow", 2),
    "flow": (PPO(entropy_coef=0.01), "flow", 2),
    "decoupled": (PPO(decoupled=True, behaviour_threshold=1.3), "gaussian", 2),
    "decoupled tokens": (PPO(decoupled=True, behaviour_threshold=1.3, level="token", whiten="none"), "gaussian", 2),
    "kl in reward": (PPO(kl="k1", kl_coef=0.2, kl_in="reward", level="action"), "gaussian", 3),
    "kl in chunk reward": (PPO(kl="k1", kl_coef=0.2, kl_in="reward", level="token"), "flow", 2),
}
each_variant = pytest.mark.parametrize("name", VARIANTS)


def case(name, *, seed=0, dtype=torch.float64, holes=True, lanes=3):
    """An objective, the model that computes targets, the same model some updates later, and a trajectory."""
    objective, kind, chunk = VARIANTS[name]
    start = make(objective, kind=kind, chunk=chunk, dtype=dtype)
    trajectory = collect(start, seed=seed, shift=0.2, holes=holes, lanes=lanes)
    now = copy.deepcopy(start)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in now.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=rng, dtype=dtype)
    return objective, start, now, trajectory


@each_variant
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_loss_and_gradient_equal_the_formulas_written_out_unit_by_unit(name, seed):
    objective, start, now, trajectory = case(name, seed=seed)
    batch, _ = objective.targets(start, trajectory)
    found, loss = gradient(objective, now, batch, [])
    now.zero_grad()
    expected = by_hand.ppo_loss(objective, start, now, trajectory)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6, abs=1e-7)
    flat = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in now.parameters()])
    assert flat.abs().max() > 1e-3
    torch.testing.assert_close(found, flat, atol=1e-7, rtol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(VARIANTS)), st.sets(st.integers(1, 17)), st.integers(0, 50), st.booleans())
def test_law2_any_cut_into_micro_batches_gives_the_same_gradient(name, cuts, seed, single):
    objective, start, now, trajectory = case(name, seed=seed, dtype=torch.float32 if single else torch.float64)
    batch, _ = objective.targets(start, poison(trajectory, math.nan))
    order = torch.from_numpy(np.random.default_rng(seed).permutation(batch.size))
    whole, loss = gradient(objective, now, batch, [])
    parts, sum_of_parts = gradient(objective, now, batch.take(order), cuts)
    tolerance = 1e-6 if single else 1e-12
    scale = max(float(whole.abs().max()), 1.0)
    assert whole.isfinite().all()
    assert float((parts - whole).abs().max()) <= tolerance * scale * 2
    assert sum_of_parts == pytest.approx(loss, abs=tolerance * 10, rel=tolerance * 10)


@each_variant
@pytest.mark.parametrize("hidden", [math.nan, 1e6, -math.inf])
def test_nothing_under_a_mask_reaches_a_gradient_or_a_metric(name, hidden):
    objective, start, now, trajectory = case(name, seed=3)
    if objective.level == "token" or name == "flow":
        mask = np.random.default_rng(0).random(trajectory.units.logprob.shape) < 0.7
        trajectory = dataclasses.replace(trajectory, units=dataclasses.replace(trajectory.units, mask=mask))
    assert not trajectory.valid.all()
    results = []
    for given_trajectory in (trajectory, poison(trajectory, hidden)):
        batch, metrics = objective.targets(start, given_trajectory)
        found, loss = gradient(objective, now, batch, [5, 11])
        batch = objective.prepare(batch, batch.size)
        sums = {k: float(v[0]) for k, v in objective.losses(now, batch, "update").metrics.items()}
        counts = {k: float(v) for k, v in objective.counts(batch).items()}
        results.append((found, loss, sums, counts, {k: (v.value, v.weight) for k, v in metrics.items()}))
    (clean, *rest), (dirty, *others) = results
    assert torch.equal(clean, dirty)
    assert rest == others


@each_variant
def test_counts_are_what_counts_and_add_up(name):
    objective, start, _, trajectory = case(name, seed=4)
    batch, _ = objective.targets(start, trajectory)
    whole = objective.counts(batch)
    parts = [objective.counts(batch.rows(a, b)) for a, b in ((0, 1), (1, 7), (7, batch.size))]
    assert set(whole) == set(objective.denominators)
    for key, number in whole.items():
        assert sum(float(p[key]) for p in parts) == float(number)
    if not objective.decoupled:
        units = {"chunk": trajectory.valid.any(-1), "action": trajectory.valid}.get(objective.level)
        per_action = trajectory.units.logprob[0].size // trajectory.valid.shape[2]
        expected = trajectory.valid.sum() * per_action if units is None else units.sum()
        assert float(whole["units"]) == expected
    rewards = trajectory.valid if objective.per_action else trajectory.valid.any(-1)
    assert float(whole["values"]) == rewards.sum()


def test_a13_targets_bootstrap_from_the_true_final_observation():
    class Critic(torch.nn.Module):
        """V(s) is the number seen."""

        def __init__(self):
            super().__init__()
            self.policy = torch.nn.Linear(1, 1, dtype=torch.float64)
            self.calls = []

        def value(self, name, obs):
            self.calls.append((name, tuple(obs["state"].shape)))
            return obs["state"]

    # a lane: steps seen at 0.5, 0.6, 0.7, then the first observation of the next episode (9), then the true end (0.8)
    def trajectory(**flags):
        end = np.array([[False], [False], [True]])
        every = {"terminated": np.zeros((3, 1), bool), "truncated": np.zeros((3, 1), bool)}
        every |= dict.fromkeys(flags, end)
        return Trajectory(
            obs={"state": np.array([[0.5], [0.6], [0.7], [9.0], [0.8]])},
            obs_at=np.array([[0], [1], [2]]),
            next_at=np.array([[1], [2], [4]]),
            reward=np.array([[[0.0]], [[0.0]], [[1.0]]]),
            valid=np.ones((3, 1, 1), bool),
            **every,
            version=np.zeros((3, 1), np.int64),
            episode=np.zeros((3, 1), np.int64),
            group=np.zeros((3, 1), np.int64),
            lane=np.array([0]),
            units=Units((), np.zeros(3), {}),
        )

    objective, model = PPO(gamma=0.9, gae_lambda=0.95, whiten="none"), Critic()
    for flags, expected in (
        ({"terminated": 1}, [0.284958, 0.2865, 0.3]),
        ({"truncated": 1}, [0.811296, 0.9021, 1.02]),
        ({}, [0.811296, 0.9021, 1.02]),
    ):
        batch, metrics = objective.targets(model, trajectory(**flags))
        assert batch.columns["advantage"].tolist() == pytest.approx(expected, abs=1e-6)
        assert metrics["train/advantage_mean"].value == pytest.approx(sum(expected) / 3, abs=1e-6)
    assert model.calls == [("value", (5, 1))] * 3  # one forward pass over all observation rows


def test_values_that_come_with_the_trajectory_are_used_and_no_critic_is_asked():
    objective, start, _, trajectory = case("plain")
    with torch.no_grad():
        every = start.value("value", {"state": torch.from_numpy(trajectory.obs["state"])}).numpy()
    expected, _ = objective.targets(start, trajectory)
    start.calls = 0
    spoken = dataclasses.replace(
        trajectory, value=every[trajectory.obs_at], bootstrap=every[trajectory.next_at][..., 0]
    )
    found, _ = objective.targets(start, spoken)
    assert start.calls == 0
    for name in ("advantage", "return"):
        assert torch.equal(found.columns[name], expected.columns[name])
    with pytest.raises(ValueError, match="bootstrap"):
        objective.targets(start, dataclasses.replace(spoken, bootstrap=None))


def test_on_the_first_update_nothing_is_clipped_and_the_kl_is_zero():
    objective, kind, chunk = VARIANTS["flow"]
    model = make(objective, kind=kind, chunk=chunk)
    batch, _ = objective.targets(model, collect(model, seed=0))
    batch = objective.prepare(batch, batch.size)
    loss = objective.losses(model, batch, "update")
    assert float(loss.metrics["clip_fraction"][0]) == 0
    assert abs(float(loss.metrics["approx_kl"][0])) < 1e-12
    assert loss.terms[0].total.item() == pytest.approx(-float(batch.columns["advantage"].sum()), abs=1e-9)


def test_metrics_of_a_policy_that_moved_by_hand():
    objective = PPO(whiten="none", clip_low=0.2, clip_high=0.2)
    model = make(objective, kind="joint")
    batch, _ = objective.targets(model, collect(model, seed=0, steps=1, lanes=4, holes=False, end=0))
    moved = torch.tensor([0.0, 0.1, 0.5, -0.5], dtype=torch.float64)
    columns = batch.columns | {
        "logprob": batch.columns["logprob"] - moved,
        "factor": torch.full_like(moved, -1.0),
        "lower": torch.full_like(moved, -20.0),
        "upper": torch.full_like(moved, math.log(1.2)),
    }
    loss = objective.losses(model, dataclasses.replace(batch, columns=columns), "update")
    assert float(loss.metrics["clip_fraction"][0]) == 1  # only 0.5 is beyond 1.2 on the side where A > 0 clips
    k3 = sum(math.exp(x) - 1 - x for x in (0.1, 0.5, -0.5))
    assert float(loss.metrics["approx_kl"][0]) == pytest.approx(k3, abs=1e-12)
    assert loss.terms[0].total.item() == pytest.approx(-(1 + math.exp(0.1) + 1.2 + math.exp(-0.5)), abs=1e-12)


def test_levels_are_the_same_where_a_decision_is_one_number():
    found = []
    for level in ("token", "action", "chunk"):
        objective = PPO(level=level, entropy_coef=0.1)
        model = make(objective, kind="gaussian")
        trajectory = collect(model, seed=2, shift=0.2)
        units = trajectory.units
        if level != "chunk":  # keep one of the two dimensions at every level
            assert model.policy.sizes == (1, 2)
        mask = np.array([True, False]) & np.ones(units.logprob.shape, bool)
        trajectory = dataclasses.replace(trajectory, units=dataclasses.replace(units, mask=mask))
        found.append(gradient(objective, model, objective.targets(model, trajectory)[0], [])[0])
    torch.testing.assert_close(found[0], found[2])
    torch.testing.assert_close(found[1], found[2])


def test_the_critic_has_an_output_per_reward():
    spec = make(PPO()).policy.spec
    for options, outputs in (
        ({}, 1),
        ({"level": "token"}, 1),
        ({"level": "action"}, 5),
        ({"level": "action", "reward_level": "chunk"}, 1),
        ({"level": "token", "reward_level": "action"}, 5),
    ):
        head = PPO(**options, critic_hidden=(7,), critic_activation="relu").heads(spec, 5)["value"]
        assert (head.outputs, head.hidden, head.activation) == (outputs, (7,), "relu")
    objective = PPO(level="action")
    model = make(PPO(), kind="gaussian", chunk=3)  # a critic with one output
    with pytest.raises(ValueError, match=r"head 'value': shape \(\d+, 1\), expected \(\d+, 3\)"):
        objective.targets(model, collect(model, seed=0))


def test_whitening_uses_the_rows_it_names():
    trajectory_model = make(PPO())
    trajectory = collect(trajectory_model, seed=5)
    raw, _ = PPO(whiten="none").targets(trajectory_model, trajectory)
    mask, plain = raw.columns["mask"], raw.columns["advantage"]
    kept = plain[mask]
    whole = torch.where(mask, (plain - kept.mean()) / (kept.std(correction=0) + 1e-8), 0.0)
    batch, metrics = PPO(whiten="batch").targets(trajectory_model, trajectory)
    torch.testing.assert_close(batch.columns["advantage"], whole)
    torch.testing.assert_close(PPO(whiten="batch").prepare(batch, batch.size).columns["advantage"], whole)
    assert metrics["train/advantage_mean"].value == pytest.approx(float(kept.mean()))  # reported before whitening
    batch, _ = PPO(whiten="minibatch").targets(trajectory_model, trajectory)
    torch.testing.assert_close(batch.columns["advantage"], plain)
    part = PPO(whiten="minibatch").prepare(batch.rows(3, 11), 8).columns
    there = part["advantage"][part["mask"]]
    assert float(there.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(there.std(correction=0)) == pytest.approx(1.0, abs=1e-6)
    for rows in (4, 5):  # an epoch at once is each optimiser batch by itself, also where the last one is smaller
        epoch = PPO().prepare(batch, rows).columns
        for start in range(0, batch.size, rows):
            part = PPO().prepare(batch.rows(start, min(start + rows, batch.size)), rows).columns
            for name in ("advantage", "factor", "lower", "upper"):
                torch.testing.assert_close(epoch[name][start : start + rows], part[name])
    assert [PPO(whiten=w).scope for w in ("none", "minibatch", "batch")] == ["group", "batch", "batch"]


def test_decoupled_weights_and_dropped_units():
    objective = PPO(decoupled=True, behaviour_threshold=2.0, whiten="none")
    model = make(objective, kind="joint")
    trajectory = collect(model, seed=0, steps=1, lanes=3, holes=False, end=0)
    moved = trajectory.units.logprob - np.array([0.0, math.log(1.5), math.log(2.5)])
    trajectory = dataclasses.replace(trajectory, units=dataclasses.replace(trajectory.units, logprob=moved))
    batch, _ = objective.targets(model, trajectory)
    assert batch.columns["weight"].tolist() == pytest.approx([1.0, 1.5, 0.0])
    assert float(objective.counts(batch)["units"]) == 2  # the dropped unit left the denominator
    assert float(objective.counts(batch)["values"]) == 3  # its value still learns
    plain, _ = PPO(whiten="none").targets(model, trajectory)
    loss = objective.losses(model, batch, "update")
    expected = plain.columns["advantage"][0] + 1.5 * plain.columns["advantage"][1]
    assert loss.terms[0].total.item() == pytest.approx(-float(expected))
    assert float(loss.metrics["approx_kl"][0]) == pytest.approx(0.0, abs=1e-12)  # against the proximal policy
    torch.testing.assert_close(batch.columns["behaviour_logprob"], torch.from_numpy(moved))


@pytest.mark.parametrize(
    ("options", "outside"),
    [
        ({"behaviour_threshold": 2.0}, 1 / 4),
        ({"behaviour_threshold": 2.0, "behaviour_rule": "truncate"}, 1 / 4),
        ({"behaviour_threshold": 2.0, "behaviour_rule": "mask"}, 2 / 4),
        ({}, None),
    ],
)
def test_weights_of_the_behaviour_correction_are_reported_as_they_were_before_their_rule(options, outside):
    objective = PPO(decoupled=True, whiten="none", **options)
    model = make(objective, kind="joint")
    trajectory = collect(model, seed=0, steps=1, lanes=5, holes=False, end=0)
    moved = trajectory.units.logprob - np.log([1.0, 1.5, 2.5, 0.4, 100.0])
    valid = trajectory.valid.copy()
    valid[:, 4] = False
    units = dataclasses.replace(trajectory.units, logprob=moved)
    _, metrics = objective.targets(model, dataclasses.replace(trajectory, units=units, valid=valid))
    found = {name[16:]: x for name, x in metrics.items() if name.startswith("train/behaviour_")}
    expected = {"weight_mean": 5.4 / 4, "weight_max": 2.5} | ({} if outside is None else {"outside": outside})
    assert {name: x.value for name, x in found.items()} == pytest.approx(expected)
    assert all(x.reduce == ("max" if name == "weight_max" else "mean") for name, x in found.items())
    assert all(x.weight == 4 for x in found.values())


def test_weights_are_reported_only_where_a_correction_is_asked_for():
    model = make(PPO(), kind="joint")
    _, metrics = PPO().targets(model, collect(model, seed=0))
    assert not [name for name in metrics if "behaviour" in name]


def test_decoupled_on_fresh_data_is_plain_ppo():
    found = []
    for objective in (PPO(), PPO(decoupled=True, behaviour_threshold=2.0)):
        model = make(objective, kind="flow", chunk=2)
        batch, _ = objective.targets(model, collect(model, seed=1))
        found.append(gradient(objective, model, batch, [4])[0])
    torch.testing.assert_close(*found, atol=1e-10, rtol=1e-10)


def test_target_kl_stops_above_one_and_a_half_times_the_target():
    objective = PPO(target_kl=0.02)
    assert not objective.after_update({"approx_kl": 0.03})
    assert objective.after_update({"approx_kl": 0.0301})
    assert objective.after_update({"approx_kl": math.nan})
    assert not PPO().after_update({})
    with pytest.raises(KeyError):
        objective.after_update({})


def test_a30_with_nothing_valid_the_loss_is_zero_and_metrics_are_nan():
    objective, start, now, trajectory = case("everything")
    empty = poison(dataclasses.replace(trajectory, valid=np.zeros_like(trajectory.valid)), math.nan)
    with pytest.warns(RuntimeWarning, match="no valid step"):
        batch, metrics = objective.targets(start, empty)
    assert all(math.isnan(metric.value) for metric in metrics.values())
    found, loss = gradient(objective, now, batch, [2])
    assert loss == 0.0
    assert (found == 0).all()
    assert all(float(count) == 0 for count in objective.counts(batch).values())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a05_a_reward_that_is_not_a_number_is_an_error_that_names_the_sample(value):
    objective, start, _, trajectory = case("plain", holes=False)
    reward = trajectory.reward.copy()
    reward[2, 1] = value
    with pytest.raises(ValueError, match=rf"reward: {value} at step 2 of lane 1, episode {trajectory.episode[2, 1]}"):
        objective.targets(start, dataclasses.replace(trajectory, reward=reward))


def test_a05_a_reward_of_zero_and_rewards_of_any_number_type_are_values():
    objective, start, _, trajectory = case("plain", holes=False)
    for dtype in (np.int64, bool, np.float32, np.float16):
        reward = np.zeros_like(trajectory.reward).astype(dtype)
        reward[1, 1] = 1
        batch, _ = objective.targets(start, dataclasses.replace(trajectory, reward=reward))
        exact, _ = objective.targets(start, dataclasses.replace(trajectory, reward=reward.astype(np.float64)))
        assert torch.equal(batch.columns["return"], exact.columns["return"])
        assert batch.columns["return"].dtype == torch.float64


def test_rows_that_are_all_valid_carry_no_masks():
    objective, start, _, trajectory = case("plain", holes=False)
    batch, _ = objective.targets(start, trajectory)
    assert set(batch.columns) == {"logprob", "advantage", "return", "behaviour_logprob"}
    assert batch.size == trajectory.reward.size
    assert objective.counts(batch) == {"units": 18.0, "values": 18.0}


def test_the_behaviour_log_prob_stays_for_the_parity_check():
    objective, start, _, trajectory = case("action")
    batch, _ = objective.targets(start, poison(trajectory, math.nan))
    again = start.policy.score(batch.obs, batch.record).logprob
    there = batch.columns["unit_mask"]
    fresh = collect(start, seed=0, shift=0.0)
    batch, _ = objective.targets(start, fresh)
    gap = (start.policy.score(batch.obs, batch.record).logprob - batch.columns["behaviour_logprob"]).abs()
    assert gap[batch.columns["unit_mask"]].max() < 1e-12
    assert again[there].isfinite().all()


class _Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class _Fixed:
    """A model whose answers cost nothing, so that what is counted is the loss alone."""

    def __init__(self, batch):
        size = batch.columns["behaviour_logprob"].shape
        logprob = torch.zeros(size, requires_grad=True)
        self.policy, self.out = self, Score(logprob, torch.zeros(size))
        self.axes, self.spoken = ("chunk", "dim"), torch.zeros_like(batch.columns["return"], requires_grad=True)

    def score(self, obs, record):
        return self.out

    def value(self, name, obs):
        return self.spoken


def test_options_that_are_off_cost_no_operation():
    objective, start, _, trajectory = case("plain", holes=False, dtype=torch.float32)
    batch = objective.targets(start, trajectory)[0]
    batch = objective.prepare(batch, batch.size)
    model = _Fixed(batch)
    with _Count() as seen:
        loss = objective.losses(model, batch, "update")
    assert [term.name for term in loss.terms] == ["policy", "value"]
    # level, ratio, clip, surrogate; value; then the metrics: entropy, approximate KL, clip fraction
    surrogate = ["sum.dim_IntList", "sub.Tensor", "clamp.Tensor", "exp.default", "dot.default"]
    metrics = ["sum.default", "expm1.default", "sub_.Tensor", "sum.default", "ne.Tensor", "count_nonzero.default"]
    work = [name for name in seen.names if not name.startswith("detach")]
    assert sorted(work) == sorted([*surrogate, "huber_loss.default", *metrics])
    with _Count() as seen:
        assert PPO(whiten="none").prepare(batch, batch.size) is batch
        objective.counts(batch)
    assert seen.names == []


def test_columns_follow_the_precision_of_the_model():
    for dtype in (torch.float64, torch.float32):
        objective, start, _, trajectory = case("everything", dtype=dtype)
        batch, _ = objective.targets(start, trajectory)
        batch = objective.prepare(batch, batch.size)
        masks = {"mask", "unit_mask", "value_mask", "valid"}
        assert {x.dtype for name, x in batch.columns.items() if name not in masks} == {dtype}


def test_arrays_in_shared_memory_that_cannot_be_written_are_accepted():
    objective, start, _, trajectory = case("plain")
    for array in (trajectory.reward, trajectory.obs["state"], trajectory.units.logprob, trajectory.terminated):
        array.flags.writeable = False
    before = trajectory.reward.copy()
    objective.targets(start, trajectory)  # warnings are errors in this suite
    assert np.array_equal(before, trajectory.reward)


def test_ragged_units_and_wrong_shapes_are_refused_by_name():
    objective, start, _, trajectory = case("action")
    units = trajectory.units
    for change, message in (
        ({"units": dataclasses.replace(units, step_of=np.arange(18))}, r"units\.step_of"),
        ({"units": dataclasses.replace(units, axes=("chunk",))}, r"units\.logprob"),
        ({"units": dataclasses.replace(units, axes=("dim", "chunk"))}, "2 actions along 'chunk', reward has 3"),
        ({"units": dataclasses.replace(units, axes=("a", "b"))}, "needs a policy with an axis 'chunk'"),
        ({"valid": trajectory.valid[..., :1]}, "valid"),
        ({"next_at": trajectory.next_at[:2]}, "next_at"),
    ):
        with pytest.raises(ValueError, match=message):
            objective.targets(start, dataclasses.replace(trajectory, **change))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1.1}, "gamma: 1.1"),
        ({"gae_lambda": -0.1}, "gae_lambda"),
        ({"clip_low": 0.0}, "clip_low"),
        ({"clip_high": -1.0}, "clip_high"),
        ({"dual_clip": 1.0}, "dual_clip: 1.0"),
        ({"value_clip": 0.0}, "value_clip"),
        ({"huber": -1.0}, "huber"),
        ({"entropy_coef": -0.1}, "entropy_coef"),
        ({"kl": "k4", "kl_coef": 0.1}, "kl: 'k4'"),
        ({"kl": "k3"}, "kl_coef: 0.0 with kl 'k3'"),
        ({"kl_coef": 0.1}, "kl_coef: 0.1 with kl 'none'"),
        ({"kl_in": "both"}, "kl_in"),
        ({"kl_in": "reward"}, "kl_in: 'reward' with kl 'none'"),
        ({"kl": "k1", "kl_coef": 0.1}, "kl: k1 in a loss teaches nothing, .*; use k2, k3 or kl_in reward"),
        ({"target_kl": 0.0}, "target_kl"),
        ({"whiten": "yes"}, "whiten: 'yes'"),
        ({"level": "step"}, "level: 'step'"),
        ({"reward_level": "action"}, "reward_level"),
        ({"behaviour_threshold": 2.0}, "behaviour_threshold"),
        ({"reward_scale": 0.0}, "reward_scale"),
        ({"log_ratio_clamp": 0.0}, "log_ratio_clamp"),
    ],
)
def test_a20_fields_out_of_range_are_errors_that_name_the_field(options, message):
    with pytest.raises(ValueError, match=message):
        PPO(**options)


def test_a12_an_unknown_field_is_an_error():
    with pytest.raises(TypeError, match="clip_ratio_c"):
        PPO(clip_ratio_c=3.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        PPO().gamma = 0.5


def test_ppo_finds_the_best_action_of_a_one_step_task():
    objective = PPO(gamma=0.0, entropy_coef=0.0)
    model = make(objective, kind="gaussian", dtype=torch.float32)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.03)
    direction, returns = np.array([[1.0, -1.0], [0.5, 0.0], [0.0, 0.5]]), []
    for step in range(40):
        trajectory = collect(model, seed=step, steps=8, lanes=16, holes=False, end=0)
        best = np.tanh(trajectory.obs["state"][trajectory.obs_at.reshape(-1)] @ direction)
        reward = -np.square(trajectory.units.record["action"][:, 0] - best).sum(-1)
        trajectory = dataclasses.replace(trajectory, reward=reward.reshape(8, 16, 1), terminated=np.ones((8, 16), bool))
        returns.append(reward.mean())
        batch, _ = objective.targets(model, trajectory)
        for _ in range(6):
            gradient(objective, model, batch, [])
            optimiser.step()
    assert returns[0] < -2.0
    assert np.mean(returns[-3:]) > -0.4
