"""Demonstrations instead of a rollout: conversations that a language model learns by heart (supervised fine-tuning)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from m2flow.protocols import Dialogue, TaskSource, TextCodec
from m2flow.roles.answers import AXES, same_tasks
from m2flow.roles.rollout import EPISODES_PER_LANE, RolloutConfig
from m2flow.types import Metric, Report, Task, Tick, Trajectory, Tree, Units


class Demonstrations:
    """Source stage. Lane b of L shows the tasks at positions b, b + L, b + 2L, ...; the units are what was to be said.

    A task's payload holds `messages` with answers of the assistant, or a prompt and its `completion`.
    """

    def __init__(
        self,
        *,
        codec: TextCodec,
        dialogue: Callable[[Task], Dialogue],
        source: TaskSource,
        index: Callable[[int], int],
        config: RolloutConfig,
        lanes: Sequence[int],
        max_tokens: int,
    ) -> None:
        self.codec, self.dialogue, self.source, self.index = codec, dialogue, source, index
        self.config, self.lanes, self.max_tokens = config, np.array(lanes, np.int64), max_tokens
        self.drawn = 0  # tasks of each lane so far

    def work(self, items: Sequence[Tick]) -> Iterator[Trajectory | Report]:
        """One Trajectory and a Report for each tick."""
        for tick in items:
            began = time.perf_counter()
            positions = self.lanes + self.drawn * self.config.lanes
            self.drawn += 1
            shown = [self._show(self.source.task(self.index(int(p)))) for p in positions]
            made = self._trajectory(shown, positions, tick)
            yield made
            answered = float(made.valid.sum())
            metrics = {
                "rollout/tokens": Metric(answered, "sum"),
                "rollout/length": Metric(answered / len(shown), "mean", float(len(shown))),
                "rollout/episodes": Metric(float(len(shown)), "sum"),
                "rollout/env_steps": Metric(float(len(shown)), "sum"),
                "rollout/truncated": Metric(float(made.truncated.mean()), "mean", float(len(shown))),
                "time/rollout_s": Metric(time.perf_counter() - began, "sum"),
            }
            yield Report(tick.step, metrics)

    def _show(self, task: Task) -> tuple[list[int], list[int]]:
        """Ids of a conversation, and the positions of those that the model should say."""
        ids, said = self.codec.demonstration(demonstrated(task, self.dialogue))
        at = [place for place, wanted in enumerate(said) if wanted]
        if not at:
            raise ValueError(f"env: task {task.id} has nothing for the model to say; give it a completion")
        return ids, at

    def _trajectory(self, shown: Sequence[tuple[list[int], list[int]]], positions: Any, tick: Tick) -> Trajectory:
        """Of an answer longer than `max_tokens` the rest is not learnt."""
        within = [limited(at, self.max_tokens) for _, at in shown]
        cut = np.array([len(left) < len(at) for left, (_, at) in zip(within, shown, strict=True)])
        kept = [(ids[: left[-1] + 1], left) for left, (ids, _) in zip(within, shown, strict=True)]
        rows, chunk = len(kept), max(len(at) for _, at in kept)
        tokens = np.zeros((rows, max(len(ids) for ids, _ in kept)), np.int64)
        at = np.zeros((rows, chunk), np.int64)
        for row, (ids, places) in enumerate(kept):
            tokens[row, : len(ids)], at[row, : len(places)] = ids, places
        line = np.arange(rows)[None]
        return Trajectory(
            obs={"tokens": tokens, "length": np.array([len(ids) for ids, _ in kept], np.int64), "at": at},
            obs_at=line,
            next_at=line,
            reward=np.zeros((1, rows, chunk), np.float32),
            valid=(at > 0)[None],
            terminated=np.ones((1, rows), bool),
            truncated=cut[None],
            version=np.full((1, rows), tick.version, np.int64),
            episode=(self.lanes * EPISODES_PER_LANE + self.drawn)[None],
            group=positions[None],
            lane=self.lanes,
            units=Units(AXES, np.zeros((rows, chunk)), {}),
            step=tick.step,
        )

    def state(self) -> Tree:
        """The place in the data."""
        return {"drawn": self.drawn, "tasks": self.source.size}

    def restore(self, state: Tree) -> None:
        """Go on behind it."""
        same_tasks(state, self.source)
        self.drawn = int(state["drawn"])


def demonstrated(task: Task, dialogue: Callable[[Task], Dialogue]) -> list[Mapping[str, Any]]:
    """The messages of a demonstration. Raises ValueError where a task has none."""
    completion = task.payload.get("completion")
    messages = list(dialogue(task).open())
    if completion is not None:
        return [*messages, {"role": "assistant", "content": str(completion)}]
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(
            f"env: task {task.id} has no completion and no message of the assistant to learn; example: "
            '{"prompt": "2+2=", "completion": "4"}'
        )
    return messages


def limited(at: Sequence[int], most: int) -> list[int]:
    """Positions without those behind the first `most` of each answer, a run of neighbours."""
    kept, run = [], 0
    for i, place in enumerate(at):
        run = run + 1 if i and place == at[i - 1] + 1 else 1
        if run <= most:
            kept.append(place)
    return kept
