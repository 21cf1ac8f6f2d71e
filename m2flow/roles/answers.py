"""Rollout of a language model: groups of attempts at tasks become one Trajectory.

    slot g of G: task at position g, then g + G, g + 2G, ...        one group of attempts per slot and training step
        attempts (conversations, all in flight together) -> reward -> has the group spread? else the slot's next task

A slot draws its tasks itself, so what is trained on depends neither on how slots are split over replicas nor on which
group is complete first. In a Trajectory an answer is one decision whose chunk is its sampled tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from m2flow import seeds
from m2flow.algorithms.advantages import group_filter
from m2flow.protocols import TaskSource
from m2flow.roles.conversation import Attempt, Judge, Talker
from m2flow.roles.results import components, succeeded
from m2flow.roles.rollout import EPISODES_PER_LANE, RolloutConfig
from m2flow.types import Array, Metric, Report, Task, Tick, Trajectory, Tree, Units

AXES = ("chunk",)


class SampleTable(Protocol):
    """Where samples are written for people to read."""

    def write(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Store rows of plain values under a name."""


@dataclass(frozen=True, slots=True)
class Group:
    """The attempts at one task with what the reward gave them."""

    attempts: Sequence[Attempt]
    scores: Mapping[str, Array]  # name -> [attempts]
    position: int  # of the task in the order of tasks
    kept: bool = True  # False: it has no spread, and is not trained on
    flat: bool = False  # True: it has no spread, and all its attempts count as equally good

    @property
    def rewards(self) -> NDArray[np.float32]:
        """[attempts], what is trained on."""
        reward = np.asarray(self.scores["reward"], np.float32)
        return np.full_like(reward, reward.mean()) if self.flat else reward


class AnswerRollout:
    """Source stage. `lanes` are those of this replica, whole groups; `index` maps a position to a row of `source`."""

    def __init__(
        self,
        *,
        talker: Talker,
        source: TaskSource,
        index: Callable[[int], int],
        judge: Judge,
        config: RolloutConfig,
        lanes: Sequence[int],
        seed: int,
        table: SampleTable | None = None,
    ) -> None:
        self.talker, self.source, self.index, self.judge = talker, source, index, judge
        self.config, self.table = config, table
        self.seed = seeds.derive(seed, "answers")
        self.slots = sorted({lane // config.group for lane in lanes})
        self.cursor = dict.fromkeys(self.slots, 0)  # tasks that each slot has drawn
        self.rejected: Counter[str] = Counter()
        self.discarded: list[Group] = []  # what gave way to another task in this step

    async def work(self, items: Sequence[Tick]) -> AsyncIterator[Trajectory | Report]:
        """One Trajectory and a Report for each tick."""
        for tick in items:
            began = time.perf_counter()
            self.rejected.clear()
            self.discarded = []
            groups = await asyncio.gather(*(self._group(slot) for slot in self.slots))
            self._enough(groups)
            sampled = [*groups, *sorted(self.discarded, key=lambda group: group.position)]
            if self.table is not None:
                self.table.write(f"step_{tick.step:06d}", table_rows(sampled))
            yield trajectory(groups, self.slots, self.config.group, tick)
            metrics = measures(sampled) | self._rejections()
            yield Report(tick.step, metrics | {"time/rollout_s": Metric(time.perf_counter() - began, "sum")})

    async def _group(self, slot: int) -> Group:
        """The slot's next group; while it has no spread and `resample` allows, the one after it."""
        for left in range(self.config.resample, -1, -1):
            position = slot + self.cursor[slot] * (self.config.lanes // self.config.group)
            self.cursor[slot] += 1
            task = self.source.task(self.index(position))
            key = seeds.derive(self.seed, position)
            held = [self.talker.attempt(task, k, seeds.derive(key, k)) for k in range(self.config.group)]
            attempts = await asyncio.gather(*held)
            group = Group(attempts, await self.judge.score(attempts), position)
            why = dead(judged(group.scores)) if self.config.resample else ""
            if not why:
                return group
            self.rejected[why] += 1
            spent = replace(group, kept=False)
            if not left:
                return replace(group, flat=True) if self.config.when_dry == "keep" else spent
            self.discarded.append(spent)
        raise AssertionError

    def _enough(self, groups: Sequence[Group]) -> None:
        """Where the recipe says so, a slot that found no group with spread ends the run."""
        dry = sum(not group.kept for group in groups)
        if dry and self.config.when_dry == "error":
            counts = ", ".join(f"{n} {why.replace('_', ' ')}" for why, n in sorted(self.rejected.items()))
            raise ValueError(
                f"rollout.resample: {dry} of {len(groups)} groups found no task whose {self.config.group} attempts "
                f"score differently within {self.config.resample + 1} tries (kept {len(groups) - dry}; rejected: "
                f"{counts}) and rollout.when_dry is error; use easier or harder tasks, more attempts per task, a "
                "higher resample, or when_dry: drop (train on fewer groups) or keep (on the last, advantage 0)"
            )

    def _rejections(self) -> dict[str, Metric]:
        if not self.config.resample:
            return {}
        names = ("all_right", "all_wrong", "all_equal")
        return {f"rollout/rejected_{name}": Metric(float(self.rejected[name]), "sum") for name in names}

    def state(self) -> Tree:
        """How many tasks each slot has drawn: all that the next step depends on."""
        return {"cursor": [[slot, count] for slot, count in self.cursor.items()], "tasks": self.source.size}

    def restore(self, state: Tree) -> None:
        """Go on with the tasks behind those."""
        same_tasks(state, self.source)
        saved = {int(slot): int(count) for slot, count in state["cursor"]}
        if set(saved) != set(self.slots):
            raise ValueError(f"checkpoint: groups {sorted(saved)} of the rollout do not fit {self.slots}")
        self.cursor = saved

    def close(self) -> None:
        """End the reward's workers."""
        self.judge.close()


def same_tasks(state: Tree, source: TaskSource) -> None:
    """Raise ValueError where the tasks are others than when the state was saved: positions would mean other rows."""
    if state["tasks"] != source.size:
        raise ValueError(
            f"checkpoint: there were {state['tasks']} tasks, and now env has {source.size}; use the old data"
        )


def judged(scores: Mapping[str, Array]) -> Array:
    """What tells a group with spread from one without: right or wrong where the reward says so (DAPO), else the reward.

    So a group of wrong answers of different lengths has none, whatever a length punishment adds.
    """
    names = [name for name in scores if name == "correct" or name.endswith("/correct")]
    return succeeded(scores) if names else scores["reward"]


def dead(score: Array) -> str:
    """Why a group of these scores cannot teach anything: all_right, all_wrong, all_equal; "" where it can."""
    if len(score) < 2:
        return ""
    found = group_filter(score=torch.as_tensor(np.asarray(score, np.float32)), group=torch.zeros(len(score)).long())
    return next((why for why in ("all_right", "all_wrong", "all_equal") if getattr(found, why)), "")


def trajectory(groups: Sequence[Group], slots: Sequence[int], size: int, tick: Tick) -> Trajectory:
    """The columns of these groups, one per attempt, T = 1. See `models.lm` for the observation of a language model."""
    attempts = [attempt for group in groups for attempt in group.attempts]
    rows, chunk = len(attempts), max(1, *(len(a.at) for a in attempts))
    tokens = np.zeros((rows, max(len(a.tokens) for a in attempts)), np.int64)
    at, version = np.zeros((rows, chunk), np.int64), np.zeros((rows, chunk), np.int64)
    logprob = np.zeros((rows, chunk), np.float64)
    for row, a in enumerate(attempts):
        tokens[row, : len(a.tokens)] = a.tokens
        at[row, : len(a.at)], logprob[row, : len(a.at)] = a.at, a.logprob
        version[row, : len(a.at)] = a.version
    kept = np.repeat([group.kept for group in groups], size)
    valid = (at > 0) & kept[:, None]
    reward = np.zeros((rows, chunk), np.float32)
    score = np.concatenate([group.rewards for group in groups])
    last = np.maximum(np.count_nonzero(at, axis=1) - 1, 0)
    reward[np.arange(rows), last] = np.where(kept, score, 0.0)
    lane = np.array([slot * size + k for slot in slots for k in range(size)], np.int64)
    position = [group.position for group in groups]
    cut = np.array([a.finish != "stop" for a in attempts])
    line = np.arange(rows)[None]
    return Trajectory(
        obs={"tokens": tokens, "length": np.array([len(a.tokens) for a in attempts], np.int64), "at": at},
        obs_at=line,
        next_at=line,
        reward=reward[None],
        valid=valid[None],
        terminated=np.ones((1, rows), bool),  # an answer's limit is part of its task: nothing follows it
        truncated=cut[None],
        version=np.where(at > 0, version, np.iinfo(np.int64).max).min(1)[None],
        episode=(lane * EPISODES_PER_LANE + np.repeat(position, size))[None],
        group=np.repeat(position, size)[None],
        lane=lane,
        units=Units(AXES, logprob, {}),
        step=tick.step,
    )


def measures(groups: Sequence[Group]) -> dict[str, Metric]:
    """What a step reports about all that was sampled, also what gave way to another task."""
    attempts = [attempt for group in groups for attempt in group.attempts]
    count = float(len(attempts))
    length = np.array([len(a.at) for a in attempts], np.float64)
    turns = np.array([sum(m["role"] == "assistant" for m in a.messages) for a in attempts], np.float64)
    reward = np.concatenate([np.asarray(group.scores["reward"], np.float64) for group in groups])
    metrics = {
        "rollout/return": Metric(float(reward.mean()), "mean", count),
        "rollout/success": Metric(float(np.concatenate([succeeded(g.scores) for g in groups]).mean()), "mean", count),
        "rollout/length": Metric(float(length.mean()), "mean", count),
        "rollout/length_min": Metric(float(length.min()), "min"),
        "rollout/length_max": Metric(float(length.max()), "max"),
        "rollout/truncated": Metric(float(np.mean([a.finish != "stop" for a in attempts])), "mean", count),
        "rollout/turns": Metric(float(turns.mean()), "mean", count),
        "rollout/tokens": Metric(float(length.sum()), "sum"),
        "rollout/episodes": Metric(count, "sum"),
        "rollout/env_steps": Metric(float(turns.sum()), "sum"),
    }
    for name in dict.fromkeys(name for a in attempts for name in a.info):
        total = float(sum(a.info.get(name, 0.0) for a in attempts))
        metrics[f"rollout/{name}"] = Metric(total / count, "mean", count)
    return metrics | components([group.scores for group in groups])


def table_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """One row of plain values per attempt: task, conversation, and every component of its reward."""
    rows = []
    for group in groups:
        for k, attempt in enumerate(group.attempts):
            row = describe(attempt.task, attempt)
            row |= {"position": group.position, "trained": group.kept}
            row |= {f"reward/{name}": float(values[k]) for name, values in group.scores.items()}
            rows.append(row)
    return rows


def describe(task: Task, attempt: Attempt) -> dict[str, Any]:
    """What a person wants to read of an attempt."""
    asked = [(m["role"], str(m["content"])) for m in attempt.messages if m["role"] != "assistant"]
    return {
        "task": task.id,
        "attempt": attempt.number,
        "prompt": "\n".join(text if role == "user" else f"{role}: {text}" for role, text in asked),
        "text": attempt.text,
        "gold": str(task.payload.get("answer", "")),
        "finish": attempt.finish,
        "tokens": len(attempt.at),
        "logprob": float(np.sum(attempt.logprob)),
        "turns": sum(m["role"] == "assistant" for m in attempt.messages),
    }
