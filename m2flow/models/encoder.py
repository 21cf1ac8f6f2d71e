"""From an observation dict to rows of numbers: fields flattened in the order of the spec, optionally normalised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from m2flow.models.layers import HostViews
from m2flow.models.normalizer import MIN_STD, Normalizer
from m2flow.types import Array, Field, Observation, Spec


def tensor(x: Array, like: Tensor | None = None) -> Tensor:
    """A tensor that shares memory with `x` where it can, with the dtype and device of `like` where it is given."""
    if isinstance(x, np.ndarray):
        x = torch.from_numpy(x if x.flags.writeable and x.flags.c_contiguous else np.array(x, order="C"))
    out: Tensor = x if like is None else x.to(like)
    return out


def host(x: Array) -> NDArray[Any]:
    """A numpy array that shares memory with `x` where it can."""
    return x if isinstance(x, np.ndarray) else np.asarray(x.detach().cpu())


def policy_spec(spec: Spec, dtype: torch.dtype = torch.float32) -> Spec:
    """What a policy of this dtype reads from an environment: numbers as `dtype`, categories as they are."""
    name = str(dtype).removeprefix("torch.")
    fields = {key: _read_as(field, name) for key, field in spec.observation.items()}
    return Spec(observation=fields, action=spec.action)


def _read_as(field: Field, dtype: str) -> Field:
    if field.categories is not None:
        return field
    return Field(field.shape, dtype, field.low, field.high, field.unit)


class Encoder(nn.Module):
    """Flattens and normalises. A field with `categories` becomes one-hot.

    Example: fields `{"state": (3,), "goal": (2,)}` and 8 lanes give `[8, 5]`, the state first.
    """

    normalizer: Normalizer | None

    def __init__(self, fields: Mapping[str, Field], *, normalize: bool, clip: float, min_std: float = MIN_STD) -> None:
        super().__init__()
        if not fields:
            raise ValueError("observation: the spec has no field to read")
        self.fields = tuple((name, field.size, field.categories) for name, field in fields.items())
        self.size = sum(size * (categories or 1) for _, size, categories in self.fields)
        self.normalizer = Normalizer(self.size, clip, min_std) if normalize else None
        self._views = self._make_views()

    def _make_views(self) -> HostViews:
        return HostViews(() if self.normalizer is None else (self.normalizer.shift, self.normalizer.scale))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Casts and moves replace buffers."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._views = self._make_views()
        return self

    def forward(self, obs: Observation, like: Tensor) -> Tensor:
        """[S, size] with the dtype and device of `like`; no gradient flows through observations' statistics."""
        flat = self._flat(obs, like)
        return flat if self.normalizer is None else self.normalizer(flat)

    def _flat(self, obs: Observation, like: Tensor) -> Tensor:
        parts = []
        for name, size, categories in self.fields:
            x = obs[name]
            if categories is not None:
                x = nn.functional.one_hot(tensor(x).to(like.device).long(), categories)
            parts.append(tensor(x, like).reshape(-1, size * (categories or 1)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def rows(self, obs: Observation, dtype: Any) -> NDArray[Any]:
        """The same in numpy. May share memory with `obs` where nothing had to change; never write to it."""
        parts = []
        for name, size, categories in self.fields:
            x: NDArray[Any] = obs[name]
            if type(x) is not np.ndarray:
                x = host(x)
            if len(self.fields) == 1 and self.normalizer is None and x.ndim == 2 and x.dtype is dtype:
                return x  # nothing to do
            if categories is not None:
                x = np.eye(categories, dtype=dtype)[x]
            parts.append(x.reshape(-1, size * (categories or 1)).astype(dtype, copy=False))
        flat: NDArray[Any] = parts[0] if len(parts) == 1 else np.concatenate(parts, 1)
        if self.normalizer is None:
            return flat
        shift, scale = self._views()
        flat = flat - shift
        flat *= scale
        clip = self.normalizer.clip
        np.maximum(flat, -clip, out=flat)
        np.minimum(flat, clip, out=flat)
        return flat

    def update(self, obs: Observation) -> None:
        """Take in observations [S, ...] for the statistics; nothing to do without normalisation.

        Raises:
            ValueError: NaN or infinity; the statistics are then unchanged.
        """
        if self.normalizer is not None:
            self.normalizer.update(self._flat(obs, self.normalizer.mean))
