"""On-policy objectives: PPO with its options as field values, and GRPO, which needs no critic.

    Trajectory [T, B] --targets--> Batch [S] --prepare--> one optimiser batch --losses--> sums --trainer--> gradient

`targets` runs once per step and does all that can be done beforehand, so that `losses`, which runs hundreds of times,
is a forward pass and a handful of operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from m2flow.algorithms import advantages, losses
from m2flow.algorithms.estimates import Estimate, statistics, weight_statistics, without_critic
from m2flow.algorithms.reduce import expect_shape, inner, row_sums, sequence_shares, to_level, weighted_sum
from m2flow.algorithms.settings import check_ppo, check_without_critic
from m2flow.algorithms.targets import (
    Rows,
    any_unit,
    check_rewards,
    like,
    spread,
    step_rows,
    to_tensors,
    to_units,
    whole_episodes,
)
from m2flow.protocols import Model, Policy
from m2flow.types import Array, Batch, Head, Loss, Metric, Phase, Spec, Term, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class PPO:
    """Proximal policy optimisation (1707.06347), with GAE (1506.02438) and the options of its descendants.

    A *unit* is what has a probability ratio of its own: every entry of the log-prob (`level` token), one action of a
    chunk (action; for a language model a token), or the whole decision (chunk; the default, and plain PPO where a
    decision is one action; sequence: its length-normalised ratio, GSPO). All terms are means over the units of an
    optimiser batch unless `aggregation` says otherwise, the value loss over its values. Which values make which
    algorithm: docs/algorithms.md.

    Columns of its batches, U units in a row: `logprob`, `advantage` [S, *U], and what `losses` reads of the latter:
    `factor`, `lower`, `upper` [S, *U]; `return`, `value` [S, K]; `behaviour_logprob` [S, *axes] for the parity check.
    `mask` [S, *U], `unit_mask` [S, *axes] and `value_mask` [S, K] exist only where something does not count;
    `weight` and `reference` [S, *U], `share` and `sequences` [S] only where their option is on.
    """

    gamma: float = 0.99  # per chunk at reward level "chunk", per action at "action"
    gae_lambda: float = 0.95  # 0: trust the critic after one step; 1: the whole return
    clip_low: float = 0.2  # ratio at least 1 - clip_low
    clip_high: float = 0.2  # ratio at most 1 + clip_high; larger than clip_low is clip-higher
    surrogate: Literal["clip", "cispo"] = "clip"  # cispo: clipped ratio, without gradient, times A log pi
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
    level: Literal["token", "action", "chunk", "sequence"] = "chunk"  # what has a probability ratio of its own
    reward_level: Literal["action", "chunk"] | None = None  # null: "action" at level action, else "chunk"
    aggregation: Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum"] = (
        "token-mean"  # how units (tokens) become one loss; a sequence is an answer or an episode
    )
    aggregation_constant: float | None = None  # divides each sequence's sum, for instance by the longest answer
    mask_truncated: bool = False  # leave out episodes that a limit cut short (answers of full length)
    decoupled: bool = False  # clip around the policy of the start of the step, weigh by it over the one that acted
    behaviour_threshold: float | None = None  # weight at which the rule acts (decoupled only)
    behaviour_rule: Literal["drop", "truncate", "mask"] = (
        "drop"  # leave out above | bound (TIS) | also below 1/it (MIS)
    )
    behaviour_level: Literal["unit", "sequence"] = "unit"  # whose weight: each unit's own, or that of all in a decision
    reward_scale: float = 1.0  # rewards are multiplied by this
    log_ratio_clamp: float = losses.LIMIT  # log ratios beyond plus and minus this are cut off
    critic_hidden: tuple[int, ...] = (64, 64)  # widths of the critic's hidden layers
    critic_activation: str = "tanh"  # tanh | relu | elu | silu

    critic: ClassVar[bool] = True
    couples_batch: ClassVar[bool] = False
    phases: ClassVar[tuple[Phase, ...]] = (Phase("update", "all"),)
    requires: ClassVar[frozenset[str]] = frozenset({"score"})

    def __post_init__(self) -> None:
        check_ppo(self)

    @property
    def scope(self) -> str:
        """Whitening looks at a whole batch first; without it, rows are ready as they arrive."""
        return "group" if self.whiten == "none" else "batch"

    @property
    def denominators(self) -> tuple[str, ...]:
        """Units, values of a critic, and sequences where a mean is taken over them."""
        return ("units", *(("values",) if self.critic else ()), *(() if self.per == "units" else (self.per,)))

    @property
    def per(self) -> str:
        """What the policy, entropy and KL terms are counted per."""
        return "units" if self.aggregation == "token-mean" else "sequences"

    @property
    def needs_reference(self) -> bool:
        """True where a KL term reads `Model.reference`."""
        return self.kl != "none"

    @property
    def kl_level(self) -> str:
        """Where a KL in the loss is estimated: that of a whole decision is too large for k3 at level sequence."""
        return "token" if self.level == "sequence" else self.level

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
        columns, unit_mask, weights = self._policy_columns(model, rows)
        reward, valid = trajectory.reward * self.reward_scale, trajectory.valid
        if not self.per_action:
            reward, valid = (x[..., None] for x in advantages.chunk_reward(reward=reward, valid=valid))
        if self.kl != "none" and self.kl_in == "reward":
            reward = reward - self.kl_coef * self._penalty(model, rows).reshape(reward.shape)
        elif self.kl != "none":
            columns["reference"] = self._scored(model.reference, rows, self.kl_level)
        estimate = self.estimate(model, trajectory, reward, valid)
        columns["advantage"] = spread(rows, estimate.advantage, self.level)
        if self.mask_truncated:
            whole = whole_episodes(trajectory)
            valid, unit_mask = valid & whole[..., None], _within(unit_mask, whole.reshape(-1), rows)
        if unit_mask is not None:
            mask = any_unit(unit_mask, axes=rows.axes, level=self.level)
            fits = {mask.shape: mask, unit_mask.shape: unit_mask}
            columns = {name: torch.where(fits[x.shape], x, 0.0) for name, x in columns.items()}
            columns |= {"mask": mask, "unit_mask": unit_mask}
        columns |= self._shares(columns, rows, trajectory.episode)
        columns |= self._value_columns(estimate, valid.reshape(len(rows.valid), -1))
        if self.whiten == "batch":
            columns["advantage"] = advantages.whiten(columns["advantage"], mask=columns.get("mask"))
        if self.whiten != "minibatch":
            self._bound(columns)
        columns["behaviour_logprob"] = rows.logprob
        return Batch(rows.obs, rows.record, columns), statistics(estimate, valid) | weights

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
        if "sequences" in columns:
            out["sequences"] = columns["sequences"].sum()
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
        mask, share = columns.get("unit_mask"), columns.get("share")
        score = model.policy.score(batch.obs, batch.record)
        logprob = to_level(score.logprob, axes=model.policy.axes, level=self.level, mask=mask)
        log_ratio = logprob - columns["logprob"]
        if self.level == "sequence":
            log_ratio = log_ratio * columns["share"]
        bounded = log_ratio.clamp(columns["lower"], columns["upper"])
        if self.surrogate == "clip":
            terms = [Term("policy", inner(bounded.exp(), columns["factor"]), self.per)]
        else:
            terms = [Term("policy", inner(logprob, bounded.detach().exp() * columns["factor"]), self.per)]
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
        entropy = entropy if mask is None else torch.where(mask, entropy, 0.0)
        if self.entropy_coef:
            terms.append(Term("entropy", -weighted_sum(entropy, share), self.per, self.entropy_coef))
        if self.kl != "none" and self.kl_in == "loss":
            if self.level == "sequence":
                logprob = score.logprob if mask is None else torch.where(mask, score.logprob, 0.0)
            distance = losses.kl(policy_logprob=logprob, reference_logprob=columns["reference"], estimator=self.kl)
            terms.append(Term("kl", weighted_sum(distance, share), self.per, self.kl_coef))
        metrics = {
            "approx_kl": (losses.approx_kl_sum(log_ratio=log_ratio), "units"),
            "clip_fraction": (torch.count_nonzero(bounded != log_ratio), "units"),
            "entropy": (weighted_sum(entropy.detach(), share if self.level == "sequence" else None), "units"),
        }
        return Loss(tuple(terms), metrics)

    def after_update(self, metrics: Mapping[str, float]) -> bool:
        """Target-KL: stop when `approx_kl` exceeds 1.5 times the target, or is not a number."""
        return self.target_kl is not None and not metrics["approx_kl"] <= 1.5 * self.target_kl

    def _policy_columns(self, model: Model, rows: Rows) -> tuple[dict[str, Tensor], Tensor | None, dict[str, Metric]]:
        """Log-prob at the level that the ratio is against, with its weight where decoupled; the mask of units; what the
        step reports of its weights."""
        if self.level == "action" and "chunk" not in rows.axes:
            raise ValueError(
                f"level: 'action' needs a policy with an axis 'chunk', not {rows.axes}; use chunk or token"
            )
        behaviour = to_level(rows.logprob, axes=rows.axes, level=self.level)
        if not self.decoupled:
            return {"logprob": behaviour}, rows.mask, {}
        proximal = self._scored(model.policy, rows, self.level)
        length = _entries(rows) if self.level == "sequence" and self.behaviour_level == "unit" else 1.0
        raw = losses.behaviour_weight(
            proximal_logprob=proximal / length,
            behaviour_logprob=behaviour / length,
            joint=self.behaviour_level == "sequence",
            log_ratio_limit=self.log_ratio_clamp,
        )
        weight, keep = losses.bound_weight(raw, threshold=self.behaviour_threshold, rule=self.behaviour_rule)
        mask = None if rows.mask is None else any_unit(rows.mask, axes=rows.axes, level=self.level)
        metrics = weight_statistics(raw, mask=mask, bounded=None if self.behaviour_threshold is None else weight)
        columns = {"logprob": proximal, "weight": weight}
        return columns, rows.mask if bool(keep.all()) else _within(rows.mask, keep, rows), metrics

    def _scored(self, policy: Policy, rows: Rows, level: str) -> Tensor:
        """Log-prob of all rows by a policy, at a level."""
        logprob: Tensor = policy.score(rows.obs, rows.record).logprob.to(rows.logprob.dtype)
        expect_shape("score", logprob, rows.logprob.shape)
        return to_level(logprob, axes=rows.axes, level=level, mask=rows.mask)

    def _shares(self, columns: Mapping[str, Tensor], rows: Rows, episode: Tensor) -> dict[str, Tensor]:
        """How the units of a row count, where it is not each the same (`reduce.sequence_shares`); level sequence: one
        over the number of its entries."""
        dtype = rows.logprob.dtype
        if self.level == "sequence":
            return {"share": 1.0 / _entries(rows)}
        if self.per == "units":
            return {}
        mask = columns.get("mask")
        share, part = sequence_shares(
            mask=torch.ones_like(columns["advantage"], dtype=torch.bool) if mask is None else mask,
            sequence=episode.reshape(-1),
            how=self.aggregation,
            constant=self.aggregation_constant,
        )
        return {"share": share.to(dtype), "sequences": part.to(dtype)}

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

    def _penalty(self, model: Model, rows: Rows) -> Tensor:
        """KL of the policy that acted against the reference, summed to one number per reward: [S, K].

        Estimated per unit, whatever the level: the estimators bound and curve the difference, which over a whole answer
        is far too large for them.
        """
        assert self.kl != "none"
        reference = self._scored(model.reference, rows, "token")
        penalty = losses.kl(policy_logprob=rows.logprob, reference_logprob=reference, estimator=self.kl)
        return to_level(penalty, axes=rows.axes, level="action" if self.per_action else "chunk")

    def _bound(self, columns: dict[str, Tensor]) -> None:
        """Add the bounds of log r, which depend on the sign of the advantage, and what the ratio is multiplied with."""
        advantage = columns["advantage"]
        clip = {"clip_low": self.clip_low, "clip_high": self.clip_high, "limit": self.log_ratio_clamp}
        if self.surrogate == "clip":
            bounds = losses.log_ratio_bounds(advantage=advantage, dual_clip=self.dual_clip, **clip)
        else:
            bounds = losses.importance_bounds(advantage=advantage, **clip)
        columns["lower"], columns["upper"] = bounds
        columns["factor"] = advantage.neg()
        if self.decoupled:
            columns["factor"] *= columns["weight"]
        if self.per == "sequences":
            columns["factor"] *= columns["share"].reshape(-1, *[1] * (advantage.dim() - 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPO(PPO):
    """Group-relative policy optimisation (2402.03300) and its relatives: PPO without a critic.

    A group is `Trajectory.group`, the score of an attempt the sum of its rewards within the trajectory, and its
    advantage the score less that of the `baseline`, the same for all its steps. `std` none is Dr.GRPO (2503.20783),
    `leave_one_out` RLOO (2402.14740), `none` with `whiten: batch` Reinforce++ (2501.03262). Groups whose scores (as the
    environment gave them, without `reward_scale` and KL) are all equal are counted, not drawn again.
    """

    gamma: float = 1.0  # per chunk at reward level "chunk", per action at "action"; read with credit to_go only
    value_coef: float = 0.0  # there is no critic
    whiten: Literal["batch", "minibatch", "none"] = "none"  # the group has normalised them already
    baseline: Literal["group", "leave_one_out", "none"] = "group"  # mean score of all, or of the other attempts; or 0
    std: Literal["sample", "population", "none"] = "sample"  # deviation of a group that divides its advantages
    credit: Literal["episode", "to_go"] = "episode"  # to_go: an action has what was earned from there on

    critic: ClassVar[bool] = False

    def __post_init__(self) -> None:
        PPO.__post_init__(self)
        check_without_critic(self)

    @property
    def needs_groups(self) -> bool:
        """Attempts at one task are compared."""
        return self.baseline != "none"

    def heads(self, spec: Spec, chunk: int = 1) -> Mapping[str, Head | float]:  # noqa: ARG002
        """None: there is no critic."""
        return {}

    def estimate(self, model: Model, trajectory: Trajectory, reward: Tensor, valid: Tensor) -> Estimate:  # noqa: ARG002
        """Scores against the baseline. Raises ValueError on a group of one where groups are compared."""
        return without_critic(
            trajectory,
            reward=reward,
            valid=valid,
            baseline=self.baseline,
            std=self.std,
            credit=self.credit,
            gamma=self.gamma,
            reward_scale=self.reward_scale,
        )


def _entries(rows: Rows) -> Tensor:
    """[S]: how many units of a row count, at least 1."""
    mask = torch.ones_like(rows.logprob, dtype=torch.bool) if rows.mask is None else rows.mask
    return row_sums(mask).clamp(min=1).to(rows.logprob.dtype)


def _within(unit_mask: Tensor | None, keep: Tensor, rows: Rows) -> Tensor:
    """`unit_mask` [S, *axes] where `keep`, at any level, is true."""
    kept = to_units(keep, axes=rows.axes, shape=tuple(rows.logprob.shape))
    return kept.contiguous() if unit_mask is None else kept & unit_mask
