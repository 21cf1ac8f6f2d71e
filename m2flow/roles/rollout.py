"""Rollout: steps an environment with the policy's actions and writes whole-lane arrays into a Trajectory.

One `Tick` yields one Trajectory per sub-batch of lanes and one Report about the episodes that ended. Sub-batches are in
flight together: while one waits for its environment or for the policy service, another goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from m2flow import seeds
from m2flow.protocols import VectorEnv
from m2flow.roles.segment import Segment
from m2flow.spec import Join
from m2flow.types import Metric, Observation, Report, Step, Tick, Trajectory, Tree

EPISODES_PER_LANE = 1 << 32  # episode id = lane * this + k-th episode of the lane


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """How much is collected per training step."""

    lanes: int = 8  # environments stepped together, over all replicas
    length: int = 128  # decisions per lane and training step
    group: int = 1  # neighbouring lanes that start every episode alike; attempts at one task, for group baselines

    def __post_init__(self) -> None:
        if self.lanes < 1:
            raise ValueError(f"lanes: must be at least 1, got {self.lanes}")
        if self.group < 1 or self.lanes % self.group:
            raise ValueError(f"group: must be at least 1 and divide lanes {self.lanes}, got {self.group}")
        if self.length < 1:
            raise ValueError(f"length: must be at least 1, got {self.length}")


@dataclass(frozen=True, slots=True)
class Acting:
    """What the rollout needs to know of the policy without holding it: `Policy.noise`, `axes`, `chunk`, float dtype."""

    noise: tuple[str, tuple[int, ...]]
    axes: tuple[str, ...]
    chunk: int
    dtype: str = "float32"


class Rollout:
    """Source stage. `envs` are the sub-batches of this replica; `policy` is a service handle."""

    def __init__(
        self, *, envs: Sequence[VectorEnv], policy: Any, join: Join, acting: Acting, config: RolloutConfig, seed: int
    ) -> None:
        self.config = config
        self.turn = 0
        key = seeds.derive(seed, "act")
        self.lanes = [_Lanes(env, policy, join, acting, key, config.group, overlap=len(envs) > 1) for env in envs]

    async def work(self, items: Sequence[Tick]) -> AsyncIterator[Trajectory | Report]:
        """One Trajectory per sub-batch and a Report, for each tick."""
        for tick in items:
            began = time.perf_counter()
            start, self.turn = self.turn, self.turn + self.config.length
            runs = [group.collect(tick, start, self.config.length) for group in self.lanes]
            for trajectory in [await runs[0]] if len(runs) == 1 else await asyncio.gather(*runs):
                yield trajectory
            yield Report(tick.step, self._metrics() | {"time/rollout_s": Metric(time.perf_counter() - began, "sum")})

    def _metrics(self) -> dict[str, Metric]:
        ended = [episode for group in self.lanes for episode in group.take_ended()]
        metrics = {
            "rollout/episodes": Metric(float(len(ended)), "sum"),
            "rollout/env_steps": Metric(float(sum(group.take_steps() for group in self.lanes)), "sum"),
        }
        if ended:
            weight = float(len(ended))
            for name, column in zip(("return", "length", "success"), np.array(ended, np.float64).T, strict=True):
                if not np.isnan(column).any():
                    metrics[f"rollout/{name}"] = Metric(float(column.mean()), "mean", weight)
        return metrics

    def state(self) -> Tree:
        """Turn counter and every sub-batch's lanes."""
        return {"turn": self.turn, "lanes": [group.state() for group in self.lanes]}

    def restore(self, state: Tree) -> None:
        """Continue from `state`; lanes must be split as they were."""
        saved = [list(map(int, group["ids"])) for group in state["lanes"]]
        here = [list(map(int, group.env.lanes)) for group in self.lanes]
        if saved != here:
            raise ValueError(
                f"rollout: checkpoint holds lanes {saved}, this plan has {here}; resume with the same replicas and "
                "sub-batches, or start a new run from the checkpoint's weights"
            )
        self.turn = int(state["turn"])
        for group, saved_group in zip(self.lanes, state["lanes"], strict=True):
            group.restore(saved_group)

    def close(self) -> None:
        """Free the simulators."""
        for group in self.lanes:
            group.env.close()


class _Lanes:
    """One sub-batch: its env, where it stands, and the running sums of its episodes."""

    def __init__(
        self, env: VectorEnv, policy: Any, join: Join, acting: Acting, key: int, group: int, *, overlap: bool
    ) -> None:
        self.env, self.policy, self.join, self.acting, self.key, self.overlap = env, policy, join, acting, key, overlap
        self.obs: Observation = join.encode(env.reset())
        self.ids = np.asarray(env.lanes, np.int64)
        self.groups, self.grouped = self.ids // group, group > 1
        size = len(self.ids)
        self.episode = np.zeros(size, np.int64)
        self.sums = np.zeros((3, size))  # return, length, success so far
        self.knows_success = False
        self.steps = 0
        self.ended: list[tuple[float, float, float]] = []

    async def collect(self, tick: Tick, turn: int, length: int) -> Trajectory:
        """`length` decisions on every lane."""
        kind, shape = self.acting.noise
        noise = seeds.draw(kind, self.key, self.ids, np.arange(turn, turn + length), shape).astype(self.acting.dtype)
        segment = Segment(length, self.obs, self.acting.chunk)
        for t in range(length):
            action = await self.policy.act(self.obs, noise[t])
            decoded = self.join.decode(action.action, self.ids)
            held = (
                self.join.decode(np.zeros_like(action.action[:, :1]), self.ids)[:, 0]
                if self.acting.chunk > 1
                else decoded
            )
            segment.acted(
                t,
                action,
                self.ids * EPISODES_PER_LANE + self.episode,
                self.groups * EPISODES_PER_LANE + self.episode,
            )
            alive = np.ones(len(self.ids), bool)
            for c in range(self.acting.chunk):
                self.env.send(decoded[:, c] if alive.all() else np.where(_like(alive, held), decoded[:, c], held))
                if self.overlap:
                    await asyncio.sleep(0)
                step = self.env.recv()
                encoded = self.join.encode(step.obs, self.ids)
                final = encoded if step.final_obs is step.obs else self.join.encode(step.final_obs, self.ids)
                segment.stepped(t, c, step, encoded, final, alive)
                self._count(step, alive)
                # A lane whose episode ended, or that only reset itself, waits for the next decision: the rest of this
                # chunk was decided on an observation of the old episode. Its actions are held and count nowhere.
                alive = alive & step.valid & ~(step.terminated | step.truncated)
                self.obs = encoded
        if self.grouped and not (segment.terminated[-1] | segment.truncated[-1]).all():
            raise ValueError(
                f"rollout.group: step {tick.step} cuts episodes, and a group baseline compares whole ones; make "
                "rollout.length a multiple of the episodes' length, and let all episodes have one length"
            )
        return segment.trajectory(tick, self.ids, self.acting.axes)

    def _count(self, step: Step, alive: np.ndarray[Any, Any]) -> None:
        """Add this step to the running episodes and take out those that ended."""
        counted = step.valid & alive
        self.sums[0] += np.where(counted, step.reward, 0.0)
        self.sums[1] += counted
        self.steps += int(counted.sum())
        success = step.info.get("success")
        if success is not None:
            self.knows_success = True
            np.maximum(self.sums[2], np.where(counted, success, 0.0), out=self.sums[2])
        done = (step.terminated | step.truncated) & counted
        if done.any():
            for lane in np.nonzero(done)[0]:
                ret, size, won = self.sums[:, lane]
                self.ended.append((ret, size, won if self.knows_success else np.nan))
            self.sums[:, done] = 0.0
            self.episode[done] += 1

    def take_ended(self) -> list[tuple[float, float, float]]:
        """(return, length, success or NaN) of episodes that ended since the last call."""
        ended, self.ended = self.ended, []
        return ended

    def take_steps(self) -> int:
        """Environment steps since the last call."""
        steps, self.steps = self.steps, 0
        return steps

    def state(self) -> dict[str, Any]:
        env_state = self.env.snapshot()
        if env_state.get("cut"):
            self._cut(self.env.restore(env_state))
        return {
            "ids": self.ids.copy(),
            "env": env_state,
            "episode": self.episode.copy(),
            "sums": self.sums.copy(),
            "knows_success": self.knows_success,
        }

    def _cut(self, obs: Observation) -> None:
        """The env could only be saved by starting fresh episodes: the running ones are dropped, not reported."""
        self.obs = self.join.encode(obs)
        self.sums[:] = 0.0
        self.episode += 1

    def restore(self, state: dict[str, Any]) -> None:
        self.obs = self.join.encode(self.env.restore(state["env"]))
        self.episode[:] = state["episode"]
        self.sums[:] = state["sums"]
        self.knows_success = bool(state["knows_success"])


def _like(mask: np.ndarray[Any, Any], array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return mask.reshape(-1, *([1] * (array.ndim - 1)))
