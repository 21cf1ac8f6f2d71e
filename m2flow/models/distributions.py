"""Distributions over action chunks, on the outputs of a network: Gaussian, tanh-squashed Gaussian, categorical.

Each knows how many outputs it needs, which noise it draws with, and its unit axes, and has the same five methods:
`draw` (torch), `draw_rows` (numpy, the same function for acting on a few lanes), `score`, `tensors` (its own
parameters, in the order in which `draw_rows` takes them) and `advance` (a training step is over). `noise` None draws
the mode.
Shapes: B rows, C actions in a chunk, `*shape` of one action, K categories.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from m2flow.logits import categorical_score, normalised
from m2flow.models.encoder import tensor
from m2flow.types import Action, Array, Field, Score

HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
LOG_2 = math.log(2.0)
WIDE = (-20.0, 2.0)  # bounds of a log standard deviation that a network puts out (Haarnoja et al. 2018)
Host = NDArray[Any]


def action_range(field: Field) -> tuple[Host, Host] | None:
    """Centre and half width of a bounded action, float64 [*shape]; None if any bound is missing or infinite."""
    if field.low is None or field.high is None:
        return None
    low, high = (
        np.broadcast_to(np.asarray(bound, np.float64).reshape(field.shape if np.ndim(bound) else ()), field.shape)
        for bound in (field.low, field.high)
    )
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        return None
    return (low + high) / 2.0, (high - low) / 2.0


class Gaussian(nn.Module):
    """Independent normal distributions, one per action dimension. Record: "action" [B, C, *shape].

    The log standard deviation is a parameter of its own, or an output of the network (`state_dependent`), or follows a
    `schedule` of (training step, standard deviation): log-linear in between, constant outside.
    """

    log_std: Tensor | None
    step: Tensor
    kind = "normal"

    def __init__(
        self,
        field: Field,
        chunk: int,
        init: float,
        bounds: tuple[float, float] | None,
        *,
        state_dependent: bool,
        schedule: Sequence[tuple[int, float]] = (),
    ) -> None:
        super().__init__()
        if len(field.shape) > 1:
            raise ValueError(f"action: shape {field.shape} has {len(field.shape)} axes; this policy emits vectors")
        self.shape = (chunk, *field.shape)
        self.axes = ("chunk", "dim")[: len(self.shape)]
        self.init = init
        self.bounds = WIDE if bounds is None and state_dependent else bounds
        self.outputs = chunk * field.size * (2 if state_dependent else 1)
        self.schedule = tuple(schedule)
        if self.schedule:
            self.register_buffer("step", torch.zeros((), dtype=torch.int64))
            self.register_buffer("log_std", torch.full(field.shape, math.log(self.schedule[0][1])))
        else:
            self.log_std = None if state_dependent else nn.Parameter(torch.full(field.shape, init))

    @torch.no_grad()
    def advance(self) -> None:
        """One training step is over: the schedule moves on."""
        if self.schedule:
            assert self.log_std is not None
            self.step += 1
            steps, stds = zip(*self.schedule, strict=True)
            self.log_std.fill_(float(np.interp(float(self.step), steps, np.log(stds))))

    def tensors(self) -> tuple[Tensor, ...]:
        """Parameters beside the network's."""
        own = self.log_std
        return () if own is None else (own,)

    def parameters_of(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """Mean [B, C, *shape] and log standard deviation, which broadcasts against it."""
        own = self.log_std
        if own is not None:
            mean, log_std = out.view(-1, *self.shape), own
        else:
            mean, raw = out.view(-1, 2, *self.shape).unbind(1)
            log_std = raw + self.init
        if self.bounds is not None:
            log_std = log_std.clamp(*self.bounds)
        return mean, log_std

    def parameters_of_rows(self, out: Host, own: Sequence[Host]) -> tuple[Host, Host]:
        """The same in numpy."""
        if own:
            mean, log_std = out.reshape(-1, *self.shape), own[0]
        else:
            both = out.reshape(-1, 2, *self.shape)
            mean, log_std = both[:, 0], both[:, 1] + self.init
        if self.bounds is not None:
            log_std = np.minimum(np.maximum(log_std, self.bounds[0]), self.bounds[1])
        return mean, log_std

    def draw(self, out: Tensor, noise: Tensor | None) -> Action:
        """action = mean + std * noise."""
        mean, log_std = self.parameters_of(out)
        action = mean.clone() if noise is None else mean + log_std.exp() * noise
        return Action(action, normal_logprob(action, mean, log_std), {"action": action})

    def draw_rows(self, out: Host, noise: Host | None, own: Sequence[Host]) -> Action:
        """The same in numpy."""
        if own and self.bounds is None:  # the usual case, without a call
            mean, log_std = out.reshape(-1, *self.shape), own[0]
        else:
            mean, log_std = self.parameters_of_rows(out, own)
        if noise is None:
            return Action(mean, normal_logprob_rows(mean, mean, log_std), {"action": mean})
        action = np.exp(log_std) * noise
        action += mean
        logprob = noise * noise  # the noise is (action - mean) / std
        logprob *= -0.5
        logprob -= log_std + HALF_LOG_2PI
        return Action(action, logprob, {"action": action})

    def score(self, out: Tensor, record: Mapping[str, Array]) -> Score:
        """Log-prob and entropy [B, C, *shape]."""
        mean, log_std = self.parameters_of(out)
        logprob = normal_logprob(tensor(record["action"]), mean, log_std)
        return Score(logprob, (log_std + (HALF_LOG_2PI + 0.5)).expand_as(logprob))


class Squashed(nn.Module):
    """A Gaussian put through tanh and scaled to the action's range (1801.01290, appendix C).

    The log-prob is the density of the squashed action on [-1, 1], so it does not depend on the action's unit. The
    entropy is the Gaussian's plus the log-Jacobian at the recorded action: one sample of the true one, with its
    gradient. Record: "action" (scaled) and "pre_tanh", both [B, C, *shape].
    """

    kind = "normal"
    centre: Tensor
    half_width: Tensor

    def __init__(self, field: Field, normal: Gaussian) -> None:
        super().__init__()
        scale = action_range(field)
        if scale is None:
            raise ValueError(f"dist: squashed needs finite action bounds, got low={field.low}, high={field.high}")
        self.normal = normal
        self.axes, self.outputs, self.shape = normal.axes, normal.outputs, normal.shape
        for name, value in zip(("centre", "half_width"), scale, strict=True):
            self.register_buffer(name, torch.tensor(value, dtype=torch.float32), persistent=False)

    def advance(self) -> None:
        """One training step is over."""
        self.normal.advance()

    def tensors(self) -> tuple[Tensor, ...]:
        """Centre and half width, then the Gaussian's own parameters."""
        return self.centre, self.half_width, *self.normal.tensors()

    def draw(self, out: Tensor, noise: Tensor | None) -> Action:
        """action = centre + half_width * tanh(mean + std * noise), with gradients where `out` has them."""
        mean, log_std = self.normal.parameters_of(out)
        raw = mean.clone() if noise is None else mean + log_std.exp() * noise
        logprob = normal_logprob(raw, mean, log_std) - log_slope(raw)
        action = torch.addcmul(self.centre, self.half_width, raw.tanh())
        return Action(action, logprob, {"action": action, "pre_tanh": raw})

    def draw_rows(self, out: Host, noise: Host | None, own: Sequence[Host]) -> Action:
        """The same in numpy."""
        centre, half_width, *rest = own
        mean, log_std = self.normal.parameters_of_rows(out, rest)
        raw = mean if noise is None else mean + np.exp(log_std) * noise
        slope = 2.0 * (LOG_2 - raw - np.logaddexp(0.0, -2.0 * raw))
        logprob = (normal_logprob_rows(raw, mean, log_std) - slope).astype(raw.dtype, copy=False)
        action = centre + half_width * np.tanh(raw)
        return Action(action, logprob, {"action": action, "pre_tanh": raw})

    def score(self, out: Tensor, record: Mapping[str, Array]) -> Score:
        """Log-prob and entropy [B, C, *shape]."""
        mean, log_std = self.normal.parameters_of(out)
        raw = tensor(record["pre_tanh"])
        z = (raw - mean) * torch.exp(-log_std)
        logprob = z * z * -0.5 - (log_std + HALF_LOG_2PI) - log_slope(raw)
        again = mean + log_std.exp() * z.detach()
        return Score(logprob, log_std + (HALF_LOG_2PI + 0.5) + log_slope(again))


class Categorical(nn.Module):
    """One of K categories per entry of the action, drawn by the inverse of the cumulative distribution.

    One place divides by the temperature: acting, scoring and entropy all see `logits / temperature`. Record: "action"
    int64 [B, C, *shape].
    """

    kind = "uniform"

    def __init__(self, field: Field, chunk: int, temperature: float) -> None:
        super().__init__()
        if field.categories is None:
            raise ValueError("dist: categorical needs an action with categories")
        if len(field.shape) > 1:
            raise ValueError(f"action: shape {field.shape} has {len(field.shape)} axes; this policy emits vectors")
        self.shape = (chunk, *field.shape)
        self.axes = ("chunk", "dim")[: len(self.shape)]
        self.categories, self.temperature = field.categories, temperature
        self.outputs = chunk * field.size * field.categories

    def advance(self) -> None:
        """Nothing is scheduled."""

    def tensors(self) -> tuple[Tensor, ...]:
        """No parameters of its own."""
        return ()

    def log_probs(self, out: Tensor) -> Tensor:
        """[B, C, *shape, K]."""
        return normalised(out.view(-1, *self.shape, self.categories), self.temperature)

    def draw(self, out: Tensor, noise: Tensor | None) -> Action:
        """The first category whose cumulative probability exceeds the noise."""
        log_probs = self.log_probs(out)
        if noise is None:
            action = log_probs.argmax(-1)
        else:
            action = (noise.unsqueeze(-1) >= log_probs.exp().cumsum(-1)[..., :-1]).sum(-1)
        logprob = log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        return Action(action, logprob, {"action": action})

    def draw_rows(self, out: Host, noise: Host | None, own: Sequence[Host]) -> Action:  # noqa: ARG002
        """The same in numpy."""
        logits = out.reshape(-1, *self.shape, self.categories) / out.dtype.type(self.temperature)
        logits -= logits.max(-1, keepdims=True)
        probs = np.exp(logits)
        total = probs.sum(-1, keepdims=True)
        if noise is None:
            action = logits.argmax(-1)
        else:
            action = (noise[..., None] >= (probs / total).cumsum(-1)[..., :-1]).sum(-1)
        logprob = np.take_along_axis(logits, action[..., None], -1)[..., 0] - np.log(total[..., 0])
        return Action(action, logprob, {"action": action})

    def score(self, out: Tensor, record: Mapping[str, Array]) -> Score:
        """Log-prob and entropy [B, C, *shape]."""
        logits = out.view(-1, *self.shape, self.categories)
        action = tensor(record["action"]).long()
        return Score(*categorical_score(logits=logits, action=action, temperature=self.temperature))


def normal_logprob(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """log N(x; mean, exp(log_std)^2), elementwise."""
    z = (x - mean) * torch.exp(-log_std)
    return z * z * -0.5 - (log_std + HALF_LOG_2PI)


def normal_logprob_rows(x: Host, mean: Host, log_std: Host) -> Host:
    """The same in numpy."""
    z = x - mean
    z *= np.exp(-log_std)
    z *= z
    z *= -0.5
    z -= log_std + HALF_LOG_2PI
    return z


def log_slope(raw: Tensor) -> Tensor:
    """log(1 - tanh(raw)^2), without cancellation for large |raw|."""
    return 2.0 * (LOG_2 - raw - functional.softplus(-2.0 * raw))
