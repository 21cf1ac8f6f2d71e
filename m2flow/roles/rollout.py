"""Rollout: steps an environment with the policy's actions and writes whole-lane arrays into a Trajectory.

One `Tick` yields one Trajectory per sub-batch of lanes and one Report about the episodes that ended. Sub-batches are in
flight together: while one waits for its environment or for the policy service, another goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from m2flow import seeds
from m2flow.protocols import Reward, VectorEnv
from m2flow.roles.results import components
from m2flow.roles.segment import Segment
from m2flow.spec import Join
from m2flow.types import Array, EpisodeResult, Metric, Observation, Report, Step, Tick, Trajectory, Tree

EPISODES_PER_LANE = 1 << 32  # episode id = lane * this + k-th episode of the lane


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """How much is collected per training step. For a language model a lane is an answer, and `length` is 1."""

    lanes: int = 8  # environments stepped together, or answers per training step; over all replicas
    length: int = 128  # decisions per lane and training step; a whole conversation is one
    group: int = 1  # neighbouring lanes that start every episode alike; attempts at one task, for group baselines
    # times that a group whose attempts are alike gives way to another task (DAPO; text only). Alike: all right or all
    # wrong where the reward has a component `correct`, else equal rewards
    resample: int = 0
    # what becomes of a group without spread after that: keep (advantage 0) | drop (not trained on) | error
    when_dry: Literal["keep", "drop", "error"] = "keep"

    def __post_init__(self) -> None:
        if self.lanes < 1:
            raise ValueError(f"lanes: must be at least 1, got {self.lanes}")
        if self.group < 1 or self.lanes % self.group:
            raise ValueError(f"group: must be at least 1 and divide lanes {self.lanes}, got {self.group}")
        if self.length < 1:
            raise ValueError(f"length: must be at least 1, got {self.length}")
        if self.resample < 0:
            raise ValueError(f"resample: must be 0 or more, got {self.resample}")
        if self.when_dry not in ("keep", "drop", "error"):
            raise ValueError(f"when_dry: must be keep, drop or error, got {self.when_dry!r}")
        if self.resample and self.group < 2:
            raise ValueError(f"resample: {self.resample} needs groups of 2 or more attempts, and group is {self.group}")
        if self.when_dry != "keep" and not self.resample:
            raise ValueError(f"when_dry: {self.when_dry!r} is only read with resample of 1 or more")


@dataclass(frozen=True, slots=True)
class Acting:
    """What the rollout needs to know of the policy without holding it: `Policy.noise`, `axes`, `chunk`, float dtype."""

    noise: tuple[str, tuple[int, ...]]
    axes: tuple[str, ...]
    chunk: int
    dtype: str = "float32"


_NUMBERS: dict[str, Callable[[EpisodeResult], float | None]] = {
    "return": lambda episode: episode.ret,
    "length": lambda episode: float(episode.length),
    "success": lambda episode: None if episode.success_once is None else float(episode.success_once),
}


class Rollout:
    """Source stage. `envs` are the sub-batches of this replica; `policy` is a service handle."""

    def __init__(
        self,
        *,
        envs: Sequence[VectorEnv],
        policy: Any,
        join: Join,
        acting: Acting,
        config: RolloutConfig,
        seed: int,
        reward: Reward | None = None,
    ) -> None:
        self.config = config
        self.turn = 0
        key = seeds.derive(seed, "act")
        self.lanes = [
            _Lanes(env, policy, join, acting, key, config.group, reward, overlap=len(envs) > 1) for env in envs
        ]

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
        metrics = components([scores for group in self.lanes for scores in group.take_scores()]) | {
            "rollout/episodes": Metric(float(len(ended)), "sum"),
            "rollout/env_steps": Metric(float(sum(group.take_steps() for group in self.lanes)), "sum"),
        }
        for name in ("return", "length", "success"):
            # an episode that does not say whether it succeeded says nothing
            known = [value for value in (_NUMBERS[name](episode) for episode in ended) if value is not None]
            if known:
                metrics[f"rollout/{name}"] = Metric(float(np.mean(known, dtype=np.float64)), "mean", float(len(known)))
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
        self,
        env: VectorEnv,
        policy: Any,
        join: Join,
        acting: Acting,
        key: int,
        group: int,
        reward: Reward | None,
        *,
        overlap: bool,
    ) -> None:
        self.reward = reward
        self.env, self.policy, self.join, self.acting, self.key, self.overlap = env, policy, join, acting, key, overlap
        self.obs: Observation = join.encode(env.reset())
        self.ids = np.asarray(env.lanes, np.int64)
        self.groups, self.grouped = self.ids // group, group > 1
        size = len(self.ids)
        self.episode = np.zeros(size, np.int64)
        self.sums = np.zeros((3, size))  # return, length, success so far
        self.knows_success = False
        self.steps = 0
        self.ended: list[EpisodeResult] = []
        self.scores: list[Mapping[str, Array]] = []

    async def collect(self, tick: Tick, turn: int, length: int) -> Trajectory:
        """`length` decisions on every lane."""
        kind, shape = self.acting.noise
        noise = seeds.draw(kind, self.key, self.ids, np.arange(turn, turn + length), shape).astype(self.acting.dtype)
        segment, act, chunk = Segment(length, self.obs, self.acting.chunk), self.policy.act, self.acting.chunk
        decode = self.join.decode
        try:
            for t in range(length):
                action = await act(self.obs, noise[t])
                segment.acted(t, action)
                decoded = decode(action.action, self.ids)
                if chunk == 1:
                    self.env.send(decoded[:, 0])
                    if self.overlap:
                        await asyncio.sleep(0)
                    self._receive(segment, t, 0, None)
                else:
                    await self._chunk(segment, t, decoded)
        except ValueError:
            self.join.inspect(self.obs, self.ids)  # an action that is not finite, of an observation that was not
            raise
        ended = segment.finish()
        if self.grouped and not ended[-1].all():
            raise ValueError(
                f"rollout.group: step {tick.step} cuts episodes, and a group baseline compares whole ones; make "
                "rollout.length a multiple of the episodes' length, and let all episodes have one length"
            )
        number = self.episode + np.cumsum(ended, axis=0) - ended
        self._reward(segment, self._count(segment, ended, number))
        trajectory = segment.trajectory(
            tick,
            self.ids,
            self.acting.axes,
            self.ids * EPISODES_PER_LANE + number,
            self.groups * EPISODES_PER_LANE + number,
        )
        self._inspect(trajectory)
        return trajectory

    def _inspect(self, trajectory: Trajectory) -> None:
        """Nothing that is not finite goes to training or into a replay buffer: one pass over all that was collected."""
        rows = np.resize(trajectory.lane, len(next(iter(trajectory.obs.values()))))
        rows[trajectory.next_at] = trajectory.lane  # true final observations stand behind the grid
        self.join.inspect(trajectory.obs, rows)
        wrong = np.argwhere(trajectory.valid & ~np.isfinite(trajectory.reward))
        if len(wrong):
            t, b, c = wrong[0]
            raise ValueError(
                f"reward: {trajectory.reward[t, b, c]} at step {t} of lane {trajectory.lane[b]}, episode "
                f"{trajectory.episode[t, b]}; {len(wrong)} rewards are not finite"
            )

    async def _chunk(self, segment: Segment, t: int, decoded: np.ndarray[Any, Any]) -> None:
        """The actions of one decision, one after the other.

        A lane whose episode ended, or that only reset itself, waits for the next decision: the rest of this chunk was
        decided on an observation of the old episode. Its actions are held and count nowhere.
        """
        held = self.join.decode(np.zeros_like(decoded[:, :1]), self.ids)[:, 0]
        alive = np.ones(len(self.ids), bool)
        for c in range(self.acting.chunk):
            action = decoded[:, c] if alive.all() else np.where(_like(alive, held), decoded[:, c], held)
            self.env.send(action)
            if self.overlap:
                await asyncio.sleep(0)
            step = self._receive(segment, t, c, alive)
            alive = alive & step.valid & ~(step.terminated | step.truncated)

    def _receive(self, segment: Segment, t: int, c: int, alive: np.ndarray[Any, Any] | None) -> Step:
        """The environment's answer to action c of decision t."""
        step = self.env.recv()
        self.obs = obs = self.join.encode(step.obs)
        segment.stepped(t, c, step, obs, obs if step.final_obs is step.obs else self.join.encode(step.final_obs), alive)
        return step

    def _count(
        self, segment: Segment, ended: np.ndarray[Any, Any], number: np.ndarray[Any, Any]
    ) -> list[tuple[int, int, EpisodeResult]]:
        """Add a segment to the running episodes; (step, row, episode) of those that ended in it."""
        counted = segment.valid.sum(-1)
        success = np.zeros(ended.shape) if segment.success is None else segment.success.any(-1)
        self.knows_success |= segment.success is not None
        rows = np.stack([segment.reward.sum(-1, dtype=np.float64), counted, success])  # [3, T, B]
        self.steps += int(counted.sum())
        finished = []
        for lane in range(len(self.ids)):
            start = 0
            for stop in (np.nonzero(ended[:, lane])[0] + 1).tolist():
                self._add(rows[:, start:stop, lane], lane)
                ret, length, won = self.sums[:, lane]
                knows = self.knows_success
                result = EpisodeResult(
                    seed=int(number[stop - 1, lane]),
                    lane=int(self.ids[lane]),
                    length=int(length),
                    ret=float(ret),
                    success_once=bool(won) if knows else None,
                    success_at_end=bool(success[stop - 1, lane]) if knows else None,
                )
                finished.append((stop - 1, lane, result))
                self.sums[:, lane] = 0.0
                self.episode[lane] += 1
                start = stop
            self._add(rows[:, start:, lane], lane)
        self.ended += [result for _, _, result in finished]
        return finished

    def _reward(self, segment: Segment, finished: Sequence[tuple[int, int, EpisodeResult]]) -> None:
        """Where the recipe has a reward, an episode's score stands at its last action, and all other rewards are 0."""
        if self.reward is None:
            return
        segment.reward[:] = 0.0
        if finished:
            scores = self.reward.score([episode for _, _, episode in finished])
            self.scores.append(scores)
            for (t, row, _), score in zip(finished, scores["reward"], strict=True):
                segment.reward[t, row, np.nonzero(segment.valid[t, row])[0][-1]] = score

    def _add(self, rows: np.ndarray[Any, Any], lane: int) -> None:
        """Return and length add up; success at any time is success."""
        self.sums[:2, lane] += rows[:2].sum(-1)
        self.sums[2, lane] = max(self.sums[2, lane], rows[2].max(initial=0.0))

    def take_ended(self) -> list[EpisodeResult]:
        """Episodes that ended since the last call."""
        ended, self.ended = self.ended, []
        return ended

    def take_scores(self) -> list[Mapping[str, Array]]:
        """What the reward gave since the last call."""
        scores, self.scores = self.scores, []
        return scores

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
