"""The Store contract, asked of every store. A new one adds one line to STORES."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from m2flow.backends.checkpoint import CheckpointConfig
from m2flow.types import Batch

PROTOCOLS = ("Store",)
STORES = {"disk": lambda folder, **changes: CheckpointConfig(**changes).build(folder)}
stores = pytest.mark.parametrize("make", STORES.values(), ids=STORES.keys())


def assert_same(a: Any, b: Any, path: str = "") -> None:
    """Equal in type, dtype, shape and every bit; of a NaN that is a plain float only that it is one."""
    assert type(a) is type(b), f"{path}: {type(a)} is not {type(b)}"
    if isinstance(a, np.ndarray | np.generic):
        assert a.dtype == b.dtype, path
        assert np.shape(a) == np.shape(b), path
        assert a.tobytes() == b.tobytes(), path
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, path
        assert a.shape == b.shape, path
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), path
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            assert_same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}/{i}")
    elif isinstance(a, float):
        assert np.float64(a).tobytes() == np.float64(b).tobytes() or (a != a and b != b), path
    else:
        assert a == b, path


def everything() -> dict[str, Any]:
    """One of each kind that a state may hold."""
    base = torch.arange(12.0)
    array = np.arange(6.0)
    return {
        "numpy": [
            np.arange(3).astype(dtype)
            for dtype in ("u1", "i1", "i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "?")
        ],
        "odd": [np.array([1.5], ">f4"), np.array(["ab", "c"]), np.array(["2020-01-01"], "M8[D]")],
        "layout": [np.arange(6.0).reshape(2, 3).T, np.arange(6)[::-2], np.asfortranarray(np.eye(3))],
        "scalars": [np.float32(0.1), np.int64(-5), np.bool_(True), np.array(7), np.array(2.5, np.float32)],
        "empty": [np.zeros((0, 3), np.float32), np.zeros(0, ">i4"), torch.zeros(2, 0), torch.zeros(0).bfloat16()],
        "torch": [torch.ones(2, dtype=getattr(torch, d)) for d in ("bool", "uint8", "int64", "float16", "bfloat16")],
        "small": [torch.tensor(3), torch.tensor(1.5).bfloat16(), torch.ones(2, dtype=torch.float8_e4m3fn)],
        "shared": [base, base[3:6], base.view(3, 4).t(), base, array, array[:2], array],
        "nan": [np.array([np.nan, np.inf, -0.0]), torch.tensor([torch.nan, -torch.inf])],
        "floats": [float("nan"), float("inf"), float("-inf"), -0.0, 0.1, 1e-320, 1.0],
        "ints": [0, -1, 2**63, 2**200, True, False],
        "texts": ["", "a/b", "ü 漢 \n \x00", "map"],
        "none": None,
        "bytes": b"\x00\xff",
        "nested": [[], {}, (), [[1, (2, [3])]], {"a/b": 1, "a": {"b": np.ones(1)}}, {"a/b": np.zeros(1)}],
        "keys": {1: "int", "1": "text", (2, 3): np.ones(2), None: 0},
        "map": {"map": {"numpy": "numpy"}},
        "generator": np.random.default_rng(0).bit_generator.state,
        "torch_rng": torch.random.get_rng_state(),
    }


@stores
def test_what_was_saved_is_loaded_to_the_last_bit(make: Any, tmp_path: Path) -> None:
    state, meta = everything(), {"metrics": {"eval/return": 1.5}, "note": None, "array": np.ones(2)}
    make(tmp_path).save(7, state, meta)
    step, loaded, loaded_meta = make(tmp_path).load()
    assert step == 7
    assert_same(loaded, state)
    assert_same(dict(loaded_meta), meta)


@stores
def test_dataclasses_of_types_and_other_mappings(make: Any, tmp_path: Path) -> None:
    batch = Batch({"x": np.ones((2, 3))}, {"action": torch.ones(2)}, {"reward": np.zeros(2)})
    weight = torch.nn.Parameter(torch.ones(1))
    make(tmp_path).save(1, {"waiting": [batch], "ordered": OrderedDict(a=1), "grad": weight}, {})
    _, loaded, _ = make(tmp_path).load()
    assert isinstance(loaded["waiting"][0], Batch)
    assert_same(loaded["waiting"][0].obs, batch.obs)
    assert loaded["waiting"][0].next_obs is None
    assert_same(loaded["ordered"], {"a": 1})
    assert_same(loaded["grad"], torch.ones(1))


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary(max_size=9)
    | hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, min_side=0, max_side=3)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=plain)
@pytest.mark.parametrize("kind", list(STORES))
def test_any_tree_survives(kind: str, state: Any, tmp_path: Path) -> None:
    store = STORES[kind](tmp_path)
    store.save(1, state, {})
    assert_same(store.load(1)[1], state)


@stores
def test_what_cannot_be_restored_exactly_is_refused_by_path(make: Any, tmp_path: Path) -> None:
    class Flag(int):
        pass

    store = make(tmp_path)
    store.save(1, {"a": 1}, {})
    for bad, where in (
        ({"a": [object()]}, "/state/a/0 is a builtins.object"),
        ({"a": {"b": {1, 2}}}, "/state/a/b is a builtins.set"),
        ({"a": Flag(1)}, "Flag"),
        ({"a": np.array([object()])}, "/state/a is an array of dtype object"),
        ({"a": lambda: 0}, "function"),
    ):
        with pytest.raises(TypeError, match=where):
            store.save(2, bad, {})
    assert list(store.steps()) == [1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_000001"]


@stores
def test_latest_given_and_missing(make: Any, tmp_path: Path) -> None:
    store = make(tmp_path / "new" / "folder", keep=None)
    assert list(store.steps()) == []
    with pytest.raises(FileNotFoundError, match=r"no complete checkpoint in .*there are none"):
        store.load()
    for step in (2, 10, 1_000_000):
        store.save(step, {"step": step}, {})
    assert list(store.steps()) == [2, 10, 1_000_000]
    assert store.load()[:2] == (1_000_000, {"step": 1_000_000})
    assert store.load(2)[:2] == (2, {"step": 2})
    with pytest.raises(FileNotFoundError, match=r"no complete checkpoint of step 3 .*\[2, 10, 1000000\]"):
        store.load(3)


@stores
def test_the_newest_are_kept_in_the_order_of_writing(make: Any, tmp_path: Path) -> None:
    """A run resumed from step 4 writes 5 after 8 was written: 5 is newer, and is what `load` gives."""
    store = make(tmp_path, keep=2)
    for step in (2, 4, 6, 8):
        store.save(step, {"step": step}, {})
    assert list(store.steps()) == [6, 8]
    store.save(5, {"step": 5}, {})
    assert list(store.steps()) == [5, 8]
    assert store.load()[0] == 5


@stores
@pytest.mark.parametrize(("mode", "best"), [("max", 4), ("min", 3)])
def test_the_best_is_kept_whatever_its_age(make: Any, tmp_path: Path, mode: str, best: int) -> None:
    store = make(tmp_path, keep=1, best_metric="eval/return", best_mode=mode)
    for step, value in ((1, 5.0), (2, 9.0), (3, 1.0), (4, 9.0), (5, 2.0), (6, float("nan")), (7, None)):
        store.save(step, {}, {"metrics": {} if value is None else {"eval/return": value}})
    assert store.best() == best
    assert list(store.steps()) == [best, 7]
    assert store.load()[0] == 7


@stores
def test_saving_a_step_again_replaces_it(make: Any, tmp_path: Path) -> None:
    store = make(tmp_path, keep=1)
    for value in (1, 2):
        store.save(3, {"value": value}, {})
    assert list(store.steps()) == [3]
    assert store.load()[1] == {"value": 2}


@stores
def test_loaded_arrays_can_be_written_to(make: Any, tmp_path: Path) -> None:
    frozen = np.ones(3)
    frozen.flags.writeable = False
    make(tmp_path).save(1, {"a": frozen, "b": torch.ones(2), "c": np.array([1], ">i4")}, {})
    _, loaded, _ = make(tmp_path).load()
    loaded["a"][0] = loaded["b"][0] = loaded["c"][0] = 5
    assert frozen[0] == 1


@stores
def test_the_state_is_not_changed_by_saving(make: Any, tmp_path: Path) -> None:
    state = everything()
    make(tmp_path).save(1, state, {})
    assert_same(state, everything())
