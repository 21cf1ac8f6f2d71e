"""Loss terms as pure functions. None of them divides: a mean is taken by the trainer, once, over the global count.

Names: `logprob` is the policy being trained, `old_logprob` the policy the ratio is against, advantage A, ratio
r = exp(logprob - old_logprob). Everything is elementwise on equal shapes, except what is called a sum.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from m2flow.algorithms.reduce import expect_shape, row_sums

Estimator: TypeAlias = Literal["k1", "k2", "k3"]
ESTIMATORS = ("k1", "k2", "k3")
LIMIT = 20.0  # default bound on |log ratio|: exp(20) is 5e8, which no useful update needs


def log_ratio_bounds(
    *, advantage: Tensor, clip_low: float, clip_high: float, dual_clip: float | None, limit: float
) -> tuple[Tensor, Tensor]:
    """Where the PPO objective stops depending on log r: lower and upper bound per element.

    min(r A, clip(r, 1-l, 1+h) A) equals A times r bounded above by 1+h where A >= 0, and below by 1-l where A < 0;
    the dual clip adds the upper bound c where A < 0 (1912.09729). So the whole objective (PPO, 1707.06347) is
    A exp(clamp(log r, lower, upper)), with the same gradient, in four operations; clip_high > clip_low is clip-higher
    (DAPO, 2503.14476). `limit` bounds |log r| on the sides that PPO leaves open.
    """
    positive = advantage >= 0
    below = -limit if clip_low >= 1.0 else max(-limit, math.log1p(-clip_low))
    above = min(limit, math.log1p(clip_high))
    capped = limit if dual_clip is None else min(limit, math.log(dual_clip))
    lower = torch.where(positive, advantage.new_full((), -limit), below)
    upper = torch.where(positive, advantage.new_full((), above), capped)
    return lower, upper


def approx_kl_sum(*, log_ratio: Tensor) -> Tensor:
    """Sum of r - 1 - log r: the k3 estimate of KL(old || new) on samples of the old policy, without gradient."""
    log_ratio = log_ratio.detach()
    return torch.expm1(log_ratio).sub_(log_ratio).sum()


def importance_bounds(*, advantage: Tensor, clip_low: float, clip_high: float, limit: float) -> tuple[Tensor, Tensor]:
    """Bounds of log r on both sides, whatever the sign of the advantage: those of the weight that CISPO (2506.13585)
    puts on log pi. With clip_low 1 there is only the upper one, as in the paper."""
    below = -limit if clip_low >= 1.0 else max(-limit, math.log1p(-clip_low))
    return torch.full_like(advantage, below), torch.full_like(advantage, min(limit, math.log1p(clip_high)))


def behaviour_weight(
    *, proximal_logprob: Tensor, behaviour_logprob: Tensor, joint: bool = False, log_ratio_limit: float = LIMIT
) -> Tensor:
    """Decoupled PPO (AReaL, 2505.24298): w = pi_prox / pi_behaviour, constant in the weights.

    The objective is w min(u A, clip(u) A) with u = pi / pi_prox. `joint`: w is that of the whole row [S, ...], the
    product over its units, and all of them share it.
    """
    expect_shape("behaviour_logprob", behaviour_logprob, proximal_logprob.shape)
    log_weight = proximal_logprob - behaviour_logprob
    if joint and log_weight.dim() > 1:
        whole = row_sums(log_weight)
        log_weight = whole.reshape(-1, *[1] * (log_weight.dim() - 1)).expand_as(log_weight)
    return log_weight.clamp(-log_ratio_limit, log_ratio_limit).exp()


def bound_weight(weight: Tensor, *, threshold: float | None, rule: str = "drop") -> tuple[Tensor, Tensor]:
    """What is done with weights w at a `threshold` C (None: nothing), and which units are kept:

    - drop: units with w > C are left out;
    - truncate: their weight becomes C (truncated importance sampling, TIS, for an engine whose log-probs differ);
    - mask: units with w outside [1/C, C] are left out (MIS).

    The weight of what is left out is 0, and it must leave the denominator as well.
    """
    if threshold is None or rule == "truncate":
        every = torch.ones_like(weight, dtype=torch.bool)
        return weight if threshold is None else weight.clamp(max=threshold), every
    keep = weight <= threshold
    if rule == "mask":
        keep &= weight >= 1.0 / threshold
    return torch.where(keep, weight, 0.0), keep


def value_loss_sum(
    *,
    value: Tensor,
    target: Tensor,
    old_value: Tensor | None = None,
    clip: float | None = None,
    huber: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Sum of h(value - target), h(x) = x^2 / 2, or Huber's with `huber` as the point where it turns linear.

    With `clip` e: max of h(value - target) and h(clip(value, old_value - e, old_value + e) - target) (PPO, 1707.06347).
    """
    expect_shape("target", target, value.shape)
    if clip is not None and old_value is None:
        raise ValueError("value_loss_sum: clip needs old_value")
    if mask is not None:
        expect_shape("mask", mask, value.shape)
        value, target = torch.where(mask, value, 0.0), torch.where(mask, target, 0.0)
        old_value = None if old_value is None else torch.where(mask, old_value, 0.0)
    delta = math.inf if huber is None else huber  # Huber's loss with no linear part is the half square
    if clip is None or old_value is None:
        return functional.huber_loss(value, target, reduction="sum", delta=delta)
    near = value.clamp(old_value - clip, old_value + clip)
    losses = (functional.huber_loss(x, target, reduction="none", delta=delta) for x in (value, near))
    return torch.maximum(*losses).sum()


def kl(*, policy_logprob: Tensor, reference_logprob: Tensor, estimator: Estimator, limit: float = LIMIT) -> Tensor:
    """Estimate of KL(policy || reference) on samples of the policy, per element (Schulman 2020, "Approximating KL").

    With d = reference - policy: k1 = -d (unbiased, any sign), k2 = d^2 / 2, k3 = e^d - d - 1 (unbiased, never
    negative). d is bounded by `limit`. As a loss, the gradient of k2 is that of the KL; that of k1 averages to zero,
    so k1 teaches nothing as a loss and belongs into the reward.
    """
    expect_shape("reference_logprob", reference_logprob, policy_logprob.shape)
    d = (reference_logprob - policy_logprob).clamp(-limit, limit)
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return 0.5 * d.square()
    if estimator == "k3":
        return torch.expm1(d) - d
    raise ValueError(f"estimator: {estimator!r}, expected one of {', '.join(ESTIMATORS)}")


def sac_target(
    *,
    reward: Tensor,
    terminated: Tensor,
    next_q: Tensor,
    next_logprob: Tensor,
    temperature: Tensor | float,
    gamma: float,
) -> Tensor:
    """y = r + gamma (1 - terminated) (min_j Q_j(s', a') - alpha log pi(a'|s')): [S] (SAC, 1801.01290, 1812.05905).

    `next_q` [copies, S] comes from the slow critics. A truncated step is not terminated and bootstraps. Pass
    temperature 0 to leave the entropy out of the target.
    """
    for name, x in (("terminated", terminated), ("next_logprob", next_logprob), ("next_q", next_q[0])):
        expect_shape(name, x, reward.shape)
    soft = next_q.amin(dim=0) - temperature * next_logprob
    return reward + gamma * torch.where(terminated, 0.0, soft)


def sac_critic_sum(*, q: Tensor, target: Tensor) -> Tensor:
    """Sum over critics and rows of (Q_j(s, a) - y)^2; `q` [copies, S], `target` [S] without gradient."""
    expect_shape("q", q, (q.shape[0], *target.shape))
    return functional.mse_loss(q, target.expand_as(q), reduction="sum")


def sac_actor_sum(*, q: Tensor, logprob: Tensor, temperature: Tensor | float) -> Tensor:
    """Sum over rows of alpha log pi(a|s) - min_j Q_j(s, a), for a differentiable a; `q` [copies, S], `logprob` [S]."""
    expect_shape("q", q, (q.shape[0], *logprob.shape))
    return (temperature * logprob - q.amin(dim=0)).sum()


def sac_temperature_sum(*, log_temperature: Tensor, logprob: Tensor, target_entropy: float) -> Tensor:
    """Sum over rows of -alpha (log pi(a|s) + target entropy), alpha = exp(log_temperature) (1812.05905, section 5)."""
    return -log_temperature.exp() * (logprob.detach() + target_entropy).sum()
