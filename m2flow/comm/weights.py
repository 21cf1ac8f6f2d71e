"""Weights on their way from a trainer to services: a snapshot with a checksum per name, verified before it is loaded.

    trainer:  weights = publish(version, state)            copies at once, so later changes do not show
    service:  pull(weights, at_least=3); load_into(module.state_dict(), weights, prefix="policy.")

The checksum covers name, shape, dtype and the bytes in C order, so strides do not matter. Dtype rule: kept as they are,
unless `publish` is told a dtype, which floating point arrays are then converted to; loading converts between floating
point dtypes only.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from m2flow.comm import tree
from m2flow.types import Array, Weights


class WeightsError(ValueError):
    """Weights that are not what was sent, or do not fit where they are to go."""


def publish(
    version: int, arrays: Mapping[str, Array] | Iterable[tuple[str, Array]], *, dtype: str | None = None
) -> Weights:
    """A snapshot on the CPU, in the order of names, with checksums. `arrays` may be a lazy iterator; it is read here.

    `dtype` such as "bfloat16" (tensors) or "float16" converts floating point arrays, no others.
    """
    pairs = arrays.items() if isinstance(arrays, Mapping) else arrays
    snapshot: dict[str, Array] = {}
    for name, array in pairs:
        if name in snapshot:
            raise WeightsError(f"weights: {name!r} is published twice")
        snapshot[name] = _snapshot(array, dtype)
    ordered = {name: snapshot[name] for name in sorted(snapshot)}
    return Weights(version, ordered, {name: checksum(name, array) for name, array in ordered.items()})


def checksum(name: str, array: Array) -> int:
    """crc32 over name, shape, dtype and bytes in C order."""
    view, kind, dtype = tree.as_numpy(_on_host(array))
    start = zlib.crc32(f"{name}|{tuple(view.shape)}|{kind}|{dtype}".encode())
    return zlib.crc32(np.ascontiguousarray(view).reshape(-1).view(np.uint8).data, start)


def _on_host(array: Array) -> Array:
    return array.detach().cpu() if tree.is_tensor(array) else array


def verify(weights: Weights) -> None:
    """WeightsError with the first name that is missing, unexpected, without a checksum, or changed."""
    for name in weights.checksums:
        if name not in weights.arrays:
            raise WeightsError(f"weights of version {weights.version}: {name!r} was announced but did not arrive")
    for name, array in weights.arrays.items():
        if name not in weights.checksums:
            raise WeightsError(
                f"weights of version {weights.version}: {name!r} has no checksum; make them with publish()"
            )
        if checksum(name, array) != weights.checksums[name]:
            raise WeightsError(
                f"weights of version {weights.version}: {name!r} is not what was sent (checksum differs)"
            )


def pull(weights: Weights, *, at_least: int | None = None) -> Mapping[str, Array]:
    """The arrays of received weights, verified. `at_least`: the oldest version that will do."""
    if at_least is not None and weights.version < at_least:
        raise WeightsError(f"weights of version {weights.version} arrived, at least {at_least} is needed")
    verify(weights)
    return weights.arrays


def load_into(state: Mapping[str, Array], weights: Weights, prefix: str = "") -> None:
    """Copy the weights named `prefix` + name into the arrays of `state` (a module's state_dict(), or numpy arrays).

    All or nothing: names, shapes and dtypes are checked before the first copy. A name of `state` may be absent if it is
    tied to one that is there (shares its memory); tied names that come with different values are refused.
    """
    given = {name.removeprefix(prefix): array for name, array in weights.arrays.items() if name.startswith(prefix)}
    unexpected = [name for name in given if name not in state]
    tied = {_memory(state[name]) for name in given if name in state}
    missing = [name for name in state if name not in given and _memory(state[name]) not in tied]
    if unexpected or missing:
        raise WeightsError(f"weights do not fit: missing {missing or 'nothing'}, unexpected {unexpected or 'nothing'}")
    first: dict[Any, str] = {}
    for name, array in given.items():
        _fits(name, state[name], array)
        other = first.setdefault(_memory(state[name]), name)
        if other != name and checksum("", array) != checksum("", given[other]):
            raise WeightsError(f"weights: {other!r} and {name!r} share memory here but arrived with different values")
    for name, array in given.items():
        _copy(state[name], array)


def _snapshot(array: Array, dtype: str | None) -> Array:
    if tree.is_tensor(array):
        import torch

        # clone first: .cpu() and .to() may return the very same memory
        own = array.detach().clone(memory_format=torch.contiguous_format).cpu()
        return own.to(getattr(torch, dtype)) if dtype is not None and own.is_floating_point() else own
    own = np.array(array, order="C", copy=True)
    return own.astype(dtype) if dtype is not None and own.dtype.kind == "f" else own


def _memory(array: Array) -> Any:
    """Equal for arrays that are the same memory seen in the same way. An empty array is tied to nothing."""
    if tree.is_tensor(array):
        place = (array.data_ptr(), tuple(array.shape), tuple(array.stride()), str(array.dtype), str(array.device))
        return place if array.numel() else id(array)
    where = array.__array_interface__
    return (where["data"][0], array.shape, array.strides, array.dtype.str) if array.size else id(array)


def _fits(name: str, target: Array, array: Array) -> None:
    if tuple(target.shape) != tuple(array.shape):
        raise WeightsError(f"weights: {name!r} has shape {tuple(array.shape)}, here it is {tuple(target.shape)}")
    kinds = [_kind(target), _kind(array)]
    if kinds[0] != kinds[1]:
        raise WeightsError(
            f"weights: {name!r} is {array.dtype}, here it is {target.dtype}; only float converts to float"
        )


def _kind(array: Array) -> str:
    if tree.is_tensor(array):
        return "float" if array.is_floating_point() else str(array.dtype).removeprefix("torch.")
    return "float" if array.dtype.kind == "f" else str(array.dtype)


def _copy(target: Array, array: Array) -> None:
    if tree.is_tensor(target):
        import torch

        with torch.no_grad():
            target.copy_(array if tree.is_tensor(array) else torch.from_numpy(np.array(array)))
    else:
        if tree.is_tensor(array):
            known = hasattr(np, str(array.dtype).removeprefix("torch."))  # numpy has no bfloat16
            array = (array if known else array.float()).detach().numpy()
        np.copyto(target, array, casting="same_kind")
