"""From logits to log-probabilities: the one place where that is done, for whoever samples, trains or compares.

The temperature divides the logits here and nowhere else, so sampling, scoring and entropy cannot disagree about it.
"""

from __future__ import annotations

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
