"""Running mean and standard deviation of observations, as part of a policy's weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

MIN_STD = 1e-4  # its square is added to the variance


class Normalizer(nn.Module):
    """`(x - mean) / sqrt(var + min_std^2)`, clipped to `[-clip, clip]`. The identity until the first `update`.

    The statistics are float64 buffers `count` [], `mean` [n], `m2` [n] (sum of squared deviations); they stay float64
    when the policy is cast. `shift` and `scale` [n] are what `forward` uses, in the policy's dtype; they are buffers
    too, so that a copy of the weights acts the same whatever way it was loaded.

    Example: after `update([[1.], [3.]])`, mean 2 and variance 1, `forward([[3.]])` is `[[1.]]`.
    """

    count: Tensor
    mean: Tensor
    m2: Tensor
    shift: Tensor
    scale: Tensor

    def __init__(self, size: int, clip: float, min_std: float = MIN_STD) -> None:
        super().__init__()
        self.clip, self.min_std = clip, min_std
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise rows [S, n] (a new tensor)."""
        return (x - self.shift).mul_(self.scale).clamp_(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, rows: Tensor) -> None:
        """Take in rows [S, n], S >= 0: the parallel update of Chan, Golub and LeVeque (1979).

        Raises:
            ValueError: a row holds NaN or infinity; the statistics are then unchanged.
        """
        rows = rows.to(torch.float64)
        size = len(rows)
        if size == 0:
            return
        mean = rows.mean(0)
        m2 = (rows - mean).square_().sum(0)
        finite = torch.isfinite(m2)
        if not bool(finite.all()):
            column = int(torch.nonzero(~finite)[0])
            raise ValueError(f"observation: column {column} of the flat observation holds NaN or infinity")
        total = self.count + size
        delta = mean - self.mean
        self.mean.add_(delta * (size / total))
        self.m2.add_(m2).add_(delta.square_() * (self.count * size / total))
        self.count.copy_(total)
        self._derive()

    def _derive(self) -> None:
        """`shift` and `scale` from the statistics."""
        if bool(self.count > 0):
            self.shift.copy_(self.mean)
            self.scale.copy_((self.m2 / self.count).add_(self.min_std**2).rsqrt_())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Casts and moves: the statistics follow to the device but keep their precision."""
        kept = {name: getattr(self, name) for name in ("count", "mean", "m2")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in kept.items():
            setattr(self, name, value.to(self.shift.device))
        self._derive()
        return self
