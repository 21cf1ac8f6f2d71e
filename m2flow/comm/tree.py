"""Nested trees of arrays and plain values: walk them, and turn them into bytes and back.

A tree is made of dict, list, tuple, dataclasses, numpy arrays, torch tensors and plain values. `pack` gives a header
and one buffer per array:

    header   JSON: [skeleton, [[kind, dtype, shape], ...]]; kind "n" for numpy, "t" for torch
    buffers  the arrays' bytes in C order; an array is never pickled, whatever its strides

The skeleton holds plain values as they are, a dict with text keys as an object, and all else as a tagged list: "a"
array, "s" numpy scalar, "b" bytes, "l" list, "t" tuple, "d" dict with other keys, "c" dataclass of `m2flow.types` (or
one that was given to `register`), "p" pickle. A pickle is only written and read between our own processes (`trusted`),
for plain objects such as configs and exceptions; arrays inside it still travel as buffers. What arrives is owned: numpy
arrays as numpy, tensors as CPU tensors without gradient; OrderedDict and read-only mappings as dict.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import pickle  # only between our own processes, see the module's docstring
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from m2flow import types
from m2flow.types import Array, Tree

ALIGN = 64  # bytes; where arrays begin in one joint body
_PLAIN = frozenset((type(None), bool, int, float, str))
_MAPPINGS = frozenset((dict, OrderedDict, MappingProxyType))
_NUMPY_KINDS = "biufcSUmM"
_CLASSES: dict[str, type] = {}
_FIELDS: dict[type, tuple[str, tuple[str, ...]]] = {}  # class -> (wire name, field names)
_dumps = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_loads = json.JSONDecoder().decode
_dtype = functools.cache(np.dtype)


def register(cls: type) -> type:
    """Let a dataclass travel without pickle. Both sides must have called this; usable as a decorator."""
    if not dataclasses.is_dataclass(cls):
        raise ValueError(f"register: {cls!r} is not a dataclass")
    name = cls.__name__ if cls.__module__ == types.__name__ else f"{cls.__module__}:{cls.__qualname__}"
    _CLASSES[name] = cls
    _FIELDS[cls] = (name, tuple(f.name for f in dataclasses.fields(cls)))
    return cls


for _cls in list(vars(types).values()):
    if isinstance(_cls, type) and _cls.__module__ == types.__name__ and dataclasses.is_dataclass(_cls):
        register(_cls)


# ---- walking


def is_tensor(value: Any) -> bool:
    """Whether `value` is a torch tensor; never imports torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_array(value: Any) -> bool:
    """Whether `value` is a numpy array or a torch tensor."""
    return isinstance(value, np.ndarray) or is_tensor(value)


def map_leaves(fn: Callable[[Any], Any], tree: Tree) -> Tree:
    """The same tree with `fn` applied to every array; other values are kept as they are."""
    if type(tree) in _PLAIN:
        return tree
    if is_array(tree):
        return fn(tree)
    if type(tree) in _MAPPINGS:
        return {key: map_leaves(fn, value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        parts = [map_leaves(fn, value) for value in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [f.name for f in dataclasses.fields(tree) if f.init]
        return dataclasses.replace(tree, **{n: map_leaves(fn, getattr(tree, n)) for n in names})
    return tree


def copy(tree: Tree) -> Tree:
    """A tree that shares no array with the given one."""
    return map_leaves(lambda leaf: leaf.detach().clone() if is_tensor(leaf) else leaf.copy(), tree)


# ---- bytes


def as_numpy(array: Array) -> tuple[np.ndarray[Any, Any], str, str]:
    """(numpy view with the same item size and strides, kind "n" or "t", dtype name), without copying.

    A bfloat16 tensor is seen as int16. ValueError for tensors that are not plain CPU tensors and for arrays of objects.
    """
    if isinstance(array, np.ndarray):
        if array.dtype.kind not in _NUMPY_KINDS or array.itemsize == 0:
            raise ValueError(f"a numpy array of dtype {array.dtype} has no plain bytes; use numbers, booleans or text")
        if isinstance(array, np.ma.MaskedArray):
            raise ValueError("a masked array would lose its mask; send data and mask apart")  # noqa: TRY004
        return array, "n", array.dtype.str
    torch = sys.modules["torch"]
    if array.device.type != "cpu":
        raise ValueError(f"a tensor on {array.device} cannot leave its process yet; move it to the CPU first")
    if array.layout != torch.strided or array.is_quantized:
        raise ValueError(f"a tensor of layout {array.layout} (quantized: {array.is_quantized}) is not supported")
    plain = array.detach().resolve_conj().resolve_neg()
    name = str(plain.dtype).removeprefix("torch.")
    if not hasattr(np, name.removesuffix("_")) and name != "bool":
        plain = plain.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()])
    return plain.numpy(), "t", name


class _Encoder:
    """One walk over a tree: collects leaves and their descriptions, returns the skeleton."""

    def __init__(self, trusted: bool) -> None:
        self.trusted = trusted
        self.leaves: list[np.ndarray[Any, Any]] = []
        self.metas: list[tuple[str, str, tuple[int, ...]]] = []

    def leaf(self, array: Array) -> int:
        view, kind, dtype = as_numpy(array)
        self.leaves.append(view)
        self.metas.append((kind, dtype, view.shape))
        return len(self.leaves) - 1

    def encode(self, tree: Tree) -> Any:
        cls = type(tree)
        if cls in _PLAIN:
            return tree
        if cls is np.ndarray:
            return ("a", self.leaf(tree))
        if cls in _MAPPINGS:
            if all(type(key) is str for key in tree):
                return {key: self.encode(value) for key, value in tree.items()}
            return ("d", *(self.encode(part) for item in tree.items() for part in item))
        if cls is list or cls is tuple:
            return ("l" if cls is list else "t", *map(self.encode, tree))
        if cls in _FIELDS:
            name, fields = _FIELDS[cls]
            return ("c", name, *(self.encode(getattr(tree, field)) for field in fields))
        return self.other(tree, cls)

    def other(self, tree: Tree, cls: type) -> Any:
        """Everything that is not common."""
        if is_array(tree):
            return ("a", self.leaf(tree))
        if isinstance(tree, np.generic) and tree.dtype.kind in _NUMPY_KINDS:
            return ("s", self.leaf(np.asarray(tree)))
        if cls is bytes:
            return ("b", self.leaf(np.frombuffer(tree, np.uint8)))
        if not self.trusted:
            raise ValueError(
                f"cannot pack a {cls.__module__}.{cls.__qualname__}: only arrays, plain values, dict, list, tuple, the "
                "dataclasses of m2flow.types and those given to m2flow.comm.tree.register travel here"
            )
        out = io.BytesIO()
        pickler = pickle.Pickler(out, protocol=5)
        pickler.persistent_id = lambda obj: self.leaf(obj) if is_array(obj) else None  # type: ignore[method-assign]
        try:
            pickler.dump(tree)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ValueError(f"cannot pack a {cls.__module__}.{cls.__qualname__}: {error}") from error
        return ("p", self.leaf(np.frombuffer(out.getbuffer(), np.uint8)))


def encode(tree: Tree, *, trusted: bool = False) -> tuple[bytes, list[np.ndarray[Any, Any]]]:
    """The header, and every array as a numpy view of any strides. ValueError says what cannot travel, and where."""
    encoder = _Encoder(trusted)
    try:
        skeleton = encoder.encode(tree)
    except ValueError as error:
        raise ValueError(f"{_place_of_trouble(tree, trusted)}: {error}") from error
    return _dumps((skeleton, encoder.metas)).encode("ascii"), encoder.leaves


def pack(tree: Tree, *, trusted: bool = False) -> tuple[bytes, list[memoryview]]:
    """Header and one buffer of C-order bytes per array. Contiguous arrays are viewed, others copied once."""
    header, leaves = encode(tree, trusted=trusted)
    return header, [np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data for leaf in leaves]


def unpack(header: bytes | memoryview, buffers: Sequence[Any], *, trusted: bool = False) -> Tree:
    """The tree again, with arrays of its own (one copy)."""
    skeleton, metas = _loads(bytes(header).decode("ascii"))
    return _build(skeleton, [_array(meta, buffer) for meta, buffer in zip(metas, buffers, strict=True)], trusted)


def layout(leaves: Sequence[np.ndarray[Any, Any]]) -> tuple[list[int], int]:
    """Where each array begins in one joint body, and the body's size."""
    return _offsets([leaf.nbytes for leaf in leaves])


def unpack_body(header: bytes | memoryview, body: Any, *, trusted: bool = False) -> Tree:
    """Like `unpack`, from one joint body laid out by `layout`."""
    skeleton, metas = _loads(bytes(header).decode("ascii"))
    sizes = [_size(meta) for meta in metas]
    starts, _ = _offsets(sizes)
    view = memoryview(body)
    leaves = [_array(meta, view[a : a + n]) for meta, a, n in zip(metas, starts, sizes, strict=True)]
    return _build(skeleton, leaves, trusted)


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    starts, end = [], 0
    for size in sizes:
        start = -(-end // ALIGN) * ALIGN
        starts.append(start)
        end = start + size
    return starts, end


def _size(meta: Sequence[Any]) -> int:
    kind, name, shape = meta
    count = 1
    for extent in shape:
        count *= extent
    return count * int(_dtype(name).itemsize if kind == "n" else _torch_dtype(name).itemsize)


def _torch_dtype(name: str) -> Any:
    import torch  # a tensor is in the tree, so its consumer needs torch anyway

    return getattr(torch, name)


def _array(meta: Sequence[Any], buffer: Any) -> Array:
    kind, name, shape = meta
    if kind == "n":
        return np.frombuffer(buffer, _dtype(name)).reshape(shape).copy()
    dtype = _torch_dtype(name)
    import torch

    flat = torch.from_numpy(np.frombuffer(buffer, np.uint8).copy())
    return flat.view(dtype).reshape(shape) if flat.numel() else torch.empty(shape, dtype=dtype)


def _build(node: Any, leaves: Sequence[Array], trusted: bool) -> Tree:
    if type(node) is dict:
        return {key: _build(value, leaves, trusted) for key, value in node.items()}
    if type(node) is not list:
        return node
    tag, *rest = node
    if tag == "a":
        return leaves[rest[0]]
    if tag in ("l", "t"):
        parts = [_build(part, leaves, trusted) for part in rest]
        return parts if tag == "l" else tuple(parts)
    if tag == "c":
        cls = _CLASSES.get(rest[0])
        if cls is None:
            raise ValueError(f"a {rest[0]!r} arrived, which this process does not know: import and register its class")
        return cls(*(_build(part, leaves, trusted) for part in rest[1:]))
    if tag == "d":
        parts = [_build(part, leaves, trusted) for part in rest]
        return dict(zip(parts[::2], parts[1::2], strict=True))
    if tag == "s":
        return leaves[rest[0]][()]
    if tag == "b":
        return leaves[rest[0]].tobytes()
    if tag == "p" and trusted:
        unpickler = pickle.Unpickler(io.BytesIO(leaves[rest[0]].tobytes()))  # noqa: S301  our own process wrote it
        unpickler.persistent_load = lambda index: leaves[index]  # type: ignore[method-assign]
        return unpickler.load()
    raise ValueError(f"a header holds {tag!r}, which is not accepted here")


def _place_of_trouble(tree: Tree, trusted: bool, path: str = "payload") -> str:
    """The path of the first part that cannot be packed."""
    parts: list[tuple[str, Any]] = []
    if isinstance(tree, Mapping):
        parts = [(f"{path}[{key!r}]", value) for key, value in tree.items()]
    elif isinstance(tree, (list, tuple)):
        parts = [(f"{path}[{i}]", value) for i, value in enumerate(tree)]
    elif type(tree) in _FIELDS:
        parts = [(f"{path}.{name}", getattr(tree, name)) for name in _FIELDS[type(tree)][1]]
    for name, value in parts:
        try:
            _Encoder(trusted).encode(value)
        except ValueError:
            return _place_of_trouble(value, trusted, name)
    return path
