"""A tree of arrays and plain values as (JSON, named tensors), and back, exactly. Nothing is ever pickled.

JSON says what is what: null, true, numbers, strings and lists are themselves; all else is an object with one tag:

    {"map": {..}}  {"pairs": [[key, value], ..]}  {"tuple": [..]}  {"float": "nan"}  {"bytes": base64}
    {"type": name, "fields": {..}}                a dataclass of m2flow.types
    {"numpy": name, ..}  {"torch": name, ..}      the array `name`; with "raw": [dtype, shape] it was stored as bytes
"""

from __future__ import annotations

import base64
import dataclasses
import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from m2flow import types
from m2flow.types import Tree

# What every version of safetensors stores as it is; other dtypes are stored as bytes.
NATIVE = frozenset({"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bfloat16"})


def encode(tree: Tree) -> tuple[Any, dict[str, Any]]:
    """JSON-ready skeleton, and contiguous CPU tensors by name (the path of the array in the tree).

    A tensor may share memory with the tree: write it before the tree changes.

    Raises:
        TypeError: a value that could not be restored exactly; names its path and type.
    """
    encoder = _Encoder()
    return encoder.encode(tree, ""), encoder.arrays


def decode(skeleton: Any, arrays: Mapping[str, Any]) -> Tree:
    """The inverse of `encode`."""
    if isinstance(skeleton, list):
        return [decode(item, arrays) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    tag = next(iter(skeleton))
    value = skeleton[tag]
    match tag:
        case "map":
            return {key: decode(item, arrays) for key, item in value.items()}
        case "pairs":
            return {decode(key, arrays): decode(item, arrays) for key, item in value}
        case "tuple":
            return tuple(decode(item, arrays) for item in value)
        case "float":
            return float(value)
        case "type":
            fields = {key: decode(item, arrays) for key, item in skeleton["fields"].items()}
            return getattr(types, value)(**fields)
        case "bytes":
            return base64.b64decode(value)
        case "numpy":
            return _numpy(arrays[value], skeleton)
        case "torch":
            return _torch(arrays[value], skeleton.get("raw"))
    raise ValueError(f"checkpoint: unknown tag {tag!r}; it was written by a newer version of m2flow")


class _Encoder:
    """Walks a tree and collects its arrays."""

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}
        self._addresses: set[int] = set()

    def encode(self, x: Any, path: str) -> Any:
        """The skeleton of `x`."""
        if isinstance(x, np.ndarray | np.generic):
            return self._numpy(x, path)
        kind = type(x)
        if x is None or kind in (bool, int, str):
            return x
        if kind is float:
            return x if math.isfinite(x) else {"float": repr(x)}
        if kind is bytes:
            return {"bytes": base64.b64encode(x).decode()}
        if kind is list:
            return [self.encode(item, f"{path}/{i}") for i, item in enumerate(x)]
        if kind is tuple:
            return {"tuple": [self.encode(item, f"{path}/{i}") for i, item in enumerate(x)]}
        if isinstance(x, Mapping):
            return self._mapping(x, path)
        if getattr(types, kind.__name__, None) is kind:
            values = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
            return {"type": kind.__name__, "fields": {k: self.encode(v, f"{path}/{k}") for k, v in values.items()}}
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(x, torch.Tensor):
            return self._torch(x, path)
        raise TypeError(
            f"checkpoint: {path or 'the state'} is a {kind.__module__}.{kind.__qualname__}; a state holds arrays, "
            "None, bool, int, float, str, bytes, dataclasses of m2flow.types, and lists, tuples and dicts of these"
        )

    def _mapping(self, x: Mapping[Any, Any], path: str) -> dict[str, Any]:
        if all(type(key) is str for key in x):
            return {"map": {key: self.encode(item, f"{path}/{key}") for key, item in x.items()}}
        return {"pairs": [[self.encode(k, f"{path}/key"), self.encode(v, f"{path}/{k}")] for k, v in x.items()]}

    def _numpy(self, x: Any, path: str) -> dict[str, Any]:
        import torch

        array = np.ascontiguousarray(x).reshape(np.shape(x))  # ascontiguousarray makes [1] of a scalar
        if array.dtype.hasobject or array.dtype.names is not None:
            raise TypeError(
                f"checkpoint: {path} is an array of dtype {array.dtype}, which holds objects or named fields"
            )
        entry: dict[str, Any] = {}
        if array.dtype.name not in NATIVE or not array.dtype.isnative:
            entry["raw"] = [array.dtype.str, list(array.shape)]
            array = np.frombuffer(bytearray(array.tobytes()), np.uint8)
        if isinstance(x, np.generic):
            entry["scalar"] = True
        if not array.flags.writeable:
            array = array.copy()
        return {"numpy": self._put(torch.from_numpy(array), path), **entry}

    def _torch(self, x: Any, path: str) -> dict[str, Any]:
        import torch

        flat = x.detach().cpu().contiguous()
        dtype = str(x.dtype).removeprefix("torch.")
        if dtype in NATIVE:
            return {"torch": self._put(flat, path)}
        return {"torch": self._put(flat.reshape(-1).view(torch.uint8), path), "raw": [dtype, list(x.shape)]}

    def _put(self, tensor: Any, path: str) -> str:
        """Store under its path. Two paths can read the same ("a/b" is also a key): a number keeps them apart.

        Safetensors refuses tensors that share memory, so a part of a larger one, or one met before, is copied.
        """
        address = tensor.data_ptr()
        if tensor.untyped_storage().nbytes() != tensor.nbytes or (address and address in self._addresses):
            tensor = tensor.clone()
        self._addresses.add(address)
        stem = name = path.lstrip("/") or "array"
        number = 1
        while name in self.arrays:
            number += 1
            name = f"{stem}#{number}"
        self.arrays[name] = tensor
        return name


def _numpy(tensor: Any, entry: Mapping[str, Any]) -> Any:
    array = tensor.numpy()
    if "raw" in entry:
        dtype, shape = entry["raw"]
        array = np.frombuffer(array.tobytes(), dtype).reshape(shape).copy()
    return array[()] if entry.get("scalar") else array


def _torch(tensor: Any, raw: Any) -> Any:
    if raw is None:
        return tensor
    import torch

    dtype, shape = raw
    return tensor.clone().view(getattr(torch, dtype)).reshape(shape)
