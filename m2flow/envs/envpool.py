"""Environments of envpool: a vector env in C++ threads of this process (Meta-World, MuJoCo, Fetch, Atari, ...).

What envpool does, found out by experiment with 1.2.5 and kept by tests:
- Each lane has its own seed, given when the pool is made; its k-th initial state depends on that seed and k only.
- A lane whose episode ended is reset by the next step, which ignores the action: that `Step` has `valid` False there
  and shows the first observation. The observation at the end of an episode is the true final one.
- An episode that terminates exactly at its time limit is reported as truncated only.
- `send` returns at once and `recv` waits without holding Python's lock, so several pools can be in flight.
- Every `recv` hands out fresh arrays, in lane order.
- A pool cannot be saved. `snapshot` starts a fresh pool whose seeds depend on the number of the snapshot, and says so.
"""

from __future__ import annotations

import difflib
import importlib.util
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from m2flow.envs import spaces
from m2flow.envs.lanes import LaneSeeds, check_action, seeded, training
from m2flow.envs.render import gl_available, load_gl, without_shadows
from m2flow.types import Array, Observation, Spec, Step, Tree

# envpool finds OpenGL only if libEGL's symbols were there before it: then it can draw, else it ends the process.
_GL_FIRST = "envpool" not in sys.modules and load_gl()

_OURS = ("num_envs", "batch_size", "num_threads", "seed", "env_seed", "max_episode_steps", "base_path")
_SUCCESS_KEYS = ("info:success", "info:is_success")
_METAWORLD_CAMERA = 2  # "corner2"; Meta-World's corner cameras (1..3) hang upside down


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvPoolConfig:
    """An envpool task, for instance "MetaWorld/ButtonPressTopdown-v3" or "HalfCheetah-v5"."""

    task: str = field(metadata={"example": "MetaWorld/ButtonPressTopdown-v3"})  # name of the task in envpool
    max_episode_steps: int | None = None  # time limit; null: the task's own
    options: Mapping[str, Any] = field(default_factory=dict)  # further settings of the task; Meta-World shows its goal
    threads: int = 0  # C++ threads; 0: as many as the plan gives the stage
    info: tuple[str, ...] = ()  # further numbers of `info` to hand on
    width: int = 320  # pixels of a frame
    height: int = 240  # pixels of a frame
    camera: int | None = None  # number of the MuJoCo camera; null: a good one

    cuts: ClassVar[bool] = True  # a checkpoint starts fresh episodes, because a pool cannot be saved

    def __post_init__(self) -> None:
        if self.max_episode_steps is not None and self.max_episode_steps < 1:
            raise ValueError(f"max_episode_steps: must be at least 1, got {self.max_episode_steps}")
        if self.threads < 0:
            raise ValueError(f"threads: must not be negative, got {self.threads}")
        if self.width < 1 or self.height < 1:
            raise ValueError(f"width: a frame needs at least one pixel, got {self.width} x {self.height}")
        taken = sorted(set(self.options) & set(_OURS))
        if taken:
            raise ValueError(f"options: {taken} are set by m2flow (lanes, seed, threads, max_episode_steps)")

    def build(self, lanes: Sequence[int], seed: int, threads: int = 1, group: int = 1) -> EnvPoolEnv:
        """Lanes of a training run, stepped by `threads` C++ threads."""
        return EnvPoolEnv(self, training(lanes, seed, group), self.threads or threads)

    def build_seeded(self, seeds: Sequence[int], threads: int = 1, render: bool = False) -> EnvPoolEnv:
        """One lane per seed; each plays one episode and then stands still. `render`: frames can be drawn."""
        return EnvPoolEnv(self, seeded(seeds), self.threads or threads, render)

    def spec(self) -> Spec:
        """What the environment shows and accepts. Makes no simulator."""
        return spaces.spec_of(*_spaces(self.pool_spec()))

    def time_limit(self) -> int | None:
        """Steps after which an episode is truncated."""
        return int(self.pool_spec().config.max_episode_steps)

    def renderable(self) -> tuple[bool, str]:
        """Whether frames can be drawn on this machine, and if not, what to do."""
        if not _needs_gl(self.task):
            return True, ""
        ready, why = gl_available()
        if ready and not _GL_FIRST:
            return (
                False,
                "envpool was imported before m2flow loaded libEGL, so it cannot draw; import m2flow.envs.envpool first",
            )
        return ready, why

    def arguments(self) -> dict[str, Any]:
        """Settings of the task, with m2flow's defaults."""
        chosen = dict(self.options)
        if self.task.startswith("MetaWorld/"):
            chosen.setdefault("partially_observable", False)  # envpool's default hides the goal from the observation
        if self.max_episode_steps is not None:
            chosen["max_episode_steps"] = self.max_episode_steps
        return chosen

    def pool_spec(self) -> Any:
        """envpool's description of the task. Raises ValueError for a task or option that does not exist."""
        envpool = _envpool()
        if self.task not in envpool.list_all_envs():
            near = difflib.get_close_matches(self.task, envpool.list_all_envs(), n=3)
            raise ValueError(
                f"task: envpool has no {self.task!r}" + (f"; did you mean {' or '.join(near)}?" if near else "")
            )
        known = set(envpool.make_spec(self.task).config._fields)
        wrong = sorted(set(self.options) - known)
        if wrong:
            raise ValueError(f"options: {self.task} does not know {wrong}; it knows {sorted(known - set(_OURS))}")
        return envpool.make_spec(self.task, **self.arguments())


def _envpool() -> Any:
    if importlib.util.find_spec("envpool") is None:
        raise ImportError("package envpool is missing: pip install 'm2flow[envpool]'")
    import envpool

    return envpool


def _spaces(spec: Any) -> tuple[Any, Any]:
    """Observation and action space, without gymnasium's remarks on the precision of infinite bounds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return spec.gymnasium_observation_space, spec.gymnasium_action_space


def _needs_gl(task: str) -> bool:
    _envpool()
    from envpool.registration import registry

    return bool(registry.specs[task][0].startswith("envpool.mujoco")) if task in registry.specs else True


class EnvPoolEnv:
    """A VectorEnv over one envpool. Made by `EnvPoolConfig.build`."""

    def __init__(self, config: EnvPoolConfig, seeds: LaneSeeds, threads: int, render: bool = False) -> None:
        self.config, self.seeds, self.threads, self.drawable = config, seeds, threads, render
        self.lanes, self.spec = seeds.ids, config.spec()
        self.rows = np.arange(len(self.lanes), dtype=np.int32)
        self._row_bytes = self.rows.tobytes()
        self.epoch = -1
        self._pool: Any = None
        self._open(0)
        self._read_layout()

    def _open(self, epoch: int) -> None:
        """A fresh pool; the old one is freed first."""
        self._pool = None
        arguments = self.config.arguments()
        if self.drawable:
            arguments |= {
                "render_mode": "rgb_array",
                "render_width": self.config.width,
                "render_height": self.config.height,
            }
            if _needs_gl(self.config.task):
                arguments["base_path"] = without_shadows(self.config.pool_spec().config.base_path)
        self._pool = _envpool().make_gymnasium(
            self.config.task,
            num_envs=len(self.lanes),
            num_threads=min(self.threads, len(self.lanes)),
            seed=self.seeds.pool(epoch),
            **arguments,
        )
        self.epoch = epoch
        self._first: Observation | None = None  # observation of a pool that was reset and not yet stepped
        self._ended = np.zeros(len(self.lanes), bool)  # lanes that the next step resets (or that stand still)
        self._obs: Observation = {}
        self._live = self.rows
        self._pending = False

    def _read_layout(self) -> None:
        """Where things lie in what `_recv` returns."""
        spec, keys = self._pool.spec, list(self._pool._state_keys)
        actions = list(self._pool._spec._action_keys)
        if len(actions) != 3 or self._pool.config.get("max_num_players", 1) != 1:
            raise ValueError(f"task: {self.config.task} has several players or actions, which m2flow does not take")
        shown = [key for key in keys if key == "obs" or key.startswith("obs:")]
        self._obs_at = {}
        observation_space, action_space = _spaces(spec)
        for leaf in spaces.leaves(observation_space):
            key = "obs:" + ".".join(map(str, leaf.path)) if leaf.path else shown[0]
            self._obs_at[leaf.name] = (keys.index(key), leaf)
        self._action_dtype = spec.action_array_spec[actions[-1]].dtype
        self._action_start = int(getattr(action_space, "start", 0))
        self._at = {name: keys.index(name) for name in ("info:env_id", "elapsed_step", "done", "trunc", "reward")}
        self._success_at = next((keys.index(key) for key in _SUCCESS_KEYS if key in keys), None)
        missing = [name for name in self.config.info if f"info:{name}" not in keys]
        if missing:
            known = sorted(key[5:] for key in keys if key.startswith("info:") and not key.endswith("env_id"))
            raise ValueError(f"info: {self.config.task} says nothing called {missing}; it says {known}")
        self._info_at = {name: keys.index(f"info:{name}") for name in self.config.info}

    def reset(self) -> Observation:
        """Start every lane at its first episode."""
        if self.epoch != 0 or (self._obs and self._first is None):
            self._open(0)
        return self._begin()

    def _begin(self) -> Observation:
        """The first observations of a fresh pool."""
        if self._first is None:
            self._pool._reset(self.rows)
            state = self._pool._recv()
            self._check_order(state, self._row_bytes)
            self._first = self._obs = self._observe(state)
        return self._first

    def _observe(self, state: Any) -> Observation:
        return {name: state[at] - leaf.start if leaf.start else state[at] for name, (at, leaf) in self._obs_at.items()}

    def _check_order(self, state: Any, rows: bytes) -> None:
        got = state[self._at["info:env_id"]]
        assert got.tobytes() == rows, f"envpool handed out lanes {got.tolist()}, not in the order they were sent"

    def send(self, action: Array) -> None:
        """Start a step; the simulator works while the caller goes on."""
        assert not self._pending, "send: the last step has not been received"
        array = check_action(action, len(self.lanes), self.spec.action.shape)
        self._pending = True
        if self._action_start:
            array = array + self._action_start
        array = np.ascontiguousarray(array, self._action_dtype)
        self._first = None
        if self.seeds.single and self._ended.any():
            self._live = self.rows[~self._ended]
            if not len(self._live):
                return
            array = array[self._live]
        self._pool._send([self._live, self._live, array])

    def recv(self) -> Step:
        """Wait for the step that `send` started."""
        assert self._pending, "recv: nothing was sent"
        self._pending = False
        if len(self._live) < len(self.lanes):
            return self._recv_some()
        state = self._pool._recv()
        self._check_order(state, self._row_bytes)
        at = self._at
        obs = self._obs = self._observe(state)
        done, truncated, valid = state[at["done"]], state[at["trunc"]], ~self._ended
        if self._ended.any():
            started = state[at["elapsed_step"]][self._ended]
            assert (started == 0).all(), (
                f"{self.config.task}: lanes were not reset by the step after their end ({started})"
            )
        self._ended = done
        return Step(obs, state[at["reward"]], done & ~truncated, truncated, obs, valid, self._info(state))

    def _info(self, state: Any) -> dict[str, Array]:
        info = {} if self._success_at is None else {"success": state[self._success_at] > 0}
        for name, at in self._info_at.items():
            info[name] = state[at]
        return info

    def _recv_some(self) -> Step:
        """A step of an evaluation in which some lanes have already finished and stand still."""
        live, size = self._live, len(self.lanes)
        obs = {name: array.copy() for name, array in self._obs.items()}
        reward, valid = np.zeros(size, np.float32), np.zeros(size, bool)
        done, truncated = np.zeros(size, bool), np.zeros(size, bool)
        info: dict[str, Array] = {} if self._success_at is None else {"success": np.zeros(size, bool)}
        if len(live):
            state = self._pool._recv()
            self._check_order(state, live.tobytes())
            for name, array in self._observe(state).items():
                obs[name][live] = array
            reward[live], valid[live] = state[self._at["reward"]], True
            done[live], truncated[live] = state[self._at["done"]], state[self._at["trunc"]]
            for name, array in self._info(state).items():
                info.setdefault(name, np.zeros((size, *array.shape[1:]), array.dtype))[live] = array
        self._obs = obs
        self._ended = self._ended | done
        return Step(obs, reward, done & ~truncated, truncated, obs, valid, info)

    def snapshot(self) -> Tree:
        """Start fresh episodes in a fresh pool. What `restore` returns afterwards is where this env now stands."""
        assert not self.seeds.single, "an evaluation env holds one episode per lane and is not saved"
        self._open(self.epoch + 1)
        self._begin()
        return {"cut": True, "epoch": self.epoch}

    def restore(self, state: Tree) -> Observation:
        """Continue from a snapshot: the first observations of its fresh pool."""
        if self.epoch != int(state["epoch"]) or self._first is None:
            self._open(int(state["epoch"]))
        return self._begin()

    def render(self, lane: int) -> Array:
        """uint8 [height, width, 3] of the lane in row `lane`."""
        if not self.drawable:
            raise ValueError("this env was built without frames; build it with render=True")
        meta_world = self.config.task.startswith("MetaWorld/")
        camera = self.config.camera if self.config.camera is not None else (_METAWORLD_CAMERA if meta_world else -1)
        frame = self._pool.render(np.array([lane], np.int32), camera)[0]
        return np.ascontiguousarray(frame[::-1, ::-1] if meta_world and camera in (1, 2, 3) else frame)

    def close(self) -> None:
        """Free the pool and its threads."""
        self._pool = None
