from __future__ import annotations

import dataclasses
import inspect
import math

import numpy as np
import pytest
import torch

from m2flow.algorithms.onpolicy import GRPO, PPO
from tests.unit.algorithms.tiny_model import collect, gradient, make, poison


def attempts(model, *, seed=0, poisoned=False):
    """Four lanes, one attempt each, of two tasks; they score 1, 0, 0, 0 and 2, 5 in 2 + 1, ... steps."""
    trajectory = collect(model, seed=seed, steps=3, lanes=6, holes=False, end=0)
    reward = np.zeros((3, 6, 1))
    reward[:, :, 0] = [[1, 0, 0, 0, 1, 2], [0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 9, 2]]
    lane = np.broadcast_to(np.arange(6), (3, 6))
    trajectory = dataclasses.replace(
        trajectory,
        reward=reward,
        episode=100 + lane,
        group=np.where(lane < 4, 7, 3),
        valid=np.where((lane == 4) & (np.arange(3)[:, None] == 2), False, True)[..., None],
    )
    return poison(trajectory, math.nan) if poisoned else trajectory


@pytest.mark.parametrize("poisoned", [False, True])
def test_advantages_are_group_normalised_scores_of_episodes_by_hand(poisoned):
    objective = GRPO()
    model = make(objective)
    batch, metrics = objective.targets(model, attempts(model, poisoned=poisoned))
    s = math.sqrt(0.5)  # scores 2 and 5, sample deviation 3 / sqrt 2
    row = [1.5, -0.5, -0.5, -0.5, -s, s]
    found = batch.columns["advantage"].reshape(3, 6)
    expected = torch.tensor([row, row, [*row[:4], 0.0, s]], dtype=torch.float64)
    torch.testing.assert_close(found, expected)
    assert metrics["train/advantage_max"].value == 1.5
    assert metrics["train/advantage_mean"].weight == 17.0
    assert "train/return_mean" not in metrics


def test_dr_grpo_and_population_deviation_are_field_values():
    for std, best in (("none", 0.75), ("population", math.sqrt(3.0))):
        objective = GRPO(std=std)
        model = make(objective)
        batch, _ = objective.targets(model, attempts(model))
        assert float(batch.columns["advantage"][0]) == pytest.approx(best)


def test_there_is_no_critic():
    objective = GRPO()
    model = make(objective)
    assert objective.heads(model.policy.spec, 1) == {}
    batch, _ = objective.targets(model, attempts(model))
    loss = objective.losses(model, objective.prepare(batch, batch.size), "update")
    assert [term.name for term in loss.terms] == ["policy"]
    assert set(objective.counts(batch)) == set(objective.denominators) == {"units"}
    assert model.calls == 0
    assert objective.scope == "group"


def test_a07_a_group_of_one_is_an_error():
    objective = GRPO()
    model = make(objective)
    trajectory = attempts(model)
    group = trajectory.group.copy()
    group[:, 0] = 55
    with pytest.raises(ValueError, match="group 55 has one attempt"):
        objective.targets(model, dataclasses.replace(trajectory, group=group))


def test_a06_a_dead_group_moves_no_weight():
    objective = GRPO()
    model = make(objective, dtype=torch.float32)
    trajectory = attempts(model)
    same = dataclasses.replace(trajectory, reward=np.full_like(trajectory.reward, 0.1), valid=np.ones((3, 6, 1), bool))
    batch, _ = objective.targets(model, same)
    found, loss = gradient(objective, model, batch, [])
    assert loss == 0.0
    assert (found == 0).all()


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
def test_law2_any_cut_gives_the_same_gradient(level):
    objective = GRPO(level=level, kl="k3", kl_coef=0.1, entropy_coef=0.01)
    model = make(objective, chunk=2)
    trajectory = poison(collect(model, seed=1, steps=8, lanes=4, shift=0.2), math.nan)
    batch, _ = objective.targets(model, trajectory)
    whole, _ = gradient(objective, model, batch, [])
    parts, _ = gradient(objective, model, batch, [1, 2, 17, 30])
    assert whole.abs().max() > 0
    torch.testing.assert_close(parts, whole, atol=1e-12, rtol=1e-12)


def test_a20_fields_of_a_critic_are_errors():
    for name, value in (("huber", 0.9), ("gae_lambda", 1.0), ("value_coef", 1.0), ("critic_hidden", (32,))):
        with pytest.raises(ValueError, match=f"{name}: GRPO has no critic"):
            GRPO(**{name: value})
    with pytest.raises(ValueError, match=r"gamma: 0\.9, only read with credit to_go"):
        GRPO(gamma=0.9)
    with pytest.raises(ValueError, match="std"):
        GRPO(std="mean")
    with pytest.raises(ValueError, match="clip_low"):
        GRPO(clip_low=2.0)


def test_a_variant_costs_at_most_sixty_lines():
    assert len(inspect.getsource(GRPO).splitlines()) <= 60
    assert issubclass(GRPO, PPO)


def test_an_empty_batch_has_no_advantage():
    objective = GRPO()
    model = make(objective)
    trajectory = attempts(model)
    with pytest.warns(RuntimeWarning, match="no valid step"):
        batch, _ = objective.targets(model, dataclasses.replace(trajectory, valid=np.zeros((3, 6, 1), bool)))
    assert gradient(objective, model, batch, [3])[1] == 0.0
