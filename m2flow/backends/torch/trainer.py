"""The trainer for one torch process: gradients of sums, divided once by global counts; clipping; the optimiser step.

    gradient = sum over micro-batches, sum over terms, coef * d total / counts[per]

Nobody else divides, so any cut of a batch into micro-batches gives the same gradient.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from m2flow.backends import devices
from m2flow.backends.torch.group import Group, same_arrays
from m2flow.backends.torch.model import Model
from m2flow.backends.torch.optim import SGD, Adam, Optimizer
from m2flow.capabilities import Autocasts, Shares, constants
from m2flow.comm.weights import checksums
from m2flow.protocols import Objective
from m2flow.types import Array, Batch, Phase, Term, Tree, Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchTrainerConfig:
    """Optimiser, clipping, schedule, and where it runs. `linear` and `cosine` fall to `final_fraction` of the rate."""

    learning_rate: float = 3e-4  # of every group without one of its own
    group_learning_rates: Mapping[str, float] = field(default_factory=dict)  # by group, in place of learning_rate
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"  # one per parameter group
    betas: tuple[float, float] = (0.9, 0.999)  # adam and adamw
    eps: float = 1e-8  # adam and adamw
    momentum: float = 0.0  # sgd
    weight_decay: float = 0.0  # pull of weights towards 0
    max_grad_norm: float | None = 0.5  # norm over a group beyond which its gradient is scaled down; null: never
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # of the learning rate
    schedule_steps: int | None = None  # training steps until the end of a falling schedule
    schedule_updates: int | None = None  # or optimiser steps of the group; give one of the two
    final_fraction: float = 0.0  # of the learning rate, where a falling schedule ends
    warmup_steps: int = 0  # training steps over which the rate rises to what the schedule says
    dtype: Literal["float32", "float64"] = "float32"  # of weights, gradients and moments
    autocast: Literal["none", "bfloat16"] = "none"  # of products in forward and backward passes; weights keep dtype
    device: str = "cpu"  # as torch names it
    threads: int = 1  # threads of torch's arithmetic in a process

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: must be more than 0 and finite, got {getattr(self, name)}")
        for group, rate in self.group_learning_rates.items():
            if not 0.0 <= rate < math.inf:
                raise ValueError(f"group_learning_rates: {group} must be 0 or more and finite, got {rate}")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas: each must be in [0, 1), got {self.betas}")
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum: must be in [0, 1), got {self.momentum}")
        if self.weight_decay < 0.0:
            raise ValueError(f"weight_decay: must be 0 or more, got {self.weight_decay}")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0.0:
            raise ValueError(f"max_grad_norm: must be more than 0, or null to switch it off, got {self.max_grad_norm}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps: must be 0 or more, got {self.warmup_steps}")
        if self.autocast != "none" and self.dtype != "float32":
            raise ValueError(f"autocast: {self.autocast} needs dtype: float32, got {self.dtype}; use none")
        if not 0.0 <= self.final_fraction <= 1.0:
            raise ValueError(f"final_fraction: must be in [0, 1], got {self.final_fraction}")
        devices.check_name(self.device)
        if not 1 <= self.threads <= 1024:
            raise ValueError(f"threads: must be at least 1 and at most 1024, got {self.threads}")
        self._check_schedule()

    def _check_schedule(self) -> None:
        given = [n for n in ("schedule_steps", "schedule_updates") if getattr(self, n) is not None]
        if self.schedule != "constant" and len(given) != 1:
            raise ValueError(
                f"schedule: {self.schedule} needs schedule_steps or schedule_updates (one of them), got {given}"
            )
        if self.schedule == "constant" and given:
            raise ValueError(f"{given[0]}: only read with schedule: linear or cosine; set that, or remove this")
        for name in given:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}")

    def build(self, policy: Any, objective: Objective, seed: int) -> TorchTrainer:
        """A trainer that owns `policy` from now on, cast to `dtype`; new heads depend on `seed`.

        Raises:
            ValueError: torch does not find the device on this machine.
        """
        devices.check_there(self.device)
        return TorchTrainer(policy, objective, self, seed)


class TorchTrainer:
    """See `protocols.Trainer`.

    Metrics of `forward_backward` are sums with the name of their denominator; each term appears as `<term>_loss`. On
    the CPU they are Python numbers, elsewhere tensors, so that nothing waits for a device.
    """

    def __init__(self, policy: Any, objective: Objective, config: TorchTrainerConfig, seed: int) -> None:
        missing = sorted(need for need in objective.requires if not callable(getattr(policy, need, None)))
        if missing:
            who, needs = type(policy).__name__, ", ".join(missing)
            raise ValueError(f"{type(objective).__name__} needs a policy that can {needs}; {who} cannot")
        self.config, self.objective = config, objective
        self.version = 0
        policy = policy.to(device=config.device, dtype=getattr(torch, config.dtype))
        heads = objective.heads(policy.spec, policy.chunk)
        if config.autocast != "none" and isinstance(policy, Autocasts):  # so that it scores alike outside of updates
            policy.autocast = torch.bfloat16  # before the reference is made of it
        self.model = Model(policy, heads, seed, reference=objective.needs_reference)
        self._constant = frozenset(f"policy.{name}" for name in constants(policy))
        self._fingerprint: int | None = None
        self._sharing = policy.sharing if isinstance(policy, Shares) else nullcontext
        self.groups = self._make_groups()
        self._trained = [
            (p, frozenset(g for g, x in self.groups.items() if n in x.flat.parameters))
            for n, p in self.model.trainable.items()
        ]
        self._focused = ""
        self._counts: dict[str, Array | float] = {}  # of the terms of this optimiser batch
        self._published = False

    def _make_groups(self) -> dict[str, Group]:
        """One group per name that a phase moves. Two groups never share a parameter: their moments would part."""
        groups: dict[str, Group] = {}
        owner: dict[str, str] = {}
        for phase in self.objective.phases:
            if phase.group in groups:
                continue
            parameters = self.model.group(phase.group)
            shared = next((name for name in parameters if name in owner), None)
            if shared is not None:
                raise ValueError(f"groups {owner[shared]!r} and {phase.group!r} both move {shared}; make them disjoint")
            owner |= dict.fromkeys(parameters, phase.group)
            rate = self.config.group_learning_rates.get(phase.group, self.config.learning_rate)
            groups[phase.group] = Group(phase.group, parameters, self.model, self._optimizer, rate)
        unknown = sorted(set(self.config.group_learning_rates) - set(groups))
        if unknown:
            raise ValueError(f"group_learning_rates: no group {unknown[0]!r}; there are {', '.join(groups)}")
        return groups

    # ---- gradients

    def forward_backward(
        self, batch: Batch, phase: Phase, counts: Mapping[str, Array | float], noise: Array | None = None
    ) -> Mapping[str, tuple[Array, str]]:
        """Add the gradient of these rows, each term divided by `counts` (of the whole optimiser batch).

        A term whose count is 0 gives no gradient, whatever its total is.

        Raises:
            ValueError: a denominator is missing or no number.
            RuntimeError: no term depends on the phase's parameters.
        """
        self._focus(phase.group)
        kind, policy = self.config.device.partition(":")[0], self.model.policy
        half = self.config.autocast != "none" and (not isinstance(policy, Autocasts) or policy.casts())
        with self._sharing(), torch.autocast(kind, torch.bfloat16) if half else nullcontext():
            loss = self.objective.losses(self.model, batch, phase.name, noise)
        roots, scales, counted = [], [], False
        sums: dict[str, tuple[Array, str]] = {}
        for term in loss.terms:
            sums[f"{term.name}_loss"] = (_number(term.total), term.per)
            scale = _scale(term, counts, phase)
            if term.coef:
                self._counts[term.per] = counts[term.per]
            if scale is None:
                continue
            counted = True
            if term.total.requires_grad:
                roots.append(term.total)
                scales.append(scale)
        if roots:
            torch.autograd.backward(roots, scales)
        elif counted:
            names = ", ".join(term.name for term in loss.terms)
            raise RuntimeError(f"phase {phase.name!r}: no term ({names}) depends on the parameters of {phase.group!r}")
        for name, (total, per) in loss.metrics.items():
            sums[name] = (_number(total), per)
        return sums

    def _focus(self, group: str) -> None:
        """Only the phase's parameters take gradients: the actor's loss leaves the critic's alone, and costs less."""
        if group != self._focused:
            for parameter, groups in self._trained:
                parameter.requires_grad_(group in groups)
            self._focused = group

    def step(self, phase: Phase) -> Mapping[str, Array]:
        """Clip, move the phase's parameter group, clear gradients, move slow copies.

        Metrics `grad_norm` (before clipping) and `lr`, with `/<phase>` where there are several phases. Where no term
        counted anything there is no update: momentum and weight decay would move the weights all the same.

        Raises:
            FloatingPointError: on the CPU, a gradient that is not finite; the weights are untouched.
        """
        group = self.groups[phase.group]
        norm = group.clip(self.config.max_grad_norm, phase.name)
        rate = self._rate(group)
        counted = not self._counts or any(float(count) > 0 for count in self._counts.values())
        self._counts = {}
        if counted:
            group.optimizer.update(group.flat.data, group.flat.grad, rate)
        group.flat.grad.zero_()
        if counted and group.slow:
            with torch.no_grad():
                for slow, fast, share in group.slow:
                    torch._foreach_lerp_(slow, fast, share)
        suffix = "" if len(self.objective.phases) == 1 else f"/{phase.name}"
        return {f"grad_norm{suffix}": norm, f"lr{suffix}": rate}

    def _optimizer(self, data: Tensor) -> Optimizer:
        config = self.config
        if config.optimizer == "sgd":
            return SGD(data, config.momentum, config.weight_decay)
        return Adam(data, config.betas, config.eps, config.weight_decay, decoupled=config.optimizer == "adamw")

    def _rate(self, group: Group) -> float:
        """Learning rate of the group's next update."""
        config = self.config
        rate = group.base_rate * min((self.version + 1) / max(config.warmup_steps, 1), 1.0)
        if config.schedule == "constant":
            return rate
        if config.schedule_steps is not None:
            done = self.version / config.schedule_steps
        else:
            assert config.schedule_updates is not None
            done = group.optimizer.updates / config.schedule_updates
        done = min(done, 1.0)
        left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return rate * (config.final_fraction + (1.0 - config.final_fraction) * left)

    # ---- weights and state

    def weights(self, prefix: str = "") -> Weights:
        """Copies of the parameters and buffers whose name starts with `prefix`, stamped with the version. Without what
        training never changes and whoever receives them has built himself (`policy.constant`).

        Checksums (CRC-32 of the bytes, by name) are made for the first publication only: they cost more than a small
        update, and what can go wrong on the way is wrong from the start.

        Raises:
            FloatingPointError: a weight is not finite. Nothing acts with such weights, and no checkpoint holds them.
        """
        self._check()
        for group in self.groups.values():
            group.check_finite()
        arrays = {
            name: x.detach().to("cpu", copy=True) for name, x in self._arrays().items() if name.startswith(prefix)
        }
        if not arrays:
            raise ValueError(f"weights: no name starts with {prefix!r}")
        first, self._published = not self._published, True
        return Weights(self.version, arrays, checksums(arrays) if first else {})

    def state(self) -> Tree:
        """Weights, buffers, slow copies, moments and counters, by name; copies. Of what is constant only a checksum."""
        self._check()
        return {
            "version": self.version,
            "model": {name: x.detach().clone() for name, x in self._arrays().items()},
            "optimizer": {name: group.state() for name, group in self.groups.items()},
        } | ({"constant": self._constant_checksum()} if self._constant else {})

    def _arrays(self) -> dict[str, Tensor]:
        """The model's state by name, less what is constant."""
        return {name: x for name, x in self.model.state_dict().items() if name not in self._constant}

    def _constant_checksum(self) -> int:
        """Of all that is constant, as it is in memory; made once."""
        if self._fingerprint is None:
            held = self.model.state_dict()
            sums = checksums({name: held[name] for name in sorted(self._constant)})
            self._fingerprint = zlib.crc32(repr(sorted(sums.items())).encode())
        return self._fingerprint

    @torch.no_grad()
    def restore(self, state: Tree) -> None:
        """Continue exactly.

        Raises:
            ValueError: the state is of another model or optimiser; nothing has been changed then.
        """
        own = self._arrays()
        if state.get("constant") != (self._constant_checksum() if self._constant else None):
            raise ValueError(
                "checkpoint: it trained on top of other weights than those that the recipe's policy has here (they are "
                "not part of a checkpoint); give policy.path the model that the run started from"
            )
        same_arrays("model", own, state["model"])
        if set(state["optimizer"]) != set(self.groups):
            there, here = sorted(state["optimizer"]), sorted(self.groups)
            raise ValueError(f"checkpoint: optimizer groups {there} do not fit this objective's {here}")
        for name, group in self.groups.items():
            group.fits(state["optimizer"][name])
        for name, x in own.items():
            x.copy_(state["model"][name])
        for name, group in self.groups.items():
            group.restore(state["optimizer"][name])
        self.version = int(state["version"])

    def _check(self) -> None:
        """Raise RuntimeError if the model no longer holds what is being trained."""
        here = dict(self.model.named_parameters())
        replaced = [name for name, parameter in self.model.trainable.items() if here.get(name) is not parameter]
        if replaced:
            raise RuntimeError(
                f"{replaced[0]} was replaced behind the trainer's back; load values in place (assign=False)"
            )
        for group in self.groups.values():
            group.flat.check()

    # ---- residence

    def onload(self) -> None:
        """Bring weights and moments to the configured device."""
        self._move(torch.device(self.config.device))

    def offload(self) -> None:
        """Move weights and moments to host memory. Not while a gradient is held."""
        self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        if all(group.flat.data.device == device for group in self.groups.values()):
            return
        self._check()
        self.model.to(device)
        for group in self.groups.values():
            group.gather(device)


def _number(total: Any) -> Any:
    """A Python number where that costs no wait, else the detached tensor."""
    return total.item() if total.is_cpu else total.detach()


def _scale(term: Term, counts: Mapping[str, Array | float], phase: Phase) -> Tensor | None:
    """coef / count as a tensor like the term's total; None where the term does not count."""
    if term.per not in counts:
        known = ", ".join(sorted(counts))
        raise ValueError(
            f"phase {phase.name!r}: term {term.name!r} is per {term.per!r}, which is not counted ({known})"
        )
    count, total = counts[term.per], term.total
    if isinstance(count, Tensor):
        if not count.is_cpu:  # no wait for the device
            return torch.where(count > 0, term.coef / count, 0.0).to(total.dtype)
        count = count.item()
    if not 0.0 <= count < math.inf:
        raise ValueError(f"phase {phase.name!r}: counts[{term.per!r}] is {count}, expected 0 or more and finite")
    return None if count == 0 or term.coef == 0 else _constant(term.coef / count, total.dtype, total.device)


@lru_cache(maxsize=256)
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)
