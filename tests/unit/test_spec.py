from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m2flow.spec import join
from m2flow.types import Field, Spec

STATE = Field((3,), "float64")
ARM = Field((2,), low=-1.0, high=1.0)


def spec(observation: Any = None, action: Field = ARM) -> Spec:
    return Spec({"state": STATE} if observation is None else observation, action)


def test_nothing_is_copied_when_both_sides_agree() -> None:
    j = join(spec(), spec())
    obs = {"state": np.zeros((4, 3))}
    assert j.encode(obs) is obs
    free = join(spec(action=Field((2,))), spec(action=Field((2,))))
    action = np.zeros((4, 1, 2), np.float32)
    assert free.decode(action) is action


def test_observations_are_picked_by_name_and_cast_to_the_policys_float_type() -> None:
    env = spec({"state": STATE, "image": Field((2, 2, 3), "uint8", 0, 255), "goal": Field((1,))})
    policy = spec({"image": Field((2, 2, 3), "float32"), "state": Field((3,), "float32")})
    j = pickle.loads(pickle.dumps(join(policy, env)))
    obs = {
        "state": np.array([[0.1, 2.0, 3.0]]),
        "image": np.full((1, 2, 2, 3), 200, np.uint8),
        "goal": np.zeros((1, 1), np.float32),
    }
    out = j.encode(obs)
    assert set(out) == {"image", "state"}
    assert (out["state"].dtype, out["image"].dtype) == (np.float32, np.float32)
    np.testing.assert_array_equal(out["state"], np.float32([[0.1, 2.0, 3.0]]))
    assert (out["image"] == 200).all()
    assert obs["state"].dtype == np.float64


@pytest.mark.parametrize("chunk", [(), (1,), (5,)])
def test_actions_are_clipped_per_dimension_and_the_recorded_ones_stay(chunk: tuple[int, ...]) -> None:
    field = Field((2,), "float64", (-1.0, -2.0), (1.0, 0.5))
    j = join(spec(action=Field((2,), "float32")), spec(action=field))
    action = np.broadcast_to(np.float32([-9, 9]), (3, *chunk, 2)).copy()
    out = j.decode(action)
    assert out.shape == action.shape
    assert out.dtype == np.float64
    assert (out[..., 0] == -1.0).all()
    assert (out[..., 1] == 0.5).all()
    assert (action[..., 0] == -9).all()


@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=4, max_size=4),
    low=st.one_of(st.none(), st.floats(-5, 0)),
    high=st.one_of(st.none(), st.floats(0.1, 5)),
)
def test_decode_is_numpys_clip_for_any_bounds(values: list[float], low: float | None, high: float | None) -> None:
    j = join(spec(action=Field((2,))), spec(action=Field((2,), "float32", low, high)))
    action = np.array(values, np.float32).reshape(2, 2)
    wanted = np.clip(action, -np.inf if low is None else low, np.inf if high is None else high)
    np.testing.assert_array_equal(j.decode(action), wanted.astype(np.float32))


def test_torch_tensors_are_taken() -> None:
    j = join(spec({"state": Field((3,), "float32")}), spec())
    out = j.encode({"state": torch.ones(2, 3, dtype=torch.float64)})
    assert out["state"].dtype == torch.float32
    assert j.decode(torch.full((2, 1, 2), 3.0)).tolist() == [[[1.0, 1.0]]] * 2
    with pytest.raises(ValueError, match="NaN in lane 1"):
        j.inspect({"state": torch.tensor([[1.0, 1, 1], [1, float("nan"), 1]], dtype=torch.float64)})


def test_nan_and_infinity_are_errors_that_name_the_lanes() -> None:
    j = join(spec(), spec())
    obs = np.zeros((4, 3))
    obs[1, 2] = np.nan
    with pytest.raises(ValueError, match=r"observation 'state' from the environment: NaN in lane 1$"):
        j.inspect({"state": obs})
    obs[3, 0] = np.inf
    with pytest.raises(ValueError, match=r"NaN in lanes 21, 23$"):
        j.inspect({"state": obs}, lanes=np.array([20, 21, 22, 23]))
    action = np.zeros((2, 1, 2), np.float32)
    action[0, 0, 1] = -np.inf
    with pytest.raises(ValueError, match=r"action from the policy: infinity in lane 0$"):
        j.decode(action)


def test_opposite_infinities_and_huge_finite_numbers_are_told_apart() -> None:
    j = join(spec(), spec())
    huge = np.full((2, 3), 1e308)
    assert j.encode({"state": huge})["state"] is huge
    j.inspect({"state": huge})
    small = join(spec({"state": Field((3,))}), spec({"state": Field((3,))}))
    huge32 = np.full((2, 3), 3e38, np.float32)
    assert small.encode({"state": huge32})["state"] is huge32
    with pytest.raises(ValueError, match="infinity in lane 0"):
        j.inspect({"state": np.array([[np.inf, -np.inf, 0.0], [0.0, 0.0, 0.0]])})


def test_discrete_actions_keep_their_numbers_and_unknown_ones_are_errors() -> None:
    pick = Field((), "int64", categories=3)
    j = join(spec(action=pick), spec(action=pick))
    action = np.array([[0], [2]])
    assert j.decode(action) is action
    with pytest.raises(ValueError, match=r"category outside 0..2 in lane 1"):
        j.decode(np.array([0, 3]))
    with pytest.raises(ValueError, match=r"category outside 0..2 in lane 0"):
        j.decode(np.array([-1, 1]))
    with pytest.raises(ValueError, match="float32"):
        j.decode(np.zeros((2, 1), np.float32))


def test_integer_ranges_are_kept() -> None:
    field = Field((2,), "int64", 0, (3.0, 1.0))
    j = join(spec(action=field), spec(action=field))
    out = j.decode(np.array([[5, 5], [-1, 0]]))
    assert out.tolist() == [[3, 1], [0, 0]]
    assert out.dtype == np.int64


@pytest.mark.parametrize(
    ("policy", "env", "message"),
    [
        (spec({"pose": STATE}), spec(), r"'pose': the policy reads it, the environment shows only \['state'\]"),
        (spec({"state": Field((4,))}), spec(), r"reads shape \(4,\), the environment shows \(3,\)"),
        (spec({"state": Field((3,), "int64")}), spec(), "reads int64, the environment shows float64"),
        (spec({"state": Field((3,), unit="m")}), spec({"state": Field((3,), unit="cm")}), "'m'.*'cm'"),
        (
            spec({"k": Field((), "int64", categories=3)}),
            spec({"k": Field((), "int64", categories=4)}),
            "knows 3 categories, the environment 4",
        ),
        (spec(action=Field((3,))), spec(), r"emits shape \(3,\), the environment accepts \(2,\)"),
        (spec(action=Field((), "int64", categories=2)), spec(action=Field(())), "2 categories.*float32 numbers"),
        (
            spec(action=Field((), "int64", categories=2)),
            spec(action=Field((), "int64", categories=5)),
            "emits 2 categories, the environment accepts 5 categories",
        ),
        (spec(action=Field((2,), "int64")), spec(), "emits int64, the environment accepts float32"),
        (spec(action=Field((2,), low=5.0, high=6.0)), spec(), "emits 5.0 to 6.0.*accepts -1.0 to 1.0.*do not meet"),
    ],
)
def test_what_does_not_fit_is_said_at_load_with_both_sides(policy: Spec, env: Spec, message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)policy and environment do not fit:.*{message}"):
        join(policy, env)


def test_all_that_does_not_fit_is_said_at_once() -> None:
    with pytest.raises(ValueError, match=r"(?s)'pose'.*\n.*shape \(3,\)"):
        join(spec({"pose": STATE}, Field((3,))), spec())


def test_arrays_of_another_shape_than_the_spec_says_are_errors() -> None:
    j = join(spec(), spec())
    with pytest.raises(ValueError, match=r"'state': got \[B, 4\], the spec says \[B, 3\]"):
        j.encode({"state": np.zeros((2, 4))})
    with pytest.raises(ValueError, match=r"action: got \(2, 3\), the environment accepts"):
        j.decode(np.zeros((2, 3)))
