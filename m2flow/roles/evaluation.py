"""Evaluation: every held-out initial state exactly once, by a protocol that is stored with its number.

An episode is a pure function of (weights, seed): each lane plays one episode from one seed, so the result does not
depend on how seeds are spread over workers and lanes. Training is left as it was: no global random state moves, no
module changes its mode.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from m2flow import seeds as noise_seeds
from m2flow.protocols import VideoSink
from m2flow.roles.results import EvalProtocol, summarise
from m2flow.roles.untouched import Untouched
from m2flow.sections import EnvConfig, HorizonLimited, StepLimited, TaskConfig
from m2flow.spec import Join
from m2flow.types import Action, Array, EpisodeResult, Observation, Report, Step, Tick

__all__ = ["EvalProtocol", "EvaluationConfig", "Evaluator", "partition", "summarise"]
_LOG = logging.getLogger("m2flow.evaluation")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    """Held-out evaluation. Its seeds lie below 2**21 = 2097152; no training episode starts from one of those."""

    seeds: int = 50  # held-out initial states, counted up from first_seed, or held-out tasks of a language model
    first_seed: int = 1_000_000  # the range ends below 2097152: training uses the seeds above
    seed_list: tuple[int, ...] = ()  # these seeds instead of a range, each below 2097152
    horizon: int | None = None  # steps per episode; null: the environment's own time limit
    success: Literal["once", "end"] = "once"  # headline: success at any step, or at the last one
    deterministic: bool = True  # act with the policy's mode; false: sample
    every: int = 0  # training steps between evaluations; 0: only before the first and after the last
    lanes: int = 50  # episodes played at the same time per worker
    videos: int = 0  # episodes of the first seeds that are filmed
    traces: int = 3  # episodes of the first seeds whose reward per step is kept for the report
    stride: int = 5  # environment steps per frame of a video

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ValueError(f"seeds: at least one is needed, got {self.seeds}")
        held_out = noise_seeds.HELD_OUT
        if not 0 <= self.first_seed <= held_out - self.seeds:
            raise ValueError(
                f"first_seed: {self.seeds} seeds from {self.first_seed} on must lie between 0 and {held_out - 1}, "
                "because training uses those above"
            )
        wrong = [seed for seed in self.seed_list if not 0 <= seed < held_out]
        if wrong:
            raise ValueError(
                f"seed_list: {wrong[0]} must lie between 0 and {held_out - 1}, because training uses those above"
            )
        if len(set(self.seed_list)) != len(self.seed_list):
            raise ValueError("seed_list: a seed is listed twice; every initial state counts once")
        if self.horizon is not None and self.horizon < 1:
            raise ValueError(f"horizon: must be at least 1 step, got {self.horizon}")
        if self.success not in ("once", "end"):
            raise ValueError(f"success: must be 'once' or 'end', got {self.success!r}")
        for name in ("every", "videos", "traces"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: must not be negative, got {getattr(self, name)}")
        for name in ("lanes", "stride"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}")

    def protocol(self, env: EnvConfig | TaskConfig) -> EvalProtocol:
        """The protocol for an environment config. Raises ValueError where nothing would end an episode."""
        if isinstance(env, TaskConfig):
            return self._examination(env)
        horizon = self.horizon if self.horizon is not None else env.time_limit()
        if horizon is None:
            raise ValueError(
                "horizon: the environment has no time limit of its own, so evaluation.horizon must be given"
            )
        return self._made(at_horizon(env, horizon), horizon)

    def _made(self, config: Any, horizon: int) -> EvalProtocol:
        options = dataclasses.asdict(config)
        kind = type(config)
        name = options.get("task") or options.get("id") or kind.__name__.removesuffix("Config")
        return EvalProtocol(
            suite=str(name),
            options={"env": f"{kind.__module__}:{kind.__qualname__}", **options},
            seeds=tuple(self.seed_list) or tuple(range(self.first_seed, self.first_seed + self.seeds)),
            horizon=horizon,
            success=self.success,
            deterministic=self.deterministic,
        )

    def _examination(self, env: TaskConfig) -> EvalProtocol:
        """Of a language model: seed number k stands for the k-th task that is held out."""
        if self.videos:
            raise ValueError(f"videos: {self.videos}, and conversations cannot be filmed; remove it")
        if self.horizon is not None:
            raise ValueError("horizon: answers end at env.max_tokens; remove it")
        return self._made(env, env.max_tokens * env.max_turns)


def at_horizon(env: EnvConfig, horizon: int) -> EnvConfig:
    """The environment config with a time limit of at least `horizon`: training may use shorter episodes.

    Raises:
        ValueError: its time limit is shorter and cannot be set.
    """
    limit = env.time_limit()
    if limit is None or limit >= horizon:
        return env
    config: Any = env  # a dataclass; `replace` wants to know which
    if isinstance(env, StepLimited):
        return dataclasses.replace(config, max_episode_steps=horizon)  # type: ignore[no-any-return]
    if isinstance(env, HorizonLimited):
        return dataclasses.replace(config, horizon=horizon)  # type: ignore[no-any-return]
    raise ValueError(f"horizon: {horizon} steps, but the environment ends episodes after {limit}; use at most {limit}")


def partition(seeds: Sequence[int], workers: int, rank: int) -> list[int]:
    """The share of worker `rank`: every worker-th seed, so that each seed is in exactly one share."""
    if not 0 <= rank < workers:
        raise ValueError(f"rank: must be between 0 and {workers - 1}, got {rank}")
    return list(seeds[rank::workers])


class Evaluator:
    """Source stage: a Tick of kind "evaluate" yields one Report with this worker's episodes.

    `policy` is a service handle (or an object whose `act` answers directly). `noise` and `dtype` are those of the
    policy and only used by a sampling protocol.
    """

    def __init__(
        self,
        protocol: EvalProtocol,
        env_config: EnvConfig,
        policy: Any,
        join: Join,
        rank: int = 0,
        size: int = 1,
        video_writer: VideoSink | None = None,
        *,
        config: EvaluationConfig | None = None,
        threads: int = 1,
        noise: tuple[str, tuple[int, ...]] | None = None,
        dtype: str = "float32",
    ) -> None:
        self.protocol, self.policy, self.join = protocol, policy, join
        self.env_config = at_horizon(env_config, protocol.horizon)
        self.config = config or EvaluationConfig()
        self.threads, self.noise, self.dtype = threads, noise, dtype
        self.rows = partition(range(protocol.count), size, rank)  # positions in protocol.seeds
        self.key = noise_seeds.derive(protocol.noise_seed, "evaluation")
        self.apart = Untouched(self.key)
        if not protocol.deterministic and noise is None:
            raise ValueError("evaluation: a sampling protocol needs the policy's noise (kind and shape)")
        self.writer = self._usable(video_writer)

    @classmethod
    def build(cls, recipe: Any, policy: Any, context: Any, video_writer: VideoSink | None = None) -> Evaluator:
        """From a recipe. `policy`: any copy of it, for its spec and noise; `context`: rank, devices and services."""
        from m2flow.spec import join

        return cls(
            recipe.evaluation.protocol(recipe.env),
            recipe.env,
            context.services["policy"],
            join(policy.spec, recipe.env.spec()),
            context.rank,
            context.size,
            video_writer,
            config=recipe.evaluation,
            threads=max(1, len(context.devices)),
            noise=policy.noise,
            dtype=recipe.trainer.dtype,
        )

    def _usable(self, writer: VideoSink | None) -> VideoSink | None:
        """The writer if it is asked for and frames can be drawn; else one line says why there are no videos."""
        if writer is None or self.config.videos == 0:
            return None
        ready, why = self.env_config.renderable()
        if ready and importlib.util.find_spec("imageio_ffmpeg") is None:
            ready, why = False, "package imageio-ffmpeg is missing: pip install 'm2flow[video]'"
        if ready:
            return writer
        if 0 in self.rows:
            _LOG.warning("no videos: %s", why)
            writer.none(why)
        return None

    async def work(self, items: Sequence[Tick]) -> AsyncIterator[Report]:
        """This worker's episodes, wave after wave, in the order of the protocol's seeds."""
        for tick in items:
            if tick.kind != "evaluate":
                continue
            self.apart = Untouched(self.key)
            results: list[EpisodeResult] = []
            for start in range(0, len(self.rows), self.config.lanes):
                results += await self._wave(self.rows[start : start + self.config.lanes], tick.step)
            yield Report(tick.step, payload=results, kind="evaluate")

    async def _wave(self, rows: Sequence[int], step: int) -> list[EpisodeResult]:
        """One episode for each of these positions."""
        keys = [self.protocol.seeds[row] for row in rows]
        filmed = [i for i, row in enumerate(rows) if row < self.config.videos] if self.writer else []
        with self.apart.block():
            env = self.env_config.build_seeded(keys, self.threads, render=bool(filmed))
        try:
            tally = _Tally(rows, self.protocol.horizon, self.config.traces)
            film = _Film(env, filmed, self.config.stride)
            with self.apart.block():
                obs = self._seen(env.reset(), rows)
                film.shoot(tally.alive, first=True)
            turn = 0
            while tally.alive.any():
                action = await self._act(obs, keys, turn)
                obs = self._play(env, self.join.decode(action.action, rows), tally, film)
                turn += 1
            names = self._write(film, keys, step)
            return tally.results(keys, names)
        finally:
            env.close()

    async def _act(self, obs: Observation, keys: Sequence[int], turn: int) -> Action:
        noise = None
        if not self.protocol.deterministic:
            assert self.noise is not None
            kind, shape = self.noise
            streams, turns = np.array(keys, np.int64), np.array([turn], np.int64)
            noise = noise_seeds.draw(kind, self.key, streams, turns, shape)[0].astype(self.dtype)
        with self.apart.block(self.policy):
            answer = self.policy.act(obs, noise)
            action: Action = await answer if inspect.isawaitable(answer) else answer
        return action

    def _seen(self, obs: Observation, rows: Array) -> Observation:
        """What the policy sees. Raises ValueError where it is not finite."""
        seen = self.join.encode(obs)
        self.join.inspect(seen, rows)
        return seen

    def _play(self, env: Any, actions: Array, tally: _Tally, film: _Film) -> Observation:
        """Carry out one decision, [B, C, ...]; what the policy sees next."""
        with self.apart.block():
            for c in range(actions.shape[1]):
                env.send(actions[:, c])
                step: Step = env.recv()
                before = tally.alive
                tally.add(step)
                film.shoot(before, ended=before & ~tally.alive)
                if not tally.alive.any():
                    break
            return self._seen(step.obs, tally.rows)

    def _write(self, film: _Film, keys: Sequence[int], step: int) -> dict[int, str]:
        """Complete files before anything is reported."""
        names = {}
        for i, frames in film.frames.items():
            assert self.writer is not None
            names[i] = self.writer.write(f"step_{step:06d}_seed_{keys[i]}", frames)
        return names


class _Tally:
    """Running numbers of one wave. A lane counts until its episode ends or the horizon is reached."""

    def __init__(self, rows: Sequence[int], horizon: int, traces: int) -> None:
        size = len(rows)
        self.rows, self.horizon = list(rows), horizon
        self.alive = np.ones(size, bool)
        self.ret, self.length = np.zeros(size), np.zeros(size, np.int64)
        self.once, self.end, self.knows_success = np.zeros(size, bool), np.zeros(size, bool), False
        self.traced: dict[int, list[float]] = {i: [] for i, row in enumerate(rows) if row < traces}

    def add(self, step: Step) -> None:
        """One environment step."""
        alive = self.alive
        assert step.valid[alive].all(), "a lane of an evaluation did not answer before its episode ended"
        self.ret += np.where(alive, np.asarray(step.reward, np.float64), 0.0)
        self.length += alive
        if "success" in step.info:
            self.knows_success = True
            success = np.asarray(step.info["success"]) > 0
            self.once |= alive & success
            self.end = np.where(alive, success, self.end)
        for i, rewards in self.traced.items():
            if alive[i]:
                rewards.append(float(step.reward[i]))
        self.alive = alive & ~(step.terminated | step.truncated) & (self.length < self.horizon)

    def results(self, keys: Sequence[int], videos: Mapping[int, str]) -> list[EpisodeResult]:
        """One result per lane. `lane` is the position of the seed in the protocol."""
        return [
            EpisodeResult(
                seed=keys[i],
                lane=row,
                length=int(self.length[i]),
                ret=float(self.ret[i]),
                success_once=bool(self.once[i]) if self.knows_success else None,
                success_at_end=bool(self.end[i]) if self.knows_success else None,
                video=videos.get(i, ""),
                steps={"reward": self.traced[i]} if i in self.traced else {},
            )
            for i, row in enumerate(self.rows)
        ]


class _Film:
    """Frames of the filmed lanes: the first, every stride-th, and the one at the end."""

    def __init__(self, env: Any, lanes: Iterable[int], stride: int) -> None:
        self.env, self.stride, self.steps = env, stride, 0
        self.frames: dict[int, list[Array]] = {lane: [] for lane in lanes}

    def shoot(self, alive: Array, *, first: bool = False, ended: Array | None = None) -> None:
        """After a reset or a step."""
        self.steps += not first
        for lane, frames in self.frames.items():
            if alive[lane] and (self.steps % self.stride == 0 or (ended is not None and ended[lane])):
                frames.append(self.env.render(lane))
