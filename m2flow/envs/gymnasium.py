"""Gymnasium environments, in this process or in worker processes.

In process, one step of B lanes is B calls of `env.step` and a few writes into fresh arrays: gymnasium's own checkers,
order and time-limit wrappers are left out, the time limit is counted here. A lane whose episode ends is reset within
the same step, from the seed of its k-th episode (lanes.py).

A running episode is saved as its seed and its actions, and restored by playing them again: exact for deterministic
simulators (MuJoCo is one), and checked against the stored observation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from m2flow.envs import spaces
from m2flow.envs.action_log import ActionLog, check_replayed, same_epoch
from m2flow.envs.gym_lanes import Answer, GymLanes, World, make, renderable
from m2flow.envs.lanes import LaneSeeds, check_action, seeded, training
from m2flow.types import Array, Observation, Spec, Step, Tree

if TYPE_CHECKING:
    from m2flow.protocols import VectorEnv


@dataclass(frozen=True, kw_only=True, slots=True)
class GymnasiumConfig:
    """A Gymnasium environment by id, for instance "HalfCheetah-v5", or "my_package.envs:MyEnv-v0" to import first."""

    id: str = field(metadata={"example": "Pendulum-v1"})  # as gymnasium.make takes it; "module:Id" imports first
    workers: int = 0  # processes that step the lanes; 0: this process
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # arguments of gymnasium.make
    max_episode_steps: int | None = None  # time limit; null: the registered one
    success: str | None = "auto"  # entry of `info` that says success; auto: looked for with one trial step; null: none
    info: tuple[str, ...] = ()  # further numbers of `info` to hand on
    resume: Literal["replay", "cut"] = "replay"  # how a running episode is saved: played again, or cut off
    timeout: float = 60.0  # seconds a worker may take for one answer

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ValueError(f"workers: must not be negative, got {self.workers}")
        if self.max_episode_steps is not None and self.max_episode_steps < 1:
            raise ValueError(f"max_episode_steps: must be at least 1, got {self.max_episode_steps}")
        if self.resume not in ("replay", "cut"):
            raise ValueError(f"resume: must be 'replay' or 'cut', got {self.resume!r}")
        if self.timeout <= 0:
            raise ValueError(f"timeout: must be positive, got {self.timeout}")

    def build(self, lanes: Sequence[int], seed: int, threads: int = 1, group: int = 1) -> VectorEnv:  # noqa: ARG002
        """Lanes of a training run. `threads` is not used: a Gymnasium env steps in one thread, see `workers`."""
        return self._build(training(lanes, seed, group), render=False)

    def build_seeded(self, seeds: Sequence[int], threads: int = 1, render: bool = False) -> VectorEnv:  # noqa: ARG002
        """One lane per seed; each plays one episode and then stands still. `render`: frames can be drawn."""
        return self._build(seeded(seeds), render)

    def _build(self, lanes: LaneSeeds, render: bool) -> VectorEnv:
        if self.workers == 0:
            return GymnasiumEnv(self.world(), lanes, render, cut=self.resume == "cut")
        from m2flow.envs.workers import WorkerEnv

        return WorkerEnv(
            self.world(), lanes, render, workers=self.workers, timeout=self.timeout, cut=self.resume == "cut"
        )

    def world(self) -> World:
        """The part of this that makes an environment."""
        return World(self.id, self.kwargs, self.max_episode_steps, self.success, self.info)

    def spec(self) -> Spec:
        """What the environment shows and accepts (makes one env)."""
        env = make(self.world(), render=False)
        try:
            return spaces.spec_of(env.observation_space, env.action_space)
        finally:
            env.close()

    def time_limit(self) -> int | None:
        """Steps after which an episode is truncated; None: never."""
        return self.world().time_limit()

    def renderable(self) -> tuple[bool, str]:
        """Whether frames can be drawn on this machine, and if not, what to do."""
        return renderable(self.world())


class GymnasiumEnv:
    """A VectorEnv of Gymnasium envs in this process. Made by `GymnasiumConfig.build`."""

    def __init__(self, world: World, seeds: LaneSeeds, render: bool = False, *, cut: bool = False) -> None:
        self.world, self.seeds, self.cut = world, seeds, cut
        self.group = GymLanes(world, seeds, render)
        self.spec, self.lanes = self.group.spec, seeds.ids
        self._blank = Answer.blank(self.spec, self.group.info_names, len(self.lanes))
        self.log = ActionLog(len(self.lanes), keep=not (cut or seeds.single))
        self.obs: Observation = {}
        self._action: Array = None

    def reset(self) -> Observation:
        """Start every lane at its first episode."""
        return self._start([0] * len(self.lanes))

    def _start(self, episodes: Sequence[int]) -> Observation:
        obs = spaces.empty(self.spec.observation, len(self.lanes))
        for row, episode in enumerate(episodes):
            self.group.start(row, episode, obs)
        self.log.clear()
        self.obs = obs
        return obs

    def send(self, action: Array) -> None:
        """Take the action; the work is done by `recv`."""
        assert self._action is None, "send: the last step has not been received"
        self._action = check_action(action, len(self.lanes), self.spec.action.shape)

    def recv(self) -> Step:
        """Step every lane."""
        action, self._action = self._action, None
        assert action is not None, "recv: nothing was sent"
        out = self._blank.fresh()
        if self.seeds.single:
            for name, array in self.obs.items():
                out.obs[name][:] = array  # finished lanes keep showing their last observation
        self.log.add(action)
        ended = self.group.step(action, out)
        self.obs = final = out.obs
        if out.final:
            final = {name: array.copy() for name, array in out.obs.items()}
            for name, array in out.final.items():
                final[name][ended] = array[ended]
            for row in ended:
                self.log.ended(row)
        return Step(out.obs, out.reward, out.terminated, out.truncated, final, out.valid, out.info)

    def snapshot(self) -> Tree:
        """Episode numbers and the actions since each lane's reset; see `GymnasiumConfig.resume`."""
        assert not self.seeds.single, "an evaluation env holds one episode per lane and is not saved"
        if self.cut:
            self._start([k + 1 for k in self.group.episodes])
        return self.log.state(self.group.episodes, self.obs, cut=self.cut)

    def restore(self, state: Tree) -> Observation:
        """Continue from a snapshot."""
        if same_epoch(state, self.group.episodes, self.obs, self.log):
            return self.obs
        obs = spaces.empty(self.spec.observation, len(self.lanes))
        for row, (episode, actions) in enumerate(zip(state["episode"], state["actions"], strict=True)):
            self.group.start(row, int(episode), obs)
            self.group.play(row, actions, obs)
        check_replayed(obs, state, self.lanes, self.world.id)
        self.log.load(state["actions"])
        self.obs, self._action = obs, None
        return obs

    def render(self, lane: int) -> Array:
        """uint8 [H, W, 3] of the lane in row `lane`."""
        return self.group.render(lane)

    def close(self) -> None:
        """Close every env."""
        self.group.close()
