"""Joins a policy to an environment: renames nothing, casts what is safe, clips actions, and refuses the rest at load.

`join(policy.spec, env.spec)` compares both sides once. The `Join` it returns is used on the hot path: no work when both
sides already agree, except that no action reaches an environment that is not finite.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from m2flow.types import Array, Field, Observation, Spec


def _kind(dtype: str) -> str:
    """'f' float, 'i' integer, 'u' unsigned, 'b' bool. Torch's bfloat16 is no numpy type and counts as a float."""
    return "f" if dtype == "bfloat16" else np.dtype(dtype).kind


def _flat_bound(value: float | tuple[float, ...] | None, field: Field) -> Any:
    """A bound as a scalar or an array of the field's shape; None where it does not limit anything."""
    if value is None:
        return None
    if isinstance(value, tuple):
        bound = np.array(value, dtype=field.dtype).reshape(field.shape)
        return bound if np.isfinite(bound).any() else None
    if not math.isfinite(value):
        return None
    return float(value) if _kind(field.dtype) == "f" else int(value)


def _observation_problems(policy: Spec, env: Spec) -> list[str]:
    problems = []
    for name, want in policy.observation.items():
        have = env.observation.get(name)
        if have is None:
            problems.append(
                f"observation {name!r}: the policy reads it, the environment shows only {sorted(env.observation)}"
            )
            continue
        if tuple(want.shape) != tuple(have.shape):
            problems.append(
                f"observation {name!r}: the policy reads shape {want.shape}, the environment shows {have.shape}"
            )
        if _kind(want.dtype) != "f" and want.dtype != have.dtype:
            problems.append(
                f"observation {name!r}: the policy reads {want.dtype}, the environment shows {have.dtype}; "
                "only a cast to a float type is made by itself"
            )
        if want.categories is not None and want.categories != have.categories:
            problems.append(
                f"observation {name!r}: the policy knows {want.categories} categories, the environment "
                f"{have.categories}"
            )
        if want.unit and have.unit and want.unit != have.unit:
            problems.append(
                f"observation {name!r}: the policy reads unit {want.unit!r}, the environment shows {have.unit!r}"
            )
    return problems


def _action_problems(want: Field, have: Field) -> list[str]:
    """`want`: what the environment accepts; `have`: what the policy emits."""
    problems = []
    if tuple(want.shape) != tuple(have.shape):
        problems.append(f"action: the policy emits shape {have.shape}, the environment accepts {want.shape}")
    if want.categories != have.categories:
        problems.append(f"action: the policy emits {_describe(have)}, the environment accepts {_describe(want)}")
    elif (_kind(want.dtype) == "f") != (_kind(have.dtype) == "f"):
        problems.append(f"action: the policy emits {have.dtype}, the environment accepts {want.dtype}")
    if want.unit and have.unit and want.unit != have.unit:
        problems.append(f"action: the policy emits unit {have.unit!r}, the environment accepts {want.unit!r}")
    if not problems and want.categories is None and _disjoint(want, have):
        problems.append(
            f"action: the policy emits {have.low} to {have.high}, the environment accepts {want.low} to {want.high}; "
            "the ranges do not meet"
        )
    return problems


def _describe(field: Field) -> str:
    return f"{field.dtype} numbers" if field.categories is None else f"{field.categories} categories"


def _disjoint(a: Field, b: Field) -> bool:
    def full(value: float | tuple[float, ...] | None, field: Field, default: float) -> Any:
        return np.broadcast_to(
            np.asarray(default if value is None else value, float).reshape(
                field.shape if isinstance(value, tuple) else ()
            ),
            field.shape,
        )

    low = np.maximum(full(a.low, a, -np.inf), full(b.low, b, -np.inf))
    return bool((low > np.minimum(full(a.high, a, np.inf), full(b.high, b, np.inf))).any())


def join(policy: Spec, env: Spec) -> Join:
    """The transforms between a policy and an environment.

    Observations the policy does not read are dropped; a cast to a float type is made; a policy action is clipped to the
    environment's range and cast to its dtype. Everything else must agree.

    Raises:
        ValueError: names every field that does not fit, with what each side says.
    """
    problems = _observation_problems(policy, env) + _action_problems(env.action, policy.action)
    if problems:
        raise ValueError("policy and environment do not fit:\n  " + "\n  ".join(problems))
    read = tuple(
        _Read(
            name,
            field.dtype,
            None if field.dtype == "bfloat16" else np.dtype(field.dtype),
            tuple(field.shape),
            _kind(env.observation[name].dtype) == "f",
        )
        for name, field in policy.observation.items()
    )
    return Join(
        env=env,
        fields=read,
        same_names=set(policy.observation) == set(env.observation),
        action_shape=tuple(env.action.shape),
        action_dtype=np.dtype(env.action.dtype),
        low=_flat_bound(env.action.low, env.action),
        high=_flat_bound(env.action.high, env.action),
    )


class _Read(NamedTuple):
    """A field that the policy reads."""

    name: str
    dtype: str
    host_dtype: Any  # the same for numpy
    shape: tuple[int, ...]
    check: bool  # whether it can hold NaN


@dataclass(frozen=True, slots=True)
class Join:
    """Encode observations for the policy, decode actions for the environment. Made by `join`; picklable.

    Arrays are numpy, or torch tensors that stay on their device (observations) or lie on the CPU (actions).
    """

    env: Spec
    fields: tuple[_Read, ...]
    same_names: bool
    action_shape: tuple[int, ...]
    action_dtype: Any
    low: Any
    high: Any

    def encode(self, obs: Observation) -> Observation:
        """Environment observation [B, ...] to policy observation; the same dict when nothing has to change.

        Numbers are not looked at: whoever stores or acts on them calls `inspect`, for as many rows at once as it has.

        Raises:
            ValueError: an array has another shape than its spec says.
        """
        out: Observation | None = None if self.same_names else {}
        for name, dtype, host_dtype, shape, _ in self.fields:
            x = obs[name]
            if x.shape[1:] != shape:
                raise ValueError(
                    f"observation {name!r}: got [B, {_dims(x.shape[1:])}], the spec says [B, {_dims(shape)}]"
                )
            y = x if x.dtype is host_dtype else x.astype(host_dtype) if type(x) is np.ndarray else _cast(x, dtype)
            if out is not None:
                out[name] = y
            elif y is not x:
                out = {key: obs[key] for key, *_ in self.fields}
                out[name] = y
        return obs if out is None else out

    def inspect(self, obs: Observation, lanes: Array | None = None) -> None:
        """Raise ValueError where a number of an encoded observation [S, ...] is NaN or infinite; names its lane of
        `lanes` [S]."""
        for field in self.fields:
            x = obs[field.name]
            if field.check and not _finite(x):
                raise ValueError(_complaint(f"observation {field.name!r} from the environment", x, lanes))

    def decode(self, action: Array, lanes: Array | None = None) -> Array:
        """Policy action [B, *shape] or [B, C, *shape] to a numpy array for the environment; the input is not changed.

        Raises:
            ValueError: NaN, infinity, or a category that does not exist; names the lane.
        """
        x, shape, dtype = np.asarray(action), self.action_shape, self.action_dtype
        if x.shape[x.ndim - len(shape) :] != shape:
            raise ValueError(f"action: got {x.shape}, the environment accepts [B, (C,) {_dims(shape)}]")
        if self.env.action.categories is not None:
            return self._decode_discrete(x, self.env.action, lanes)
        # _finite, written out: this is called for every decision
        if x.dtype.kind == "f" and not (math.isfinite(np.vdot(x, x)) or np.isfinite(x).all()):
            raise ValueError(_complaint("action from the policy", x, lanes))
        if self.low is None and self.high is None:
            return x.astype(dtype, copy=False)
        if self.low is None:
            return np.minimum(x, self.high, dtype=dtype, casting="same_kind")
        out: Array = np.maximum(x, self.low, dtype=dtype, casting="same_kind")
        return out if self.high is None else np.minimum(out, self.high, out=out)

    def _decode_discrete(self, x: Any, field: Field, lanes: Array | None) -> Array:
        if x.dtype.kind not in "iu":
            raise ValueError(
                f"action: the policy emits {x.dtype}, the environment accepts {field.categories} categories"
            )
        assert field.categories is not None
        if x.size and (x.min() < 0 or x.max() >= field.categories):
            bad = ((x < 0) | (x >= field.categories)).reshape(len(x), -1).any(1)
            raise ValueError(
                f"action from the policy: a category outside 0..{field.categories - 1} in {_lane_names(bad, lanes)}"
            )
        return x.astype(field.dtype, copy=False)


def _dims(shape: Sequence[int]) -> str:
    return ", ".join(str(int(d)) for d in shape)


def _finite(x: Array) -> bool:
    """True when every number is finite.

    The sum of squares decides; only where it is not finite (it may overflow) is each number looked at. A dot product
    raises no floating point warning and is the cheapest pass over an array.
    """
    if isinstance(x, np.ndarray):
        return math.isfinite(np.vdot(x, x)) or bool(np.isfinite(x).all())
    return math.isfinite(float(x.sum())) or bool(x.isfinite().all())


def _cast(x: Array, dtype: str) -> Array:
    if isinstance(x, np.ndarray):
        return x if x.dtype == dtype else x.astype(dtype)
    return x.to(getattr(sys.modules["torch"], dtype))


def _complaint(what: str, x: Array, lanes: Array | None) -> str:
    values = np.asarray(x if isinstance(x, np.ndarray) else x.detach().cpu())
    bad = ~np.isfinite(values).reshape(len(values), -1).all(1)
    kind = "NaN" if np.isnan(values).any() else "infinity"
    return f"{what}: {kind} in {_lane_names(bad, lanes)}"


def _lane_names(bad: Array, lanes: Array | None) -> str:
    rows = np.flatnonzero(bad)
    names = rows if lanes is None else np.unique(np.asarray(lanes)[rows])
    shown = ", ".join(str(int(n)) for n in names[:8]) + (", ..." if len(names) > 8 else "")
    return f"lane {shown}" if len(names) == 1 else f"lanes {shown}"
