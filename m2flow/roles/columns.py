"""Joining trajectories of one step, side by side in lane order whatever order they arrived in, and cutting batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from m2flow.types import Array, Batch, Observation, Trajectory, Units


def cut(batch: Batch, rows: int) -> list[Batch]:
    """Batches of `rows` rows each, the last one with what is left; views of tensors, no copy."""
    views = batch.map(lambda x: x.split(rows))  # one call per array for all parts, not one per part
    return [views.map(lambda parts: parts[i]) for i in range(-(-batch.size // rows))]  # noqa: B023 - called at once


def side_by_side(parts: Sequence[Observation]) -> Observation:
    """All rows of several observations."""
    return parts[0] if len(parts) == 1 else {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _one_width(parts: Sequence[Trajectory]) -> Sequence[Trajectory]:
    """Answers of language models are as long as the longest of their part: the same width for all, with zeros."""
    width = max(part.reward.shape[2] for part in parts)
    extents = {
        name: tuple(max(part.obs[name].shape[i] for part in parts) for i in range(1, x.ndim))
        for name, x in parts[0].obs.items()
    }
    if all(part.reward.shape[2] == width and _fits(part.obs, extents) for part in parts):
        return parts

    def per_action(part: Trajectory) -> Trajectory:
        units = part.units
        return replace(
            part,
            obs={name: _widen(x, (len(x), *extents[name])) for name, x in part.obs.items()},
            reward=_widen(part.reward, (*part.shape, width)),
            valid=_widen(part.valid, (*part.shape, width)),
            units=replace(
                units,
                logprob=_widen(units.logprob, (len(units.logprob), width)),
                record={name: _widen(x, (len(x), width)) for name, x in units.record.items()},
            ),
        )

    if any(part.units.axes != ("chunk",) or part.value is not None for part in parts):
        raise ValueError("merge: trajectories with different numbers of actions in a chunk")
    return [per_action(part) for part in parts]


def _fits(obs: Observation, extents: Mapping[str, tuple[int, ...]]) -> bool:
    return all(x.shape[1:] == extents[name] for name, x in obs.items())


def _widen(x: Array, shape: tuple[int, ...]) -> Array:
    out = np.zeros(shape, x.dtype)
    out[tuple(slice(extent) for extent in x.shape)] = x
    return out


def merge(parts: Sequence[Trajectory]) -> Trajectory:
    """One Trajectory with the columns of all `parts`, ordered by lane. All must have the same length T and dense units.

    The result does not depend on how lanes were split over parts, except for the order of observation rows.
    """
    if len(parts) == 1:
        return parts[0]
    parts = _one_width(sorted(parts, key=lambda part: int(part.lane[0])))
    lengths = {part.shape[0] for part in parts}
    if len(lengths) > 1:
        raise ValueError(f"merge: trajectories of different lengths {sorted(lengths)} in one step")
    first = parts[0]
    if any(part.units.step_of is not None for part in parts):
        raise ValueError("merge: trajectories with several unit rows per step cannot be joined by lane")
    order = np.argsort(np.concatenate([part.lane for part in parts]), kind="stable")
    offsets = np.cumsum([0, *(len(next(iter(part.obs.values()))) for part in parts[:-1])])
    steps = [part.shape for part in parts]

    def joined(arrays: Sequence[Array]) -> Array:
        return np.concatenate(arrays, axis=1)[:, order]

    def per_step(name: str) -> Array:
        return joined([getattr(part, name) for part in parts])

    def rows(arrays: Sequence[Array]) -> Array:
        grid = joined([a.reshape(*shape, *a.shape[1:]) for a, shape in zip(arrays, steps, strict=True)])
        return grid.reshape(-1, *grid.shape[2:])

    return Trajectory(
        obs={k: np.concatenate([part.obs[k] for part in parts]) for k in first.obs},
        obs_at=joined([part.obs_at + off for part, off in zip(parts, offsets, strict=True)]),
        next_at=joined([part.next_at + off for part, off in zip(parts, offsets, strict=True)]),
        lane=np.concatenate([part.lane for part in parts])[order],
        units=Units(
            first.units.axes,
            rows([part.units.logprob for part in parts]),
            {k: rows([part.units.record[k] for part in parts]) for k in first.units.record},
            mask=None if first.units.mask is None else rows([part.units.mask for part in parts]),
        ),
        value=None if first.value is None else per_step("value"),
        bootstrap=None if first.bootstrap is None else per_step("bootstrap"),
        info={k: joined([part.info[k] for part in parts]) for k in first.info},
        step=first.step,
        **{n: per_step(n) for n in ("reward", "valid", "terminated", "truncated", "version", "episode", "group")},
    )
