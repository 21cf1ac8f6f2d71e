"""Dense networks, once for torch (gradients) and once for numpy (acting on a few lanes, where torch's cost per call is
several times that of the arithmetic). Both compute the same function of the same weights, up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from m2flow.activations import ACTIVATIONS, Host, check_activation

_address = Tensor.data_ptr  # one lookup for all calls: it is made for every weight and decision

# Products (rows x inputs x outputs of the widest layer) up to which acting is done in numpy. Beyond it numpy's BLAS
# wakes a thread for every core, whatever the plan gave this process; torch keeps to its own number of threads.
HOST_LIMIT = 1 << 22


def check_network(hidden: Sequence[int], activation: str) -> None:
    """Raise ValueError for widths or an activation that cannot be built."""
    if any(width < 1 for width in hidden):
        raise ValueError(f"hidden: every width must be at least 1, got {tuple(hidden)}")
    check_activation(activation)


class Dense(nn.Module):
    """`x @ weight.T + bias`. The weight is orthogonal times `gain` (Saxe et al. 2013), the bias zero."""

    def __init__(self, inputs: int, outputs: int, gain: float, generator: torch.Generator) -> None:
        super().__init__()
        weight = torch.empty(outputs, inputs)
        nn.init.orthogonal_(weight, gain, generator=generator)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        return functional.linear(x, self.weight, self.bias)


def dense(x: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], activate: Callable[[Tensor], Tensor]) -> Tensor:
    """Layers of (weight, bias) with the activation between them, not behind the last."""
    *inner, (weight, bias) = pairs
    for w, b in inner:
        x = activate(functional.linear(x, w, b))
    return functional.linear(x, weight, bias)


class Trunk(nn.Module):
    """Dense layers of the given widths, each followed by the activation; the identity without widths."""

    def __init__(
        self, inputs: int, hidden: Sequence[int], activation: str, gain: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.activation = activation
        sizes = (inputs, *hidden)
        self.outputs = sizes[-1]
        dense = [Dense(before, after, gain, generator) for before, after in pairwise(sizes)]
        self.layers = nn.ModuleList(dense)
        # The parameters themselves, because attribute access through nn.Module costs as much as a small product.
        self.pairs = tuple((layer.weight, layer.bias) for layer in dense)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        activate = ACTIVATIONS[self.activation][0]
        for weight, bias in self.pairs:
            x = activate(functional.linear(x, weight, bias))
        return x


def on_host(rows: Any, weight: Tensor, widest: int) -> bool:
    """Whether to act on `rows` (one array of an observation) in numpy: a small batch of numpy arrays, weights in RAM.

    `weight` is any of the network's, `widest` the size of its largest.
    """
    return isinstance(rows, np.ndarray) and weight.is_cpu and len(rows) * widest <= HOST_LIMIT


class HostViews:
    """Numpy views of CPU tensors, made anew when a tensor has moved to other memory. Shares memory, copies nothing.

    The tensors are those of the module when the views are made; a module whose buffers are replaced (`_apply`) makes
    new ones.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._at: list[int] = []
        self._views: tuple[Host, ...] = ()

    def __call__(self) -> tuple[Host, ...]:
        """The views, in the order of the tensors."""
        at = list(map(_address, self._tensors))
        if at != self._at:
            self._views = tuple(tensor.detach().numpy() for tensor in self._tensors)
            self._at = at
        return self._views

    def __getstate__(self) -> dict[str, Any]:
        return {"_tensors": self._tensors}  # addresses mean nothing in a copy or in another process

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_tensors"])  # type: ignore[misc]
