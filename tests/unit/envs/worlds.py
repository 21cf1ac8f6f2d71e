"""Gymnasium environments made for tests. Importing this registers them, as "tests.unit.envs.worlds:<Id>" does."""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Mixed(gymnasium.Env[Any, Any]):
    """Dict, Discrete and image observations, an action counted from 1, success in info. Ends when `total` reaches 6."""

    observation_space = spaces.Dict(
        {
            "arm": spaces.Dict({"pos": spaces.Box(-1, 1, (3,), np.float64), "grip": spaces.Discrete(3, start=-1)}),
            "image": spaces.Box(0, 255, (4, 5, 3), np.uint8),
        }
    )
    action_space = spaces.Discrete(3, start=1)

    def _obs(self) -> dict[str, Any]:
        image = np.full((4, 5, 3), self.total, np.uint8)
        return {"arm": {"pos": self.pos.copy(), "grip": int(self.total % 3) - 1}, "image": image}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.total, self.pos = 0, self.np_random.uniform(-1, 1, 3)
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.total += int(action)
        self.pos = np.clip(self.pos + self.np_random.normal(0, 0.1, 3), -1, 1)
        over = self.total >= 6
        return self._obs(), float(action), over, False, {"is_success": self.total == 6, "total": self.total}


class Counting(gymnasium.Env[Any, Any]):
    """Shows how often it was reset (over its life) and the step; ends after 4 steps."""

    observation_space = spaces.Box(0, 1e6, (2,), np.float64)
    action_space = spaces.Box(-1, 1, (1,), np.float32)
    resets = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.number, self.steps = self.resets, 0
        self.resets += 1
        return np.array([self.number, 0.0]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return np.array([self.number, self.steps], float), 0.0, self.steps == 4, False, {}


class Forgetful(Counting):
    """Not deterministic: its reset counter is not part of its seed."""


class Reusing(gymnasium.Env[Any, Any]):
    """Hands out its own array again and again, also from reset."""

    observation_space = spaces.Box(-1e6, 1e6, (2,), np.float64)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.own = getattr(self, "own", np.zeros(2))
        self.own[:] = self.np_random.uniform(-1, 1), 0.0
        return self.own, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.own[1] += 1
        return self.own, 0.0, self.own[1] == 3, False, {}


class Trouble(gymnasium.Env[Any, Any]):
    """Raises on action 1, hangs on 2, ends its process on 3."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == 1:
            raise RuntimeError("the gripper is stuck")
        if action == 2:
            time.sleep(600)
        if action == 3:
            print("about to die", file=__import__("sys").stderr, flush=True)
            os._exit(7)
        return np.zeros(1, np.float32), 0.0, False, False, {}


class Slow(Reusing):
    """Never ends; every step takes `seconds`."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self.seconds)
        obs, reward, *_ = super().step(action)
        return obs, reward, False, False, {}


class Hidden(Counting):
    """Shows nothing; the reward counts the steps."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(2), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return np.zeros(2), float(self.steps), False, False, {}


gymnasium.register("Slow-v0", entry_point=Slow)
gymnasium.register("Hidden-v0", entry_point=Hidden)
gymnasium.register("Mixed-v0", entry_point=Mixed, max_episode_steps=20)
gymnasium.register("Counting-v0", entry_point=Counting)
gymnasium.register("Forgetful-v0", entry_point=Forgetful)
gymnasium.register("Reusing-v0", entry_point=Reusing)
gymnasium.register("Trouble-v0", entry_point=Trouble)
gymnasium.register(
    "Autoresetting-v0",
    entry_point=Counting,
    additional_wrappers=(gymnasium.wrappers.Autoreset.wrapper_spec(),),
)
