"""A flow policy: an action chunk grows out of noise in K Euler steps along a learnt velocity, with noise at every step.

    A_0 ~ N(0, 1),    A_{k+1} ~ N(A_k + v(A_k, k/K, obs) / K, std_k^2),    action = A_K

The chain is a Markov one, so the joint log-likelihood is exact: log N(A_0) + sum_k log N(A_{k+1} | A_k). This is the
flow-noise variant of piRL (2510.25889). The policy gradient sees the whole chain as one decision. Without noise the
action is the end of the deterministic flow from A_0 = 0, the mode of where it starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from m2flow import seeds
from m2flow.activations import ACTIVATIONS
from m2flow.models.distributions import (
    HALF_LOG_2PI,
    Host,
    action_range,
    normal_logprob,
    normal_logprob_rows,
)
from m2flow.models.encoder import Encoder, host, policy_spec, tensor
from m2flow.models.layers import Dense, HostViews, Trunk, check_network, on_host
from m2flow.types import Action, Array, Observation, Score, Spec

TIME_FEATURES = 4  # cos(pi j t), j = 1..4


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowConfig:
    """Velocity network and noise of a flow policy. An action with bounds is grown on [-1, 1] and scaled to them."""

    hidden: tuple[int, ...] = (64, 64)  # widths of the velocity network
    activation: str = "tanh"  # tanh | relu | elu | silu
    steps: int = 4  # denoising steps, K
    chunk: int = 1  # actions per decision
    std: float = 0.2  # deviation of a denoising step, at the start if it is learnt
    learn_std: bool = True  # one deviation per step and dimension, between std_min and std_max
    std_min: float = 0.05  # smallest deviation that is learnt
    std_max: float = 0.5  # and the largest
    normalize: bool = False  # running mean and deviation of the observation, part of the weights
    clip_obs: float = 10.0  # a normalised number stays within plus and minus this
    hidden_gain: float = math.sqrt(2.0)  # orthogonal initialisation of the hidden layers
    output_gain: float = 0.01  # and of the velocity

    def __post_init__(self) -> None:
        check_network(self.hidden, self.activation)
        if not self.hidden:
            raise ValueError("hidden: a velocity network needs at least one hidden layer")
        for name in ("steps", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}")
        for name in ("std", "clip_obs", "hidden_gain", "output_gain"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: must be more than 0 and finite, got {getattr(self, name)}")
        if self.learn_std and not 0.0 < self.std_min < self.std < self.std_max < math.inf:
            limits = f"std_min {self.std_min} and std_max {self.std_max}"
            raise ValueError(f"std: a learnt {self.std} must lie between {limits}")

    def build(self, spec: Spec, seed: int) -> FlowPolicy:
        """A policy whose weights depend on `seed` only. The global random state is not touched."""
        return FlowPolicy(spec, self, seed)


class FlowPolicy(nn.Module):
    """See `Policy`. Noise [B, K+1, C, D]: first the start, then one per step. Record: "trace" [B, K+1, C, D], the chain
    A_0 .. A_K. Log-prob per unit, [B, K+1, C, D]; its entry 0 is that of the start, which no weight can change."""

    axes = ("denoise", "chunk", "dim")
    centre: Tensor
    half_width: Tensor
    time: Tensor
    fixed_std: Tensor
    raw_std: nn.Parameter | None

    def __init__(self, spec: Spec, config: FlowConfig, seed: int) -> None:
        super().__init__()
        if spec.action.categories is not None or len(spec.action.shape) != 1:
            raise ValueError(f"action: a flow policy emits vectors of numbers, not {spec.action}")
        generator = torch.Generator().manual_seed(seeds.derive(seed, "flow"))
        self.spec = policy_spec(spec)
        self.chunk, self.steps, self.activation = config.chunk, config.steps, config.activation
        self.dims = spec.action.size
        self.noise = ("normal", (config.steps + 1, config.chunk, self.dims))
        self.encoder = Encoder(spec.observation, normalize=config.normalize, clip=config.clip_obs)
        width, flat = config.hidden[0], config.chunk * self.dims
        # The first layer, split: the observation's part is the same at every denoising step.
        self.seen = Dense(self.encoder.size, width, config.hidden_gain, generator)
        self.moved = Dense(flat + TIME_FEATURES, width, config.hidden_gain, generator)
        self.trunk = Trunk(width, config.hidden[1:], config.activation, config.hidden_gain, generator)
        self.velocity = Dense(self.trunk.outputs, flat, config.output_gain, generator)
        self._constants(spec, config)
        self._pairs = tuple(
            (layer.weight, layer.bias) for layer in (self.seen, self.moved, *self.trunk.layers, self.velocity)
        )
        self._widest = max(weight.numel() for weight, _ in self._pairs)
        self._views = HostViews(self._tensors())

    def _constants(self, spec: Spec, config: FlowConfig) -> None:
        """Time features [K, 4], the action's scale [D], and the deviations, learnt or fixed, [K, 1, D]."""
        t = torch.arange(config.steps)[:, None] / config.steps
        self.register_buffer("time", torch.cos(math.pi * t * torch.arange(1, TIME_FEATURES + 1)), persistent=False)
        scale = action_range(spec.action) or (np.zeros(self.dims), np.ones(self.dims))
        for name, value in zip(("centre", "half_width"), scale, strict=True):
            self.register_buffer(name, torch.tensor(value, dtype=torch.float32), persistent=False)
        self.std_range = (config.std_min, config.std_max)
        shape = (config.steps, 1, self.dims)
        if config.learn_std:
            share = (config.std - config.std_min) / (config.std_max - config.std_min)
            self.raw_std = nn.Parameter(torch.full(shape, math.log(share / (1.0 - share))))
        else:
            self.raw_std = None
        self.register_buffer("fixed_std", torch.full(shape, config.std), persistent=False)

    def _tensors(self) -> tuple[Tensor, ...]:
        own = self.fixed_std if self.raw_std is None else self.raw_std
        pairs: chain[Tensor] = chain.from_iterable(self._pairs)
        return (*pairs, own, self.time, self.centre, self.half_width)

    @property
    def _weight(self) -> Tensor:
        """Any parameter: its dtype and device are the policy's."""
        weight: Tensor = self._pairs[0][0]
        return weight

    def _std(self) -> Tensor:
        """Deviation of each denoising step, [K, 1, D]."""
        if self.raw_std is None:
            return self.fixed_std
        low, high = self.std_range
        return low + (high - low) * torch.sigmoid(self.raw_std)

    def act(self, obs: Observation, noise: Array | None) -> Action:
        """Decide for B lanes: action [B, C, D], log-prob and trace [B, K+1, C, D]."""
        first = next(iter(obs.values()))
        if on_host(first, self._weight, self._widest):
            return self._act_rows(obs, noise)
        with torch.no_grad():
            trace, logprob, action = self._act_torch(obs, noise)
        if isinstance(first, np.ndarray):
            return Action(host(action), host(logprob), {"trace": host(trace)})
        return Action(action, logprob, {"trace": trace})

    def _act_torch(self, obs: Observation, noise: Array | None) -> tuple[Tensor, Tensor, Tensor]:
        seen = self.seen(self.encoder(obs, self._weight))
        drawn = None if noise is None else tensor(noise, self._weight)
        std = self._std()
        now = seen.new_zeros(len(seen), self.chunk, self.dims) if drawn is None else drawn[:, 0]
        states, means = [now], []
        for k in range(self.steps):
            moved = torch.cat([now.flatten(1), self.time[k].expand(len(seen), -1)], 1)
            mean = now + self._flow(seen, moved).view_as(now) / self.steps
            now = mean if drawn is None else mean + std[k] * drawn[:, k + 1]
            states.append(now)
            means.append(mean)
        trace = torch.stack(states, 1)
        return trace, self._logprob(trace, torch.stack(means, 1), std), torch.addcmul(self.centre, self.half_width, now)

    def _act_rows(self, obs: Observation, noise: Array | None) -> Action:
        """`act` in numpy: the same function, up to rounding."""
        views = self._views()
        layers, (own, time, centre, half_width) = views[:-4], views[-4:]
        activate = ACTIVATIONS[self.activation][1]
        x = self.encoder.rows(obs, own.dtype)
        seen = x @ layers[0].T + layers[1]
        flat = self.chunk * self.dims
        by_action = layers[2][:, :flat].T
        by_time = time @ layers[2][:, flat:].T + layers[3]
        low, high = self.std_range
        # sigmoid(x) = (1 + tanh(x / 2)) / 2 cannot overflow
        std = own if self.raw_std is None else low + (high - low) * (0.5 * (1.0 + np.tanh(0.5 * own)))
        trace = np.zeros((len(x), self.steps + 1, self.chunk, self.dims), x.dtype)
        means = np.zeros_like(trace)
        drawn = None if noise is None else host(noise)
        if drawn is not None:
            trace[:, 0] = drawn[:, 0]
        for k in range(self.steps):
            now = trace[:, k]
            h = now.reshape(len(x), flat) @ by_action
            h += seen
            h += by_time[k]
            h = activate(h)
            for i in range(4, len(layers) - 2, 2):
                h = h @ layers[i].T
                h += layers[i + 1]
                h = activate(h)
            velocity = h @ layers[-2].T + layers[-1]
            means[:, k + 1] = now + velocity.reshape(now.shape) / self.steps
            trace[:, k + 1] = means[:, k + 1] if drawn is None else means[:, k + 1] + std[k] * drawn[:, k + 1]
        log_std = np.concatenate([np.zeros_like(std[:1]), np.log(std)])
        action: Host = centre + half_width * trace[:, -1]
        return Action(action, normal_logprob_rows(trace, means, log_std), {"trace": trace})

    def score(self, obs: Observation, record: Mapping[str, Array]) -> Score:
        """Log-prob and entropy of recorded chains, [S, K+1, C, D]: all denoising steps in one pass."""
        seen = self.seen(self.encoder(obs, self._weight))
        trace = tensor(record["trace"], self._weight)
        rows, before = len(trace), trace[:, :-1]
        moved = torch.cat([before.flatten(2), self.time.expand(rows, -1, -1)], 2)
        mean = before + self._flow(seen[:, None], moved).view_as(before) / self.steps
        std = self._std()
        logprob = self._logprob(trace, mean, std)
        entropy = torch.cat([torch.zeros_like(std[:1]), std.log()]) + (HALF_LOG_2PI + 0.5)
        return Score(logprob, entropy.expand_as(logprob))

    def _flow(self, seen: Tensor, moved: Tensor) -> Tensor:
        """Velocity [..., C*D] from the observation's part of the first layer and [action, time features]."""
        activate = ACTIVATIONS[self.activation][0]
        weight, bias = self._pairs[1]
        velocity: Tensor = self.velocity(self.trunk(activate(seen + functional.linear(moved, weight, bias))))
        return velocity

    def _logprob(self, trace: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """[S, K+1, C, D] from the chain, the means of its transitions [S, K, C, D], and their deviations."""
        start = trace[:, :1].square() * -0.5 - HALF_LOG_2PI
        return torch.cat([start, normal_logprob(trace[:, 1:], mean, std.log())], 1)

    def features(self, obs: Observation) -> Tensor:
        """[S, F]: the normalised flat observation."""
        x: Tensor = self.encoder(obs, self._weight)
        return x

    def observe(self, obs: Observation) -> None:
        """Take in observations [S, ...] for normalisation; nothing to do without it."""
        self.encoder.update(obs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Casts and moves; the spec says which dtype is read."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.spec = policy_spec(self.spec, self._weight.dtype)
        self._views = HostViews(self._tensors())
        return self
