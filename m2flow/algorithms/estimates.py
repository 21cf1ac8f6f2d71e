"""From rewards to advantages without a critic, and what a step reports of its advantages."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from m2flow.algorithms import advantages
from m2flow.algorithms.reduce import masked_max, masked_mean, masked_min
from m2flow.algorithms.targets import episode_scores
from m2flow.types import Metric, Trajectory


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a variant says about each reward: advantage, and the critic's target and opinion if there is a critic."""

    advantage: Tensor  # [T, B, K], K actions or 1
    returns: Tensor | None = None  # [T, B, K]
    value: Tensor | None = None  # [T, B, K]
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # what else the step reports


def without_critic(
    trajectory: Trajectory,
    *,
    reward: Tensor,
    valid: Tensor,
    baseline: Literal["group", "leave_one_out", "none"],
    std: Literal["sample", "population", "none"],
    credit: Literal["episode", "to_go"],
    gamma: float,
    reward_scale: float,
) -> Estimate:
    """Scores of attempts against a baseline. `reward`, `valid` [T, B, K]; `reward` is scaled and has its KL already.

    The score of an attempt is the sum of its rewards within the trajectory, and stands at all its steps. With credit
    to_go every action has what was earned from there on, and the baseline is that of the scores as the environment gave
    them: a KL that was paid before must not count for what comes after. Raises ValueError on a group of one where
    groups are compared.
    """
    score, group, of_step = episode_scores(trajectory, reward=reward, valid=valid)
    if not len(score):
        return Estimate(torch.zeros_like(reward))
    given, _, _ = episode_scores(trajectory, reward=trajectory.reward, valid=trajectory.valid)

    def relative(x: Tensor) -> Tensor:
        return advantages.group_normalise(score=x, group=group, std=std, others=baseline == "leave_one_out")

    metrics = {} if baseline == "none" else advantages.group_filter(score=given, group=group).metrics()
    if credit == "to_go":
        ends = {"terminated": trajectory.terminated, "truncated": trajectory.truncated}
        advantage = advantages.reward_to_go(reward=reward, valid=valid, gamma=gamma, **ends)
        if baseline != "none":
            scaled = given * reward_scale
            advantage = advantage - (scaled - relative(scaled))[of_step][..., None]
    else:
        advantage = (score if baseline == "none" else relative(score))[of_step][..., None]
    return Estimate(torch.where(valid, advantage, 0.0), metrics=metrics)


def statistics(estimate: Estimate, valid: Tensor) -> dict[str, Metric]:
    """What `targets` reports, over valid steps only: not a number where there are none."""
    advantage, returns, value = estimate.advantage, estimate.returns, estimate.value
    count = int(valid.sum())
    if not count:
        warnings.warn("no valid step in this batch: its metrics are nan, its loss is 0", RuntimeWarning, stacklevel=3)
    mean = masked_mean(advantage, mask=valid)
    numbers = {
        "advantage_mean": mean,
        "advantage_std": masked_mean((advantage - mean).square(), mask=valid).sqrt(),
        "advantage_min": masked_min(advantage, mask=valid),
        "advantage_max": masked_max(advantage, mask=valid),
    }
    if returns is not None and value is not None:
        numbers["return_mean"] = masked_mean(returns, mask=valid)
        numbers["value_mean"] = masked_mean(value, mask=valid)
        error = returns - value
        left = masked_mean((error - masked_mean(error, mask=valid)).square(), mask=valid)
        whole = masked_mean((returns - numbers["return_mean"]).square(), mask=valid)
        numbers["explained_variance"] = torch.where(whole > 0, 1 - left / whole, math.nan)
    values = torch.stack(list(numbers.values())).tolist()
    how: dict[str, Literal["min", "max"]] = {"advantage_min": "min", "advantage_max": "max"}
    return {
        f"train/{name}": Metric(number, how.get(name, "mean"), float(count))
        for name, number in zip(numbers, values, strict=True)
    } | dict(estimate.metrics)


def weight_statistics(weight: Tensor, *, mask: Tensor | None, bounded: Tensor | None) -> dict[str, Metric]:
    """What a step reports of the weights between the policy at its start and the one that acted, [S, *U], before a
    rule bounds them: where both agree, mean and maximum are 1. `bounded`: what the rule makes of them; None: no rule.
    """
    mask = torch.ones_like(weight, dtype=torch.bool) if mask is None else mask
    count = float(mask.sum())
    numbers = {
        "behaviour_weight_mean": masked_mean(weight, mask=mask),
        "behaviour_weight_max": masked_max(weight, mask=mask),
    }
    if bounded is not None:  # a unit that the rule leaves out has the weight 0, which no other has
        numbers["behaviour_outside"] = masked_mean((bounded != weight).to(weight.dtype), mask=mask)
    values = torch.stack(list(numbers.values())).tolist()
    return {
        f"train/{name}": Metric(number, "max" if name == "behaviour_weight_max" else "mean", count)
        for name, number in zip(numbers, values, strict=True)
    }
