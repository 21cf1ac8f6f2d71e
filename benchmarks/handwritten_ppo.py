"""PPO written by hand in one function: no stages, no channels, no driver, no classes of ours but the environment.

It is what the abstractions are measured against, so it does the same maths as m2flow with `recipes/halfcheetah_*.yaml`
and the same things that make it fast: acting in numpy, all parameters in one flat tensor, one fused Adam call, one
permutation per epoch, metrics per optimiser batch. Its weights are compared with those of a run of the product in
tests/unit/test_benchmarks.py. What it leaves out is what a hand-written script leaves out: checks,
checkpoints, logs, resuming, any other algorithm, policy, environment or placement.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from m2flow import seeds
from m2flow.protocols import VectorEnv

HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


def train(
    env: VectorEnv,
    *,
    steps: int,
    seed: int,
    length: int = 256,
    minibatch: int = 512,
    epochs: int = 4,
    hidden: int = 64,
    learning_rate: float = 3e-4,
    eps: float = 1e-5,
    gamma: float = 0.99,
    lam: float = 0.95,
    clip: float = 0.2,
    value_coef: float = 1.0,
    max_norm: float = 0.5,
    on_step: Callable[[int, dict[str, float]], None] | None = None,
) -> torch.Tensor:
    """Train for `steps` times `length` decisions on every lane of `env`; returns the flat parameters.

    `value_coef` is of (V - return)^2 / 2. The environment must show one array "state" or "obs" and take a box action.
    """
    # ---- networks: 2 hidden layers of tanh for the mean and for the value, a free log standard deviation
    [name], lanes = env.spec.observation, len(env.lanes)
    inputs, dims = env.spec.observation[name].size, env.spec.action.size
    low = np.broadcast_to(np.asarray(env.spec.action.low, np.float32), (dims,))
    high = np.broadcast_to(np.asarray(env.spec.action.high, np.float32), (dims,))

    def layers(key: int, outputs: int, gain: float) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(key)
        made = []
        for rows, columns, scale in (
            (hidden, inputs, math.sqrt(2.0)),
            (hidden, hidden, math.sqrt(2.0)),
            (outputs, hidden, gain),
        ):
            made += [nn.init.orthogonal_(torch.empty(rows, columns), scale, generator), torch.zeros(rows)]
        return made

    actor = layers(seeds.derive(seeds.derive(seed, "policy"), "mlp"), dims, 0.01)
    critic = layers(seeds.derive(seed, "head", "value"), 1, 1.0)
    # in the order in which the product keeps them, so that sums over all of them agree to the last bit
    start = [*actor[:4], torch.zeros(dims), *actor[4:], *critic[::2], *critic[1::2]]
    flat = torch.cat([x.reshape(-1) for x in start])
    grad, first, second = torch.zeros_like(flat), torch.zeros_like(flat), torch.zeros_like(flat)
    sizes = [x.numel() for x in start]
    views = [nn.Parameter(part.view_as(x)) for part, x in zip(flat.split(sizes), start, strict=True)]
    for view, part in zip(views, grad.split(sizes), strict=True):
        view.grad = part.view_as(view)
    w1, b1, w2, b2, log_std, w3, b3, v1, v2, v3, c1, c2, c3 = views
    n1, m1, n2, m2, n_std, n3, m3 = (x.detach().numpy() for x in views[:7])
    linear = nn.functional.linear

    def value(x: torch.Tensor) -> torch.Tensor:
        return linear(torch.tanh(linear(torch.tanh(linear(x, v1, c1)), v2, c2)), v3, c3)

    # ---- arrays of one step
    raw = env.reset()[name]
    rows = length * lanes
    key, shuffle = seeds.derive(seed, "act"), seeds.derive(seed, "learn")
    returns, ended = np.zeros(lanes), []
    updates, counter = 0, torch.zeros(())
    one, coef = torch.tensor(1.0 / minibatch), torch.tensor(value_coef / minibatch)
    for step in range(steps):
        obs = np.empty((rows + lanes, inputs), np.float32)
        action, logprob = np.empty((length, lanes, dims), np.float32), np.empty((length, lanes, dims), np.float32)
        reward = np.empty((length, lanes), np.float32)
        terminated, truncated = np.zeros((length, lanes), bool), np.zeros((length, lanes), bool)
        next_at, finals, last = np.arange(lanes, rows + lanes).reshape(length, lanes), [], rows + lanes
        turns = np.arange(step * length, (step + 1) * length)
        noise = seeds.normal(seed=key, streams=env.lanes, turns=turns, shape=(dims,)).astype(np.float32)
        obs[:lanes] = raw

        # ---- act
        for t in range(length):
            x = np.tanh(obs[t * lanes : (t + 1) * lanes] @ n1.T + m1)
            x = np.tanh(x @ n2.T + m2)
            mean = x @ n3.T + m3
            z = noise[t]
            a = np.exp(n_std) * z + mean
            action[t], logprob[t] = a, z * z * -0.5 - (n_std + HALF_LOG_2PI)
            env.send(np.minimum(np.maximum(a, low), high))
            out = env.recv()
            raw = out.obs[name]
            obs[(t + 1) * lanes : (t + 2) * lanes] = raw
            reward[t], terminated[t], truncated[t] = out.reward, out.terminated, out.truncated
            returns += out.reward
            done = out.terminated | out.truncated
            if done.any():
                where = np.nonzero(done)[0]
                next_at[t, where] = np.arange(last, last + len(where))
                finals.append(out.final_obs[name][where].astype(np.float32))
                last += len(where)
                ended += returns[where].tolist()
                returns[where] = 0.0

        # ---- generalised advantage estimation, by doubling
        seen = torch.from_numpy(np.concatenate([obs, *finals]) if finals else obs)
        with torch.no_grad():
            spoken = value(seen)[:, 0]
            now, then = spoken[:rows].view(length, lanes), spoken[torch.from_numpy(next_at)]
            over = torch.from_numpy(terminated)
            follows = ~(over | torch.from_numpy(truncated))
            follows[-1] = False
            then = torch.where(over, 0.0, then)
            total = torch.from_numpy(reward) + gamma * then - now
            factor = follows.to(now.dtype) * (gamma * lam)
            span = 1
            while span < length:
                total[:-span] = torch.addcmul(total[:-span], factor[:-span], total[span:])
                factor[:-span] = factor[:-span] * factor[span:]
                span *= 2
            advantage, target = total.reshape(rows), (total + now).reshape(rows, 1)
        states, acted = seen[:rows], torch.from_numpy(action).view(rows, 1, dims)
        old = torch.from_numpy(logprob).view(rows, 1, dims).sum(dim=(1, 2))

        # ---- epochs of optimiser batches
        sums = [0.0] * 6
        for epoch in range(epochs):
            order = np.random.Generator(np.random.Philox(seeds.derive(shuffle, step, epoch))).permutation(rows)
            index = torch.from_numpy(order)
            columns = [states, acted, old, advantage, target]
            if minibatch < rows:
                columns = [x[index] for x in columns]
            for begin in range(0, rows, minibatch):
                x, a, lp, adv, ret = (column[begin : begin + minibatch] for column in columns)
                deviation, centre = torch.std_mean(adv, correction=0)
                adv = (adv - centre) / (deviation + 1e-8)
                positive = adv >= 0
                lower = torch.where(positive, -20.0, math.log1p(-clip))
                upper = torch.where(positive, math.log1p(clip), 20.0)
                hidden_1 = torch.tanh(linear(torch.tanh(linear(x, w1, b1)), w2, b2))
                z = (a - linear(hidden_1, w3, b3).view(-1, 1, dims)) * torch.exp(-log_std)
                ratio = (z * z * -0.5 - (log_std + HALF_LOG_2PI)).sum(dim=(1, 2)) - lp
                bounded = ratio.clamp(lower, upper)
                policy_loss = torch.dot(bounded.exp(), -adv)
                value_loss = nn.functional.huber_loss(value(x), ret, reduction="sum", delta=math.inf)
                torch.autograd.backward([policy_loss, value_loss], [one, coef])
                with torch.no_grad():
                    norm = torch.linalg.vector_norm(grad).item()
                    if norm > max_norm - 1e-6:
                        grad.mul_(max_norm / (norm + 1e-6))
                    updates += 1
                    torch._fused_adam_(
                        [flat], [grad], [first], [second], [], [counter.fill_(updates)], lr=learning_rate, beta1=0.9,
                        beta2=0.999, weight_decay=0.0, eps=eps, amsgrad=False, maximize=False,
                    )  # fmt: skip
                    grad.zero_()
                    far = ratio.detach()
                    sums[0] += policy_loss.item()
                    sums[1] += value_loss.item()
                    sums[2] += torch.expm1(far).sub_(far).sum().item()
                    sums[3] += torch.count_nonzero(bounded != ratio).item()
                    sums[4] += (log_std + (HALF_LOG_2PI + 0.5)).sum().item()
                    sums[5] += norm
        batches = epochs * math.ceil(rows / minibatch)
        names = ("policy_loss", "value_loss", "approx_kl", "clip_fraction", "entropy", "grad_norm")
        metrics: dict[str, Any] = {n: s / batches for n, s in zip(names, sums, strict=True)}
        if ended:
            metrics["return"] = float(np.mean(ended))
            ended = []
        if on_step is not None:
            on_step(step, metrics)
    return flat
