"""Parts that misbehave, named in recipes as "tests.integration.parts:Name"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from m2flow.envs.toy import PointReachConfig, ToyEnv
from m2flow.models.mlp import MLPConfig, MLPPolicy
from m2flow.types import Array, Observation, Score, Spec, Step


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


class Burning(ToyEnv):
    """Fails in the third step."""

    steps = 0

    def recv(self) -> Step:
        """A step, or the end of it."""
        self.steps += 1
        if self.steps == 3:
            raise OSError("the motor is on fire")
        return super().recv()


@dataclass(frozen=True, kw_only=True, slots=True)
class BurningConfig(PointReachConfig):
    """Builds a Burning environment."""

    def build(self, lanes: Sequence[int], seed: int, threads: int = 1) -> Any:
        """The environment."""
        from m2flow.envs.lanes import training

        return Burning(self, training(lanes, seed))
