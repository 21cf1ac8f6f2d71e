"""Small environments in pure numpy: for tests, examples, and to try an algorithm in seconds. Saved exactly.

All lanes are stepped by the same few array operations; the start of an episode is a pure function of its seed.
"""

# ruff: noqa: ARG002 (all worlds take the same arguments, and none needs them all)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from m2flow import seeds as noise
from m2flow.envs.lanes import LaneSeeds, check_action, seeded, training
from m2flow.types import Array, Field, Observation, Spec, Step, Tree

Autoreset = Literal["same", "next"]  # a lane is reset within the step that ends its episode, or by the step after it
SIZE = 96  # pixels of a frame


class _Toy:
    """What the configs of this file share."""

    __slots__ = ()

    def build(self, lanes: Sequence[int], seed: int, threads: int = 1, group: int = 1) -> ToyEnv:
        """Lanes of a training run."""
        return ToyEnv(self, training(lanes, seed, group))

    def build_seeded(self, seeds: Sequence[int], threads: int = 1, render: bool = False) -> ToyEnv:
        """One lane and one episode per seed."""
        return ToyEnv(self, seeded(seeds))

    def renderable(self) -> tuple[bool, str]:
        """Frames can be drawn everywhere."""
        return True, ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PointReachConfig(_Toy):
    """A point is steered to a goal on a square. Observation "state": x, y, goal x, goal y in [-1, 1].

    The action is a velocity, moved by `speed` per step. The reward is minus the distance; success is a distance below
    `radius`. A policy that heads straight for the goal succeeds within 30 steps.
    """

    horizon: int = 40  # steps until an episode is truncated
    speed: float = 0.1  # length of one step at full action
    radius: float = 0.1  # distance that counts as reached
    terminate: bool = False  # whether reaching the goal ends the episode
    autoreset: Autoreset = "same"  # whether a finished lane resets in the same step or in the next
    dtype: Literal["float32", "float64"] = "float32"  # of observations, actions and rewards

    def __post_init__(self) -> None:
        _check(self.horizon, self.autoreset, self.dtype)
        if self.speed <= 0 or self.radius <= 0:
            raise ValueError(f"speed: speed and radius must be positive, got {self.speed} and {self.radius}")

    def spec(self) -> Spec:
        """Observation "state" [4], action [2] in [-1, 1]."""
        return Spec({"state": Field((4,), self.dtype, -1.0, 1.0)}, Field((2,), self.dtype, -1.0, 1.0))

    def time_limit(self) -> int | None:
        """Steps after which an episode is truncated."""
        return self.horizon

    def world(self) -> _Point:
        """The rules of the world."""
        return _Point(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class BanditConfig(_Toy):
    """A contextual bandit: the best arm of context c is (c + 1) mod arms, and pays 1; the others pay 0.

    Observation "state" is the context, one-hot; each step shows a new one. Success is having chosen the best arm. The
    episode terminates after `horizon` steps.
    """

    contexts: int = 4  # different situations
    arms: int = 4  # actions to choose from
    horizon: int = 1  # choices per episode
    autoreset: Autoreset = "same"  # whether a finished lane resets in the same step or in the next
    dtype: Literal["float32", "float64"] = "float32"  # of observations and rewards

    def __post_init__(self) -> None:
        _check(self.horizon, self.autoreset, self.dtype)
        if self.contexts < 1 or self.arms < 2:
            raise ValueError(f"arms: at least 1 context and 2 arms are needed, got {self.contexts} and {self.arms}")

    def spec(self) -> Spec:
        """Observation "state" [contexts], action one of `arms`."""
        return Spec({"state": Field((self.contexts,), self.dtype, 0.0, 1.0)}, Field((), "int64", categories=self.arms))

    def time_limit(self) -> int | None:
        """Steps after which an episode ends."""
        return self.horizon

    def world(self) -> _Bandit:
        """The rules of the world."""
        return _Bandit(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class CountConfig(_Toy):
    """Counts. Observation "state": number of the episode in its lane (0, 1, 2, ...) and step within it (0 .. every).

    The episode ends every `every` steps, whatever is done; the reward is the step number reached.
    """

    every: int = 4  # steps per episode
    end: Literal["terminated", "truncated"] = "terminated"  # what the end of an episode is called
    autoreset: Autoreset = "next"  # whether a finished lane resets in the same step or in the next
    dtype: Literal["float32", "float64"] = "float32"  # of observations and rewards

    def __post_init__(self) -> None:
        _check(self.every, self.autoreset, self.dtype)
        if self.end not in ("terminated", "truncated"):
            raise ValueError(f"end: must be 'terminated' or 'truncated', got {self.end!r}")

    def spec(self) -> Spec:
        """Observation "state" [2], action [1] in [-1, 1], which changes nothing."""
        return Spec({"state": Field((2,), self.dtype, 0.0)}, Field((1,), self.dtype, -1.0, 1.0))

    def time_limit(self) -> int | None:
        """Steps after which an episode ends."""
        return self.every

    def world(self) -> _Count:
        """The rules of the world."""
        return _Count(self)


def _check(horizon: int, autoreset: str, dtype: str) -> None:
    if horizon < 1:
        raise ValueError(f"horizon: an episode needs at least 1 step, got {horizon}")
    if autoreset not in ("same", "next"):
        raise ValueError(f"autoreset: must be 'same' or 'next', got {autoreset!r}")
    if dtype not in ("float32", "float64"):
        raise ValueError(f"dtype: must be 'float32' or 'float64', got {dtype!r}")


class ToyEnv:
    """B lanes of one toy world. The state of a lane is its world state, its step, and its episode number."""

    def __init__(self, config: Any, seeds: LaneSeeds) -> None:
        self.spec, self.seeds, self.lanes = config.spec(), seeds, seeds.ids
        self.world, self.dtype, self.next = config.world(), config.dtype, config.autoreset == "next"
        size = len(self.lanes)
        self.state = np.zeros((size, self.world.width), np.float64)
        self.elapsed = np.zeros(size, np.int64)
        self.episode = np.zeros(size, np.int64)
        self.seed = np.zeros(size, np.int64)  # of the running episode
        self.ended = np.zeros(size, bool)  # lanes that wait for their reset, or stand still in an evaluation
        self._action: Array = None

    def _start(self, rows: Array) -> None:
        """Begin the episodes whose numbers are in `episode`."""
        self.seed[rows] = [self.seeds.episode(int(row), int(self.episode[row])) for row in rows]
        self.elapsed[rows] = 0
        self.ended[rows] = False
        self.state[rows] = self.world.start(self.seed[rows], self.episode[rows])

    def _observe(self) -> Observation:
        return {"state": self.world.show(self.state).astype(self.dtype)}

    def reset(self) -> Observation:
        """Start every lane at its first episode."""
        self.episode[:] = 0
        self._action = None
        self._start(np.arange(len(self.lanes)))
        return self._observe()

    def send(self, action: Array) -> None:
        """Take the action; `recv` does the work."""
        assert self._action is None, "send: the last step has not been received"
        self._action = check_action(action, len(self.lanes), self.spec.action.shape)

    def recv(self) -> Step:
        """Move every lane."""
        action, self._action = self._action, None
        assert action is not None, "recv: nothing was sent"
        valid = ~self.ended
        if self.ended.any() and not self.seeds.single:
            rows = np.flatnonzero(self.ended)
            self.episode[rows] += 1
            self._start(rows)
        live = np.flatnonzero(valid)
        size = len(self.lanes)
        reward, success = np.zeros(size), np.zeros(size, bool)
        terminated, truncated = np.zeros(size, bool), np.zeros(size, bool)
        self.elapsed[live] += 1
        self.state[live], reward[live], success[live], terminated[live], truncated[live] = self.world.move(
            self.state[live], action[live].astype(np.float64), self.elapsed[live], self.seed[live]
        )
        done = terminated | truncated
        obs = final = self._observe()
        if done.any():
            if self.next or self.seeds.single:
                self.ended |= done
            else:
                rows = np.flatnonzero(done)
                self.episode[rows] += 1
                self._start(rows)
                obs = self._observe()
        info = {"success": success} if self.world.knows_success else {}
        return Step(obs, reward.astype(self.dtype), terminated, truncated, final, valid, info)

    def snapshot(self) -> Tree:
        """Everything: an exact copy."""
        assert not self.seeds.single, "an evaluation env holds one episode per lane and is not saved"
        names = ("state", "elapsed", "episode", "seed", "ended")
        return {"cut": False, **{name: getattr(self, name).copy() for name in names}}

    def restore(self, state: Tree) -> Observation:
        """Continue from a snapshot."""
        for name in ("state", "elapsed", "episode", "seed", "ended"):
            getattr(self, name)[:] = state[name]
        self._action = None
        return self._observe()

    def render(self, lane: int) -> Array:
        """uint8 [96, 96, 3] of the lane in row `lane`."""
        return self.world.draw(self.state[lane], int(self.elapsed[lane]))

    def close(self) -> None:
        """Nothing to free."""


class _Point:
    """State: x, y, goal x, goal y."""

    width, knows_success = 4, True

    def __init__(self, config: PointReachConfig) -> None:
        self.config = config

    def start(self, seeds: Array, episodes: Array) -> Array:
        return noise.uniform(0, seeds, np.zeros(1, np.int64), (4,))[0] * 1.8 - 0.9

    def show(self, state: Array) -> Array:
        return state

    def move(self, state: Array, action: Array, elapsed: Array, seeds: Array) -> tuple[Array, ...]:
        c = self.config
        after = state.copy()
        after[:, :2] = np.clip(state[:, :2] + c.speed * np.clip(action, -1.0, 1.0), -1.0, 1.0)
        offset = after[:, :2] - after[:, 2:]
        distance = np.sqrt(offset[:, 0] ** 2 + offset[:, 1] ** 2)
        success = distance < c.radius
        terminated = success & c.terminate
        return after, -distance, success, terminated, (elapsed >= c.horizon) & ~terminated

    def draw(self, state: Array, elapsed: int) -> Array:
        frame = _canvas()
        _disc(frame, state[2:], self.config.radius, (60, 160, 90))
        _disc(frame, state[:2], 0.06, (40, 90, 200))
        return _bar(frame, elapsed / self.config.horizon)


class _Bandit:
    """State: the context."""

    width, knows_success = 1, True

    def __init__(self, config: BanditConfig) -> None:
        self.config = config

    def start(self, seeds: Array, episodes: Array) -> Array:
        return self._context(seeds, np.zeros(len(seeds), np.int64))

    def _context(self, seeds: Array, turn: Array) -> Array:
        streams = seeds + (turn << 32)  # seeds are below 2**31, so every (episode, turn) is a stream of its own
        return np.floor(noise.uniform(0, streams, np.zeros(1, np.int64), (1,))[0] * self.config.contexts)

    def show(self, state: Array) -> Array:
        return np.arange(self.config.contexts)[None, :] == state

    def move(self, state: Array, action: Array, elapsed: Array, seeds: Array) -> tuple[Array, ...]:
        best = (state[:, 0] + 1) % self.config.arms
        right = action == best
        done = elapsed >= self.config.horizon
        return self._context(seeds, elapsed), right.astype(np.float64), right, done, np.zeros(len(done), bool)

    def draw(self, state: Array, elapsed: int) -> Array:
        frame = _canvas()
        width = SIZE // self.config.contexts
        left = int(state[0]) * width
        frame[SIZE // 4 : SIZE - SIZE // 4, left : left + width] = (40, 90, 200)
        return _bar(frame, elapsed / self.config.horizon)


class _Count:
    """State: episode number, step."""

    width, knows_success = 2, False

    def __init__(self, config: CountConfig) -> None:
        self.config = config

    def start(self, seeds: Array, episodes: Array) -> Array:
        return np.stack([episodes, np.zeros(len(episodes))], 1).astype(np.float64)

    def show(self, state: Array) -> Array:
        return state

    def move(self, state: Array, action: Array, elapsed: Array, seeds: Array) -> tuple[Array, ...]:
        after = state.copy()
        after[:, 1] = elapsed
        done, no = elapsed >= self.config.every, np.zeros(len(elapsed), bool)
        ends = (done, no) if self.config.end == "terminated" else (no, done)
        return after, elapsed.astype(np.float64), no, *ends

    def draw(self, state: Array, elapsed: int) -> Array:
        return _bar(_canvas(), elapsed / self.config.every)


def _canvas() -> Array:
    frame = np.full((SIZE, SIZE, 3), 245, np.uint8)
    frame[[0, -1]] = frame[:, [0, -1]] = 120
    return frame


def _disc(frame: Array, centre: Array, radius: float, colour: tuple[int, int, int]) -> None:
    axis = np.linspace(-1.0, 1.0, SIZE)
    inside = (axis[None, :] - centre[0]) ** 2 + (-axis[:, None] - centre[1]) ** 2 <= radius**2
    frame[inside] = colour


def _bar(frame: Array, share: float) -> Array:
    frame[-4:-1, 1 : 1 + int(np.clip(share, 0.0, 1.0) * (SIZE - 2))] = (200, 120, 40)
    return frame
