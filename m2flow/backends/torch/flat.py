"""The parameters of one group as views of one flat tensor, and their gradients as views of another.

Clipping, the optimiser and clearing gradients are then a handful of calls per update, however many parameters there
are. For small networks that is most of their cost. Nothing outside sees it: states and weights are kept by name.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class FlatGroup:
    """`data` [n] and `grad` [n] of the given parameters, in their order."""

    data: Tensor
    grad: Tensor

    def __init__(self, label: str, parameters: Mapping[str, nn.Parameter]) -> None:
        self.label = label
        self.parameters = dict(parameters)
        dtypes = sorted({str(p.dtype) for p in self.parameters.values()})
        if len(dtypes) > 1:
            raise ValueError(f"group {label!r} mixes {', '.join(dtypes)}; cast its parameters to one dtype")
        self.gather()

    @torch.no_grad()
    def gather(self) -> None:
        """Copy the parameters, where they are now, into a new flat tensor; gradients start at zero."""
        self.data = torch.cat([p.detach().reshape(-1) for p in self.parameters.values()])
        self.grad = torch.zeros_like(self.data)
        grads = self.split(self.grad)
        for name, view in self.split(self.data).items():
            parameter = self.parameters[name]
            parameter.data = view
            parameter.grad = grads[name]
        self._bound = [(name, p, grads[name], p.data_ptr()) for name, p in self.parameters.items()]

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat tensor by parameter name, each in its parameter's shape."""
        parts = torch.split(flat, [p.numel() for p in self.parameters.values()])
        return {name: part.view(p.shape) for (name, p), part in zip(self.parameters.items(), parts, strict=True)}

    def check(self) -> None:
        """Raise RuntimeError if a parameter's data or gradient was replaced: training would go on without effect."""
        for name, parameter, grad, address in self._bound:
            if parameter.grad is not grad or parameter.data_ptr() != address:
                what = "gradient" if parameter.grad is not grad else "data"
                raise RuntimeError(
                    f"the {what} of {name} was replaced behind the trainer's back; load values in place, do not use "
                    "zero_grad(set_to_none=True), and cast or move the model before the trainer is built"
                )
