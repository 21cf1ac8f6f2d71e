"""The activations that a policy's networks and the heads on them can have, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

Host = NDArray[Any]


def _np_relu(x: Host) -> Host:
    return np.maximum(x, 0.0, out=x)


def _np_tanh(x: Host) -> Host:
    return np.tanh(x, out=x)


def _np_elu(x: Host) -> Host:
    return np.where(x > 0.0, x, np.expm1(np.minimum(x, 0.0)))


def _np_silu(x: Host) -> Host:
    return x * (0.5 * (1.0 + np.tanh(0.5 * x)))  # x * sigmoid(x), in a form that cannot overflow


# name -> (torch, numpy; may work in place)
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Host], Host]]] = {
    "tanh": (torch.tanh, _np_tanh),
    "relu": (torch.relu, _np_relu),
    "elu": (functional.elu, _np_elu),
    "silu": (functional.silu, _np_silu),
}


def check_activation(name: str) -> None:
    """Raise ValueError for an activation that is not in the table."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation: {name!r} is unknown; choose one of {', '.join(ACTIVATIONS)}")
