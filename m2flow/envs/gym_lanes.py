"""B Gymnasium envs stepped one after another into given arrays: what runs in this process and inside each worker."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from m2flow.envs import spaces
from m2flow.envs.lanes import LaneSeeds
from m2flow.envs.render import gl_available, prepare_mujoco
from m2flow.types import Array, Observation, Spec

NEVER = 1 << 62  # steps
SUCCESS_NAMES = ("success", "is_success", "succeed")


@dataclass(frozen=True, slots=True)
class World:
    """Which Gymnasium environment, and what to read of it: what a process needs to make its lanes.

    Example: `World("HalfCheetah-v5", max_episode_steps=200)`. The fields are those of `GymnasiumConfig`.
    """

    id: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_episode_steps: int | None = None
    success: str | None = "auto"
    info: tuple[str, ...] = ()

    def time_limit(self) -> int | None:
        """Steps after which an episode is truncated; None: never."""
        return self.max_episode_steps or registered(self).max_episode_steps


def _gymnasium() -> Any:
    if importlib.util.find_spec("gymnasium") is None:
        raise ImportError("package gymnasium is missing: pip install 'm2flow[gymnasium]'")
    import gymnasium

    return gymnasium


def registered(world: World) -> Any:
    """The registered EnvSpec behind an id. Raises ValueError with gymnasium's hint where there is none."""
    gymnasium = _gymnasium()
    module, _, name = world.id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)  # which registers its environments
        return gymnasium.spec(name)
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise ValueError(
            f"id: {world.id!r} is no Gymnasium environment ({error}); an environment of another package needs "
            "the form 'package.module:Id', so that the package is imported first"
        ) from error


def make(world: World, render: bool) -> Any:
    """One environment without checkers. The time limit is left to the caller."""
    gymnasium = _gymnasium()
    spec = copy.copy(registered(world))
    spec.order_enforce = False
    spec.disable_env_checker = True
    kwargs = dict(world.kwargs)
    if render:
        kwargs.setdefault("render_mode", "rgb_array")
    if "mujoco" in str(spec.entry_point):
        prepare_mujoco(render)
    env = gymnasium.make(spec, max_episode_steps=-1, **kwargs)
    _refuse_autoreset(env, gymnasium, world)
    if render and hasattr(env.unwrapped, "model"):
        quality = env.unwrapped.model.vis.quality  # in software these two cost ten times the rest of a frame
        quality.shadowsize = quality.offsamples = 0
    return env


def renderable(world: World) -> tuple[bool, str]:
    """Whether this env can be drawn here, by drawing it once (where that cannot end the process), or why not."""
    gymnasium = _gymnasium()
    if "mujoco" in str(registered(world).entry_point):
        ready, why = gl_available()
        if not ready:
            return False, why
    env = None
    try:
        env = make(world, render=False)
        if "rgb_array" not in env.metadata.get("render_modes", []):
            return False, f"{world.id} cannot draw frames (it has no render mode rgb_array)"
        env.close()
        env = make(world, render=True)
        env.reset(seed=0)
        env.render()
    except (gymnasium.error.Error, ImportError) as error:
        return False, f"{world.id} cannot draw frames here: {' '.join(str(error).split())}"
    finally:
        if env is not None:
            env.close()
    return True, ""


def _refuse_autoreset(env: Any, gymnasium: Any, world: World) -> None:
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, gymnasium.wrappers.Autoreset):
            raise ValueError(  # noqa: TRY004 a user's error, in the form of all of them
                f"id: {world.id!r} is wrapped in gymnasium's Autoreset, so every episode would be reset twice and "
                "every second initial state skipped; register it without that wrapper"
            )
        env = env.env


class GymLanes:
    """B Gymnasium envs stepped one after another into given arrays. Used in process and inside workers."""

    def __init__(self, world: World, seeds: LaneSeeds, render: bool) -> None:
        self.world, self.seeds, self.drawable = world, seeds, render
        self.envs = [make(world, render) for _ in seeds.lanes]
        self.leaves = spaces.leaves(self.envs[0].observation_space)
        first = self.leaves[0]
        self.spec = spaces.spec_of(self.envs[0].observation_space, self.envs[0].action_space)
        self.encode = spaces.action_encoder(self.envs[0].action_space)
        self.limit = world.time_limit() or NEVER
        self.success = self._find_success()
        self.info_names = (*(("success",) if self.success else ()), *world.info)  # columns of `Step.info`
        self.steps = [env.step for env in self.envs]
        # One array to write per lane and nothing to translate: most environments, so their loop has no branches.
        plain = len(self.leaves) == 1 and not first.path and not first.start
        self.lean = plain and self.encode is None and not self.info_names and not seeds.single
        self.clock = self.next_deadline = 0
        self.deadlines = [NEVER] * len(self.envs)
        self.episodes = [0] * len(self.envs)
        self.finished = [False] * len(self.envs)

    def _find_success(self) -> str | None:
        """The entry of info that says success. "auto" plays one step; the env is reset with its true seed later."""
        if self.world.success != "auto":
            return self.world.success
        env = self.envs[0]
        env.reset(seed=0)
        env.action_space.seed(0)
        info = env.step(env.action_space.sample())[4]
        return next((name for name in SUCCESS_NAMES if name in info), None)

    def write(self, obs: Observation, row: int, raw: Any) -> None:
        """Put one lane's raw observation into row `row`."""
        for leaf in self.leaves:
            obs[leaf.name][row] = leaf.get(raw)

    def start(self, row: int, episode: int, obs: Observation) -> None:
        """Reset one lane to its episode `episode`."""
        self.episodes[row], self.finished[row] = episode, False
        self._allow(row, self.limit)
        raw, _ = self.envs[row].reset(seed=self.seeds.episode(row, episode))
        self.write(obs, row, raw)

    def _allow(self, row: int, steps: int) -> None:
        """Give a lane this many steps until its time limit."""
        self.deadlines[row] = self.clock + steps
        self.next_deadline = min(self.deadlines)

    def step(self, action: Array, out: Answer) -> list[int]:
        """Step every lane into `out`, whose flags are all False and whose info is all 0.

        Returns the rows that ended. They have been reset, with their final observation in `out.final`; or they stand
        still, where each lane plays one episode.
        """
        self.clock += 1
        ended: list[int] = []
        obs, reward, encode, single = out.obs, out.reward, self.encode, self.seeds.single
        due = self.clock >= self.next_deadline  # some lane may reach its time limit; most steps need not look which
        if self.lean:
            target = obs[self.leaves[0].name]
            for row, (step, act) in enumerate(zip(self.steps, action, strict=True)):
                raw, reward[row], terminated, truncated, _ = step(act)
                if (terminated or truncated or due) and self._ends(out, row, raw, terminated, truncated):
                    ended.append(row)
                else:
                    target[row] = raw
            return ended
        for row, (step, act) in enumerate(zip(self.steps, action, strict=True)):
            if self.finished[row]:
                out.valid[row] = False
                continue
            raw, reward[row], terminated, truncated, info = step(act if encode is None else encode(act))
            self._write_info(out, row, info)
            if (terminated or truncated or due) and self._ends(out, row, raw, terminated, truncated):
                ended.append(row)
                if not single:
                    continue  # the row already shows the first observation of the next episode
            self.write(obs, row, raw)
        return ended

    def _ends(self, out: Answer, row: int, raw: Any, terminated: bool, truncated: bool) -> bool:
        """Flag a lane whose episode ends in this step, and reset it; False where it only might have ended."""
        late = self.clock >= self.deadlines[row]
        if not (terminated or truncated or late):
            return False
        out.terminated[row], out.truncated[row] = terminated, truncated or late
        if self.seeds.single:
            self.finished[row] = True
            self._allow(row, NEVER)
        else:
            self._write_final(out, row, raw)  # before the reset, which may overwrite what `raw` refers to
            self.start(row, self.episodes[row] + 1, out.obs)
        return True

    def _write_final(self, out: Answer, row: int, raw: Any) -> None:
        if not out.final:
            out.final = spaces.empty(self.spec.observation, len(self.envs))
        self.write(out.final, row, raw)

    def _write_info(self, out: Answer, row: int, info: Mapping[str, Any]) -> None:
        if self.success is not None:
            out.info["success"][row] = info.get(self.success, 0) > 0
        for name in self.world.info:
            if name not in info:
                raise ValueError(f"info: {self.world.id} says nothing called {name!r}; it says {sorted(info)}")
            out.info[name][row] = info[name]

    def play(self, row: int, actions: Array, obs: Observation) -> None:
        """Take the next `actions` [n, *action shape] of one lane's saved episode again, telling nothing of them."""
        for action in actions:
            raw, *_ = self.steps[row](action if self.encode is None else self.encode(action))
            self.write(obs, row, raw)
        self._allow(row, self.deadlines[row] - self.clock - len(actions))

    def render(self, row: int) -> Array:
        """uint8 [H, W, 3] of one lane."""
        if not self.drawable:
            raise ValueError("this env was built without frames; build it with render=True")
        return np.asarray(self.envs[row].render(), np.uint8)

    def close(self) -> None:
        """Close every env."""
        for env in self.envs:
            env.close()


@dataclass(slots=True)
class Answer:
    """Arrays that one step is written into, [B, ...]."""

    obs: Observation
    reward: Array
    terminated: Array
    truncated: Array
    valid: Array
    info: dict[str, Array]
    final: Observation = field(default_factory=dict)  # rows that were reset; empty until there is one

    @staticmethod
    def blank(spec: Spec, info: Sequence[str], lanes: int) -> Answer:
        """Flags False, valid True, info 0."""
        return Answer(
            spaces.empty(spec.observation, lanes),
            np.zeros(lanes, np.float32),
            np.zeros(lanes, bool),
            np.zeros(lanes, bool),
            np.ones(lanes, bool),
            {name: np.zeros(lanes, bool if name == "success" else np.float64) for name in info},
        )

    def fresh(self) -> Answer:
        """New arrays with these contents."""
        return Answer(
            {name: array.copy() for name, array in self.obs.items()},
            self.reward.copy(),
            self.terminated.copy(),
            self.truncated.copy(),
            self.valid.copy(),
            {name: array.copy() for name, array in self.info.items()},
        )
