"""PPO improves a flow policy on a toy task: the whole denoising chain is one decision with one likelihood."""

from __future__ import annotations

import numpy as np
import torch

from m2flow import seeds
from m2flow.algorithms.onpolicy import PPO
from m2flow.backends.torch.trainer import TorchTrainerConfig
from m2flow.models.flow import FlowConfig
from m2flow.types import Field, Spec, Trajectory, Units

SPEC = Spec({"state": Field((2,))}, Field((2,), low=-1.0, high=1.0))
LANES = 512


def collect(policy, step: int) -> tuple[Trajectory, float]:
    """One decision on each lane: reward is minus the squared distance of the action to the observation."""
    lanes, turns = np.arange(LANES), np.array([step])
    obs = (2.0 * seeds.uniform(1, lanes, turns, (2,))[0] - 1.0).astype(np.float32) * 0.8
    kind, shape = policy.noise
    got = policy.act({"state": obs}, seeds.draw(kind, 2, lanes, turns, shape)[0].astype(np.float32))
    reward = -np.square(got.action[:, 0] - obs).sum(1).astype(np.float32)
    rows = np.arange(LANES)[None]
    trajectory = Trajectory(
        obs={"state": np.concatenate([obs, obs])},
        obs_at=rows,
        next_at=rows + LANES,
        reward=reward.reshape(1, LANES, 1),
        valid=np.ones((1, LANES, 1), bool),
        terminated=np.ones((1, LANES), bool),
        truncated=np.zeros((1, LANES), bool),
        version=np.full((1, LANES), step),
        episode=rows,
        group=rows,
        lane=lanes,
        units=Units(policy.axes, got.logprob, got.record),
        step=step,
    )
    return trajectory, float(reward.mean())


def test_ppo_improves_a_flow_policy() -> None:
    policy = FlowConfig(hidden=(32, 32), steps=4).build(SPEC, 0)
    objective = PPO(critic_hidden=(32, 32))
    trainer = TorchTrainerConfig(learning_rate=3e-3).build(policy, objective, 0)
    (phase,) = objective.phases
    rewards, gaps = [], []
    for step in range(20):
        trajectory, reward = collect(policy, step)
        batch, _ = objective.targets(trainer.model, trajectory)
        with torch.no_grad():
            again = policy.score(batch.obs, batch.record).logprob
        gaps.append((again - batch.columns["behaviour_logprob"]).abs().max().item())
        for epoch in range(4):
            order = torch.from_numpy(np.random.default_rng((step, epoch)).permutation(LANES))
            for part in order.split(128):
                rows = objective.prepare(batch.take(part), len(part))
                trainer.forward_backward(rows, phase, objective.counts(rows))
                trainer.step(phase)
        rewards.append(reward)
    obs = np.random.default_rng(0).uniform(-0.8, 0.8, (256, 2)).astype(np.float32)
    mode = -np.square(policy.act({"state": obs}, None).action[:, 0] - obs).sum(1).mean()
    assert max(gaps) < 1e-5  # law 3, at every step
    assert rewards[0] < -2.0
    assert rewards[-1] > -0.1
    assert mode > -0.05
