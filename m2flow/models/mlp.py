"""Small policies: dense layers from the flat observation to a Gaussian, squashed Gaussian or categorical action."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from m2flow import seeds
from m2flow.activations import ACTIVATIONS
from m2flow.models.distributions import Categorical, Gaussian, Squashed
from m2flow.models.encoder import Encoder, host, policy_spec, tensor
from m2flow.models.layers import HOST_LIMIT, Dense, HostViews, Trunk, check_network, dense
from m2flow.models.normalizer import MIN_STD
from m2flow.types import Action, Array, Field, Observation, Score, Spec


@dataclass(frozen=True, kw_only=True, slots=True)
class MLPConfig:
    """A dense network. `dist: auto` is categorical for an action with categories, else Gaussian."""

    hidden: tuple[int, ...] = (64, 64)  # widths of the hidden layers
    activation: str = "tanh"  # tanh | relu | elu | silu
    dist: Literal["auto", "gaussian", "squashed", "categorical"] = "auto"  # of actions; auto: by the environment
    chunk: int = 1  # actions per decision
    shared_trunk: bool = False  # value and Q heads stand on the hidden layers, not on the observation
    log_std_init: float = 0.0  # log standard deviation at the start
    state_dependent_std: bool | None = None  # the network puts out the deviation too; null: only where squashed
    std_schedule: tuple[tuple[int, float], ...] = ()  # [[training step, deviation], ...] in place of learning it
    log_std_bounds: tuple[float, float] | None = None  # null: [-20, 2] where state dependent, else none
    temperature: float = 1.0  # divides the logits of a categorical action
    normalize: bool = False  # running mean and deviation of the observation, part of the weights
    clip_obs: float = 10.0  # a normalised number stays within plus and minus this
    min_std: float = MIN_STD  # of a normalised number: what hardly moves is not blown up
    hidden_gain: float = math.sqrt(2.0)  # orthogonal initialisation of the hidden layers
    output_gain: float = 0.01  # and of the last one

    def __post_init__(self) -> None:
        check_network(self.hidden, self.activation)
        for name in ("temperature", "clip_obs", "min_std", "hidden_gain", "output_gain"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: must be more than 0 and finite, got {getattr(self, name)}")
        if self.chunk < 1:
            raise ValueError(f"chunk: must be at least 1, got {self.chunk}")
        steps = [step for step, _ in self.std_schedule]
        if steps != sorted(set(steps)) or any(std <= 0 for _, std in self.std_schedule):
            given = [list(point) for point in self.std_schedule]
            raise ValueError(f"std_schedule: expected rising steps with deviations above 0, got {given}")
        if self.std_schedule and (self.state_dependent_std or self.dist == "categorical"):
            raise ValueError("std_schedule: needs one deviation per action dimension; remove it or state_dependent_std")
        if self.log_std_bounds is not None and not self.log_std_bounds[0] < self.log_std_bounds[1]:
            raise ValueError(f"log_std_bounds: the first must be below the second, got {self.log_std_bounds}")

    def build(self, spec: Spec, seed: int) -> MLPPolicy:
        """A policy whose weights depend on `seed` only. The global random state is not touched."""
        return MLPPolicy(spec, self, seed)


class MLPPolicy(nn.Module):
    """See `Policy`. Numpy observations are acted on in numpy and give numpy arrays; torch ones in torch."""

    propose: Callable[[Observation, Array], tuple[Tensor, Tensor]]

    def __init__(self, spec: Spec, config: MLPConfig, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seeds.derive(seed, "mlp"))
        self.spec = policy_spec(spec)
        self.chunk = config.chunk
        self.shared_trunk = config.shared_trunk
        self.encoder = Encoder(
            spec.observation, normalize=config.normalize, clip=config.clip_obs, min_std=config.min_std
        )
        self.trunk = Trunk(self.encoder.size, config.hidden, config.activation, config.hidden_gain, generator)
        self.distribution = make_distribution(spec.action, config)
        self.last = Dense(self.trunk.outputs, self.distribution.outputs, config.output_gain, generator)
        self.axes = self.distribution.axes
        self.noise = (self.distribution.kind, self.distribution.shape)
        if isinstance(self.distribution, Squashed):
            self.propose = self._propose
        # In tuples: assigned directly they would be registered a second time, under another name. And reading an
        # attribute of an nn.Module costs as much as a small product.
        self._pairs = (*self.trunk.pairs, (self.last.weight, self.last.bias))
        self._modules_used = (self.encoder, self.distribution)
        self._activate = ACTIVATIONS[config.activation]
        self._settle()

    def _settle(self) -> None:
        """What acting in numpy needs to know of where the weights are now.

        Views of weights and biases in order, then of what the distribution owns; and for how many rows it is used.
        """
        self._views = HostViews((*chain.from_iterable(self._pairs), *self.distribution.tensors()))
        widest = max(weight.numel() for weight, _ in self._pairs)
        self._host_rows = HOST_LIMIT // widest if self._weight.is_cpu else 0

    @property
    def _weight(self) -> Tensor:
        """Any parameter: its dtype and device are the policy's."""
        weight: Tensor = self._pairs[0][0]
        return weight

    def act(self, obs: Observation, noise: Array | None) -> Action:
        """Decide for B lanes: action [B, C, *action shape], log-prob [B, *axes]. `noise` None: the mode."""
        first = next(iter(obs.values()))
        if type(first) is not np.ndarray or len(first) > self._host_rows:
            decided = self._act_torch(obs, noise)
            return _to_host(decided) if isinstance(first, np.ndarray) else decided
        views, (encoder, distribution) = self._views(), self._modules_used
        layers = 2 * len(self._pairs) - 2
        x = encoder.rows(obs, views[0].dtype)
        for i in range(0, layers, 2):
            x = x @ views[i].T
            x += views[i + 1]
            x = self._activate[1](x)
        x = x @ views[layers].T
        x += views[layers + 1]
        drawn = None if noise is None else host(noise).astype(x.dtype, copy=False)
        return distribution.draw_rows(x, drawn, views[layers + 2 :])

    @torch.no_grad()
    def _act_torch(self, obs: Observation, noise: Array | None) -> Action:
        drawn = None if noise is None else tensor(noise, self._weight)
        return self.distribution.draw(self._out(obs), drawn)

    def score(self, obs: Observation, record: Mapping[str, Array]) -> Score:
        """Log-prob and entropy of recorded actions, [S, *axes], with gradients."""
        return self._modules_used[1].score(self._out(obs), record)

    def features(self, obs: Observation) -> Tensor:
        """[S, F]: the normalised flat observation, or the hidden layers' output with `shared_trunk`."""
        x: Tensor = self._modules_used[0].forward(obs, self._weight)
        return self.trunk(x) if self.shared_trunk else x

    def observe(self, obs: Observation) -> None:
        """A training step is over: take in its observations [S, ...] for normalisation, move schedules on."""
        self.encoder.update(obs)
        self.distribution.advance()

    def _propose(self, obs: Observation, noise: Array) -> tuple[Tensor, Tensor]:
        """A differentiable action ([S, *action shape], [S, C, *action shape] for chunks) and its joint log-prob [S].

        Only squashed policies have it, as the attribute `propose`.
        """
        drawn = self.distribution.draw(self._out(obs), tensor(noise, self._weight))
        action: Tensor = drawn.action
        return action.squeeze(1) if self.chunk == 1 else action, drawn.logprob.flatten(1).sum(1)

    def _out(self, obs: Observation) -> Tensor:
        x: Tensor = self._modules_used[0].forward(obs, self._weight)
        return dense(x, self._pairs, self._activate[0])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Casts and moves; the spec says which dtype is read."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.spec = policy_spec(self.spec, self._weight.dtype)
        self._settle()
        return self


def make_distribution(action: Field, config: MLPConfig) -> Gaussian | Squashed | Categorical:
    """The distribution that the config names and the action allows."""
    discrete = action.categories is not None
    dist = config.dist if config.dist != "auto" else "categorical" if discrete else "gaussian"
    if dist == "categorical":
        return Categorical(action, config.chunk, config.temperature)
    if discrete:
        raise ValueError(f"dist: {dist} cannot emit one of {action.categories} categories; use categorical or auto")
    if config.temperature != 1.0:
        raise ValueError(f"temperature: only a categorical action has one, and this one is {dist}; remove it")
    state_dependent = config.state_dependent_std
    if state_dependent is None:
        state_dependent = dist == "squashed" and not config.std_schedule
    normal = Gaussian(
        action,
        config.chunk,
        config.log_std_init,
        config.log_std_bounds,
        state_dependent=state_dependent,
        schedule=config.std_schedule,
    )
    return Squashed(action, normal) if dist == "squashed" else normal


def _to_host(action: Action) -> Action:
    return Action(host(action.action), host(action.logprob), {k: host(v) for k, v in action.record.items()})
