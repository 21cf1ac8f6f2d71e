"""A small real model and trajectories with every kind of hole in them, for the tests of algorithms."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from m2flow.types import Field, Score, Spec, Trajectory, Units

OBS = 3


class Gaussian(nn.Module):
    """Diagonal Gaussian over units [*sizes]; `propose` squashes one action with tanh. Axis names as given."""

    def __init__(self, axes: tuple[str, ...], sizes: tuple[int, ...], seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        self.axes, self.sizes, self.noise = axes, sizes, ("normal", sizes)
        self.chunk = sizes[axes.index("chunk")] if "chunk" in axes else 1
        self.spec = Spec({"state": Field((OBS,))}, Field((sizes[-1],) if sizes else (1,), low=-1.0, high=1.0))
        wide = math.prod(sizes)
        self.weight = nn.Parameter(0.5 * torch.randn(wide, OBS, generator=rng, dtype=dtype))
        self.log_std = nn.Parameter(0.1 * torch.randn(sizes, generator=rng, dtype=dtype) - 0.3)

    def mean(self, obs):
        return torch.tanh(obs["state"].to(self.weight.dtype) @ self.weight.T).reshape(-1, *self.sizes)

    def score(self, obs, record):
        normal = torch.distributions.Normal(self.mean(obs), self.log_std.exp())
        action = record["action"].to(self.weight.dtype)
        return Score(normal.log_prob(action), normal.entropy())

    def act(self, obs, noise):
        action = self.mean(obs) + self.log_std.exp() * noise
        return action.detach(), self.score(obs, {"action": action}).logprob.detach()

    def propose(self, obs, noise):
        raw = self.mean(obs) + self.log_std.exp() * noise
        logprob = torch.distributions.Normal(self.mean(obs), self.log_std.exp()).log_prob(raw)
        squash = 2 * (math.log(2) - raw - nn.functional.softplus(-2 * raw))
        return torch.tanh(raw), (logprob - squash).sum(-1)


class Model(nn.Module):
    """Policy, heads asked for by an objective, slow copies."""

    def __init__(self, policy: Gaussian, heads: dict, seed: int = 1, hidden: int = 8) -> None:
        super().__init__()
        self.policy, self.reference, self.calls = policy, None, 0
        rng, dtype = torch.Generator().manual_seed(seed), policy.weight.dtype
        self.params = nn.ParameterDict()
        for name, head in heads.items():
            if isinstance(head, float):
                self.params[name] = nn.Parameter(torch.tensor(head, dtype=dtype))
                continue
            wide = OBS + (math.prod(policy.sizes) if head.takes_action else 0)
            for suffix, shape in (("1", (head.copies, hidden, wide)), ("2", (head.copies, head.outputs, hidden))):
                self.params[name + suffix] = nn.Parameter(0.5 * torch.randn(shape, generator=rng, dtype=dtype))
        self.copies = {name: getattr(head, "copies", 0) for name, head in heads.items()}
        self.slow = {name: parameter.detach().clone() * 0.9 for name, parameter in self.params.items()}

    def value(self, name, obs, action=None, *, slow=False):
        self.calls += 1
        weights = self.slow if slow else self.params
        x = obs["state"].to(self.policy.weight.dtype)
        if action is not None:
            x = torch.cat([x, action.flatten(1).to(x.dtype)], dim=1)
        hidden = torch.tanh(torch.einsum("chi,si->csh", weights[name + "1"], x))
        out = torch.einsum("coh,csh->cso", weights[name + "2"], hidden)
        return out if self.copies[name] > 1 else out[0]

    def scalar(self, name):
        return self.params[name]


AXES = {
    "gaussian": (("chunk", "dim"), lambda chunk: (chunk, 2)),
    "flow": (("denoise", "chunk", "dim"), lambda chunk: (3, chunk, 2)),
    "joint": ((), lambda chunk: ()),
}


def make(objective, *, kind: str = "gaussian", chunk: int = 1, dtype=torch.float64, seed: int = 0) -> Model:
    axes, sizes = AXES[kind]
    policy = Gaussian(axes, sizes(chunk), seed, dtype)
    model = Model(policy, dict(objective.heads(policy.spec, policy.chunk)))
    if objective.needs_reference:
        model.reference = Gaussian(axes, sizes(chunk), seed + 100, dtype).requires_grad_(False)
    return model


def collect(
    model: Model,
    *,
    seed: int,
    steps: int = 6,
    lanes: int = 3,
    holes: bool = True,
    end: float = 0.25,
    shift: float = 0.0,
) -> Trajectory:
    """A trajectory as a rollout writes it: numpy, true final observations appended, reset-only steps, cut chunks.

    `shift` is added to the recorded log-prob, as if other weights had acted.
    """
    rng = np.random.default_rng(seed)
    policy, count = model.policy, steps * lanes
    obs = rng.normal(size=((steps + 1) * lanes, OBS))
    obs_at = np.arange(count).reshape(steps, lanes)
    next_at = obs_at + lanes
    kind = rng.random((steps, lanes))
    terminated, truncated = kind < end / 2, (kind >= end / 2) & (kind < end)
    valid = np.ones((steps, lanes, policy.chunk), bool)
    episode = np.zeros((steps, lanes), np.int64)
    finals = []
    for lane in range(lanes):
        current = lane * 1000
        for t in range(steps):
            before = t > 0 and (terminated | truncated)[t - 1, lane]
            if before and holes and valid[t - 1, lane].any():  # the lane resets itself: nothing was decided
                valid[t, lane] = False
                terminated[t, lane] = truncated[t, lane] = False
            current += int(before)
            episode[t, lane] = current
            if (terminated | truncated)[t, lane]:
                next_at[t, lane] = len(obs) + len(finals)
                finals.append(rng.normal(size=OBS))
                if policy.chunk > 1 and holes:
                    valid[t, lane, rng.integers(1, policy.chunk + 1) :] = False
    every = np.concatenate([obs, np.array(finals).reshape(-1, OBS)])
    noise = torch.from_numpy(rng.normal(size=(count, *policy.sizes))).to(policy.weight.dtype)
    action, logprob = policy.act({"state": torch.from_numpy(obs[:count])}, noise)
    moved = torch.from_numpy(shift * rng.normal(size=logprob.shape))
    return Trajectory(
        obs={"state": every},
        obs_at=obs_at,
        next_at=next_at,
        reward=rng.normal(size=valid.shape),
        valid=valid,
        terminated=terminated,
        truncated=truncated,
        version=np.zeros((steps, lanes), np.int64),
        episode=episode,
        group=episode % 2,
        lane=np.arange(lanes),
        units=Units(policy.axes, (logprob + moved).numpy(), {"action": action.numpy()}),
    )


def poison(trajectory: Trajectory, value: float) -> Trajectory:
    """The same trajectory with `value` wherever a mask says that nothing is to be read."""
    valid = trajectory.valid
    step = valid.any(-1)
    units = trajectory.units
    logprob, action = units.logprob.copy(), units.record["action"].copy()
    gone = ~step.reshape(-1)
    logprob[gone], action[gone] = value, value
    if "chunk" in units.axes:
        at = units.axes.index("chunk") + 1
        np.moveaxis(logprob, at, 1)[~valid.reshape(-1, valid.shape[2])] = value
    if units.mask is not None:
        logprob[~units.mask] = value
    obs = {name: x.copy() for name, x in trajectory.obs.items()}
    unread = np.setdiff1d(
        np.arange(len(obs["state"])), np.concatenate([trajectory.obs_at[step], trajectory.next_at[step]])
    )
    obs["state"][unread] = value
    return dataclasses.replace(
        trajectory,
        obs=obs,
        reward=np.where(valid, trajectory.reward, value),
        terminated=trajectory.terminated | ~step,
        units=dataclasses.replace(units, logprob=logprob, record={"action": action}),
    )


def gradient(objective, model: Model, batch, cuts, phase: str = "update", noise=None) -> tuple[torch.Tensor, float]:
    """What a trainer does with one optimiser batch cut at `cuts`: flat gradient, and the loss."""
    model.zero_grad()
    batch = objective.prepare(batch, batch.size)
    counts = objective.counts(batch)
    edges = [0, *sorted(cuts), batch.size]
    loss = 0.0
    for start, stop in pairwise(edges):
        part = batch.rows(start, stop)
        out = objective.losses(model, part, phase, None if noise is None else noise[start:stop])
        total = sum(term.total * (term.coef / max(float(counts[term.per]), 1.0)) for term in out.terms)
        total.backward()
        loss += total.item()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([g.reshape(-1) for g in grads]), loss
