from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections import OrderedDict
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from m2flow.comm import tree
from m2flow.types import Action, EpisodeResult, Metric, Report, Tick, Trajectory, Units, Weights


def same(a, b) -> bool:
    """Equal in type, dtype, shape and bits; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor):
        bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)] if a.numel() else [a, b]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


def sent(value, *, trusted=False):
    header, buffers = tree.pack(value, trusted=trusted)
    assert isinstance(header, bytes)
    assert all(isinstance(buffer, memoryview) for buffer in buffers)
    return tree.unpack(header, buffers, trusted=trusted)


def through_a_body(value):
    """As a transport does it: all arrays in one block of memory."""
    header, leaves = tree.encode(value)
    starts, size = tree.layout(leaves)
    body = bytearray(size)
    for leaf, start in zip(leaves, starts, strict=True):
        body[start : start + leaf.nbytes] = leaf.tobytes()
    return tree.unpack_body(header, body)


def trajectory() -> Trajectory:
    t, b = 3, 2
    rng = np.random.default_rng(0)
    at = np.arange(t * b).reshape(t, b)
    return Trajectory(
        obs={"state": rng.normal(size=((t + 1) * b, 5))},
        obs_at=at,
        next_at=at + b,
        reward=rng.normal(size=(t, b, 1)).astype(np.float32),
        valid=np.ones((t, b, 1), bool),
        terminated=np.zeros((t, b), bool),
        truncated=np.zeros((t, b), bool),
        version=np.full((t, b), 7),
        episode=at.copy(),
        group=at.copy(),
        lane=np.array([4, 9]),
        units=Units(("chunk", "dim"), rng.normal(size=(t * b, 1, 2)), {"action": rng.normal(size=(t * b, 1, 2))}),
        info={"success": np.zeros((t, b), bool)},
        step=12,
    )


ITEMS = {
    "trajectory": trajectory(),
    "weights": Weights(3, {"w": np.eye(2), "b": torch.zeros(2)}, {"w": 123}),
    "report": Report(1, {"loss": Metric(0.5, "mean", 3.0)}, payload=[EpisodeResult(1, 0, 5, 1.5, True)]),
    "action": Action(np.zeros((2, 1, 3)), np.zeros((2, 1, 3), np.float32), {"action": np.ones((2, 1, 3))}, 4),
    "message": ("call", 5, "rollout/0", "policy", "act", ({"state": np.zeros((8, 39))}, None)),
    "tick": Tick(3, 2, "evaluate"),
    "plain": {"a": [1, -2.5, True, None, "é\ud800"], "big": 2**128, "t": (), "n": {1: "x", (2, "b"): [None]}, "d": {}},
    "floats": [float("inf"), float("-inf"), float("nan"), -0.0, 0.1, 5e-324],
    "bytes": {"x": b"\x00\xff", "empty": b""},
    "scalars": [np.float32(1.5), np.int64(-3), np.bool_(True), np.complex64(1 + 2j)],
    "dates": np.array(["2026-01-01", "NaT"], "datetime64[s]"),
    "text": np.array(["ab", "c"]),
    "big endian": np.arange(3, dtype=">i4"),
}


@pytest.mark.parametrize("name", ITEMS)
def test_what_arrives_is_what_was_sent(name):
    for way in (sent, through_a_body):
        assert same(way(ITEMS[name]), ITEMS[name])


DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES += ["float16", "float32", "float64", "complex64", "complex128"]
numpy_arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)


@st.composite
def strided(draw):
    """A view with any strides: steps, reversed axes, transposed, broadcast."""
    array = draw(numpy_arrays)
    if array.ndim:
        array = array[tuple(slice(None, None, draw(st.sampled_from([1, -1, 2]))) for _ in range(array.ndim))]
        if draw(st.booleans()):
            array = array.T
    elif draw(st.booleans()):
        array = np.broadcast_to(array, (2, 3))
    return array


tensors = st.builds(
    lambda values, dtype, flip: (lambda t: t.t() if flip else t)(
        torch.tensor(values, dtype=torch.float64).reshape(-1, 2).to(getattr(torch, dtype))
    ),
    st.lists(st.floats(-100, 100), max_size=6).filter(lambda v: len(v) % 2 == 0),
    st.sampled_from(["bfloat16", "float16", "float32", "float64", "int64", "bool", "uint8"]),
    st.booleans(),
)
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
trees = st.recursive(
    plain | strided() | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        | st.dictionaries(st.integers() | st.tuples(st.integers(), st.text(max_size=2)), inner, max_size=3)
        | st.builds(Report, step=st.integers(), payload=inner)
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(trees)
def test_any_tree_makes_the_round_trip(value):
    assert same(sent(value), value)
    assert same(through_a_body(value), value)


def leaves(value):
    out = []
    tree.map_leaves(lambda leaf: out.append(leaf) or leaf, value)
    return out


@settings(max_examples=60, deadline=None)
@given(trees)
def test_a_copy_is_equal_and_shares_no_memory(value):
    twin = tree.copy(value)
    assert same(twin, value)
    for a, b in zip(leaves(value), leaves(twin), strict=True):
        assert isinstance(a, torch.Tensor) or not np.shares_memory(a, b)
        assert not isinstance(a, torch.Tensor) or not a.numel() or a.data_ptr() != b.data_ptr()


def test_a24_strided_arrays_arrive_in_their_own_order():
    for make in (np.arange, torch.arange):
        array = make(6).reshape(2, 3).T
        got = sent({"w": array})["w"]
        assert got.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_special_tensors_arrive():
    got = sent(
        {
            "bf16": torch.tensor(1.5, dtype=torch.bfloat16),
            "empty": torch.zeros(0, 3),
            "conj": torch.tensor([1 + 2j]).conj(),
            "fp8": torch.ones(3).to(torch.float8_e4m3fn),
            "parameter": torch.nn.Parameter(torch.ones(2)),
        }
    )
    assert got["bf16"].dtype == torch.bfloat16
    assert got["bf16"].shape == ()
    assert got["bf16"].item() == 1.5
    assert got["empty"].shape == (0, 3)
    assert got["conj"].tolist() == [1 - 2j]
    assert got["fp8"].float().tolist() == [1.0, 1.0, 1.0]
    assert got["parameter"].tolist() == [1.0, 1.0]
    assert not got["parameter"].requires_grad


def test_what_arrives_is_owned_and_writable():
    source = np.arange(4)
    got = sent({"x": source, "t": torch.ones(2)})
    source[:] = 9
    got["x"] += 1
    got["t"] += 1
    assert got["x"].tolist() == [1, 2, 3, 4]


def test_mappings_arrive_as_dict():
    value = OrderedDict(b=1, a=MappingProxyType({"x": np.ones(1)}))
    got = sent(value)
    assert same(got, {"b": 1, "a": {"x": np.ones(1)}})


class Config:
    def __init__(self):
        self.rate, self.table, self.tensor = 0.1, np.arange(1000).reshape(10, 100).T, torch.ones(2)


@dataclasses.dataclass
class Known:
    x: np.ndarray
    y: int = 0


def test_unknown_objects_are_refused_with_their_place():
    with pytest.raises(ValueError, match=r"payload\['a'\]\[1\]\['q'\]: cannot pack a .*Config"):
        tree.pack({"a": [1, {"q": Config()}]})
    with pytest.raises(ValueError, match=r"payload.payload: cannot pack a"):
        tree.pack(Report(1, payload=Config()))


def test_between_own_processes_objects_travel_and_their_arrays_are_not_pickled():
    header, buffers = tree.pack([Config()], trusted=True)
    assert max(len(b) for b in buffers) == 8000  # the table, as a buffer of its own
    [got] = tree.unpack(header, buffers, trusted=True)
    assert got.rate == 0.1
    assert same(got.table, Config().table)
    assert same(got.tensor, torch.ones(2))
    with pytest.raises(ValueError, match="'p', which is not accepted"):
        tree.unpack(header, buffers)


def test_what_cannot_be_pickled_is_refused_with_its_place():
    with pytest.raises(ValueError, match=r"payload\[0\]: cannot pack a builtins.function"):
        tree.pack([lambda: 0], trusted=True)


def test_a_registered_dataclass_travels_without_pickle():
    with pytest.raises(ValueError, match="Known"):
        tree.pack(Known(np.ones(2)))
    tree.register(Known)
    assert same(sent(Known(np.ones(2), 3)), Known(np.ones(2), 3))
    header, buffers = tree.pack(Known(np.ones(2)))
    with pytest.raises(ValueError, match="does not know"):
        tree.unpack(header.replace(b"Known", b"Other"), buffers)
    with pytest.raises(ValueError, match="not a dataclass"):
        tree.register(int)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.array([None]), "dtype object"),
        (np.zeros(2, [("a", "i4")]), "no plain bytes"),
        (np.ma.masked_array([1, 2], [True, False]), "lose its mask"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (torch.ones(2, device="meta"), "a tensor on meta"),
    ],
)
def test_arrays_without_plain_bytes_are_refused(value, words):
    with pytest.raises(ValueError, match=words):
        tree.pack({"x": value})


def test_map_reaches_every_array_and_nothing_else():
    doubled = tree.map_leaves(lambda x: x * 2, {"a": [np.ones(2), 3], "b": Report(1, payload=(torch.ones(1), "s"))})
    assert same(doubled, {"a": [np.full(2, 2.0), 3], "b": Report(1, payload=(torch.full((1,), 2.0), "s"))})


def test_no_torch_is_loaded_for_trees_without_tensors():
    code = (
        "import sys, numpy as np\nfrom m2flow.comm import tree, channel, replay, transport, weights\n"
        "h, b = tree.pack({'x': np.ones(2)})\ntree.unpack(h, b)\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
