"""Parts that misbehave, named in recipes as "tests.integration.parts:Name"."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from m2flow.algorithms.onpolicy import PPO
from m2flow.envs.toy import PointReachConfig, ToyEnv
from m2flow.models.mlp import MLPConfig, MLPPolicy
from m2flow.types import Array, Batch, Loss, Metric, Observation, Score, Spec, Step, Term, Trajectory


class Lying(MLPPolicy):
    """Scores actions as a little more likely than they were."""

    def score(self, obs: Observation, record: Mapping[str, Array]) -> Score:
        """Off by 0.1."""
        right = super().score(obs, record)
        return Score(right.logprob + 0.1, right.entropy)


@dataclass(frozen=True, kw_only=True, slots=True)
class LyingConfig(MLPConfig):
    """Builds a Lying policy."""

    def build(self, spec: Spec, seed: int) -> Lying:
        """The policy."""
        return Lying(spec, self, seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Poisoned(PPO):
    """PPO whose loss is not a number from one step on, while its gradient is as ever."""

    from_step: int = 3

    def targets(self, model: Any, trajectory: Trajectory) -> tuple[Batch, Mapping[str, Metric]]:
        """PPO's, and the poison. At lag 0 the version of the data is the step."""
        batch, metrics = PPO.targets(self, model, trajectory)
        bad = float(trajectory.version.max()) >= self.from_step
        columns = {**batch.columns, "poison": torch.full((batch.size,), float("nan") if bad else 0.0)}
        return Batch(batch.obs, batch.record, columns), metrics

    def losses(self, model: Any, batch: Batch, phase: str, noise: Array | None = None) -> Loss:
        """PPO's, plus a constant."""
        loss = PPO.losses(self, model, batch, phase, noise)
        return Loss((*loss.terms, Term("poison", batch.columns["poison"].sum(), "units")), loss.metrics)


class Burning(ToyEnv):
    """Fails in the third step."""

    steps = 0

    def recv(self) -> Step:
        """A step, or the end of it."""
        self.steps += 1
        if self.steps == 3:
            raise OSError("the motor is on fire")
        return super().recv()


class Interrupting(ToyEnv):
    """Somebody ends the run in the third step."""

    steps = 0

    def recv(self) -> Step:
        """A step, and perhaps a signal to this process."""
        self.steps += 1
        if self.steps == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().recv()


@dataclass(frozen=True, kw_only=True, slots=True)
class InterruptingConfig(PointReachConfig):
    """Builds an Interrupting environment."""

    def build(self, lanes: Sequence[int], seed: int, threads: int = 1) -> Any:
        """The environment."""
        from m2flow.envs.lanes import training

        return Interrupting(self, training(lanes, seed))


@dataclass(frozen=True, kw_only=True, slots=True)
class BurningConfig(PointReachConfig):
    """Builds a Burning environment."""

    def build(self, lanes: Sequence[int], seed: int, threads: int = 1) -> Any:
        """The environment."""
        from m2flow.envs.lanes import training

        return Burning(self, training(lanes, seed))


class Clinging:
    """A recorder that cannot be closed."""

    def __init__(self, target: Any) -> None:
        """Nothing to open."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing to write."""

    def close(self) -> None:
        """Fails."""
        raise OSError("the tracker hung up")
