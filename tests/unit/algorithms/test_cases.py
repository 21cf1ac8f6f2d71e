"""Reported cases on the path that trains: PPO's own `targets`, `prepare` and `losses`, not the formulas beside them."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.algorithms.onpolicy import GRPO, PPO
from m2flow.types import Score
from tests.unit.algorithms.test_grpo import attempts
from tests.unit.algorithms.tiny_model import collect, make, poison


def ready(objective, batch):
    return objective.prepare(batch, batch.size)


def surrogate(ratio, advantage, **options):
    """The policy term of one decision whose probability has become `ratio` times what it was."""
    objective = PPO(gamma=0.0, whiten="none", value_coef=0.0, **options)
    model = make(objective, kind="joint")
    trajectory = collect(model, seed=0, steps=1, lanes=1, holes=False, end=0)
    units = dataclasses.replace(trajectory.units, logprob=trajectory.units.logprob - math.log(ratio))
    zero = torch.zeros(1, 1, 1, dtype=torch.float64)
    trajectory = dataclasses.replace(
        trajectory, reward=0.0 * trajectory.reward + advantage, units=units, value=zero, bootstrap=zero[..., 0]
    )
    batch = objective.targets(model, trajectory)[0]
    batch = objective.prepare(batch, batch.size)
    (term,) = objective.losses(model, batch, "update").terms
    assert (term.name, term.per, float(objective.counts(batch)["units"])) == ("policy", "units", 1.0)
    return term.total.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "expected"),
    [(10, -1, 3.0, 3.0), (10, -1, None, 10.0), (10, 1, 3.0, -1.2), (0.1, -1, 3.0, 0.8), (0.1, 1, 3.0, -0.1)],
)
def test_a12_the_dual_clip_that_is_configured_is_the_one_that_is_used(ratio, advantage, dual, expected):
    assert surrogate(ratio, advantage, dual_clip=dual, clip_low=0.2, clip_high=0.2) == pytest.approx(expected, abs=1e-9)


def policy_loss(log_ratio, advantage, **options):
    """The policy term of one decision per number, by what a policy says whose probabilities have the given ratios."""
    objective = PPO(gamma=0.0, whiten="none", value_coef=0.0, **options)
    model = make(objective, kind="joint")
    trajectory = collect(model, seed=0, steps=1, lanes=len(log_ratio), holes=False, end=0)
    zero = torch.zeros(1, len(log_ratio), 1, dtype=torch.float64)
    reward = advantage.numpy().reshape(1, -1, 1)
    batch, _ = objective.targets(
        model, dataclasses.replace(trajectory, reward=reward, value=zero, bootstrap=zero[..., 0])
    )
    spoken = batch.columns["logprob"] + log_ratio
    model.policy.score = lambda obs, record: Score(spoken, torch.zeros_like(spoken))
    (term,) = objective.losses(model, ready(objective, batch), "update").terms
    return term.total


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-5, 5)), min_size=1, max_size=6),
    st.floats(0.01, 1.0),
    st.floats(0.01, 2.0),
    st.one_of(st.none(), st.floats(1.01, 20)),
)
def test_loss_and_gradient_of_ppo_equal_the_formula_of_the_paper(pairs, low, high, dual):
    log_ratio = torch.tensor([p[0] for p in pairs], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([p[1] for p in pairs], dtype=torch.float64)
    ratio = log_ratio.exp()
    objective = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    if dual is not None:
        objective = torch.where(advantage < 0, torch.maximum(objective, dual * advantage), objective)
    (expected,) = torch.autograd.grad(-objective.sum(), log_ratio)
    found = policy_loss(log_ratio, advantage, clip_low=low, clip_high=high, dual_clip=dual)
    torch.testing.assert_close(found, -objective.sum(), atol=1e-12, rtol=1e-12)
    (grad,) = torch.autograd.grad(found, log_ratio)
    bounds = [math.log1p(high), math.log1p(-low) if low < 1 else -math.inf, math.log(dual or math.inf)]
    inside = torch.tensor([min(abs(p[0] - b) for b in bounds) > 1e-9 for p in pairs])  # a kink has two derivatives
    torch.testing.assert_close(grad[inside], expected[inside], atol=1e-12, rtol=1e-12)


def test_a_huge_ratio_has_a_finite_loss_and_gradient():
    log_ratio = torch.tensor([1e4, 1e4, -1e4, -1e4], dtype=torch.float64, requires_grad=True)
    loss = policy_loss(log_ratio, torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64))
    loss.backward()
    assert loss.isfinite()
    assert log_ratio.grad.tolist() == [0.0] * 4


@pytest.mark.parametrize(("kind", "expected"), [("k2", 0.125), ("k3", 0.106531)])
def test_a12_the_kl_is_that_of_the_policy_against_the_reference(kind, expected):
    """log p = -1.0 and log ref = -1.5; the swapped call gives -0.5 and 0.148721."""
    objective = PPO(kl=kind, kl_coef=1.0, value_coef=0.0)
    model = make(objective, kind="joint")
    trajectory = collect(model, seed=0, steps=1, lanes=1, holes=False, end=0)
    _shift(model.policy, -1.0)
    _shift(model.reference, -1.5)
    batch = objective.targets(model, trajectory)[0]
    batch = objective.prepare(batch, batch.size)
    terms = {term.name: term for term in objective.losses(model, batch, "update").terms}
    assert terms["kl"].total.item() == pytest.approx(expected, abs=1e-6)
    inside = dataclasses.replace(objective, kl_in="reward", gamma=0.0, whiten="none", kl="k1")
    zero = torch.zeros(1, 1, 1, dtype=torch.float64)
    spoken = dataclasses.replace(trajectory, reward=0.0 * trajectory.reward, value=zero, bootstrap=zero[..., 0])
    units = dataclasses.replace(spoken.units, logprob=0.0 * spoken.units.logprob - 1.0)
    batch, _ = inside.targets(model, dataclasses.replace(spoken, units=units))
    assert batch.columns["advantage"].tolist() == pytest.approx([-0.5], abs=1e-9)  # what strays is punished


def _shift(policy, to):
    """Make every log-prob of a policy `to`, its gradient kept."""
    score = policy.score

    def shifted(obs, record):
        found = score(obs, record)
        return dataclasses.replace(found, logprob=found.logprob - found.logprob.detach() + to)

    policy.score = shifted


def with_scores(model, scores, groups):
    """Six attempts of three steps each; an attempt earns its score in the last one."""
    trajectory = attempts(model)
    reward = 0.0 * trajectory.reward
    reward[2, :, 0] = scores
    return dataclasses.replace(
        trajectory, reward=reward, group=0 * trajectory.group + groups, valid=trajectory.reward == trajectory.reward
    )


@pytest.mark.parametrize("options", [{}, {"reward_scale": 0.25}, {"kl": "k1", "kl_coef": 0.1, "kl_in": "reward"}])
def test_a30_grpo_counts_groups_by_the_scores_of_the_environment(options):
    objective = GRPO(**options)
    model = make(objective)
    for scores, groups, expected in (
        ([1, 1, 0, 0, 1, 0], [0, 0, 1, 1, 2, 2], (1, 1, 1, 0)),
        ([1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1], (0, 1, 1, 0)),
        ([0.5, 0.5, -3, -3, 1, 1], [0, 0, 1, 1, 2, 2], (0, 1, 1, 1)),
        ([0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 2, 2], (3, 0, 0, 0)),
    ):
        _, metrics = objective.targets(model, with_scores(model, scores, groups))
        names = ("kept", "all_right", "all_wrong", "all_equal")
        counted = [metrics[f"train/groups_{name}"] for name in names]
        assert tuple(metric.value for metric in counted) == expected
        assert {metric.reduce for metric in counted} == {"sum"}
        dead = metrics["train/dead_groups"]
        assert (dead.reduce, dead.weight) == ("mean", sum(expected))
        assert dead.value == pytest.approx(1 - expected[0] / sum(expected))


def test_a30_what_lies_under_a_mask_is_no_score():
    """Rewards of steps that are not valid would make both groups live."""
    objective = GRPO()
    model = make(objective)
    trajectory = with_scores(model, [1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1])
    valid = trajectory.valid.copy()
    valid[0, ::2] = False
    for hidden in (math.nan, 1e6):
        poisoned = poison(dataclasses.replace(trajectory, valid=valid), hidden)
        _, metrics = objective.targets(model, poisoned)
        assert metrics["train/dead_groups"].value == 1.0
        assert metrics["train/advantage_std"].value == 0.0


def test_a30_ppo_has_no_groups_to_count():
    objective = PPO()
    model = make(objective)
    _, metrics = objective.targets(model, collect(model, seed=0))
    assert not [name for name in metrics if "group" in name]


def test_a07_whitening_on_the_training_path_reads_nothing_under_the_mask():
    """The row of the case as six decisions of one lane: 1, 2, 3 count, what lies between does not."""
    results = []
    for hidden in (99.0, math.nan, 1e30):
        objective = PPO(gamma=0.0, whiten="batch")
        model = make(objective, kind="gaussian")
        trajectory = collect(model, seed=0, steps=6, lanes=1, holes=False, end=0)
        valid = trajectory.valid.copy()
        valid[1::2] = False
        reward = 0.0 * trajectory.reward
        reward[::2, 0, 0] = (1.0, 2.0, 3.0)
        zero = torch.zeros(6, 1, 1, dtype=torch.float64)
        trajectory = dataclasses.replace(
            trajectory, reward=reward, valid=valid, value=zero, bootstrap=zero[..., 0], terminated=valid[..., 0]
        )
        batch, _ = objective.targets(model, poison(copy.deepcopy(trajectory), hidden))
        results.append(batch.columns["advantage"].tolist())
    for found in results:
        assert found == pytest.approx([-1.224745, 0.0, 0.0, 0.0, 1.224745, 0.0], abs=1e-6)
