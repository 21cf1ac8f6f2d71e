"""Reported cases on whole runs, or on rollout, learner and trainer together: what no part can show by itself."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import m2flow
from m2flow.algorithms.onpolicy import PPO
from m2flow.algorithms.reduce import to_level
from m2flow.api import Run
from m2flow.backends.torch.trainer import TorchTrainerConfig
from m2flow.envs.lanes import training
from m2flow.envs.toy import CountConfig, PointReachConfig, ToyEnv
from m2flow.models.mlp import MLPConfig
from m2flow.observe.layout import read_json, write_json
from m2flow.roles.evaluation import EvalProtocol, summarise
from m2flow.roles.learner import Learner, LearnerConfig
from m2flow.roles.policy import PolicyService
from m2flow.roles.rollout import Acting, Rollout, RolloutConfig
from m2flow.runtime.failures import RunFailed
from m2flow.spec import join
from m2flow.types import EpisodeResult, Field, Report, Spec, Step, Tick, Trajectory, Units
from tests.integration import small

HERE = "tests.integration.test_cases:"
OFF_POLICY: dict[str, Any] = {
    "flow": "offpolicy",
    "policy": {"name": "mlp", "hidden": [8], "dist": "squashed"},
    "objective": {"name": "sac", "critic_hidden": [8]},
    "learner": {},
    "replay": {"batch": 16, "capacity": 400, "start": 16},
}
GROUPED = {"rollout": {"lanes": 8, "length": 20, "group": 2}, "learner": {"epochs": 1}, "objective": {"name": "grpo"}}


# ---- worlds


class Edited(ToyEnv):
    """A toy whose steps its config changes before anybody sees them."""

    def __init__(self, config: Any, seeds: Any) -> None:
        super().__init__(config, seeds)
        self.config = config

    def recv(self) -> Step:
        edited: Step = self.config.edit(super().recv(), self)
        return edited


@dataclass(frozen=True, kw_only=True, slots=True)
class EditedConfig(PointReachConfig):
    """PointReach with other steps."""

    def build(self, lanes: Sequence[int], seed: int, threads: int = 1, group: int = 1) -> Edited:
        return Edited(self, training(lanes, seed, group))

    def edit(self, step: Step, env: Edited) -> Step:
        return step


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredConfig(EditedConfig):
    """An episode earns, at its end, `scores[lane]`, whatever was done."""

    scores: tuple[float, ...] = ()

    def edit(self, step: Step, env: Edited) -> Step:
        ends = step.terminated | step.truncated
        return dataclasses.replace(step, reward=np.where(ends, np.array(self.scores)[env.lanes], 0.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedConfig(EditedConfig):
    """No step is a decision, and what it would have earned is not a number."""

    def edit(self, step: Step, env: Edited) -> Step:
        return dataclasses.replace(step, valid=~np.ones_like(step.valid), reward=np.full_like(step.reward, np.nan))


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenRewardConfig(EditedConfig):
    """The reward of lane 2 is not a number in the third step of an episode; elsewhere it is 0."""

    broken: float = math.nan

    def edit(self, step: Step, env: Edited) -> Step:
        reward = np.where((env.lanes == 2) & (env.elapsed == 3), self.broken, 0.0)
        return dataclasses.replace(step, reward=reward)


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenStateConfig(EditedConfig):
    """Lane 1 shows NaN in the fourth step of an episode, or as the true final observation of one."""

    at: str = "state"

    def edit(self, step: Step, env: Edited) -> Step:
        ended = step.terminated | step.truncated
        bad = (env.lanes == 1) & (ended if self.at == "final" else env.elapsed == 4)
        obs = step.final_obs if self.at == "final" else step.obs
        broken = {k: np.where(bad[:, None], np.nan, v) for k, v in obs.items()}
        return dataclasses.replace(step, **{"final_obs" if self.at == "final" else "obs": broken})


@dataclass(frozen=True, kw_only=True, slots=True)
class PathConfig:
    """Case A13: shows 0.5, 0.6, 0.7 and at the end 0.8; rewards 0, 0, 1. A step that only resets earns NaN."""

    end: str = "terminated"
    autoreset: str = "same"
    dtype: str = "float64"

    width, knows_success = 1, False

    def spec(self) -> Spec:
        return Spec({"state": Field((1,), self.dtype)}, Field((1,), self.dtype, -1.0, 1.0))

    def world(self) -> PathConfig:
        return self

    def edit(self, step: Step, env: Edited) -> Step:
        return dataclasses.replace(step, reward=np.where(step.valid, step.reward, np.nan))

    def start(self, seeds: Any, episodes: Any) -> Any:
        return np.zeros((len(seeds), 1))

    def show(self, state: Any) -> Any:
        return 0.5 + 0.1 * state

    def move(self, state: Any, action: Any, elapsed: Any, seeds: Any) -> Any:
        done, no = elapsed >= 3, np.zeros(len(elapsed), bool)
        ends = (done, no) if self.end == "terminated" else (no, done)
        return elapsed[:, None].astype(float), done.astype(float), no, *ends


# ---- objectives that tell what they are given


@dataclass(frozen=True, kw_only=True, slots=True)
class TellingPPO(PPO):
    """Writes to `folder` which samples each step is trained on, in which minibatches, and every ratio."""

    folder: str = ""

    def targets(self, model: Any, trajectory: Trajectory) -> Any:
        """What was collected for a step."""
        seen = {name: getattr(trajectory, name) for name in ("episode", "group", "lane", "version", "reward")}
        path = Path(self.folder) / f"step_{trajectory.step}.npz"
        np.savez(path, **seen, **trajectory.obs, **trajectory.units.record, logprob=trajectory.units.logprob)
        return PPO.targets(self, model, trajectory)

    def prepare(self, batch: Any, rows: int) -> Any:
        """The rows in the order of the minibatches, told apart by their observations."""
        self._say("minibatches", [rows, batch.obs["state"].double().sum(-1).tolist()])
        return PPO.prepare(self, batch, rows)

    def losses(self, model: Any, batch: Any, phase: str, noise: Any = None) -> Any:
        """Largest distance from 1 of the ratio of now, and of that of the reference, to the recorded log-prob."""
        said = [to_level(model.policy.score(batch.obs, batch.record).logprob, axes=model.policy.axes, level=self.level)]
        said += [batch.columns["reference"]] if "reference" in batch.columns else []
        gaps = [(logprob - batch.columns["logprob"]).exp().sub(1.0).abs().max().item() for logprob in said]
        self._say("ratios", gaps)
        return PPO.losses(self, model, batch, phase, noise)

    def _say(self, name: str, value: Any) -> None:
        with Path(self.folder, name).open("a") as file:
            file.write(json.dumps(value) + "\n")


def told(folder: Path, name: str) -> list[Any]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def status(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = read_json(run.folder.status)
    return found


def alarms(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.folder.alarms.read_text().splitlines()]


# ---- rewards


@pytest.mark.parametrize("how", [{}, OFF_POLICY], ids=["PPO", "SAC: before it is in the replay buffer"])
def test_a05_a_reward_that_is_not_a_number_ends_the_run_and_names_the_sample(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    env = {"name": HERE + "BrokenRewardConfig", "horizon": 10}
    with pytest.raises(RunFailed, match=r"reward: nan at step 2 of lane 2, episode \d+; \d+ rewards are not finite"):
        small.train(tmp_path, "run", env=env, **how)


@pytest.mark.parametrize("at", ["state", "final"])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_an_observation_that_is_not_a_number_ends_the_run_and_names_the_lane(
    tmp_path: Path, at: str, activation: str
) -> None:
    env = {"name": HERE + "BrokenStateConfig", "horizon": 10, "at": at}
    policy = {"name": "mlp", "hidden": [8], "activation": activation, "normalize": True}
    with pytest.raises(RunFailed, match=r"observation '\w+' from the environment: NaN in lane 1"):
        small.train(tmp_path, "run", env=env, policy=policy)


def test_a05_a_run_whose_rewards_are_all_zero_counts_them(tmp_path: Path) -> None:
    env = {"name": HERE + "BrokenRewardConfig", "horizon": 10, "broken": 0.0}
    run = small.train(tmp_path, "run", env=env, steps=2)
    assert [row["rollout/return"] for row in run.metrics()] == [0.0, 0.0]


# ---- denominators: one optimiser batch through PPO, Learner and the torch trainer

SPEC = Spec({"state": Field((3,), "float64")}, Field((2,), "float64", -1.0, 1.0))


def learnt(
    loss: Sequence[Sequence[float | None]], *, mask: Any = None, micro: int | None = None, chunk: int | None = None
) -> tuple[dict[str, float], torch.Tensor]:
    """Metrics and weights after one update on lanes whose actions each have the given loss; None: padded, poisoned.

    With gamma 0, no critic and the ratio 1 of a first update, the loss of an action is minus its reward.
    """
    chunk = chunk or max(map(len, loss))
    table = np.array([[*row, *[None] * (chunk - len(row))] for row in loss], float)[None]  # [1, B, C]
    valid, count = ~np.isnan(table), len(loss)
    policy = MLPConfig(hidden=(8,), chunk=chunk).build(SPEC, 1).double()
    lanes = np.array([sum(map(hash, map(str, row))) % 97 for row in loss])  # a row is the same in any order
    obs = np.stack([np.random.default_rng(int(lane)).normal(size=3) for lane in lanes])
    noise = np.stack([np.random.default_rng(int(lane)).normal(size=(chunk, 2)) for lane in lanes])
    acted = policy.act({"state": obs}, noise)
    logprob = np.where(valid[0][..., None], acted.logprob, np.nan)
    if mask is not None:
        mask = np.broadcast_to(np.array(mask)[:, None, None], logprob.shape)
        logprob = np.where(mask, logprob, np.nan)
    trajectory = Trajectory(
        obs={"state": np.concatenate([obs, obs])},
        obs_at=np.arange(count)[None],
        next_at=np.arange(count, 2 * count)[None],
        reward=-table,
        valid=valid,
        terminated=np.ones((1, count), bool),
        truncated=np.zeros((1, count), bool),
        version=np.zeros((1, count), np.int64),
        episode=np.arange(count)[None],
        group=np.arange(count)[None],
        lane=np.arange(count),
        units=Units(policy.axes, logprob, acted.record, mask=mask),
        value=np.zeros(table.shape),
        bootstrap=np.zeros((1, count)),
    )
    objective = PPO(level="action", gamma=0.0, whiten="none", value_coef=0.0)
    config = TorchTrainerConfig(dtype="float64", optimizer="sgd", learning_rate=0.1, max_grad_norm=None)
    learner = Learner(
        trainer=config.build(policy, objective, 0),
        objective=objective,
        config=LearnerConfig(epochs=1, microbatch=micro),
        seed=0,
        noise=policy.noise,
    )
    list(learner.work([trajectory]))
    (report,) = [item for item in learner.close_step(0) if isinstance(item, Report)]
    metrics = {name: metric.value for name, metric in report.metrics.items()}
    return metrics, torch.cat([x.detach().flatten() for x in policy.parameters()])


def test_a09_the_loss_and_the_update_do_not_depend_on_the_cut() -> None:
    """10/6 in one batch, in two micro-batches, in any order; means of means would be 2, sums of means 4."""
    rows = ((1, 1, 1, 1), (3, 3))
    whole, weights = learnt(rows)
    assert whole["train/policy_loss"] == pytest.approx(10 / 6, abs=1e-9)
    for given, micro in ((rows, 1), (rows[::-1], None), (rows[::-1], 1)):
        metrics, found = learnt(given, micro=micro)
        assert metrics["train/policy_loss"] == pytest.approx(10 / 6, abs=1e-9)
        assert metrics["train/grad_norm"] == pytest.approx(whole["train/grad_norm"], rel=1e-9)
        torch.testing.assert_close(found, weights, atol=1e-12, rtol=1e-12)
    assert whole["train/grad_norm"] > 0


@pytest.mark.parametrize("micro", [None, 1])
def test_a10_a_masked_answer_leaves_numerator_and_denominator(micro: int | None) -> None:
    """4 units of a finished answer, 8 of a cut one that is masked: 4/4, where 4/12 divides by what was masked."""
    answers = ((1,) * 4, (1,) * 8)
    metrics, _ = learnt(answers, mask=[True, False], micro=micro)
    assert metrics["train/policy_loss"] == pytest.approx(1.0, abs=1e-9)
    both, _ = learnt(answers, mask=[True, True], micro=micro)
    assert both["train/policy_loss"] == pytest.approx(1.0, abs=1e-9)
    nothing, weights = learnt(answers, mask=[False, False], micro=micro)
    assert nothing["train/grad_norm"] == 0.0
    assert nothing.get("train/policy_loss", 0.0) == 0.0
    assert weights.isfinite().all()


@pytest.mark.parametrize("micro", [None, 1])
def test_a11_padded_actions_do_not_dilute_the_loss(micro: int | None) -> None:
    """10 actions, 4 executed, loss 2 on each: 2.0, where dividing by 10 gives 0.8. None executed: 0. All: 2.0."""
    metrics, _ = learnt([(2.0,) * 4], chunk=10, micro=micro)
    assert metrics["train/policy_loss"] == pytest.approx(2.0, abs=1e-9)
    full, _ = learnt([(2.0,) * 10], micro=micro)
    assert full["train/policy_loss"] == pytest.approx(2.0, abs=1e-9)
    with pytest.warns(RuntimeWarning, match="no valid step"):
        nothing, weights = learnt([()], chunk=10, micro=micro)
    assert nothing["train/grad_norm"] == 0.0
    assert weights.isfinite().all()


def test_a10_a30_a_run_in_which_everything_is_masked_warns_and_trains_nothing(tmp_path: Path) -> None:
    env = {"name": HERE + "MaskedConfig", "horizon": 10, "dtype": "float64"}
    with pytest.warns(RuntimeWarning, match="no valid step"):
        run = small.train(tmp_path, "run", steps=3, env=env)
    assert status(run)["state"] == "finished"
    for row in run.metrics():
        assert row["train/advantage_mean"] is None or math.isnan(row["train/advantage_mean"])
        assert row.get("train/policy_loss", 0.0) == row["train/grad_norm"] == 0.0
    assert {(alarm["kind"], alarm["step"]) for alarm in alarms(run)} >= {("nothing", 0), ("nothing", 1)}
    assert {alarm["action"] for alarm in alarms(run)} == {"warn"}


# ---- environments


def collected(config: Any, length: int) -> Trajectory:
    """What a real rollout collects on one lane."""
    env = Edited(config, training([0], 0)) if isinstance(config, PathConfig) else config.build([0], 0)
    policy = MLPConfig(hidden=(4,)).build(config.spec(), 0).double()
    service = PolicyService(policy)

    class Handle:
        async def act(self, obs: Any, noise: Any) -> Any:
            return service.act(obs, noise)

    rollout = Rollout(
        envs=[env],
        policy=Handle(),
        join=join(policy.spec, config.spec()),
        acting=Acting(policy.noise, policy.axes, 1, "float64"),
        config=RolloutConfig(lanes=1, length=length),
        seed=0,
    )

    async def first() -> Trajectory:
        async for item in rollout.work([Tick(0, 0)]):
            if isinstance(item, Trajectory):
                return item
        raise AssertionError

    return asyncio.run(first())


class Critic(torch.nn.Module):
    """V(s) is what is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = torch.nn.Linear(1, 1, dtype=torch.float64)

    def value(self, name: str, obs: Any) -> Any:
        return obs["state"]


@pytest.mark.parametrize("autoreset", ["same", "next"])
@pytest.mark.parametrize(
    ("end", "expected"),
    [("terminated", [0.284958, 0.2865, 0.3]), ("truncated", [0.811296, 0.9021, 1.02])],
)
def test_a13_advantages_of_a_rollout_at_a_termination_and_at_a_time_limit(
    autoreset: str, end: str, expected: list[float]
) -> None:
    """Two episodes, whose ends must not see the start of the next one (0.5) but their own last observation (0.8)."""
    gap = [] if autoreset == "same" else [0.0]
    trajectory = collected(PathConfig(end=end, autoreset=autoreset), 2 * (3 + len(gap)))
    objective = PPO(gamma=0.9, gae_lambda=0.95, whiten="none")
    batch, _ = objective.targets(Critic(), trajectory)
    assert batch.columns["advantage"].tolist() == pytest.approx(2 * [*expected, *gap], abs=1e-6)


@pytest.mark.parametrize("autoreset", ["same", "next"])
def test_a14_a_rollout_trains_on_every_initial_state_once_and_on_true_last_observations(autoreset: str) -> None:
    trajectory = collected(CountConfig(every=4, autoreset=autoreset, dtype="float64"), 14)
    used = trajectory.valid[:, 0, 0]
    seen = trajectory.obs["state"][trajectory.obs_at[used, 0]].tolist()
    after = trajectory.obs["state"][trajectory.next_at[used, 0]].tolist()
    starts = [int(episode) for episode, step in seen if step == 0]
    assert starts == list(range(len(starts)))  # a second reset per episode shows 0, 2, 4
    assert len(starts) == (4 if autoreset == "same" else 3)
    assert seen == [[i // 4, i % 4] for i in range(len(seen))]
    assert after == [[i // 4, i % 4 + 1] for i in range(len(seen))]
    assert trajectory.terminated[used, 0].tolist() == [i % 4 == 3 for i in range(len(seen))]


# ---- evaluation

EVALUATORS = {
    "one": "collocated",
    "two": {
        "places": {
            "rollout": small.place("cpu:0-1"),
            "policy": small.place("cpu:0-1"),
            "learner": small.place("cpu:0-1"),
            "evaluator": small.place("cpu:0-1", 2),
        },
        "shifts": [["rollout"], ["learner"], ["evaluator"]],
    },
}


def test_a15_a_run_evaluates_each_seed_once_whoever_does_it(tmp_path: Path) -> None:
    found = []
    for name, plan in EVALUATORS.items():
        run = small.train(tmp_path, name, steps=1, plan=plan, evaluation={"seeds": 13, "lanes": 3})
        for evaluation in run.evaluations():
            assert [episode["seed"] for episode in evaluation.episodes] == list(range(1_000_000, 1_000_013))
        found.append([(e.metrics, [episode["ret"] for episode in e.episodes]) for e in run.evaluations()])
    assert found[0] == found[1]


def test_a16_a_run_that_evaluates_trains_as_one_that_does_not(tmp_path: Path) -> None:
    """Bit by bit, with a sampling policy in the evaluations and running statistics in training."""
    plain = small.train(tmp_path, "plain")
    watched = small.train(tmp_path, "watched", evaluation={"seeds": 5, "every": 1, "deterministic": False})
    assert len(watched.evaluations()) == 5
    ours, theirs = ([r for r in small.numbers(run) if "train/grad_norm" in r] for run in (plain, watched))
    assert len(ours) == len(theirs) == 4
    for a, b in zip(ours, theirs, strict=True):
        assert a == {name: value for name, value in b.items() if not name.startswith("eval/")}


# ---- checkpoints and resume


@pytest.mark.parametrize("plan", ["collocated", "disaggregated"])
def test_a18_a_resumed_run_is_given_the_samples_it_would_have_had(tmp_path: Path, plan: str) -> None:
    """12 steps at once, and 7 + 5 (in other processes where the plan has some): episodes, lanes, noise (the actions
    drawn), observations and the order of the minibatches of every step are the same."""
    seen = {}
    for name, steps in (("whole", 12), ("parts", 7)):
        folder = tmp_path / f"{name}_samples"
        folder.mkdir()
        objective = {"name": HERE + "TellingPPO", "folder": str(folder), "critic_hidden": [8]}
        run = small.train(
            tmp_path, name, plan=small.PLANS[plan], objective=objective, steps=steps, checkpoint={"every": 1}
        )
        if steps < 12:
            m2flow.resume(run, steps=12, quiet=True)
        seen[name] = folder
    for step in range(12):
        with np.load(seen["whole"] / f"step_{step}.npz") as a, np.load(seen["parts"] / f"step_{step}.npz") as b:
            assert set(a) == set(b)
            for column in a:
                np.testing.assert_array_equal(a[column], b[column], err_msg=f"step {step} {column}")
    assert told(seen["whole"], "minibatches") == told(seen["parts"], "minibatches")
    with np.load(seen["whole"] / "step_11.npz") as last, np.load(seen["whole"] / "step_6.npz") as before:
        assert last["episode"].min() > before["episode"].min()  # data moves on
        assert not np.array_equal(last["action"], before["action"])


def test_a19_a_full_disk_ends_the_run_and_the_checkpoint_before_it_continues_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    whole = small.train(tmp_path, "whole", steps=6, checkpoint={"every": 2, "keep": 1})
    save, place = safetensors.torch.save_file, tmp_path / "run"

    def full(tensors: Any, file: Any, *rest: Any) -> None:
        if "step_000004" in str(file):
            Path(file).write_bytes(b"half of it")
            raise OSError(28, "No space left on device")
        save(tensors, file, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", full)
        with pytest.raises(Exception, match="No space left on device"):
            small.train(tmp_path, "run", steps=6, checkpoint={"every": 2, "keep": 1})
    assert list(Run(place).recipe.checkpoint.build(place / "checkpoints").steps()) == [2]
    resumed = m2flow.resume(place, quiet=True)
    assert small.numbers(resumed) == small.numbers(whole)


# ---- configuration


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"rollout": {"lanes": 32}, "plan": small.plan(small.place("cpu:0-1", 64), small.place("cpu:0-1"))},
            "32 lanes.*64 replicas",
        ),
        ({"rollout": {"lanes": 8, "length": 125}, "learner": {"minibatch": 256}}, "256 does not divide.*250, 500"),
        ({"learner": {"minibatch": 32, "microbatch": 64}}, "microbatch: 64 exceeds minibatch 32"),
        ({"env": {"name": "point_reach", "subset": "easy"}}, "env.subset: unknown key"),
        ({"trainer": {"name": "torch", "lerning_rate": 1e-3}}, "trainer.lerning_rate.*did you mean 'learning_rate'"),
        ({"objective": {"name": "ppo", "clip_ratio_c": 3.0}}, "objective.clip_ratio_c: unknown key"),
        ({"objective": {"name": "ppo", "gamma": 1.5}}, "objective.gamma: 1.5"),
        ({"objective": {"name": "grpo"}, "rollout": {"lanes": 4, "length": 20}, "learner": {}}, "rollout.group"),
    ],
)
def test_a20_a_wrong_recipe_is_refused_before_anything_starts(tmp_path: Path, changes: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        small.train(tmp_path, "run", **changes)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("every", [0, -1])
def test_a20_save_interval_zero_or_less_saves_at_the_end_of_the_run_only(tmp_path: Path, every: int) -> None:
    run = small.train(tmp_path, "run", steps=3, checkpoint={"every": every, "keep": None})
    assert list(run.recipe.checkpoint.build(run.folder.checkpoints).steps()) == [3]


def test_a20_seed_null_is_drawn_stored_and_used_again_by_resume(tmp_path: Path) -> None:
    run = small.train(tmp_path, "run", seed=None, steps=1)
    drawn = run.recipe.seed
    assert isinstance(drawn, int)
    resumed = m2flow.resume(run, steps=2, quiet=True)
    assert resumed.recipe.seed == drawn
    assert small.numbers(resumed) == small.numbers(small.train(tmp_path, "again", seed=drawn, steps=2))


# ---- temperature


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a28_the_first_ratio_is_one_at_any_temperature(tmp_path: Path, dtype: str) -> None:
    """A real policy acts in a run, and its recorded log-probs meet those of learner and reference. Its logits are
    large, so a side that forgot the temperature would be off by nats."""
    entropies = []
    for temperature in (0.5, 1.0, 2.0):
        folder = tmp_path / f"told_{temperature}"
        folder.mkdir()
        run = small.train(
            tmp_path,
            f"run_{temperature}",
            env={"name": "bandit", "horizon": 4, "dtype": dtype},
            policy={"name": "mlp", "hidden": [8], "temperature": temperature, "output_gain": 3.0},
            objective={"name": HERE + "TellingPPO", "folder": str(folder), "kl": "k3", "kl_coef": 0.1},
            trainer={"name": "torch", "dtype": dtype},
            learner={"epochs": 1},
        )
        ratios = told(folder, "ratios")
        assert len(ratios) == 4
        assert max(now for now, _ in ratios) < 1e-5
        assert ratios[0][1] < 1e-5  # the reference is the policy of the start
        rows = run.metrics()
        assert max(row["train/logprob_gap"] for row in rows) < 1e-5
        entropies.append(rows[0]["train/entropy"])
    assert entropies[0] + 0.05 < entropies[1] < entropies[2] - 0.05


# ---- rows that are written


def strictly(text: str) -> Any:
    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_a29_numpy_numbers_and_lists_in_a_recipe_are_written_as_json(tmp_path: Path) -> None:
    """Seeds, rates and counts as a script computes them; every line of every file of the run is valid JSON."""
    evaluation = {"seed_list": np.array([9, 4, 7]), "every": 1, "traces": np.int64(2)}
    trainer = {"name": "torch", "learning_rate": np.float32(0.125), "dtype": "float64"}
    run = small.train(tmp_path, "run", steps=np.int64(2), evaluation=evaluation, trainer=trainer)
    assert run.recipe.evaluation.seed_list == (9, 4, 7)
    assert read_json(run.folder.config)["trainer"]["learning_rate"] == 0.125
    assert [episode["seed"] for episode in run.evaluations()[-1].episodes] == [9, 4, 7]
    files = [*run.path.rglob("*.json"), *run.path.rglob("*.jsonl")]
    assert len(files) > 5
    for file in files:
        text = file.read_text()
        for part in text.splitlines() if file.suffix == ".jsonl" else [text]:
            strictly(part)


def test_a29_an_evaluation_made_of_numpy_values_is_stored_as_json(tmp_path: Path) -> None:
    """What an environment of somebody else may hand on: numpy numbers, flags and arrays, and one that is not finite."""
    seeds = np.array([3, 5])
    episodes = [
        EpisodeResult(
            seed=seed,
            lane=np.int64(lane),
            length=np.int32(2),
            ret=np.float32(0.5 * lane),
            success_once=np.bool_(lane == 0),
            success_at_end=np.bool_(False),
            info={"force": np.float32(np.inf)},
            steps={"reward": np.array([0.25, 0.25], np.float32)},
        )
        for lane, seed in enumerate(seeds)
    ]
    protocol = EvalProtocol("toy", {"size": np.float32(0.5), "shape": np.arange(2)}, tuple(seeds.tolist()), horizon=2)
    row = strictly(write_json(tmp_path / "found.json", summarise(4, protocol, episodes)).read_text())
    assert [episode["seed"] for episode in row["episodes"]] == [3, 5]
    assert row["episodes"][1]["ret"] == 0.5
    assert row["episodes"][0]["steps"] == {"reward": [0.25, 0.25]}
    assert row["episodes"][0]["info"] == {"force": "Infinity"}
    assert row["metrics"]["eval/success_once"] == 0.5
    assert row["metrics"]["eval/return"] == 0.25


# ---- nothing left to train on


@pytest.mark.parametrize(
    ("scores", "counts"),
    [
        ((1, 1, 0, 0, 0, 0, 0.5, 0.5), {"all_right": 2, "all_wrong": 4, "all_equal": 2, "kept": 0}),
        ((1, 1, 1, 1, 1, 1, 1, 1), {"all_right": 8, "all_wrong": 0, "all_equal": 0, "kept": 0}),
    ],
)
def test_a30_a_run_whose_groups_are_all_dead_stops_after_the_limit_and_counts_them(
    tmp_path: Path, scores: tuple[float, ...], counts: dict[str, int]
) -> None:
    """4 groups of 2 lanes, 2 episodes each: 8 groups a step. The limit is that of `alarms.no_signal_steps`, 10."""
    env = {"name": HERE + "ScoredConfig", "horizon": 10, "dtype": "float64", "scores": list(scores)}
    run = small.train(tmp_path, "run", **GROUPED, env=env, steps=30)
    said = status(run)
    assert (said["state"], said["step"]) == ("stopped", 10)
    assert said["reason"].startswith("alarm no_signal")
    assert run.alarmed
    rows = run.metrics()
    assert len(rows) == 10
    for row in rows:
        assert row["train/dead_groups"] == 1.0
        assert {name: row[f"train/groups_{name}"] for name in counts} == counts
        assert row["train/grad_norm"] == 0.0
    for name, number in counts.items():
        assert f"{number} {name.replace('_', ' ')}" in said["reason"]
    assert "alarms.no_signal: stop" in said["reason"]  # the policy that was chosen


def test_a30_one_living_group_keeps_a_run_going(tmp_path: Path) -> None:
    env = {"name": HERE + "ScoredConfig", "horizon": 10, "dtype": "float64", "scores": [1, 0, 0, 0, 0, 0, 1, 1]}
    run = small.train(tmp_path, "run", **GROUPED, env=env, steps=12)
    assert status(run)["state"] == "finished"
    for row in run.metrics():
        assert row["train/dead_groups"] == 0.75
        assert (row["train/groups_kept"], row["train/groups_all_right"], row["train/groups_all_wrong"]) == (2, 2, 4)
        assert row["train/grad_norm"] > 0
