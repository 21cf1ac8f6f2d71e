"""Value and Q networks: `types.Head` made real. Several copies are evaluated in one batched product."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from m2flow.activations import ACTIVATIONS, check_activation
from m2flow.types import Array, Field, Head


class HeadNet(nn.Module):
    """Dense layers from features [S, F] (and an action) to [S, outputs], or [copies, S, outputs].

    Where every action of a chunk has features of its own, [S, C, F], one output gives [S, C] (or [copies, S, C]), and
    several give [S, C, outputs].

    A bounded action enters scaled to [-1, 1], whatever its unit; one with categories enters one-hot. Initialisation is
    orthogonal, sqrt(2) inside and `gain` at the end.
    """

    centre: Tensor
    factor: Tensor

    def __init__(self, head: Head, features: int, action: Field, chunk: int, generator: torch.Generator) -> None:
        super().__init__()
        check_activation(head.activation)
        self.head = head
        self.activate = ACTIVATIONS[head.activation][0]
        self.categories = action.categories
        self.scaled = False
        inputs = features
        if head.takes_action:
            inputs += chunk * action.size * (action.categories or 1)
            self._scale(action, chunk)
        sizes = (inputs, *head.hidden, head.outputs)
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for i, (before, after) in enumerate(pairwise(sizes)):
            gain = head.gain if i == len(sizes) - 2 else math.sqrt(2.0)
            copies = [nn.init.orthogonal_(torch.empty(after, before), gain, generator) for _ in range(head.copies)]
            self.weights.append(nn.Parameter(torch.stack([w.T for w in copies]) if head.copies > 1 else copies[0]))
            self.biases.append(
                nn.Parameter(torch.zeros(head.copies, 1, after) if head.copies > 1 else torch.zeros(after))
            )
        # The parameters themselves: reading a ParameterList costs as much as a small product.
        self.pairs = tuple(zip(self.weights, self.biases, strict=True))

    def _scale(self, action: Field, chunk: int) -> None:
        """Constants that map a bounded action to [-1, 1]."""
        if action.categories is not None or action.low is None or action.high is None:
            return
        low, high = (_full(bound, action).reshape(-1) for bound in (action.low, action.high))
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            return
        self.scaled = True
        self.register_buffer("centre", torch.tensor(np.tile((low + high) / 2, chunk)).float(), persistent=False)
        self.register_buffer("factor", torch.tensor(np.tile(2 / (high - low), chunk)).float(), persistent=False)

    def forward(self, x: Tensor, action: Array | None) -> Tensor:
        """`action` [S, ...], where the head takes one."""
        if self.head.takes_action != (action is not None):
            raise ValueError(f"a head with takes_action={self.head.takes_action} got action={type(action).__name__}")
        if x.dim() == 3:
            return self._each(x, action)
        if action is not None:
            x = torch.cat([x, self._flat(action, x)], 1)
        layer: Any = functional.linear
        if self.head.copies > 1:
            x, layer = x.expand(self.head.copies, -1, -1), _batched
        *inner, (weight, bias) = self.pairs
        for w, b in inner:
            x = self.activate(layer(x, w, b))
        out: Tensor = layer(x, weight, bias)
        return out if out.dtype == weight.dtype else out.to(weight.dtype)  # under autocast it comes back narrower

    def _each(self, x: Tensor, action: Array | None) -> Tensor:
        """A value for every action of a chunk, from its own features [S, C, F]."""
        if action is not None:
            raise ValueError("a head with takes_action=True needs features [S, F]; this policy has one per action")
        flat = self.forward(x.flatten(0, 1), None)
        out = flat.view(*flat.shape[:-2], *x.shape[:2], self.head.outputs)
        return out.squeeze(-1) if self.head.outputs == 1 else out

    def _flat(self, action: Tensor, like: Tensor) -> Tensor:
        if self.categories is not None:
            return functional.one_hot(action.long(), self.categories).flatten(1).to(like.dtype)
        flat = action.reshape(len(action), -1).to(like.dtype)
        return (flat - self.centre) * self.factor if self.scaled else flat


def _batched(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """[copies, S, in] times [copies, in, out]."""
    return torch.baddbmm(bias, x, weight)


def _full(bound: float | tuple[float, ...], field: Field) -> Any:
    values = np.asarray(bound, np.float64)
    return np.broadcast_to(values.reshape(field.shape) if values.ndim else values, field.shape)
