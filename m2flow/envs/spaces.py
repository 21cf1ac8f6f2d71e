"""Gymnasium spaces as `m2flow.types.Field`s, and observations as named arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from m2flow.types import Array, Field, Spec

_HUGE = 1e18
SINGLE = "state"  # name of the only observation of an env that has just one


@dataclass(frozen=True, slots=True)
class Leaf:
    """One named array of an observation: where it lies in the env's own structure, and what is subtracted from it."""

    name: str
    path: tuple[Any, ...]
    field: Field
    start: int = 0

    def get(self, obs: Any) -> Any:
        """This part of a raw observation."""
        for key in self.path:
            obs = obs[key]
        return obs - self.start if self.start else obs


def leaves(space: Any) -> tuple[Leaf, ...]:
    """The arrays of an observation space. Nested names are joined by "_"; the only array of an env is called "state".

    Raises:
        ValueError: a space without a fixed shape (Text, Sequence, Graph), or two parts with the same name.
    """
    found = list(_walk(space, ()))
    names = [leaf.name for leaf in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"observation space: two parts would be called {sorted(twice)}")
    return tuple(found)


def _walk(space: Any, path: tuple[Any, ...]) -> Any:
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        for key, inner in space.spaces.items():
            yield from _walk(inner, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, inner in enumerate(space.spaces):
            yield from _walk(inner, (*path, index))
    else:
        name = "_".join(str(key) for key in path) or SINGLE
        yield Leaf(name, path, field_of(space, f"observation {name!r}"), _start(space))


def field_of(space: Any, what: str) -> Field:
    """A Field for one Box, Discrete, MultiDiscrete or MultiBinary space. Discrete values are counted from 0."""
    from gymnasium import spaces

    if isinstance(space, spaces.Box):
        return Field(space.shape, str(space.dtype), _bound(space.low), _bound(space.high))
    if isinstance(space, spaces.Discrete):
        return Field((), "int64", categories=int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        counts = space.nvec.reshape(-1)
        if len(set(counts.tolist())) == 1:
            return Field(space.shape, "int64", categories=int(counts[0]))
        return Field(space.shape, "int64", 0, tuple(float(n - 1) for n in counts))
    if isinstance(space, spaces.MultiBinary):
        return Field(tuple(space.shape), "int64", categories=2)
    raise ValueError(
        f"{what}: {space} has no fixed shape; m2flow takes Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple"
    )


def _bound(values: Array) -> float | tuple[float, ...] | None:
    flat = values.reshape(-1).astype(np.float64)
    # Some simulators write the limits of the number type where they mean "no bound".
    flat = np.where((abs(flat) >= _HUGE) | (flat == np.finfo(np.float64).tiny), np.inf, flat)
    if not np.isfinite(flat).any():
        return None
    if flat.size == 0 or (flat == flat[0]).all():
        return float(flat[0])
    return tuple(float(v) for v in flat)


def _start(space: Any) -> int:
    start = getattr(space, "start", 0)
    if np.ndim(start):
        if np.any(start != 0):
            raise ValueError(f"space {space}: MultiDiscrete that does not start at 0 is not supported")
        return 0
    return int(start)


def _action(space: Any) -> Field:
    """The Field of an action space. Every policy emits one array: numbers, or categories of one count."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict | spaces.Tuple):
        text = f"action space {space}: m2flow takes one array per action; wrap the environment"
        raise ValueError(text)  # noqa: TRY004 a user's error, in the form of all of them
    field = field_of(space, "action")
    if isinstance(space, spaces.MultiDiscrete):
        _start(space)
    if field.categories is None and not np.issubdtype(np.dtype(field.dtype), np.floating):
        raise ValueError(
            f"action space {space}: no policy emits whole numbers, or categories of unequal count; wrap the "
            "environment so that it takes a Discrete, a MultiDiscrete of equal counts, or a Box of floats"
        )
    return field


def action_encoder(space: Any) -> Callable[[Array], Any] | None:
    """What turns one lane's action into what `env.step` wants; None where the row itself will do."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return int if start == 0 else lambda row: int(row) + start
    return None


def spec_of(observation_space: Any, action_space: Any) -> Spec:
    """The Spec of an environment with these single-lane spaces."""
    obs = {leaf.name: leaf.field for leaf in leaves(observation_space)}
    return Spec(obs, _action(action_space))


def empty(fields: Mapping[str, Field], lanes: int) -> dict[str, Array]:
    """Uninitialised observation arrays [B, *shape]."""
    return {name: np.empty((lanes, *field.shape), field.dtype) for name, field in fields.items()}
