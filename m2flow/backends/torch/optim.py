"""Optimisers on one flat tensor, with the mathematics of `torch.optim`."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Optimizer(Protocol):
    """Moves `data` [n] along `grad` [n]. `moments` [n] by name are all it remembers, beside the count of updates."""

    moments: dict[str, Tensor]
    updates: int

    def update(self, data: Tensor, grad: Tensor, rate: float) -> None:
        """One step, in place."""


class Adam:
    """Adam (1412.6980); with `decoupled` decay AdamW (1711.05101). One fused call, as in `torch.optim`."""

    def __init__(
        self, data: Tensor, betas: tuple[float, float], eps: float, weight_decay: float, *, decoupled: bool
    ) -> None:
        self.moments = {"exp_avg": torch.zeros_like(data), "exp_avg_sq": torch.zeros_like(data)}
        self.updates = 0
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self._step = torch.zeros((), dtype=torch.float32, device=data.device)
        self._call = torch._fused_adamw_ if decoupled else torch._fused_adam_

    def update(self, data: Tensor, grad: Tensor, rate: float) -> None:
        """One step, in place."""
        self.updates += 1
        if self._step.device != data.device:
            self._step = self._step.to(data.device)
        self._call(
            [data],
            [grad],
            [self.moments["exp_avg"]],
            [self.moments["exp_avg_sq"]],
            [],
            [self._step.fill_(self.updates)],
            lr=rate,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )


class SGD:
    """Stochastic gradient descent; momentum as in `torch.optim.SGD` (no dampening)."""

    def __init__(self, data: Tensor, momentum: float, weight_decay: float) -> None:
        self.moments = {"momentum_buffer": torch.zeros_like(data)} if momentum else {}
        self.updates = 0
        self.momentum, self.weight_decay = momentum, weight_decay

    def update(self, data: Tensor, grad: Tensor, rate: float) -> None:
        """One step, in place."""
        self.updates += 1
        if self.weight_decay:
            grad = grad.add(data, alpha=self.weight_decay)
        if self.momentum:
            grad = self.moments["momentum_buffer"].mul_(self.momentum).add_(grad)
        data.add_(grad, alpha=-rate)
