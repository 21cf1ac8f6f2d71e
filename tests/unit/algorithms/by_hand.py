"""The PPO loss written out unit by unit, from the papers, without the package: what the vectorised code must equal."""

from __future__ import annotations

import numpy as np
import torch


def ppo_loss(objective, start, now, trajectory):
    """Loss of all rows as one optimiser batch: targets by the model `start`, ratio and value by the model `now`."""
    rows = trajectory.reward.shape[0] * trajectory.reward.shape[1]
    obs = {"state": torch.from_numpy(trajectory.obs["state"][trajectory.obs_at.reshape(-1)])}
    record = {"action": torch.from_numpy(trajectory.units.record["action"])}
    score = now.policy.score(obs, record)
    behaviour = torch.from_numpy(trajectory.units.logprob)
    valid = torch.from_numpy(trajectory.valid).reshape(rows, -1)
    with torch.no_grad():
        proximal = start.policy.score(obs, record).logprob
        reference = None if start.reference is None else start.reference.score(obs, record).logprob
    units = list(_units(objective.level, now.policy.axes, behaviour.shape, valid))
    reward, kept = _rewards(objective, trajectory, valid, units, behaviour, reference)
    advantage, value = _advantages(objective, start, trajectory, reward, kept)

    weight = [float((proximal[s][m].sum() - behaviour[s][m].sum()).exp()) for s, m, _ in units]
    if objective.decoupled:
        near = [w <= objective.behaviour_threshold for w in weight]
        units = [u for u, keep in zip(units, near, strict=True) if keep]
        weight = [w for w in weight if w <= objective.behaviour_threshold]
    a = torch.stack([advantage[s, c if objective.per_action else 0] for s, _, c in units])
    if objective.whiten != "none":
        a = (a - a.mean()) / a.std(correction=0)
    total = 0.0
    for (s, mask, _), adv, w in zip(units, a, weight, strict=True):
        new, old = score.logprob[s][mask].sum(), (proximal if objective.decoupled else behaviour)[s][mask].sum()
        ratio = (new - old).exp()
        term = torch.minimum(ratio * adv, ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high) * adv)
        if objective.dual_clip and adv < 0:
            term = torch.maximum(term, objective.dual_clip * adv)
        total = total - term * (w if objective.decoupled else 1.0)
        total = total - objective.entropy_coef * score.entropy[s][mask].sum()
        if objective.kl != "none" and objective.kl_in == "loss":
            d = reference[s][mask].sum() - new
            total = total + objective.kl_coef * {"k2": d**2 / 2, "k3": d.exp() - d - 1}[objective.kl]
    error = _value_error(objective, now.value("value", obs), value, advantage + value)
    return total / len(units) + objective.value_coef * error[kept].sum() / kept.sum()


def _units(level, axes, shape, valid):
    """(row, mask of the entries of that row that share a ratio, action index) of everything that was executed."""
    at_chunk = axes.index("chunk") if "chunk" in axes else None
    for s in range(shape[0]):
        entries = [
            at for at in np.ndindex(*shape[1:]) if (valid[s].any() if at_chunk is None else valid[s, at[at_chunk]])
        ]
        key = {
            "chunk": lambda at: (),
            "action": lambda at: at[at_chunk],
            "token": lambda at: at,
        }[level]
        for k in dict.fromkeys(key(at) for at in entries):
            mask = torch.zeros(shape[1:], dtype=torch.bool)
            together = [at for at in entries if key(at) == k]
            for at in together:
                mask[at] = True
            yield s, mask, 0 if at_chunk is None else together[0][at_chunk]


def _rewards(objective, trajectory, valid, units, behaviour, reference):
    reward = torch.from_numpy(trajectory.reward).reshape(valid.shape) * objective.reward_scale
    reward = torch.where(valid, reward, 0.0)
    kept = valid
    if not objective.per_action:
        reward, kept = reward.sum(1, keepdim=True), valid.any(1, keepdim=True)
    if objective.kl_in == "reward":
        assert objective.kl == "k1"
        for s, mask, c in units:
            penalty = (behaviour[s][mask] - reference[s][mask]).sum()
            reward[s, c if objective.per_action else 0] -= objective.kl_coef * penalty
    return reward, kept


def _advantages(objective, start, trajectory, reward, kept):
    steps, lanes, _ = trajectory.reward.shape
    with torch.no_grad():
        every = start.value("value", {"state": torch.from_numpy(trajectory.obs["state"])})
    value = every[torch.from_numpy(trajectory.obs_at).reshape(-1)]
    after = every[torch.from_numpy(trajectory.next_at).reshape(-1)][:, 0]
    advantage = torch.zeros_like(value)
    for b in range(lanes):
        carried, follower = 0.0, None  # advantage and value of the next executed action of the same episode
        for t in reversed(range(steps)):
            s = t * lanes + b
            if not kept[s].any():
                carried, follower = 0.0, None
                continue
            if trajectory.terminated[t, b]:
                carried, follower = 0.0, 0.0
            elif trajectory.truncated[t, b] or follower is None:
                carried, follower = 0.0, after[s]
            for k in reversed(range(value.shape[1])):
                if kept[s, k]:
                    delta = reward[s, k] + objective.gamma * follower - value[s, k]
                    carried = delta + objective.gamma * objective.gae_lambda * carried
                    advantage[s, k], follower = carried, value[s, k]
    return advantage, value


def _value_error(objective, now, value, target):
    def h(x):
        if objective.huber is None:
            return 0.5 * x**2
        return torch.where(x.abs() < objective.huber, 0.5 * x**2, objective.huber * (x.abs() - objective.huber / 2))

    error = h(now - target)
    if objective.value_clip is None:
        return error
    near = value + (now - value).clamp(-objective.value_clip, objective.value_clip)
    return torch.maximum(error, h(near - target))
