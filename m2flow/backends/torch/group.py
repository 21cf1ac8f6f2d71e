"""One parameter group of a trainer: its flat tensors, its optimiser, and the slow copies that follow it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from m2flow.backends.torch.flat import FlatGroup
from m2flow.backends.torch.model import Model
from m2flow.backends.torch.optim import Optimizer
from m2flow.types import Array


class Group:
    """One parameter group: its flat tensors, its optimiser, and the slow copies that follow it."""

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, nn.Parameter],
        model: Model,
        optimizer: Callable[[Tensor], Optimizer],
        base_rate: float,
    ) -> None:
        self.name, self.base_rate = name, base_rate
        self.flat = FlatGroup(name, parameters)
        self.optimizer = optimizer(self.flat.data)
        self.slow: list[tuple[list[Tensor], list[Tensor], float]] = []
        for head, slow in model.slow.items():
            fast = dict(model.heads[head].named_parameters(prefix=f"heads.{head}"))
            if fast.keys() <= self.flat.parameters.keys():
                net: Any = model.heads[head]
                self.slow.append((list(slow.parameters()), list(fast.values()), net.head.ema))

    def clip(self, limit: float | None, phase: str) -> Array:
        """The gradient's norm; the gradient is scaled down to `limit`."""
        grad = self.flat.grad
        norm = torch.linalg.vector_norm(grad)
        if not grad.is_cpu:
            if limit is not None:
                grad.mul_((limit / (norm + 1e-6)).clamp_(max=1.0))
            return norm
        value = norm.item()
        if not math.isfinite(value):
            bad = _not_finite(self.flat.split(grad))
            what = f"the gradient of {', '.join(bad[:5])} is not finite ({len(bad)} parameters in all)"
            if not bad:
                largest = max(self.flat.split(grad).items(), key=lambda item: float(item[1].abs().max()))[0]
                what = f"the gradient is so large, most of all that of {largest}, that its norm overflows"
            raise FloatingPointError(
                f"phase {phase!r}, update {self.optimizer.updates + 1}: {what}; look at rewards, observations, "
                "coefficients and the learning rate"
            )
        if limit is not None and value > limit - 1e-6:
            grad.mul_(limit / (value + 1e-6))
        return value

    def check_finite(self) -> None:
        """Raise FloatingPointError if a weight is not finite."""
        if not bool(self.flat.data.isfinite().all()):
            bad = _not_finite(self.flat.split(self.flat.data))
            raise FloatingPointError(
                f"group {self.name!r}, after update {self.optimizer.updates}: {', '.join(bad[:5])} is not finite "
                f"({len(bad)} parameters in all); look at the learning rate and weight decay"
            )

    def state(self) -> dict[str, Any]:
        moments = {
            name: {key: x.clone() for key, x in self.flat.split(moment).items()}
            for name, moment in self.optimizer.moments.items()
        }
        return {"updates": self.optimizer.updates, "moments": moments}

    def fits(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if `state` is not of this group and optimiser."""
        there, here = sorted(state["moments"]), sorted(self.optimizer.moments)
        if there != here:
            raise ValueError(f"checkpoint: optimizer moments {there} of group {self.name!r} do not fit {here}")
        for name, moment in self.optimizer.moments.items():
            same_arrays(f"optimizer {name} of {self.name}", self.flat.split(moment), state["moments"][name])

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, moment in self.optimizer.moments.items():
            for key, x in self.flat.split(moment).items():
                x.copy_(state["moments"][name][key])
        self.optimizer.updates = int(state["updates"])
        self.flat.grad.zero_()

    def gather(self, device: torch.device) -> None:
        """After a move: flat tensors on the new device."""
        self.flat.gather()
        self.optimizer.moments = {name: x.to(device) for name, x in self.optimizer.moments.items()}


def _not_finite(arrays: Mapping[str, Tensor]) -> list[str]:
    return [name for name, x in arrays.items() if not bool(x.isfinite().all())]


def same_arrays(what: str, own: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    """Raise ValueError unless names, shapes and dtypes agree."""
    missing, extra = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    if missing or extra:
        raise ValueError(f"checkpoint: {what} lacks {missing[:5]} and has unknown {extra[:5]}")
    for name, x in own.items():
        if tuple(x.shape) != tuple(saved[name].shape) or x.dtype != saved[name].dtype:
            there = f"{saved[name].dtype} {tuple(saved[name].shape)}"
            raise ValueError(f"checkpoint: {what} {name} is {there}, here it is {x.dtype} {tuple(x.shape)}")
