# ruff: noqa: NPY002 (numpy's global random state is what must not move)

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from m2flow.envs.toy import BanditConfig, CountConfig, PointReachConfig
from m2flow.observe.layout import read_evaluation, write_json
from m2flow.roles.evaluation import EvalProtocol, EvaluationConfig, Evaluator, partition, summarise
from m2flow.roles.untouched import Untouched
from m2flow.seeds import HELD_OUT
from m2flow.spec import join
from m2flow.types import Action, EpisodeResult, Report, Spec, Tick

REACH = PointReachConfig(horizon=30, dtype="float64")
NOISE = ("normal", (1, 2))


@dataclass
class Pilot:
    """Heads for the goal with a shaky hand: row by row, so that an action depends on its own row only."""

    spec: Spec
    chunk: int = 1
    gain: float = 6.0
    calls: int = 0

    async def act(self, obs: Any, noise: Any) -> Action:
        self.calls += 1
        x = obs["state"]
        action = self.gain * (x[:, None, 2:] - x[:, None, :2])
        action = np.repeat(action, self.chunk, axis=1)
        if noise is not None:
            action = action + 0.5 * noise
        return Action(action=action, logprob=np.zeros_like(action), record={})


def evaluate(
    config: EvaluationConfig,
    env: Any = REACH,
    policy: Any = None,
    size: int = 1,
    writer: Any = None,
) -> tuple[EvalProtocol, list[EpisodeResult], list[Report]]:
    policy = policy or Pilot(env.spec())
    protocol = config.protocol(env)
    both = join(policy.spec, env.spec())

    async def run(rank: int) -> list[Report]:
        stage = Evaluator(protocol, env, policy, both, rank, size, writer, config=config, noise=NOISE, dtype="float64")
        return [report async for report in stage.work([Tick(3, 3, "evaluate")])]

    reports = [report for rank in range(size) for report in asyncio.run(run(rank))]
    return protocol, [episode for report in reports for episode in report.payload], reports


@pytest.mark.parametrize("workers", [4, 8, 16])
@pytest.mark.parametrize(("seeds", "envs"), [(320, 128), (260, 128), (200, 128), (150, 128)])
def test_a15_every_seed_is_in_exactly_one_share(seeds: int, envs: int, workers: int) -> None:
    """Also where only the first `envs` of the seeds are wanted: 128 different ones, each time the same."""
    chosen = list(range(1000, 1000 + seeds))[:envs]
    for wanted in (chosen, list(range(1000, 1000 + seeds))):
        shares = [partition(wanted, workers, rank) for rank in range(workers)]
        assert sorted(seed for share in shares for seed in share) == wanted
        assert shares == [partition(wanted, workers, rank) for rank in range(workers)]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_more_workers_than_seeds_leaves_some_without_work_and_all_report() -> None:
    _, episodes, reports = evaluate(EvaluationConfig(seeds=2), size=3)
    assert [len(report.payload) for report in reports] == [1, 1, 0]
    assert all(report.kind == "evaluate" and report.step == 3 for report in reports)
    assert sorted(e.seed for e in episodes) == [1_000_000, 1_000_001]


@pytest.mark.parametrize("deterministic", [True, False])
def test_a15_the_result_does_not_depend_on_workers_or_lanes(deterministic: bool) -> None:
    """Bit by bit, in float64, for a deterministic and for a sampling policy."""
    results = []
    for lanes, size in ((40, 1), (7, 1), (1, 1), (5, 3), (50, 4)):
        config = EvaluationConfig(seeds=17, lanes=lanes, deterministic=deterministic)
        protocol, episodes, _ = evaluate(config, size=size)
        results.append(summarise(3, protocol, episodes))
    assert all(other == results[0] for other in results[1:])
    assert len({e["ret"] for e in results[0].episodes}) == 17


def test_sampling_differs_from_the_mode_and_is_keyed_by_the_seed() -> None:
    _, mode, _ = evaluate(EvaluationConfig(seeds=3))
    _, drawn, _ = evaluate(EvaluationConfig(seeds=3, deterministic=False))
    _, others, _ = evaluate(EvaluationConfig(seed_list=(1_000_002, 5, 1_000_000), deterministic=False))
    assert all(a.ret != b.ret for a, b in zip(mode, drawn, strict=True))
    assert (others[0].ret, others[2].ret) == (drawn[2].ret, drawn[0].ret)


def test_episodes_are_those_of_a_hand_written_loop() -> None:
    """One env at a time, by hand: return, length, both kinds of success."""
    env_config = PointReachConfig(horizon=25, speed=0.06, radius=0.03, dtype="float64")
    pilot = Pilot(env_config.spec(), gain=1000.0)  # jumps to and fro at the goal
    _, episodes, _ = evaluate(EvaluationConfig(seeds=30, traces=30), env_config, pilot)
    for episode in episodes:
        env = env_config.build_seeded([episode.seed])
        x = env.reset()["state"]
        rewards, wins = [], []
        for _ in range(25):
            env.send(np.clip(1000.0 * (x[:, 2:] - x[:, :2]), -1, 1))
            step = env.recv()
            x = step.obs["state"]
            rewards.append(float(step.reward[0]))
            wins.append(bool(step.info["success"][0]))
        assert (episode.length, episode.ret) == (25, sum(rewards))
        assert (episode.success_once, episode.success_at_end) == (any(wins), wins[-1])
        assert episode.steps["reward"] == rewards
    kinds = {(e.success_once, e.success_at_end) for e in episodes}
    assert kinds == {(False, False), (True, False), (True, True)}


def test_an_episode_ends_at_its_own_end_and_what_follows_does_not_count() -> None:
    env = PointReachConfig(horizon=30, terminate=True, dtype="float64")
    _, episodes, _ = evaluate(EvaluationConfig(seeds=20, traces=20), env)
    assert len({e.length for e in episodes}) > 3
    for e in episodes:
        assert e.success_once
        assert e.success_at_end
        assert len(e.steps["reward"]) == e.length < 30
        assert e.ret == sum(e.steps["reward"])


def test_the_horizon_cuts_longer_episodes() -> None:
    protocol, episodes, _ = evaluate(EvaluationConfig(seeds=4, horizon=6))
    assert protocol.horizon == 6
    assert {e.length for e in episodes} == {6}


@pytest.mark.parametrize("chunk", [2, 4, 7])
def test_chunks_of_actions_are_carried_out_and_cut_at_the_end(chunk: int) -> None:
    pilot = Pilot(REACH.spec(), chunk=chunk)
    _, episodes, _ = evaluate(EvaluationConfig(seeds=3), policy=pilot)
    assert {e.length for e in episodes} == {30}
    assert pilot.calls == -(-30 // chunk)


def test_environments_that_know_no_success_and_discrete_actions() -> None:
    class Chooser:
        spec = BanditConfig(horizon=5).spec()

        def act(self, obs: Any, noise: Any) -> Action:  # answers directly, without a handle
            action = (obs["state"].argmax(1)[:, None] + 1) % 4
            return Action(action=action, logprob=np.zeros((len(action), 1)), record={})

    _, episodes, _ = evaluate(EvaluationConfig(seeds=6), BanditConfig(horizon=5), Chooser())
    assert {(e.ret, e.length, e.success_once) for e in episodes} == {(5.0, 5, True)}

    class Still:
        spec = CountConfig().spec()

        def act(self, obs: Any, noise: Any) -> Action:
            zeros = np.zeros((len(obs["state"]), 1, 1), np.float32)
            return Action(action=zeros, logprob=zeros, record={})

    protocol, episodes, _ = evaluate(EvaluationConfig(seeds=3), CountConfig(every=4), Still())
    assert [(e.ret, e.length, e.success_once) for e in episodes] == [(10.0, 4, None)] * 3
    assert "eval/success" not in summarise(3, protocol, episodes).metrics


# ---- videos


class Sink:
    """Keeps what is written, and when."""

    def __init__(self) -> None:
        self.files: dict[str, list[Any]] = {}
        self.reasons: list[str] = []

    def write(self, name: str, frames: Any) -> str:
        self.files[name] = list(frames)
        return name + ".mp4"

    def none(self, reason: str) -> None:
        self.reasons.append(reason)


def test_a16_videos_are_complete_before_the_episode_is_reported(tmp_path: Path) -> None:
    from m2flow.observe.video import VideoFolder

    config = EvaluationConfig(seeds=5, videos=2, lanes=1)
    protocol = config.protocol(REACH)
    pilot = Pilot(REACH.spec())
    stage = Evaluator(
        protocol, REACH, pilot, join(pilot.spec, REACH.spec()), 0, 1, VideoFolder(tmp_path), config=config
    )

    async def run() -> list[EpisodeResult]:
        async for report in stage.work([Tick(7, 7, "evaluate")]):
            found = sorted(os.listdir(tmp_path))
            assert found == [e.video for e in report.payload if e.video]
            assert found
            return list(report.payload)
        raise AssertionError

    episodes = asyncio.run(run())
    wanted = ["step_000007_seed_1000000.mp4", "step_000007_seed_1000001.mp4", "", "", ""]
    assert [e.video for e in episodes] == wanted


def test_films_hold_the_first_every_strideth_and_the_last_frame_of_the_asked_episodes() -> None:
    env = PointReachConfig(horizon=12, terminate=True, dtype="float64")
    sink = Sink()
    _, episodes, _ = evaluate(EvaluationConfig(seeds=4, videos=2, stride=5), env, writer=sink, size=2)
    assert len(sink.files) == 2
    for episode in episodes[:2] if episodes[0].video else episodes:
        if not episode.video:
            continue
        shot = sink.files[episode.video.removesuffix(".mp4")]
        lone = env.build_seeded([episode.seed])
        x = lone.reset()["state"]
        wanted = [lone.render(0)]
        for t in range(1, episode.length + 1):
            lone.send(np.clip(6.0 * (x[:, 2:] - x[:, :2]), -1, 1))
            x = lone.recv().obs["state"]
            if t % 5 == 0 or t == episode.length:
                wanted.append(lone.render(0))
        np.testing.assert_array_equal(shot, wanted)


def test_filming_changes_no_number() -> None:
    plain = evaluate(EvaluationConfig(seeds=6))[1]
    filmed = evaluate(EvaluationConfig(seeds=6, videos=3), writer=Sink())[1]
    assert [(e.seed, e.ret, e.length) for e in plain] == [(e.seed, e.ret, e.length) for e in filmed]


def test_where_nothing_can_be_drawn_one_line_says_so_and_the_evaluation_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Blind(PointReachConfig):
        __slots__ = ()

        def renderable(self) -> tuple[bool, str]:
            return False, "install this and that"

    sink = Sink()
    _, episodes, _ = evaluate(EvaluationConfig(seeds=3, videos=2), Blind(dtype="float64"), writer=sink, size=3)
    assert len(episodes) == 3
    assert (sink.files, sink.reasons) == ({}, ["install this and that"])
    assert [r.message for r in caplog.records] == ["no videos: install this and that"]


# ---- no trace


class Net(torch.nn.Module):
    """A policy with dropout, which is random in training and must not be in evaluation."""

    spec = Spec(REACH.spec().observation, REACH.spec().action)

    def __init__(self, fail: bool = False) -> None:
        super().__init__()
        self.fail = fail
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 2)).double()
        self.frozen = torch.nn.BatchNorm1d(3).eval()
        self.seen: list[bool] = []

    def act(self, obs: Any, noise: Any) -> Action:
        self.seen.append(self.body[1].training)
        if self.fail and len(self.seen) > 3:
            raise RuntimeError("out of memory")
        with torch.no_grad():
            action = self.body(torch.as_tensor(obs["state"]))[:, None]
        return Action(action=action, logprob=torch.zeros(len(action)), record={})


class Service:
    """How a policy is reached inside a run: a handle that holds the service that holds the policy."""

    def __init__(self, policy: Net) -> None:
        self.policy = policy


class Handle:
    def __init__(self, policy: Net) -> None:
        self._service = Service(policy)
        self.spec = policy.spec

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            return getattr(self._service.policy, name)(*args)

        return call


def states() -> tuple[Any, ...]:
    return random.random(), np.random.rand(), torch.rand(()).item()


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("wrap", [lambda net: net, Handle])
def test_a16_evaluation_leaves_no_trace(fail: bool, wrap: Any) -> None:
    """Modes of all parts and global random states are as before, also when the evaluation raises."""

    class Rolling(PointReachConfig):
        """An environment whose code draws from global random states."""

        __slots__ = ()

        def build_seeded(self, *args: Any, **kwargs: Any) -> Any:
            random.seed(1)
            np.random.seed(1)
            torch.manual_seed(1)
            return super().build_seeded(*args, **kwargs)

    torch.manual_seed(0)
    net = Net(fail)
    before = {name: part.training for name, part in net.named_modules()}
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    wanted = states()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    if fail:
        with pytest.raises(RuntimeError, match="out of memory"):
            evaluate(EvaluationConfig(seeds=3), Rolling(horizon=8, dtype="float64"), wrap(net))
    else:
        one = evaluate(EvaluationConfig(seeds=3), Rolling(horizon=8, dtype="float64"), wrap(net))[1]
        assert one == evaluate(EvaluationConfig(seeds=3), Rolling(horizon=8, dtype="float64"), wrap(net))[1]
    assert states() == wanted
    assert {name: part.training for name, part in net.named_modules()} == before
    assert net.training
    assert not net.frozen.training
    assert not any(net.seen)


def test_a_handle_to_another_process_is_not_asked_for_its_modules() -> None:
    class Remote:
        def __init__(self) -> None:
            self._service = "policy"

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

    with Untouched(0).block(Remote()):
        random.seed(3)
        value = random.random()
    assert random.random() != value  # left alone: others may draw while the answer is awaited


def test_code_that_draws_from_global_random_states_goes_on_drawing_and_is_reproducible() -> None:
    runs = []
    for _ in range(2):
        apart, drawn = Untouched(4), []
        for _ in range(3):
            before = states()
            with apart.block():
                drawn.append(states())
            assert len(set(drawn)) == len(drawn)
            assert before not in drawn
        runs.append(drawn)
    assert runs[0] == runs[1]


# ---- protocol and result


def episode(lane: int, won: bool, ret: float, end: bool | None = None) -> EpisodeResult:
    end = won if end is None else end
    return EpisodeResult(seed=100 + lane, lane=lane, length=10 + lane, ret=ret, success_once=won, success_at_end=end)


def test_numbers_and_intervals_by_hand() -> None:
    """8 of 10 successes: Wilson 95 % is 0.4901625, 0.9433178; t(9) = 2.2621572 for the mean of 0..9."""
    protocol = EvalProtocol("toy", {}, tuple(range(100, 110)), horizon=50)
    found = [episode(i, i >= 2, float(i), end=i >= 5) for i in reversed(range(10))]
    result = summarise(7, protocol, found)
    assert result.step == 7
    assert result.metrics["eval/success_once"] == 0.8
    assert result.metrics["eval/success"] == 0.8
    assert result.metrics["eval/success_at_end"] == 0.5
    assert result.intervals["eval/success"] == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert result.metrics["eval/return"] == 4.5
    half = 2.2621572 * np.std(range(10), ddof=1) / np.sqrt(10)
    assert result.intervals["eval/return"] == pytest.approx((4.5 - half, 4.5 + half), abs=1e-6)
    assert result.metrics["eval/length"] == 14.5
    assert result.metrics["eval/episodes"] == 10.0
    assert [e["lane"] for e in result.episodes] == list(range(10))
    ended = EvalProtocol("toy", {}, tuple(range(100, 110)), horizon=50, success="end")
    assert summarise(7, ended, found).metrics["eval/success"] == 0.5


def test_a_missing_or_doubled_seed_is_an_error_that_names_it() -> None:
    protocol = EvalProtocol("toy", {}, (100, 101, 102), horizon=5)
    with pytest.raises(ValueError, match=r"seeds missing \[102\], twice or foreign \[101\]"):
        summarise(0, protocol, [episode(0, True, 1.0), episode(1, True, 1.0), episode(1, True, 1.0)])
    with pytest.raises(ValueError, match=r"missing \[101, 102\]"):
        summarise(0, protocol, [episode(0, True, 1.0)])


def test_a_result_with_its_protocol_survives_its_file(tmp_path: Path) -> None:
    protocol, episodes, _ = evaluate(EvaluationConfig(seeds=5, traces=2))
    result = summarise(3, protocol, episodes)
    back = read_evaluation(write_json(tmp_path / "found.json", result))
    assert back == result
    assert EpisodeResult(**back.episodes[0]) == episodes[0]
    lone = summarise(3, EvalProtocol("toy", {}, (100,), horizon=5), [episode(0, True, 1.5)])
    file = write_json(tmp_path / "lone.json", lone)
    assert "NaN" not in file.read_text()
    assert np.isnan(read_evaluation(file).intervals["eval/return"]).all()


def test_the_protocol_says_everything_the_number_depends_on() -> None:
    row = (
        EvaluationConfig(seeds=3, first_seed=7, horizon=9, success="end", deterministic=False).protocol(REACH).to_dict()
    )
    assert row["seeds"] == [7, 8, 9]
    assert (row["count"], row["horizon"], row["success"], row["policy"]) == (3, 9, "end", "sampled")
    assert row["suite"] == "PointReach"
    assert row["options"]["env"] == "m2flow.envs.toy:PointReachConfig"
    assert row["options"]["radius"] == REACH.radius
    assert EvaluationConfig(seed_list=(5, 3)).protocol(REACH).seeds == (5, 3)
    assert EvaluationConfig().protocol(REACH).horizon == 30


def test_an_environment_without_a_time_limit_needs_a_horizon() -> None:
    class Endless(PointReachConfig):
        __slots__ = ()

        def time_limit(self) -> int | None:
            return None

    with pytest.raises(ValueError, match=r"evaluation\.horizon must be given"):
        EvaluationConfig().protocol(Endless())


def test_a_sampling_protocol_needs_to_know_the_noise() -> None:
    protocol = EvaluationConfig(deterministic=False).protocol(REACH)
    with pytest.raises(ValueError, match="needs the policy's noise"):
        Evaluator(protocol, REACH, Pilot(REACH.spec()), join(REACH.spec(), REACH.spec()))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seeds": 0}, "seeds: at least one"),
        ({"first_seed": HELD_OUT - 49}, "first_seed: 50 seeds from 2097103 on must lie between 0 and 2097151"),
        ({"seed_list": (5, HELD_OUT)}, "seed_list: 2097152 must lie between 0 and 2097151, because training uses"),
        ({"seed_list": (-1,)}, "seed_list: -1 must lie between"),
        ({"first_seed": -1}, "first_seed: "),
        ({"seed_list": (3, 3)}, "seed_list: a seed is listed twice"),
        ({"horizon": 0}, "horizon: must be at least 1"),
        ({"success": "always"}, "success: must be 'once' or 'end'"),
        ({"every": -1}, "every: must not be negative"),
        ({"videos": -1}, "videos: must not be negative"),
        ({"lanes": 0}, "lanes: must be at least 1"),
        ({"stride": 0}, "stride: must be at least 1"),
    ],
)
def test_config_errors_name_the_field(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        EvaluationConfig(**wrong)


def test_evaluation_plays_its_own_horizon_where_training_episodes_are_shorter() -> None:
    short = PointReachConfig(horizon=5)
    protocol, episodes, _ = evaluate(EvaluationConfig(seeds=3, horizon=12), short, Pilot(short.spec()))
    assert protocol.horizon == 12
    assert protocol.options["horizon"] == 12
    assert [episode.length for episode in episodes] == [12, 12, 12]


def test_a29_numbers_of_numpy_stay_numbers_in_a_stored_protocol() -> None:
    options = {"radius": np.float32(0.5), "lanes": np.int64(3), "low": np.array([0.0, 1.0])}
    stored = EvalProtocol("toy", options, (1, 2), 5).to_dict()["options"]
    assert stored == {"radius": 0.5, "lanes": 3, "low": [0.0, 1.0]}
