"""The shipped stages, small, for the contracts of stages and of states."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import cache
from typing import Any, Literal

import torch

from m2flow.algorithms.actor_critic import SAC
from m2flow.algorithms.onpolicy import PPO
from m2flow.backends.torch.trainer import TorchTrainer, TorchTrainerConfig
from m2flow.comm.replay import ReplayChannel, ReplayConfig
from m2flow.envs.toy import PointReachConfig
from m2flow.models.mlp import MLPConfig
from m2flow.rewards.function import FunctionRewardConfig
from m2flow.roles.answers import AnswerRollout
from m2flow.roles.demonstrations import Demonstrations
from m2flow.roles.evaluation import EvaluationConfig, Evaluator
from m2flow.roles.learner import Learner, LearnerConfig
from m2flow.roles.policy import PolicyService
from m2flow.roles.rollout import Acting, Rollout, RolloutConfig
from m2flow.runtime.worker import LocalHandle
from m2flow.spec import join
from m2flow.tasks.dialogue import SingleAnswer
from m2flow.types import Tick, Trajectory
from tests.unit import scripted

ENV = PointReachConfig(horizon=5, radius=0.6, autoreset="next", dtype="float64")
LENGTH = 8
SCORE = {"success": 1.0, "speed": 0.5}
OBJECTIVE = PPO(critic_hidden=(6,))
OFF_POLICY = SAC(critic_hidden=(6,))


def policy(seed: int = 0, dist: Literal["gaussian", "squashed"] = "gaussian") -> Any:
    return MLPConfig(hidden=(6,), normalize=True, dist=dist).build(ENV.spec(), seed).to(torch.float64)


def handle() -> Any:
    return LocalHandle(PolicyService(policy()))


def rollout(reward: Any = None) -> Rollout:
    """Two sub-batches."""
    acts = policy()
    return Rollout(
        envs=[ENV.build(lanes, 0) for lanes in ((0, 1), (2, 3))],
        policy=handle(),
        join=join(acts.spec, ENV.spec()),
        acting=Acting(acts.noise, acts.axes, acts.chunk, "float64"),
        config=RolloutConfig(lanes=4, length=LENGTH),
        seed=0,
        reward=reward,
    )


def scored_rollout() -> Rollout:
    """Its episodes are scored as a whole."""
    return rollout(FunctionRewardConfig(function="m2flow.rewards.episode:quick_success", components=SCORE).build())


def answers() -> AnswerRollout:
    """Two groups of two answers; the engine says what the seed of a request says."""
    talk, _ = scripted.talker(
        lambda prompt, seed: "ab" if seed % 3 else prompt,
        lambda task: SingleAnswer(({"role": "user", "content": task.payload["prompt"]},)),
    )
    return AnswerRollout(
        talker=talk,
        source=scripted.Rows([{"prompt": str(i), "answer": "ab"} for i in range(7)]),
        index=lambda position: position % 7,
        judge=scripted.judge(),
        config=RolloutConfig(lanes=4, length=1, group=2, resample=1),
        lanes=range(4),
        seed=0,
    )


def demonstrations() -> Demonstrations:
    """Three conversations a step."""
    rows = scripted.Rows([{"prompt": str(i), "completion": "a" * (i % 3 + 1)} for i in range(7)])
    return Demonstrations(
        codec=scripted.codec(),
        dialogue=lambda task: SingleAnswer(({"role": "user", "content": task.payload["prompt"]},)),
        source=rows,
        index=lambda position: position % 7,
        config=RolloutConfig(lanes=3, length=1),
        lanes=range(3),
        max_tokens=2,
    )


def trainer(objective: Any = OBJECTIVE) -> TorchTrainer:
    acts = policy(dist="gaussian" if objective is OBJECTIVE else "squashed")
    return TorchTrainerConfig(dtype="float64", learning_rate=1e-2).build(acts, objective, 0)


def learner(objective: Any = OBJECTIVE) -> Learner:
    """Optimiser batches of half a step, cut into micro-batches."""
    config = LearnerConfig(epochs=2, minibatch=16, microbatch=6)
    return Learner(trainer=trainer(objective), objective=objective, config=config, seed=0, noise=policy().noise)


def off_policy_learner() -> Learner:
    return learner(OFF_POLICY)


def replay() -> ReplayChannel:
    return ReplayConfig(batch=4, start=0, update_to_data=0.1, capacity=100).build(0)


def evaluator() -> Evaluator:
    """Three episodes, two at a time."""
    config, acts = EvaluationConfig(seeds=3, lanes=2), policy()
    return Evaluator(config.protocol(ENV), ENV, handle(), join(acts.spec, ENV.spec()), config=config, noise=acts.noise)


def outputs(made: Any) -> list[Any]:
    """What a stage yields, as the loop takes it."""
    if not isinstance(made, AsyncIterator):
        return list(made)

    async def take() -> list[Any]:
        return [output async for output in made]

    return asyncio.run(take())


@cache
def trajectories(steps: int = 6) -> list[list[Trajectory]]:
    """Of one rollout by one policy, step by step."""
    stage = rollout()
    made = [outputs(stage.work([Tick(step, 0)])) for step in range(steps)]
    return [[part for part in step if isinstance(part, Trajectory)] for step in made]
