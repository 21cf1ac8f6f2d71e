"""Checksums of weights, made by a trainer and verified by the service that is about to load them.

A checksum covers name, shape, dtype and the bytes in C order, so strides do not matter.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np

from m2flow.comm import tree
from m2flow.types import Array, Weights


class WeightsError(ValueError):
    """Weights that are not what was sent."""


def checksums(arrays: Mapping[str, Array]) -> dict[str, int]:
    """The checksum of every array, by name."""
    return {name: checksum(name, array) for name, array in arrays.items()}


def checksum(name: str, array: Array) -> int:
    """crc32 over name, shape, dtype and bytes in C order."""
    view, kind, dtype = tree.as_numpy(array.detach().cpu() if tree.is_tensor(array) else array)
    start = zlib.crc32(f"{name}|{tuple(view.shape)}|{kind}|{dtype}".encode())
    return zlib.crc32(np.ascontiguousarray(view).reshape(-1).view(np.uint8).data, start)


def verify(weights: Weights) -> None:
    """WeightsError with the first name that is missing, unexpected, without a checksum, or changed."""
    for name in weights.checksums:
        if name not in weights.arrays:
            raise WeightsError(f"weights of version {weights.version}: {name!r} was announced but did not arrive")
    for name, array in weights.arrays.items():
        if name not in weights.checksums:
            raise WeightsError(f"weights of version {weights.version}: {name!r} arrived without a checksum")
        if checksum(name, array) != weights.checksums[name]:
            raise WeightsError(
                f"weights of version {weights.version}: {name!r} is not what was sent (checksum differs)"
            )
