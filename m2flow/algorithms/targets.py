"""From a Trajectory [T, B] to flat rows [S]: what every objective does before it computes anything of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from m2flow.algorithms.reduce import expect_shape, to_level
from m2flow.types import Array, Observation, Trajectory

_FLOATS = ("reward", "value", "bootstrap")


@dataclass(frozen=True, slots=True)
class Rows:
    """All S = T*B steps of a Trajectory as rows (row t*B + b), with what is needed to score their actions again."""

    obs: Observation  # [S, ...]
    record: dict[str, Tensor]  # name -> [S, ...]
    axes: tuple[str, ...]
    logprob: Tensor  # [S, *axes], by the policy that acted; 0 where masked
    valid: Tensor  # bool [S, C]
    mask: Tensor | None  # bool [S, *axes]; None: every unit counts


def like(model: Any) -> tuple[torch.device, torch.dtype]:
    """Where the model lives, and the type to compute losses in: float64 for a float64 model, else float32.

    No model: the CPU and float32.
    """
    if model is None:
        return torch.device("cpu"), torch.float32
    parameter = next(iter(model.policy.parameters()))
    return parameter.device, torch.float64 if parameter.dtype == torch.float64 else torch.float32


def to_tensors(trajectory: Trajectory, *, device: torch.device, dtype: torch.dtype) -> Trajectory:
    """The same Trajectory with tensors on `device`, no copy where that is possible.

    Rewards, values and log-probs become `dtype`.
    """

    def move(x: Array, kind: torch.dtype | None = None) -> Array:
        if x is None or isinstance(x, int):
            return x
        if isinstance(x, Mapping):
            return {name: move(part) for name, part in x.items()}
        writeable = getattr(getattr(x, "flags", None), "writeable", True)  # torch has no read-only tensors
        return torch.as_tensor(x if writeable else x.copy(), dtype=kind, device=device)

    units = trajectory.units
    units = replace(
        units,
        logprob=move(units.logprob, dtype),
        record=move(units.record),
        step_of=move(units.step_of),
        mask=move(units.mask),
    )
    names = [field.name for field in fields(trajectory) if field.name not in ("units", "info", "step")]
    moved = {n: move(getattr(trajectory, n), dtype if n in _FLOATS else None) for n in names}
    return replace(trajectory, units=units, **moved)


def step_rows(trajectory: Trajectory) -> Rows:
    """Flatten steps of a Trajectory of tensors. Needs dense units, one row per step.

    A row that is not valid at all (its lane only reset itself) stands for no decision, and what it holds may be
    anything; it borrows observation and record of a valid row, so that a forward pass over it is finite, and counts
    nowhere.
    """
    _check(trajectory)
    units, steps = trajectory.units, trajectory.shape[0] * trajectory.shape[1]
    valid = trajectory.valid.reshape(steps, -1)
    mask = unit_mask(valid=valid, mask=units.mask, axes=units.axes, shape=tuple(units.logprob.shape))
    obs_at, record = trajectory.obs_at.reshape(-1), dict(units.record)
    logprob = units.logprob
    if mask is not None:
        logprob = torch.where(mask, logprob, 0.0)
        row = _borrow(valid.any(dim=1))
        obs_at, record = obs_at[row], {name: x[row] for name, x in record.items()}
    obs = {name: x[obs_at] for name, x in trajectory.obs.items()}
    if mask is not None and not bool(valid.any()):
        obs, record = ({name: torch.zeros_like(x) for name, x in part.items()} for part in (obs, record))
    return Rows(obs, record, units.axes, logprob, valid, mask)


def unit_mask(*, valid: Tensor, mask: Tensor | None, axes: tuple[str, ...], shape: tuple[int, ...]) -> Tensor | None:
    """bool [S, *axes] of units that count: in `mask`, and of an action that was executed. None if all do.

    `valid` [S, C] applies along the axis "chunk"; without one, to the whole row.
    """
    every = mask is None or bool(mask.all())
    if every and bool(valid.all()):
        return None
    executed = to_units(valid if "chunk" in axes else valid.any(dim=1), axes=axes, shape=shape)
    return executed.contiguous() if mask is None else executed & mask


def to_units(x: Tensor, *, axes: tuple[str, ...], shape: tuple[int, ...]) -> Tensor:
    """A view of `x` at the shape [S, *axes] of units: [S] goes to all units of a row, [S, C] along the axis "chunk"."""
    if x.dim() == 2:
        at = axes.index("chunk") + 1
        return x.reshape([shape[0], *(shape[i] if i == at else 1 for i in range(1, len(shape)))]).expand(shape)
    return x if x.shape == shape else x.reshape([shape[0], *[1] * len(axes)]).expand(shape)


def any_unit(mask: Tensor, *, axes: tuple[str, ...], level: str) -> Tensor:
    """Whether anything counts, bool, at a level: [S, *axes] to token [S, *axes], action [S, C] or chunk [S]."""
    return mask if level == "token" else to_level(mask, axes=axes, level=level) > 0


def episode_scores(trajectory: Trajectory, *, reward: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of rewards and group of each episode, [E], and the episode of each step: int64 [T, B], an index into E.

    `reward`, `valid` [T, B, K]. Only what lies within the Trajectory is summed. Steps that are not valid belong to no
    episode and hold index 0.
    """
    used = valid.any(dim=-1)
    earned = torch.where(valid, reward, 0.0).sum(dim=-1)
    ids, of_step = torch.unique(trajectory.episode[used], return_inverse=True)
    score = torch.zeros(len(ids), dtype=reward.dtype, device=reward.device).index_add(0, of_step, earned[used])
    group = torch.zeros_like(ids).index_copy(0, of_step, trajectory.group[used])
    index = torch.zeros_like(trajectory.episode)
    index[used] = of_step
    return score, group, index


def whole_episodes(trajectory: Trajectory) -> Tensor:
    """bool [T, B]: steps of episodes that no limit cut short within the Trajectory."""
    cut = trajectory.truncated & trajectory.valid.any(dim=-1)
    return ~torch.isin(trajectory.episode, trajectory.episode[cut])


def spread(rows: Rows, advantage: Tensor, level: str) -> Tensor:
    """Advantages [T, B, K] at the shape of a level: the same for all units of an action or decision."""
    flat = advantage.reshape(len(rows.valid), -1)
    if level in ("chunk", "sequence"):
        return flat[:, 0].contiguous()
    if level == "action":
        return flat.expand(rows.valid.shape).contiguous()
    per_row = flat if flat.shape[1] > 1 else flat[:, 0]
    return to_units(per_row, axes=rows.axes, shape=tuple(rows.logprob.shape)).contiguous()


def check_rewards(trajectory: Trajectory) -> None:
    """Raise ValueError where the reward of a valid step is not a finite number, and say which."""
    wrong = torch.nonzero(trajectory.valid & ~trajectory.reward.isfinite())
    if len(wrong):
        t, b, _ = wrong[0].tolist()
        raise ValueError(
            f"reward: {float(trajectory.reward[tuple(wrong[0])])} at step {t} of lane {int(trajectory.lane[b])}, "
            f"episode {int(trajectory.episode[t, b])}; {len(wrong)} rewards are not finite"
        )


def _borrow(valid: Tensor) -> Tensor:
    """Each row's own index where it is valid, else that of the first valid row (0 if there is none)."""
    first = valid.to(torch.uint8).argmax()
    return torch.where(valid, torch.arange(len(valid), device=valid.device), first)


def _check(trajectory: Trajectory) -> None:
    units, (steps, lanes) = trajectory.units, trajectory.shape
    if units.step_of is not None:
        raise ValueError(
            "units.step_of: given, but this objective takes dense units; pad the units of each step to one row"
        )
    if len(units.axes) != units.logprob.dim() - 1 or len(units.logprob) != steps * lanes:
        raise ValueError(
            f"units.logprob: shape {tuple(units.logprob.shape)}, expected [{steps * lanes}, *axes], axes {units.axes}"
        )
    expect_shape("valid", trajectory.valid, trajectory.reward.shape)
    for name in ("obs_at", "next_at", "terminated", "truncated"):
        expect_shape(name, getattr(trajectory, name), (steps, lanes))
    if "chunk" in units.axes:
        extent = units.logprob.shape[units.axes.index("chunk") + 1]
        if extent != trajectory.valid.shape[2]:
            raise ValueError(f"units.logprob: {extent} actions along 'chunk', reward has {trajectory.valid.shape[2]}")
