"""Saving a running episode as the actions since its reset, for simulators that can only be reset from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from m2flow.types import Array, Observation, Tree

PRUNE_AT = 512  # rows of the log that no running episode needs before they are dropped


class ActionLog:
    """Actions of B lanes since each lane's last reset. Adding costs one copy per step.

    `keep` False: nobody will ask for actions, so that none are held; only `fresh` is told.
    """

    def __init__(self, lanes: int, *, keep: bool = True) -> None:
        self.keep = keep
        self.fresh = True  # whether no step was taken since all lanes were reset
        self.rows: list[Array] = []  # one [B, *action shape] per step
        self.starts = [0] * lanes  # first row of each lane's running episode

    def clear(self) -> None:
        """All lanes were reset."""
        self.fresh = True
        self.rows.clear()
        self.starts = [0] * len(self.starts)

    def add(self, action: Array) -> None:
        """One step was taken."""
        self.fresh = False
        if self.keep:
            self.rows.append(action.copy())

    def ended(self, row: int) -> None:
        """A lane was reset in the step that was just added."""
        self.starts[row] = len(self.rows)
        spare = min(self.starts)
        if spare >= PRUNE_AT:
            del self.rows[:spare]
            self.starts = [start - spare for start in self.starts]

    def lane(self, row: int) -> Array:
        """[n, *action shape] of a lane's running episode."""
        rows = self.rows[self.starts[row] :]
        return np.stack([action[row] for action in rows]) if rows else np.zeros(0)

    def load(self, actions: Sequence[Array]) -> None:
        """Take over the actions of every lane, of different lengths."""
        self.clear()
        longest = max(len(lane) for lane in actions)
        self.fresh = longest == 0
        filled = next((lane for lane in actions if len(lane)), None)
        if filled is None or not self.keep:
            return
        self.starts = [longest - len(lane) for lane in actions]
        block = np.zeros((longest, len(actions), *filled.shape[1:]), filled.dtype)
        for row, lane in enumerate(actions):
            if len(lane):
                block[longest - len(lane) :, row] = lane
        self.rows = list(block)

    def state(self, episodes: Sequence[int], obs: Observation, *, cut: bool) -> Tree:
        """A snapshot: copies only."""
        return {
            "cut": cut,
            "episode": np.array(episodes, np.int64),
            "actions": [self.lane(row) for row in range(len(self.starts))],
            "obs": {name: array.copy() for name, array in obs.items()},
        }


def same_epoch(state: Tree, episodes: Sequence[int], obs: Observation, log: ActionLog) -> bool:
    """Whether an env that was cut for this snapshot still stands where the snapshot left it."""
    return bool(
        state["cut"]
        and log.fresh
        and obs
        and np.array_equal(state["episode"], episodes)
        and all(_equal(array, state["obs"][name]) for name, array in obs.items())
    )


def _equal(a: Array, b: Array) -> bool:
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


def check_replayed(obs: Observation, state: Tree, lanes: Array, name: str) -> None:
    """Refuse to continue from an observation that is not the saved one."""
    for key, array in obs.items():
        saved: Any = state["obs"][key]
        wrong = [int(lanes[row]) for row in range(len(array)) if not _equal(array[row], saved[row])]
        if wrong:
            raise ValueError(
                f"{name} cannot be resumed exactly: playing the saved actions again gave another observation {key!r} "
                f"in lanes {wrong[:8]}. The environment is not deterministic, or its version changed; set "
                "env.resume=cut to start fresh episodes at each checkpoint instead"
            )
