"""Soft actor-critic: three phases on rows drawn from a replay buffer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from m2flow.algorithms import losses
from m2flow.algorithms.advantages import chunk_reward
from m2flow.algorithms.targets import check_rewards, like, to_tensors
from m2flow.protocols import Model
from m2flow.types import Array, Batch, Head, Loss, Metric, Phase, Spec, Term, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class SAC:
    """Soft actor-critic (1801.01290, 1812.05905): twin critics with slow copies, entropy temperature learnt or fixed.

    Its rows come from a replay channel, with the columns `reward`, `valid` [S, C] and `terminated` [S], and `next_obs`
    the true successor; a truncated step bootstraps like any other. `prepare` makes `reward`, `terminated` [S] and
    `action` [S, A] of them. The policy must `propose` (a differentiable sample with its joint log-prob), and its record
    must hold under "action" what `propose` returns.

    `losses` takes `noise` [S, 2, *noise shape of the policy]: `noise[:, 0]` draws the next action of the critic's
    target, `noise[:, 1]` the action of the actor and temperature phases (the same, so that alpha sees what the actor
    did).

    How many updates follow each environment step, and on how many rows, belongs to the replay channel.
    """

    gamma: float = 0.99  # per decision
    tau: float = 0.005  # share of the critic that its slow copy takes over per update
    temperature: float | None = None  # alpha; null: learnt, towards the target entropy
    initial_temperature: float = 1.0  # where a learnt alpha starts
    target_entropy: float | None = None  # in nats per decision; null: minus the number of action dimensions
    backup_entropy: bool = True  # entropy counts in the critic's target
    actor_every: int = 1  # critic updates per actor and temperature update
    reward_scale: float = 1.0  # rewards are multiplied by this
    critics: int = 2  # the smallest of them is believed
    critic_hidden: tuple[int, ...] = (256, 256)  # widths of each critic's hidden layers
    critic_activation: str = "relu"  # tanh | relu | elu | silu

    scope: ClassVar[Literal["group", "batch"]] = "group"
    denominators: ClassVar[tuple[str, ...]] = ("steps",)
    couples_batch: ClassVar[bool] = False
    requires: ClassVar[frozenset[str]] = frozenset({"propose"})
    needs_reference: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, ok, expected in (
            ("gamma", 0.0 <= self.gamma <= 1.0, "0 to 1"),
            ("tau", 0.0 < self.tau <= 1.0, "more than 0 and at most 1"),
            ("temperature", self.temperature is None or self.temperature >= 0.0, "0 or more, or null to learn it"),
            ("initial_temperature", self.initial_temperature > 0.0, "more than 0"),
            ("actor_every", self.actor_every >= 1, "at least 1"),
            ("reward_scale", self.reward_scale > 0.0, "more than 0"),
            ("critics", self.critics >= 1, "at least 1"),
        ):
            if not ok:
                raise ValueError(f"{name}: {getattr(self, name)!r}, expected {expected}")
        if self.temperature is not None and self.target_entropy is not None:
            raise ValueError("target_entropy: not read with a fixed temperature; remove one of the two")

    @property
    def phases(self) -> tuple[Phase, ...]:
        """critic, then actor, then temperature where it is learnt."""
        phases = (Phase("critic", "q"), Phase("actor", "policy", self.actor_every))
        if self.temperature is not None:
            return phases
        return (*phases, Phase("temperature", "log_alpha", self.actor_every))

    def heads(self, spec: Spec, chunk: int = 1) -> Mapping[str, Head | float]:  # noqa: ARG002
        """Critics "q" with slow copies, and the learnt scalar "log_alpha"."""
        critic = Head(
            outputs=1,
            hidden=self.critic_hidden,
            activation=self.critic_activation,
            copies=self.critics,
            takes_action=True,
            ema=self.tau,
        )
        if self.temperature is not None:
            return {"q": critic}
        return {"q": critic, "log_alpha": math.log(self.initial_temperature)}

    @torch.no_grad()
    def targets(self, model: Model | None, trajectory: Trajectory) -> tuple[Batch, Mapping[str, Metric]]:
        """Transitions as a replay channel holds them: the steps that were decisions, in the order t*B + b.

        Of `model` only the device and precision are read; None (where the buffer is filled elsewhere): CPU and float32.
        """
        device, dtype = like(model)
        trajectory = to_tensors(trajectory, device=device, dtype=dtype)
        check_rewards(trajectory)
        decided = trajectory.valid.any(dim=-1)
        return trajectory.transitions().map(lambda x: x[decided]), {}

    def prepare(self, batch: Batch, rows: int) -> Batch:  # noqa: ARG002 - no row looks at another
        """What `losses` reads: rewards summed over the executed actions and scaled, and the actions flattened."""
        record, columns = batch.record, batch.columns
        if "action" not in record:
            raise ValueError(f"record: no 'action' among {sorted(record)}; SAC needs the executed action in the record")
        reward, _ = chunk_reward(reward=columns["reward"], valid=columns["valid"])
        ready = {
            "reward": reward * self.reward_scale,
            "terminated": columns["terminated"],
            "action": record["action"].flatten(1),
        }
        return Batch(batch.obs, record, ready, batch.next_obs)

    def counts(self, batch: Batch) -> Mapping[str, Array | float]:
        """All rows are steps."""
        return {"steps": float(batch.size)}

    def losses(self, model: Model, batch: Batch, phase: str, noise: Array | None = None) -> Loss:
        """The terms of one phase, as sums over rows."""
        if noise is None or batch.next_obs is None:
            raise ValueError("SAC.losses: needs noise [S, 2, *noise shape] and next_obs")
        if phase == "critic":
            return self._critic(model, batch, batch.next_obs, noise[:, 0])
        if phase == "actor":
            return self._actor(model, batch, noise[:, 1])
        if phase == "temperature":
            return self._temperature(model, batch, noise[:, 1])
        raise ValueError(f"phase: {phase!r}, expected one of {', '.join(p.name for p in self.phases)}")

    def after_update(self, metrics: Mapping[str, float]) -> bool:  # noqa: ARG002
        """Never stops early."""
        return False

    def _critic(self, model: Model, batch: Batch, next_obs: dict[str, Any], noise: Tensor) -> Loss:
        columns = batch.columns
        with torch.no_grad():
            action, logprob = model.policy.propose(next_obs, noise)
            target = losses.sac_target(
                reward=columns["reward"],
                terminated=columns["terminated"],
                next_q=_critics(model.value("q", next_obs, action, slow=True)),
                next_logprob=logprob,
                temperature=self._alpha(model) if self.backup_entropy else 0.0,
                gamma=self.gamma,
            )
        q = _critics(model.value("q", batch.obs, columns["action"]))
        total = losses.sac_critic_sum(q=q, target=target)
        metrics = {"q": (q.detach()[0].sum(), "steps"), "q_target": (target.sum(), "steps")}
        return Loss((Term("critic", total, "steps"),), metrics)

    def _actor(self, model: Model, batch: Batch, noise: Tensor) -> Loss:
        action, logprob = model.policy.propose(batch.obs, noise)
        q = _critics(model.value("q", batch.obs, action))
        total = losses.sac_actor_sum(q=q, logprob=logprob, temperature=self._alpha(model))
        return Loss((Term("actor", total, "steps"),), {"entropy": (-logprob.detach().sum(), "steps")})

    def _temperature(self, model: Model, batch: Batch, noise: Tensor) -> Loss:
        with torch.no_grad():
            _, logprob = model.policy.propose(batch.obs, noise)
        target = self.target_entropy
        if target is None:
            target = -float(model.policy.spec.action.size * model.policy.chunk)
        log_alpha = model.scalar("log_alpha")
        total = losses.sac_temperature_sum(log_temperature=log_alpha, logprob=logprob, target_entropy=target)
        return Loss((Term("temperature", total, "steps"),), {"alpha": (log_alpha.detach().exp() * batch.size, "steps")})

    def _alpha(self, model: Model) -> Tensor | float:
        """The temperature, without gradient."""
        if self.temperature is not None:
            return self.temperature
        alpha: Tensor = model.scalar("log_alpha").detach().exp()
        return alpha


def _critics(q: Tensor) -> Tensor:
    """[critics, S] of a head's [critics, S, 1], or of the [S, 1] of a single one."""
    return q.squeeze(-1) if q.dim() == 3 else q.squeeze(-1).unsqueeze(0)
