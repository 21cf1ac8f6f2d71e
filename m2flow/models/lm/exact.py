"""Double precision all the way through a model of transformers.

Its layers cast to float32 here and there (RMSNorm, softmax), whatever the model's dtype is. For laws that are checked
in float64 that is not enough: inputs that differ by 1e-16 round to different float32 numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Exact(TorchFunctionMode):
    """Casts of a float64 tensor to float32 do nothing while it is active."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Leave those casts out; everything else is as it was."""
        del types
        given = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float or (func is Tensor.to and torch.float32 in (*args[1:], given.get("dtype"))):
                return args[0]
            if given.get("dtype") == torch.float32:  # softmax(x, dtype=float32)
                given["dtype"] = torch.float64
        return func(*args, **given)


def mode(model: nn.Module) -> AbstractContextManager[Any]:
    """Active where the model is in float64."""
    return Exact() if next(model.parameters()).dtype == torch.float64 else nullcontext()


def install(decoder: nn.Module) -> None:
    """Every forward pass of `decoder`, whoever calls it, is exact where its weights are in float64."""
    decoder.register_forward_pre_hook(_enter)
    decoder.register_forward_hook(_leave, always_call=True)


def contexts(decoder: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For activation checkpointing: of the forward pass, and of computing it again without the hooks."""
    return nullcontext(), mode(decoder)


class _Entered(threading.local):
    """The modes of forward passes under way in this thread."""

    def __init__(self) -> None:
        self.modes: list[AbstractContextManager[Any]] = []


_entered = _Entered()


def _enter(decoder: nn.Module, _args: Any) -> None:
    _entered.modes.append(mode(decoder))
    _entered.modes[-1].__enter__()


def _leave(_decoder: nn.Module, _args: Any, _out: Any) -> None:
    _entered.modes.pop().__exit__(None, None, None)
