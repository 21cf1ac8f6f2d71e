"""From logits to log-probabilities: the one place where that is done, for whoever samples, trains or compares.

The temperature divides the logits here and nowhere else, so sampling, scoring and entropy cannot disagree about it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def normalised(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities [..., K] of softmax(logits / temperature), at least in float32."""
    if not temperature > 0.0:
        raise ValueError(f"temperature: {temperature}, expected more than 0")
    wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    return functional.log_softmax(wide / temperature if temperature != 1.0 else wide, dim=-1)


def categorical_logprob(*, logits: Tensor, action: Tensor, temperature: float) -> Tensor:
    """Log-probability of `action` int64 [...] under softmax(logits / temperature), logits [..., K]."""
    if action.shape != logits.shape[:-1]:
        raise ValueError(f"action: shape {tuple(action.shape)}, expected {tuple(logits.shape[:-1])}")
    return normalised(logits, temperature).gather(-1, action.unsqueeze(-1)).squeeze(-1)


def categorical_entropy(*, logits: Tensor, temperature: float) -> Tensor:
    """Entropy in nats of softmax(logits / temperature): [...] from logits [..., K]; -inf entries count 0."""
    scaled = normalised(logits, temperature)
    return -(scaled.exp() * torch.where(scaled.isneginf(), 0.0, scaled)).sum(dim=-1)


def categorical_score(*, logits: Tensor, action: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(log-probability of `action` int64 [...], entropy in nats [...]) of softmax(logits / temperature), at the price
    of one: what is kept for the gradient is a single array [..., K], and an entropy that nobody trains on costs no
    backward pass. First derivatives only.
    """
    if action.shape != logits.shape[:-1]:
        raise ValueError(f"action: shape {tuple(action.shape)}, expected {tuple(logits.shape[:-1])}")
    if not temperature > 0.0:
        raise ValueError(f"temperature: {temperature}, expected more than 0")
    logprob, entropy = _Score.apply(logits, action, temperature)  # type: ignore[no-untyped-call]
    return logprob, entropy


class _Score(torch.autograd.Function):
    """With p = softmax(x / T), l = log p, H the entropy: dl_a/dx = (1_a - p) / T, dH/dx = -p (l + H) / T."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, action: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Keeps log-probabilities and entropy."""
        scaled = normalised(logits, temperature)
        at = action.unsqueeze(-1)
        entropy = -(scaled.exp().mul_(torch.where(scaled.isneginf(), 0.0, scaled))).sum(dim=-1)
        ctx.save_for_backward(scaled, at, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.set_materialize_grads(False)
        return scaled.gather(-1, at).squeeze(-1), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        """The formulas above."""
        by_logprob, by_entropy = grads
        scaled, at, entropy = ctx.saved_tensors
        if by_logprob is None and by_entropy is None:
            return None, None, None
        p = scaled.exp()
        if by_entropy is None:
            assert by_logprob is not None
            out = p.mul_(by_logprob.neg().unsqueeze(-1))
        else:
            finite = torch.where(scaled.isneginf(), 0.0, scaled)
            weight = (finite + entropy.unsqueeze(-1)).mul_(by_entropy.unsqueeze(-1))
            if by_logprob is not None:
                weight += by_logprob.unsqueeze(-1)
            out = p.mul_(weight.neg_())
        if by_logprob is not None:
            out.scatter_add_(-1, at, by_logprob.unsqueeze(-1))
        if ctx.temperature != 1.0:
            out /= ctx.temperature
        return out.to(ctx.dtype), None, None
