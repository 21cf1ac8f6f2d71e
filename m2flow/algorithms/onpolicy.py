"""On-policy objectives: PPO with its options as field values, and GRPO as an example of a variant.

    Trajectory [T, B] --targets--> Batch [S] --prepare--> one optimiser batch --losses--> sums --trainer--> gradient

`targets` runs once per step and does all that can be done beforehand, so that `losses`, which runs hundreds of times,
is a forward pass and a handful of operations.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal

import torch
from torch import Tensor

from m2flow.algorithms import advantages, losses
from m2flow.algorithms.reduce import LEVELS, expect_shape, inner, masked_max, masked_mean, masked_min, to_level
from m2flow.algorithms.targets import (
    Rows,
    any_unit,
    check_rewards,
    episode_scores,
    like,
    step_rows,
    to_tensors,
    to_units,
)
from m2flow.protocols import Model, Policy
from m2flow.types import Array, Batch, Head, Loss, Metric, Phase, Spec, Term, Trajectory


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a variant says about each reward: advantage, and the critic's target and opinion if there is a critic."""

    advantage: Tensor  # [T, B, K], K actions or 1
    returns: Tensor | None = None  # [T, B, K]
    value: Tensor | None = None  # [T, B, K]
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # what else the step reports


@dataclass(frozen=True, kw_only=True, slots=True)
class PPO:
    """Proximal policy optimisation (1707.06347), with GAE (1506.02438) and the options of its descendants.

    A *unit* is what has a probability ratio of its own: every entry of the log-prob (`level` token), one action of a
    chunk (action), or the whole decision (chunk; the default, and plain PPO where a decision is one action). All
    terms are means over the units of an optimiser batch, the value loss over its values.

    Columns of its batches, U units in a row: `logprob`, `advantage` [S, *U], and what `losses` reads of the latter:
    `factor`, `lower`, `upper` [S, *U]; `return`, `value` [S, K]; `behaviour_logprob` [S, *axes] for the parity check.
    `mask` [S, *U], `unit_mask` [S, *axes] and `value_mask` [S, K] exist only where something does not count;
    `weight` and `reference` [S, *U] only where their option is on.
    """

    gamma: float = 0.99  # per chunk at reward level "chunk", per action at "action"
    gae_lambda: float = 0.95  # 0: trust the critic after one step; 1: the whole return
    clip_low: float = 0.2  # ratio at least 1 - clip_low
    clip_high: float = 0.2  # ratio at most 1 + clip_high; larger than clip_low is clip-higher
    dual_clip: float | None = None  # loss at most this times |A| where A < 0; null: unbounded
    value_clip: float | None = None  # how far the value may move from the one of the start of the step
    huber: float | None = None  # error beyond which the value loss is linear; null: half the square
    value_coef: float = 1.0  # of (V - return)^2 / 2; libraries that leave out the half call this 0.5
    entropy_coef: float = 0.0  # of the entropy, which is pushed up
    kl: Literal["none", "k1", "k2", "k3"] = "none"  # estimator of KL(policy || reference), the policy of the start
    kl_coef: float = 0.0  # of that KL
    kl_in: Literal["loss", "reward"] = "loss"  # where it is counted
    target_kl: float | None = None  # an optimiser batch whose approx_kl exceeds 1.5 times this is the last of its step
    whiten: Literal["batch", "minibatch", "none"] = "minibatch"  # rows over which advantages get mean 0 and deviation 1
    level: Literal["token", "action", "chunk"] = "chunk"  # what has a probability ratio of its own
    reward_level: Literal["action", "chunk"] | None = None  # null: "action" at level action, else "chunk"
    decoupled: bool = False  # clip around the policy of the start of the step, weigh by it over the one that acted
    behaviour_threshold: float | None = None  # units whose weight exceeds this are dropped (decoupled only)
    reward_scale: float = 1.0  # rewards are multiplied by this
    log_ratio_clamp: float = losses.LIMIT  # log ratios beyond plus and minus this are cut off
    critic_hidden: tuple[int, ...] = (64, 64)  # widths of the critic's hidden layers
    critic_activation: str = "tanh"  # tanh | relu | elu | silu

    denominators: ClassVar[tuple[str, ...]] = ("units", "values")
    couples_batch: ClassVar[bool] = False
    phases: ClassVar[tuple[Phase, ...]] = (Phase("update", "all"),)
    requires: ClassVar[frozenset[str]] = frozenset({"score"})

    def __post_init__(self) -> None:
        for name in ("gamma", "gae_lambda"):
            _require(0.0 <= getattr(self, name) <= 1.0, name, getattr(self, name), "expected 0 to 1")
        for name in ("clip_high", "reward_scale", "log_ratio_clamp"):
            _require(getattr(self, name) > 0.0, name, getattr(self, name), "expected more than 0")
        _require(0.0 < self.clip_low <= 1.0, "clip_low", self.clip_low, "expected more than 0 and at most 1")
        for name, least in (
            ("value_clip", 0.0),
            ("huber", 0.0),
            ("target_kl", 0.0),
            ("behaviour_threshold", 0.0),
            ("dual_clip", 1.0),
        ):
            given = getattr(self, name)
            _require(
                given is None or given > least, name, given, f"expected more than {least:g}, or null to switch it off"
            )
        for name in ("value_coef", "entropy_coef", "kl_coef"):
            _require(getattr(self, name) >= 0.0, name, getattr(self, name), "expected 0 or more")
        for name, allowed in (
            ("kl", ("none", *losses.ESTIMATORS)),
            ("kl_in", ("loss", "reward")),
            ("whiten", ("batch", "minibatch", "none")),
            ("level", LEVELS),
            ("reward_level", (None, "action", "chunk")),
        ):
            _require(getattr(self, name) in allowed, name, getattr(self, name), f"expected one of {allowed}")
        if (self.kl == "none") != (self.kl_coef == 0.0):
            raise ValueError(f"kl_coef: {self.kl_coef} with kl {self.kl!r}; set both to use a KL term, or neither")
        if self.kl == "k1" and self.kl_in == "loss":
            raise ValueError("kl: k1 in a loss teaches nothing, its gradient averages to 0; use k2, k3 or kl_in reward")
        if self.behaviour_threshold is not None and not self.decoupled:
            raise ValueError("behaviour_threshold: only read with decoupled: true; set that, or remove this")
        if self.level == "chunk" and self.reward_level == "action":
            raise ValueError("reward_level: 'action' needs a ratio per action or finer; set level to action or token")

    @property
    def scope(self) -> str:
        """Whitening looks at a whole batch first; without it, rows are ready as they arrive."""
        return "group" if self.whiten == "none" else "batch"

    @property
    def needs_reference(self) -> bool:
        """True where a KL term reads `Model.reference`."""
        return self.kl != "none"

    @property
    def per_action(self) -> bool:
        """Rewards, values and advantages are per action, not per chunk."""
        return (self.reward_level or ("action" if self.level == "action" else "chunk")) == "action"

    def heads(self, spec: Spec, chunk: int = 1) -> Mapping[str, Head | float]:  # noqa: ARG002
        """A critic "value" with one output, or one per action of a chunk where rewards are per action."""
        outputs = chunk if self.per_action else 1
        return {"value": Head(outputs=outputs, hidden=self.critic_hidden, activation=self.critic_activation)}

    @torch.no_grad()
    def targets(self, model: Model, trajectory: Trajectory) -> tuple[Batch, Mapping[str, Metric]]:
        """Advantages, returns and old log-probs of all steps, and statistics of them. Arrays may be numpy or torch."""
        device, dtype = like(model)
        trajectory = to_tensors(trajectory, device=device, dtype=dtype)
        check_rewards(trajectory)
        rows = step_rows(trajectory)
        columns, unit_mask = self._policy_columns(model, rows)
        reward, valid = trajectory.reward * self.reward_scale, trajectory.valid
        if not self.per_action:
            reward, valid = (x[..., None] for x in advantages.chunk_reward(reward=reward, valid=valid))
        if self.kl != "none":
            reference = self._scored(model.reference, rows)
            if self.kl_in == "reward":
                reward = reward - self.kl_coef * self._penalty(rows, reference).reshape(reward.shape)
            else:
                columns["reference"] = reference
        estimate = self.estimate(model, trajectory, reward, valid)
        columns["advantage"] = self._spread(rows, estimate.advantage)
        if unit_mask is not None:
            mask = any_unit(unit_mask, axes=rows.axes, level=self.level)
            columns = {name: torch.where(mask, x, 0.0) for name, x in columns.items()}
            columns |= {"mask": mask, "unit_mask": unit_mask}
        columns |= self._value_columns(estimate, valid.reshape(len(rows.valid), -1))
        if self.whiten == "batch":
            columns["advantage"] = advantages.whiten(columns["advantage"], mask=columns.get("mask"))
        if self.whiten != "minibatch":
            self._bound(columns)
        columns["behaviour_logprob"] = rows.logprob
        return Batch(rows.obs, rows.record, columns), _statistics(estimate, valid)

    def estimate(self, model: Model, trajectory: Trajectory, reward: Tensor, valid: Tensor) -> Estimate:
        """GAE on the critic's values: one forward pass over all observation rows, unless the Trajectory brings values.

        `reward` and `valid` [T, B, K]. This is what a variant replaces.
        """
        value, bootstrap = trajectory.value, trajectory.bootstrap
        if value is None:
            spoken = model.value("value", trajectory.obs).to(reward.dtype)
            expect_shape("head 'value'", spoken, (len(spoken), reward.shape[2]))
            value, bootstrap = spoken[trajectory.obs_at], spoken[:, 0][trajectory.next_at]
        if bootstrap is None:
            raise ValueError("trajectory.bootstrap: missing, but trajectory.value is given; give both or neither")
        advantage, returns = advantages.gae_actions(
            reward=reward,
            value=value,
            bootstrap=bootstrap,
            terminated=trajectory.terminated,
            truncated=trajectory.truncated,
            valid=valid,
            gamma=self.gamma,
            lam=self.gae_lambda,
        )
        return Estimate(advantage, returns, value)

    def counts(self, batch: Batch) -> Mapping[str, Array | float]:
        """Units and values that count in these rows."""
        columns = batch.columns
        out = {"units": columns["mask"].sum() if "mask" in columns else float(columns["logprob"].numel())}
        if "return" in columns:
            mask = columns.get("value_mask")
            out["values"] = float(columns["return"].numel()) if mask is None else mask.sum()
        return out

    def prepare(self, batch: Batch, rows: int) -> Batch:
        """Whiten the advantages of each optimiser batch of `rows` rows, where that is asked for."""
        if self.whiten != "minibatch":
            return batch
        columns = dict(batch.columns)
        columns["advantage"] = advantages.whiten_parts(columns["advantage"], rows=rows, mask=columns.get("mask"))
        self._bound(columns)
        return Batch(batch.obs, batch.record, columns, batch.next_obs)

    def losses(self, model: Model, batch: Batch, phase: str, noise: Array | None = None) -> Loss:  # noqa: ARG002
        """Clipped surrogate, value loss, and the optional terms whose coefficient is not 0. `noise` is not read.

        Metrics, per unit: `approx_kl` (k3 of the step's start against now), `clip_fraction` (units whose gradient the
        clip removed), `entropy`.
        """
        columns = batch.columns
        mask = columns.get("unit_mask")
        score = model.policy.score(batch.obs, batch.record)
        logprob = to_level(score.logprob, axes=model.policy.axes, level=self.level, mask=mask)
        log_ratio = logprob - columns["logprob"]
        bounded = log_ratio.clamp(columns["lower"], columns["upper"])
        terms = [Term("policy", inner(bounded.exp(), columns["factor"]), "units")]
        if self.value_coef:
            total = losses.value_loss_sum(
                value=model.value("value", batch.obs),
                target=columns["return"],
                old_value=columns.get("value"),
                clip=self.value_clip,
                huber=self.huber,
                mask=columns.get("value_mask"),
            )
            terms.append(Term("value", total, "values", self.value_coef))
        entropy = score.entropy if self.entropy_coef else score.entropy.detach()
        entropy = (entropy if mask is None else torch.where(mask, entropy, 0.0)).sum()
        if self.entropy_coef:
            terms.append(Term("entropy", -entropy, "units", self.entropy_coef))
        if self.kl != "none" and self.kl_in == "loss":
            distance = losses.kl(policy_logprob=logprob, reference_logprob=columns["reference"], estimator=self.kl)
            terms.append(Term("kl", distance.sum(), "units", self.kl_coef))
        metrics = {
            "approx_kl": (losses.approx_kl_sum(log_ratio=log_ratio), "units"),
            "clip_fraction": (torch.count_nonzero(bounded != log_ratio), "units"),
            "entropy": (entropy.detach(), "units"),
        }
        return Loss(tuple(terms), metrics)

    def after_update(self, metrics: Mapping[str, float]) -> bool:
        """Target-KL: stop when `approx_kl` exceeds 1.5 times the target, or is not a number."""
        return self.target_kl is not None and not metrics["approx_kl"] <= 1.5 * self.target_kl

    def _policy_columns(self, model: Model, rows: Rows) -> tuple[dict[str, Tensor], Tensor | None]:
        """Log-prob at the level that the ratio is against, with its weight where decoupled, and the mask of units."""
        if self.level == "action" and "chunk" not in rows.axes:
            raise ValueError(
                f"level: 'action' needs a policy with an axis 'chunk', not {rows.axes}; use chunk or token"
            )
        behaviour = to_level(rows.logprob, axes=rows.axes, level=self.level)
        if not self.decoupled:
            return {"logprob": behaviour}, rows.mask
        proximal = self._scored(model.policy, rows)
        weight, keep = losses.behaviour_weight(
            proximal_logprob=proximal,
            behaviour_logprob=behaviour,
            threshold=self.behaviour_threshold,
            log_ratio_limit=self.log_ratio_clamp,
        )
        columns = {"logprob": proximal, "weight": weight}
        if bool(keep.all()):
            return columns, rows.mask
        kept = to_units(keep, axes=rows.axes, shape=tuple(rows.logprob.shape))
        return columns, kept.contiguous() if rows.mask is None else kept & rows.mask

    def _scored(self, policy: Policy, rows: Rows) -> Tensor:
        """Log-prob of all rows by a policy, at the level."""
        logprob: Tensor = policy.score(rows.obs, rows.record).logprob.to(rows.logprob.dtype)
        expect_shape("score", logprob, rows.logprob.shape)
        return to_level(logprob, axes=rows.axes, level=self.level, mask=rows.mask)

    def _value_columns(self, estimate: Estimate, valid: Tensor) -> dict[str, Tensor]:
        """What the value loss reads, [S, K]; nothing where there is no critic."""
        if estimate.returns is None or estimate.value is None:
            return {}
        columns = {"return": estimate.returns.reshape(valid.shape)}
        if self.value_clip is not None:
            columns["value"] = torch.where(valid, estimate.value.reshape(valid.shape), 0.0)
        if not bool(valid.all()):
            columns["value_mask"] = valid
        return columns

    def _penalty(self, rows: Rows, reference: Tensor) -> Tensor:
        """KL of the policy that acted against the reference, summed to one number per reward: [S, K]."""
        assert self.kl != "none"
        behaviour = to_level(rows.logprob, axes=rows.axes, level=self.level)
        penalty = losses.kl(policy_logprob=behaviour, reference_logprob=reference, estimator=self.kl)
        axes = rows.axes if self.level == "token" else ("chunk",)
        return to_level(penalty, axes=axes, level="action" if self.per_action else "chunk")

    def _spread(self, rows: Rows, advantage: Tensor) -> Tensor:
        """Advantages [T, B, K] at the shape of the level: the same for all units of an action or decision."""
        flat = advantage.reshape(len(rows.valid), -1)
        if self.level == "chunk":
            return flat[:, 0].contiguous()
        if self.level == "action":
            return flat.expand(rows.valid.shape).contiguous()
        per_row = flat if flat.shape[1] > 1 else flat[:, 0]
        return to_units(per_row, axes=rows.axes, shape=tuple(rows.logprob.shape)).contiguous()

    def _bound(self, columns: dict[str, Tensor]) -> None:
        """Add the bounds of log r, which depend on the sign of the advantage, and what the ratio is multiplied with."""
        columns["lower"], columns["upper"] = losses.log_ratio_bounds(
            advantage=columns["advantage"],
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            limit=self.log_ratio_clamp,
        )
        columns["factor"] = columns["advantage"].neg()
        if self.decoupled:
            columns["factor"] *= columns["weight"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPO(PPO):
    """Group-relative policy optimisation (2402.03300): PPO without a critic, the group of attempts as the baseline.

    A group is `Trajectory.group`, the score of an attempt the sum of its rewards within the trajectory, and its
    advantage that of `group_normalise`, the same for all its steps. `std` none is Dr.GRPO (2503.20783). Groups whose
    scores (as the environment gave them, without `reward_scale` and KL) are all equal are counted, not drawn again.
    """

    value_coef: float = 0.0  # there is no critic
    whiten: Literal["batch", "minibatch", "none"] = "none"  # the group has normalised them already
    std: Literal["sample", "population", "none"] = "sample"  # deviation of a group that divides its advantages

    needs_groups: ClassVar[bool] = True
    denominators: ClassVar[tuple[str, ...]] = ("units",)

    def __post_init__(self) -> None:
        PPO.__post_init__(self)
        _require(self.std in ("sample", "population", "none"), "std", self.std, "expected sample, population or none")
        critic = ("gamma", "gae_lambda", "value_clip", "huber", "value_coef", "critic_hidden", "critic_activation")
        for item in fields(self):
            if item.name in critic and getattr(self, item.name) != item.default:
                raise ValueError(f"{item.name}: GRPO has no critic and does not read it; remove it")

    def heads(self, spec: Spec, chunk: int = 1) -> Mapping[str, Head | float]:  # noqa: ARG002
        """None: there is no critic."""
        return {}

    def estimate(self, model: Model, trajectory: Trajectory, reward: Tensor, valid: Tensor) -> Estimate:  # noqa: ARG002
        """Group-normalised episode scores. Raises ValueError on a group of one."""
        score, group, of_step = episode_scores(trajectory, reward=reward, valid=valid)
        if not len(score):
            return Estimate(torch.zeros_like(reward))
        advantage = advantages.group_normalise(score=score, group=group, std=self.std)[of_step][..., None]
        given, group, _ = episode_scores(trajectory, reward=trajectory.reward, valid=trajectory.valid)
        counted = advantages.group_filter(score=given, group=group).metrics()
        return Estimate(torch.where(valid, advantage, 0.0), metrics=counted)


def _statistics(estimate: Estimate, valid: Tensor) -> dict[str, Metric]:
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


def _require(ok: bool, name: str, given: object, expected: str) -> None:
    if not ok:
        raise ValueError(f"{name}: {given!r}, {expected}")
