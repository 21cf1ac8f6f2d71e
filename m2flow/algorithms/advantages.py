"""Returns and advantages. Pure functions; shapes are [T, B] (T decisions of B lanes) unless said otherwise.

The three ways in which a segment can stop are kept apart. `terminated`: the task ended, nothing follows. `truncated`:
the episode was cut by a limit, its true successor still has a value. Cut: the segment is over but the episode goes
on. `bootstrap` [T, B] is the value of the true successor observation; it is read where an episode was truncated, in
the last row, and before a step that is not valid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

import torch
from torch import Tensor

from m2flow.algorithms.reduce import expect_shape
from m2flow.types import Metric


def gae(
    *,
    reward: Tensor,
    value: Tensor,
    bootstrap: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2015, 1506.02438): advantage and return, both [T, B].

    delta_t = r_t + gamma V(s_{t+1}) - V(s_t);  A_t = delta_t + gamma lambda A_{t+1};  return = A + V.

    V(s_{t+1}) is 0 at a termination (also when the step is truncated too), `bootstrap` at a truncation or cut, else
    `value` of the next row; A_{t+1} passes only in the last case. A step that is not valid (a lane that only reset
    itself) gets 0, passes nothing, and the step before it counts as cut. Values there are never read.
    """
    advantage, returns = gae_actions(
        reward=reward[..., None],
        value=value[..., None],
        bootstrap=bootstrap,
        terminated=terminated,
        truncated=truncated,
        valid=valid[..., None],
        gamma=gamma,
        lam=lam,
    )
    return advantage[..., 0], returns[..., 0]


def gae_actions(
    *,
    reward: Tensor,
    value: Tensor,
    bootstrap: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """GAE at the action level: chunks of C actions are unrolled, so that every action is a step of its own.

    `reward`, `value`, `valid` [T, B, C]; `bootstrap`, `terminated`, `truncated` [T, B] belong to the last valid
    action of a chunk. Discounts apply per action. Fewer than C actions may be executed: the valid ones come first,
    and the last of them is followed by the first action of the next chunk. Returns advantage and return [T, B, C], 0
    where not valid.
    """
    ends = {"terminated": terminated, "truncated": truncated}
    _check_gae(reward, {"value": value, "valid": valid}, {"bootstrap": bootstrap, **ends}, {"gamma": gamma, "lam": lam})
    steps, lanes, actions = reward.shape
    first = valid[..., 0]
    follows = torch.zeros_like(first)  # the next row goes on with the same episode
    follows[:-1] = first[:-1] & first[1:] & ~(terminated | truncated)[:-1]
    following = torch.cat([value[1:, :, 0], bootstrap[-1:]])
    successor = torch.where(follows, following, bootstrap)
    successor = torch.where(terminated, 0.0, successor)[..., None]
    carry = (follows.to(value.dtype) * (gamma * lam))[..., None]
    if actions > 1:
        inside = valid[..., 1:]  # action c is followed by c + 1 of the same chunk
        successor = torch.cat([torch.where(inside, value[..., 1:], successor), successor], dim=-1)
        carry = torch.cat([torch.where(inside, gamma * lam, carry.expand_as(inside)), carry], dim=-1)
        # what was not executed stands between the last valid action and the next chunk: hand on without discount
        carry = torch.where(valid, carry, follows[..., None].to(value.dtype))
    delta = torch.where(valid, reward + gamma * successor - value, 0.0)
    if actions > 1:
        delta, carry = (x.transpose(1, 2).reshape(steps * actions, lanes) for x in (delta, carry))
        advantage = discounted_sum(delta, carry).reshape(steps, actions, lanes).transpose(1, 2)
        advantage = torch.where(valid, advantage, 0.0)
    else:
        advantage = discounted_sum(delta[..., 0], carry[..., 0])[..., None]
    return advantage, torch.where(valid, advantage + value, 0.0)


def _check_gae(
    reward: Tensor, per_action: dict[str, Tensor], per_step: dict[str, Tensor], factors: dict[str, float]
) -> None:
    if reward.dim() != 3 or reward.shape[0] == 0:
        raise ValueError(f"reward: shape {tuple(reward.shape)}, expected [T, B] or [T, B, C] with T > 0")
    for name, x in per_action.items():
        expect_shape(name, x, reward.shape)
    for name, x in per_step.items():
        expect_shape(name, x, reward.shape[:2])
    for name, x in (per_action | per_step).items():
        if name not in ("value", "bootstrap") and x.dtype != torch.bool:
            raise ValueError(f"{name}: dtype {x.dtype}, expected torch.bool")
    for name, number in factors.items():
        if not 0.0 <= number <= 1.0:
            raise ValueError(f"{name}: {number}, expected 0 to 1")
    valid = per_action["valid"]
    if valid.shape[2] > 1 and bool((valid[..., 1:] & ~valid[..., :-1]).any()):
        raise ValueError("valid: an executed action follows one that was not; executed actions come first in a chunk")


def discounted_sum(x: Tensor, carry: Tensor) -> Tensor:
    """y_t = x_t + carry_t y_{t+1} along the first axis, by doubling: log2(T) rounds of whole-array work.

    Each round joins neighbouring spans: (x, c) then (x', c') is (x + c x', c c'). The carry of the last row is not
    read.
    """
    total, factor, length, span = x.clone(), carry.clone(), x.shape[0], 1
    while span < length:
        total[:-span] = torch.addcmul(total[:-span], factor[:-span], total[span:])
        factor[:-span] = factor[:-span] * factor[span:]
        span *= 2
    return total


def reward_to_go(*, reward: Tensor, terminated: Tensor, truncated: Tensor, valid: Tensor, gamma: float) -> Tensor:
    """Discounted sum of what follows, [T, B, K] (REINFORCE, Williams 1992), with the rules of `gae_actions`.

    What lies behind a truncation or a cut is not known and counts 0.
    """
    zero = torch.zeros_like(reward)
    flags = {"terminated": terminated, "truncated": truncated, "valid": valid}
    return gae_actions(reward=reward, value=zero, bootstrap=zero[..., 0], gamma=gamma, lam=1.0, **flags)[0]


def chunk_reward(*, reward: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Chunk level: rewards [T, B, C] summed over executed actions, without discount, and whether any was: [T, B]."""
    expect_shape("valid", valid, reward.shape)
    return torch.where(valid, reward, 0.0).sum(dim=-1), valid.any(dim=-1)


def whiten(x: Tensor, *, mask: Tensor | None, dim: int | None = None, eps: float = 1e-8) -> Tensor:
    """(x - mean) / (std + eps) over valid elements, 0 elsewhere; population standard deviation.

    Statistics are those of `x` under `mask` (None: all count), over all elements or along `dim`. A single valid value
    has no spread to divide by and is left as it is.
    """
    if mask is None:
        if x.numel() == 1:
            return x
        std, mean = torch.std_mean(x, dim=dim, correction=0, keepdim=dim is not None)
        return (x - mean) / (std + eps)
    expect_shape("mask", mask, x.shape)
    n = mask.sum() if dim is None else mask.sum(dim=dim, keepdim=True)
    bound = n.clamp(min=1)
    kept = torch.where(mask, x, 0.0)
    mean = (kept.sum() if dim is None else kept.sum(dim=dim, keepdim=True)) / bound
    square = torch.where(mask, x - mean, 0.0).square()
    std = ((square.sum() if dim is None else square.sum(dim=dim, keepdim=True)) / bound).sqrt()
    return torch.where(mask, torch.where(n > 1, (x - mean) / (std + eps), x), 0.0)


def whiten_parts(x: Tensor, *, rows: int, mask: Tensor | None) -> Tensor:
    """`whiten` of each run of `rows` rows of [S, ...] by itself, the last one with what is left."""
    if len(x) % rows:
        masks = repeat(None) if mask is None else torch.split(mask, rows)
        return torch.cat([whiten(part, mask=m) for part, m in zip(torch.split(x, rows), masks, strict=False)])
    if x.numel() <= len(x) // rows:
        return x  # one value in each part
    flat = x.reshape(len(x) // rows, -1)
    return whiten(flat, mask=None if mask is None else mask.reshape(flat.shape), dim=1).reshape(x.shape)


def group_normalise(
    *, score: Tensor, group: Tensor, std: Literal["sample", "population", "none"] = "sample", others: bool = False
) -> Tensor:
    """Group-relative advantage [E] of E attempts: (score - group mean) / group std (GRPO, 2402.03300).

    `std`: "sample" divides by G - 1 inside the root, "population" by G, "none" not at all (Dr.GRPO, 2503.20783). A
    group is dead, and gets exactly 0, when its scores are equal to rounding: max - min <= 8 eps max|score|, with eps
    of the dtype of `score` (the standard deviation of eight times 0.1 in float32 is 8e-9, so `std > 0` does not find
    it). Raises ValueError on a group of one, whose advantage would always be 0, and on a score that is not finite.

    `others`: the mean is that of the other attempts only (RLOO, 2402.14740), which is G / (G - 1) times as much.
    """
    if std not in ("sample", "population", "none"):
        raise ValueError(f"std: {std!r}, expected 'sample', 'population' or 'none'")
    groups = _Groups.of(score, group)
    size = groups.sizes[groups.of_attempt].to(torch.float64)
    exact = score.to(torch.float64)
    centred = exact - groups.sum(exact)[groups.of_attempt] / size
    if std != "none":
        below = size - 1 if std == "sample" else size
        spread = (groups.sum(centred.square())[groups.of_attempt] / below).sqrt()
        centred = centred / torch.where(spread > 0, spread, 1.0)
    if others:
        centred = centred * size / (size - 1)
    return torch.where(groups.dead[groups.of_attempt], 0.0, centred).to(score.dtype)


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """Which attempts can teach something, and why the other groups cannot. Counts are groups."""

    keep: Tensor  # bool [E]
    kept: int
    all_right: int
    all_wrong: int
    all_equal: int  # the same score everywhere, neither right nor wrong

    def metrics(self) -> dict[str, Metric]:
        """Share of groups without spread, and how many groups there are of each kind."""
        counts = {name: getattr(self, name) for name in ("kept", "all_right", "all_wrong", "all_equal")}
        groups = sum(counts.values())
        dead = Metric((groups - self.kept) / groups if groups else math.nan, "mean", float(groups))
        each = {f"train/groups_{name}": Metric(float(number), "sum") for name, number in counts.items()}
        return {"train/dead_groups": dead} | each


def group_filter(*, score: Tensor, group: Tensor, right: float = 1.0, wrong: float = 0.0) -> GroupFilter:
    """Find groups without spread (dynamic sampling of DAPO, 2503.14476); dead means what it does in `group_normalise`.

    A dead group is all right when its mean is at least `right`, all wrong when at most `wrong`.
    """
    groups = _Groups.of(score, group)
    mean = groups.sum(score.to(torch.float64)) / groups.sizes
    near = 8 * torch.finfo(score.dtype).eps * max(1.0, abs(right), abs(wrong))
    is_right = groups.dead & (mean >= right - near)
    is_wrong = groups.dead & ~is_right & (mean <= wrong + near)
    flags = torch.stack([~groups.dead, is_right, is_wrong, groups.dead & ~is_right & ~is_wrong])
    kept, all_right, all_wrong, all_equal = flags.sum(dim=1).tolist()
    return GroupFilter(~groups.dead[groups.of_attempt], kept, all_right, all_wrong, all_equal)


@dataclass(frozen=True, slots=True)
class _Groups:
    of_attempt: Tensor  # int64 [E], index into the groups
    sizes: Tensor  # int64 [groups]
    dead: Tensor  # bool [groups]

    @staticmethod
    def of(score: Tensor, group: Tensor) -> _Groups:
        if score.dim() != 1 or not score.is_floating_point():
            raise ValueError(f"score: {score.dtype} of shape {tuple(score.shape)}, expected floats of shape [E]")
        expect_shape("group", group, score.shape)
        wrong = torch.nonzero(~score.isfinite())
        if len(wrong):
            raise ValueError(f"score: not finite at attempt {int(wrong[0])} (group {int(group[wrong[0]])})")
        ids, of_attempt, sizes = torch.unique(group, return_inverse=True, return_counts=True)
        if len(sizes) and int(sizes.min()) < 2:
            raise ValueError(
                f"group {int(ids[sizes.argmin()])} has one attempt, so its advantage is always 0; "
                "give every task at least 2 attempts"
            )
        start = torch.zeros(len(ids), dtype=score.dtype, device=score.device)
        low, high, big = (
            start.scatter_reduce(0, of_attempt, x, how, include_self=False)
            for x, how in ((score, "amin"), (score, "amax"), (score.abs(), "amax"))
        )
        return _Groups(of_attempt, sizes, high - low <= 8 * torch.finfo(score.dtype).eps * big)

    def sum(self, x: Tensor) -> Tensor:
        return torch.zeros(len(self.sizes), dtype=x.dtype, device=x.device).index_add(0, self.of_attempt, x)
