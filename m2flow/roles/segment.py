"""A Trajectory while it is being written: preallocated whole-lane arrays, one assignment per array and step."""

from __future__ import annotations

from typing import Any

import numpy as np

from m2flow.types import Action, Array, Observation, Step, Tick, Trajectory, Units


class Segment:
    """`length` decisions of B lanes with `chunk` actions each, starting from `obs`."""

    def __init__(self, length: int, obs: Observation, chunk: int) -> None:
        lanes = len(next(iter(obs.values())))
        self.length, self.lanes, self.chunk = length, lanes, chunk
        self.rows = (length + 1) * lanes
        self.obs = {k: np.empty((self.rows, *v.shape[1:]), v.dtype) for k, v in obs.items()}
        for name, array in obs.items():
            self.obs[name][:lanes] = array
        self.next_at = np.arange(lanes, self.rows).reshape(length, lanes)
        # (t, lanes, rows) of true final observations
        self.finals: list[tuple[int, np.ndarray[Any, Any], Observation]] = []
        shape = (length, lanes, chunk)
        self.reward = np.empty(shape, np.float32)
        self.valid, self.terminated, self.truncated = (np.empty(shape, bool) for _ in range(3))
        self.success: Array | None = None  # [T, B, C], where the environment knows it
        self.version = np.empty((length, lanes), np.int64)
        self.logprob: np.ndarray[Any, Any] | None = None
        self.record: dict[str, np.ndarray[Any, Any]] = {}

    def acted(self, t: int, action: Action) -> None:
        """Write the decision of step t."""
        if self.logprob is None:
            self.logprob = np.empty((self.length, *action.logprob.shape), action.logprob.dtype)
            self.record = {k: np.empty((self.length, *v.shape), v.dtype) for k, v in action.record.items()}
        self.logprob[t] = action.logprob
        for name, array in action.record.items():
            self.record[name][t] = array
        self.version[t] = action.version

    def stepped(
        self, t: int, c: int, step: Step, obs: Observation, final: Observation, alive: np.ndarray[Any, Any] | None
    ) -> None:
        """Write the answer to action c of step t. `alive`: lanes that still count in this chunk (None: all)."""
        valid: Array = step.valid if alive is None else step.valid & alive
        self.valid[t, :, c] = valid
        self.reward[t, :, c] = step.reward
        self.terminated[t, :, c] = step.terminated
        self.truncated[t, :, c] = step.truncated
        success = step.info.get("success")
        if success is not None:
            table = self.success = np.zeros(self.valid.shape, bool) if self.success is None else self.success
            table[t, :, c] = success
        if final is not obs or c < self.chunk - 1:
            lanes = np.nonzero((step.terminated | step.truncated) & valid)[0]
            if len(lanes):
                self.finals.append((t, lanes, {k: v[lanes].copy() for k, v in final.items()}))
        if c == self.chunk - 1:
            row = (t + 1) * self.lanes
            for name, array in obs.items():
                self.obs[name][row : row + self.lanes] = array

    def finish(self) -> np.ndarray[Any, Any]:
        """Blank what does not count; whether an episode ended at each step, bool [T, B]."""
        self.reward[~self.valid] = 0.0
        self.terminated &= self.valid
        self.truncated &= self.valid
        if self.success is not None:
            self.success &= self.valid
        ended: np.ndarray[Any, Any] = np.asarray((self.terminated | self.truncated).any(-1))
        return ended

    def trajectory(
        self, tick: Tick, lane: np.ndarray[Any, Any], axes: tuple[str, ...], episode: Array, group: Array
    ) -> Trajectory:
        """The finished columns. `episode` and `group` are int64 [T, B]."""
        assert self.logprob is not None
        obs: Observation = self.obs
        if self.finals:
            row = self.rows
            for t, lanes, _ in self.finals:
                self.next_at[t, lanes] = np.arange(row, row + len(lanes))
                row += len(lanes)
            obs = {k: np.concatenate([v, *(rows[k] for _, _, rows in self.finals)]) for k, v in obs.items()}
        steps = self.length * self.lanes
        flat = {k: v.reshape(steps, *v.shape[2:]) for k, v in self.record.items()}
        return Trajectory(
            obs=obs,
            obs_at=np.arange(steps).reshape(self.length, self.lanes),
            next_at=self.next_at,
            reward=self.reward,
            valid=self.valid,
            terminated=self.terminated.any(-1),
            truncated=self.truncated.any(-1),
            version=self.version,
            episode=episode,
            group=group,
            lane=lane,
            units=Units(axes, self.logprob.reshape(steps, *self.logprob.shape[2:]), flat),
            step=tick.step,
        )
