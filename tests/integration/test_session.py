"""A whole run: what is recorded, why it stops, what it leaves behind."""

from __future__ import annotations

import fnmatch
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import m2flow
from m2flow.api import Run
from m2flow.backends import checkpoint
from m2flow.build import saved_step
from m2flow.config import load
from m2flow.observe import alarms
from m2flow.observe.jsonl import rows
from m2flow.observe.layout import RunFolder, read_json, write_json
from m2flow.observe.progress import Progress
from m2flow.observe.rundata import load_run
from m2flow.runtime.failures import RunFailed
from m2flow.session import Session, entries_per_unit, terminable
from m2flow.types import Field, Spec
from tests.integration import small, small_text
from tests.integration.test_laws import assert_same

REACH = {
    "env": {"name": "point_reach"},
    "policy": {"name": "mlp", "hidden": [32, 32], "log_std_init": -0.5},
    "objective": {"name": "ppo", "gamma": 0.95, "value_coef": 0.5},
    "trainer": {"name": "torch", "learning_rate": 1e-3},
    "rollout": {"lanes": 16, "length": 80},
    "learner": {"epochs": 8, "minibatch": 320},
    "seed": 0,
}


SAC: dict[str, Any] = {
    "flow": "offpolicy",
    "policy": {"name": "mlp", "hidden": [8], "dist": "squashed"},
    "objective": {"name": "sac", "critic_hidden": [8]},
    "rollout": {"lanes": 2, "length": 8},
    "learner": {},
    "replay": {"batch": 16, "capacity": 40, "start": 16},
}


FLOW = {"name": "flow", "chunk": 2, "steps": 8}


def status(run: Run | Path) -> dict[str, Any]:
    return read_json(RunFolder(run.path if isinstance(run, Run) else run).status)


def test_ppo_learns_and_the_folder_tells_it(tmp_path: Path) -> None:
    run = small.train(
        tmp_path, "run", **REACH, steps=25, evaluation={"seeds": 20, "videos": 1}, observe={"recorders": []}
    )
    before, after = run.evaluations()
    assert before.metrics["eval/success_once"] <= 0.2
    assert after.metrics["eval/success_once"] >= 0.9
    assert after.protocol["seeds"] == list(range(1_000_000, 1_000_020))
    assert status(run)["state"] == "finished"
    folder = run.folder
    assert read_json(folder.env)["seeds"] == {"run": 0}
    assert "torch" in read_json(folder.env)["packages"]
    assert json.loads(folder.chrome_trace.read_text())["traceEvents"]
    assert len(list(folder.videos.glob("*.mp4"))) == 2, "one before, one after"
    assert "<html" in folder.report.read_text()
    assert m2flow.show(run.path)
    again = m2flow.evaluate(run)
    assert again.metrics == after.metrics, "evaluating the checkpoint gives the number of the run"
    [name] = run.policy().spec.observation
    state = np.array([[0.4, 0.4, 0.0, 0.0][: run.policy().spec.observation[name].size]] * 3)
    decided = run.policy(step=25).act({name: state}, None).action
    assert decided.shape[:2] == (3, 1)
    np.testing.assert_array_equal(decided[0], decided[2])


def test_sac_learns_through_the_replay_channel(tmp_path: Path) -> None:
    run = small.train(
        tmp_path,
        "run",
        flow="offpolicy",
        seed=0,
        steps=60,
        env={"name": "point_reach"},
        policy={"name": "mlp", "hidden": [32, 32], "activation": "relu", "dist": "squashed"},
        objective={"name": "sac", "gamma": 0.9, "critic_hidden": [32, 32], "initial_temperature": 0.1},
        trainer={"name": "torch", "learning_rate": 3e-3},
        rollout={"lanes": 4, "length": 8},
        learner={},
        replay={"batch": 128, "capacity": 10000, "start": 128},
        evaluation={"seeds": 20},
    )
    before, after = run.evaluations()
    assert before.metrics["eval/success_once"] <= 0.3
    assert after.metrics["eval/success_once"] >= 0.9


def test_sac_works_with_one_critic(tmp_path: Path) -> None:
    how = SAC | {"objective": {"name": "sac", "critic_hidden": [8], "critics": 1}}
    assert all(row["train/samples"] > 0 for row in small.train(tmp_path, "run", **how, steps=4).metrics()[2:])


def test_weights_that_are_not_finite_end_the_run_and_are_not_saved(tmp_path: Path) -> None:
    """The gradient is fine, what the last update of the step makes of it is not."""
    trainer = {"name": "torch", "dtype": "float32", "optimizer": "adamw", "weight_decay": 1e30, "learning_rate": 1e10}
    env = {"name": "point_reach", "horizon": 10}
    with pytest.raises(RunFailed, match="is not finite .* look at the learning rate and weight decay"):
        small.train(tmp_path, "run", env=env, trainer=trainer, learner={"epochs": 1}, steps=1, checkpoint={"every": 1})
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))


def test_a_folder_that_is_deleted_while_it_trains_ends_the_run(tmp_path: Path) -> None:
    def delete() -> None:
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            time.sleep(0.02)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)

    threading.Thread(target=delete, daemon=True).start()
    with pytest.raises(FileNotFoundError, match="deleted while it trained"):
        small.train(tmp_path, "run", steps=100000)


def test_sac_resume_is_exact_with_its_replay(tmp_path: Path) -> None:
    whole = small.train(tmp_path, "whole", **SAC, steps=6, checkpoint={"every": 3})
    first = small.train(tmp_path, "parts", **SAC, steps=3, checkpoint={"every": 3})
    resumed = m2flow.resume(first, steps=6, quiet=True)
    assert small.numbers(resumed) == small.numbers(whole)


def test_flow_policy_with_chunks_trains_and_is_scored_right(tmp_path: Path) -> None:
    run = small.train(tmp_path, "run", policy={"name": "flow", "hidden": [8], "chunk": 3, "steps": 2})
    rows = run.metrics()
    assert max(row["train/logprob_gap"] for row in rows) < 1e-9
    assert all(row["rollout/env_steps"] > 64 for row in rows), "every decision takes up to three environment steps"


def test_stale_data_is_stamped_and_decoupled_ppo_takes_it(tmp_path: Path) -> None:
    plan = small.plan(small.place("cpu:0", process=True), small.place("cpu:1", process=True), lag=1)
    run = small.train(tmp_path, "run", plan=plan, objective={"name": "ppo", "decoupled": True}, steps=8)
    assert len(run.metrics()) == 8
    assert all(np.isfinite(row["train/policy_loss"]) for row in run.metrics())


def test_the_shipped_plan_with_lag_trains_on_stale_data_and_learns(tmp_path: Path) -> None:
    """Two processes; the rollout of a step runs while the learner trains on the one before it."""
    settings = REACH | {"objective": {**REACH["objective"], "decoupled": True}, "plan": "plans/split_two_cores.yaml"}
    run = small.train(tmp_path, "run", **settings, steps=30, evaluation={"seeds": 20, "every": 10})
    assert status(run)["state"] == "finished"
    ages = [row["train/staleness"] for row in run.metrics() if "train/staleness" in row]
    assert len(ages) == 30
    assert ages[0] == ages[10] == 0.0, "an evaluation waits for the newest weights, and so does the step after it"
    assert 0.0 < max(ages) <= 1.0
    before, *_, after = run.evaluations()
    assert before.metrics["eval/success_once"] <= 0.2
    assert after.metrics["eval/success_once"] >= 0.8


def test_early_stop_at_a_threshold_keeps_the_checkpoint(tmp_path: Path) -> None:
    run = small.train(
        tmp_path,
        "run",
        **REACH,
        steps=60,
        evaluation={"seeds": 20, "every": 5},
        early_stop={"metric": "eval/success_once", "threshold": 0.8},
    )
    said = status(run)
    assert said["state"] == "stopped"
    assert "eval/success_once reached" in said["reason"]
    assert 0 < said["step"] < 60
    assert list(run.recipe.checkpoint.build(run.folder.checkpoints).steps())[-1] == said["step"]


def test_best_checkpoint_survives_keep_one(tmp_path: Path) -> None:
    run = small.train(
        tmp_path,
        "run",
        **REACH,
        steps=12,
        evaluation={"seeds": 10, "every": 2},
        checkpoint={"every": 2, "keep": 1, "best_metric": "eval/return"},
    )
    store = run.recipe.checkpoint.build(run.folder.checkpoints)
    returns = {item.step: item.metrics["eval/return"] for item in run.evaluations() if item.step > 0}
    best = max(returns, key=lambda step: (returns[step], step))
    assert store.best() == best
    assert set(store.steps()) == {best, 12}


def test_a_policy_that_scores_wrongly_is_stopped_at_the_first_step(tmp_path: Path) -> None:
    run = small.train(tmp_path, "run", policy={"name": "tests.integration.parts:LyingConfig", "hidden": [8]})
    said = status(run)
    assert said["state"] == "stopped"
    assert said["step"] == 1
    assert "logprob_gap" in said["reason"]
    assert run.alarmed


def test_a_loss_that_is_no_number_stops_the_run_and_the_last_good_checkpoint_stays_the_latest(tmp_path: Path) -> None:
    objective = {"name": "tests.integration.parts:Poisoned", "critic_hidden": [8], "from_step": 3}
    run = small.train(tmp_path, "run", objective=objective, steps=9, checkpoint={"every": 2})
    said = status(run)
    assert (said["state"], said["step"]) == ("stopped", 4), "step 3, the fourth, is the first with a loss that is none"
    assert "alarm non_finite: train/poison_loss is nan" in said["reason"]
    assert run.alarmed
    assert list(run.recipe.checkpoint.build(run.folder.checkpoints).steps()) == [2]


def test_a_gradient_that_is_no_number_fails_the_run_before_the_weights_move(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="finite"):
        small.train(tmp_path, "run", trainer={"name": "torch", "optimizer": "sgd", "learning_rate": 1e30}, steps=9)
    assert status(tmp_path / "run")["state"] == "failed"
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))


def test_an_environment_that_fails_fails_the_run_with_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="the motor is on fire"):
        small.train(tmp_path, "run", env={"name": "tests.integration.parts:BurningConfig"})
    said = status(tmp_path / "run")
    assert said["state"] == "failed"
    assert "the motor is on fire" in said["error"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_with_130_and_a_run_that_can_be_resumed(tmp_path: Path, number: int) -> None:
    recipe = tmp_path / "recipe.yaml"
    from m2flow.config import to_yaml

    recipe.write_text(to_yaml(small.recipe(steps=100000, checkpoint={"every": 1, "keep": 1})))
    command = [sys.executable, "-m", "m2flow.cli", "train", str(recipe), "--run-dir", str(tmp_path / "run")]
    # A background job of a shell starts with SIGINT ignored, and so would its children.
    child = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    )
    checkpoints = tmp_path / "run" / "checkpoints"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list(checkpoints.glob("step_*")):
        time.sleep(0.05)
    while time.monotonic() < deadline and status(tmp_path / "run")["step"] == 0:
        time.sleep(0.05)
    assert status(tmp_path / "run")["state"] == "running"
    assert status(tmp_path / "run")["step"] > 0, "the status follows the run"
    with pytest.raises(ValueError, match="is still running as process"):
        m2flow.resume(tmp_path / "run", quiet=True)
    child.send_signal(number)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130, said
    assert status(tmp_path / "run")["state"] == "stopped"
    done = saved_step(Run(tmp_path / "run").recipe.checkpoint.build(checkpoints))
    assert f"m2flow resume {tmp_path / 'run'}` continues it after step {done}" in status(tmp_path / "run")["reason"]
    resumed = m2flow.resume(tmp_path / "run", steps=done + 1, quiet=True)
    assert status(resumed)["state"] == "finished"


def test_an_interrupt_before_the_first_checkpoint_says_that_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt, match="no checkpoint yet, so it cannot be resumed"):
        small.train(tmp_path, "run", env={"name": "tests.integration.parts:InterruptingConfig"})
    said = status(tmp_path / "run")
    assert said["state"] == "stopped"
    assert said["reason"].startswith("ended by SIGTERM; ")


@pytest.fixture
def pressed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, int]]:
    """Step -> how often Ctrl-C is pressed while it is being told."""
    presses: dict[int, int] = {}
    told = Session._on_step

    def telling(self: Session, step: int, said: Any) -> Any:
        for _ in range(presses.get(step, 0)):
            signal.raise_signal(signal.SIGINT)
        return told(self, step, said)

    monkeypatch.setattr(Session, "_on_step", telling)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    yield presses
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_finishes_the_step_and_saves_it(
    tmp_path: Path, pressed: dict[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    straight = small.train(tmp_path, "straight")
    pressed[2] = 1
    with pytest.raises(KeyboardInterrupt, match=r"interrupted; `m2flow resume .*run` continues it after step 3$"):
        small.train(tmp_path, "run")
    assert "the step at work is finished and saved; press Ctrl-C again to end now" in capsys.readouterr().err
    said = status(tmp_path / "run")
    assert (said["state"], said["step"]) == ("stopped", 3)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    pressed.clear()
    run = m2flow.resume(tmp_path / "run", quiet=True)
    assert_same(run, straight, 0.0)
    assert status(run)["state"] == "finished"


@pytest.mark.parametrize(
    ("presses", "every", "said"),
    [
        (2, 0, "no checkpoint yet, so it cannot be resumed, and 2 step"),  # in a hurry
        (2, 1, "continues it after step 2$"),
        (1, 2, "continues it after step 2$"),  # nothing to lose but the step at work
        (2, 2, "continues it after step 2$"),
    ],
)
def test_a_second_ctrl_c_or_one_with_nothing_to_lose_ends_at_once(
    tmp_path: Path, pressed: dict[int, int], presses: int, every: int, said: str
) -> None:
    pressed[2] = presses
    with pytest.raises(KeyboardInterrupt, match=said):
        small.train(tmp_path, "run", checkpoint={"every": every})
    assert status(tmp_path / "run")["step"] == 2


def test_ctrl_c_in_the_last_step_lets_the_run_finish(tmp_path: Path, pressed: dict[int, int]) -> None:
    pressed[3] = 1
    assert status(small.train(tmp_path, "run"))["state"] == "finished"


@pytest.mark.parametrize("quiet", [False, True])
def test_what_check_notes_is_told_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    place = small.place("cpu:0")
    plan = small.plan(place, place, **small.TURNS)
    recipe = small.recipe(steps=2, plan={**plan, "places": {**plan["places"], "evaluator": place}})
    (note,) = m2flow.check(recipe).notes
    run = m2flow.train(recipe, run_dir=tmp_path / "run", quiet=quiet)
    m2flow.resume(run, steps=3, quiet=quiet)
    told = capsys.readouterr().err
    assert told.count(f"note: {note}\n") == (0 if quiet else 2)
    assert quiet or told.index("note: ") < told.index("step 2/2")


def test_a_recorder_that_cannot_be_closed_does_not_hide_how_the_run_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    observe = {"recorders": ["tests.integration.parts:Clinging"], "report": False}
    run = small.train(tmp_path, "whole", observe=observe)
    assert status(run)["state"] == "finished"
    assert "OSError: the tracker hung up" in "".join(capsys.readouterr())
    assert json.loads(run.folder.chrome_trace.read_text())["traceEvents"], "what is closed after it is whole"
    with pytest.raises(RunFailed, match="the motor is on fire"):
        small.train(tmp_path, "burnt", observe=observe, env={"name": "tests.integration.parts:BurningConfig"})
    assert status(tmp_path / "burnt")["state"] == "failed"


def test_what_the_process_was_told_to_ignore_stays_ignored() -> None:
    """`nohup m2flow train ...` lives on after the terminal is gone."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminable():
            signal.raise_signal(signal.SIGHUP)
            with pytest.raises(KeyboardInterrupt, match="ended by SIGTERM"):
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_quiet_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("m2flow.session.Progress", partial(Progress, every_s=0.0))
    small.train(tmp_path, "run", evaluation={"seeds": 2})
    assert capsys.readouterr() == ("", "")


def test_a_resumed_run_counts_the_time_it_worked(tmp_path: Path) -> None:
    first = small.train(tmp_path, "run", steps=2)
    worked = load_run(first.path).seconds
    aged = status(first) | {"started": status(first)["started"] - 86400.0}
    write_json(first.folder.status, aged)
    resumed = m2flow.resume(first, steps=3, quiet=True)
    assert status(resumed)["started"] == aged["started"]
    assert worked < load_run(resumed.path).seconds < 3600.0


@pytest.mark.parametrize(
    ("action", "settings", "entries"),
    [
        (Field((3,)), {"policy": {"name": "mlp", "chunk": 2}}, 6),
        (Field((3,)), {"policy": {"name": "mlp", "chunk": 2}, "objective": {"name": "ppo", "level": "action"}}, 3),
        (Field((3,)), {"policy": {"name": "mlp", "chunk": 2}, "objective": {"name": "ppo", "level": "token"}}, 1),
        (Field((3,)), {"policy": {"name": "mlp", "chunk": 2}, "objective": {"name": "ppo", "level": "sequence"}}, 1),
        (Field((), "int64", categories=4), {}, 1),
        (Field((3,), low=-1.0, high=1.0), SAC, 3),
        (Field((3,)), {"policy": FLOW}, 48),
        (Field((3,)), {"policy": FLOW, "objective": {"name": "ppo", "level": "action"}}, 24),
        (Field((3,)), {"policy": FLOW, "objective": {"name": "ppo", "level": "token"}}, 1),
    ],
)
def test_the_entropy_floor_counts_what_the_objective_counts(
    action: Field, settings: dict[str, Any], entries: int
) -> None:
    recipe = load(small.recipe(**settings))
    policy = recipe.policy.build(Spec({"x": Field((2,))}, action), 0)
    assert entries_per_unit(recipe.objective, policy) == entries


@pytest.mark.parametrize(("std", "told"), [(0.1, False), (0.0005, True)])
def test_every_denoising_step_may_explore_as_little_as_its_deviation(tmp_path: Path, std: float, told: bool) -> None:
    policy = {"name": "flow", "hidden": [8], "steps": 8, "std": std, "learn_std": False}
    run = small.train(tmp_path, "run", policy=policy, steps=1)
    assert ("entropy" in [row["kind"] for row in rows(run.folder.alarms)]) == told


@pytest.mark.parametrize(("log_std", "told"), [(-0.5, False), (-7.5, True)])
def test_a_gaussian_policy_that_does_not_explore_is_told_of(tmp_path: Path, log_std: float, told: bool) -> None:
    policy = {"name": "mlp", "hidden": [8], "chunk": 2, "log_std_init": log_std}
    run = small.train(tmp_path, "run", policy=policy, steps=1)
    assert ("entropy" in [row["kind"] for row in rows(run.folder.alarms)]) == told


def test_every_alarm_watches_something_that_a_run_writes(tmp_path: Path) -> None:
    grpo = {
        "objective": {"name": "grpo"},
        "rollout": {"lanes": 4, "length": 10, "group": 2},
        "learner": {"epochs": 1},
        "reward": {"name": "function", "function": "m2flow.rewards.episode:success"},
    }
    written: set[str] = set()
    for number, settings in enumerate(({}, grpo, SAC)):
        run = small.train(tmp_path, f"run-{number}", steps=2, evaluation={"seeds": 2}, **settings)
        written |= {name for row in run.metrics() for name in row}
    text = small_text.train(tmp_path, "text", steps=1, reward={"name": "math"})
    written |= {name for row in text.metrics() for name in row}
    rules = alarms.AlarmConfig().build(floor=0.0).rules
    deaf = {p for rule in rules for p in rule.patterns if not any(fnmatch.fnmatchcase(name, p) for name in written)}
    assert not deaf, f"nobody writes what these alarms read: {sorted(deaf)}"


def test_grpo_learns_from_groups_that_start_alike(tmp_path: Path) -> None:
    settings = REACH | {
        "objective": {"name": "grpo"},
        "rollout": {"lanes": 32, "length": 40, "group": 8},
        "learner": {"epochs": 4, "minibatch": 640},
    }
    run = small.train(tmp_path, "run", **settings, steps=40, evaluation={"seeds": 20})
    before, after = run.evaluations()
    assert before.metrics["eval/success_once"] <= 0.2
    assert after.metrics["eval/success_once"] >= 0.8


def test_a07_a_group_of_one_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rollout.group.*compares attempts"):
        small.train(tmp_path, "run", objective={"name": "grpo"})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"learner": {"devices": "cpu:0-1", "replicas": 2}}, "learner: sends weights, so it runs as one replica"),
        ({"learner": {"devices": "cpu:0-1", "ranks": 2}}, "learner: asks for 2 ranks"),
    ],
)
def test_what_the_local_runtime_cannot_run_is_refused(tmp_path: Path, plan: dict[str, Any], said: str) -> None:
    places = {"rollout": small.place("cpu:0-1"), "policy": small.place("cpu:0-1")} | plan
    with pytest.raises(ValueError, match=said):
        small.train(tmp_path, "run", plan={"places": places, "shifts": [["rollout", "policy"], ["learner"]]})
    assert not m2flow.check(small.recipe(plan={"places": places, "shifts": [["rollout", "policy"], ["learner"]]})).ok


def test_more_sub_batches_than_lanes_are_refused(tmp_path: Path) -> None:
    plan = small.plan(small.place("cpu:0-1"), small.place("cpu:0-1"), sub_batches={"rollout->policy": 5}, **small.TURNS)
    with pytest.raises(ValueError, match="5 sub-batch"):
        small.train(tmp_path, "run", plan=plan)
    assert not (tmp_path / "run").exists()


def test_a_damaged_checkpoint_is_named_and_an_earlier_one_continues_the_run(tmp_path: Path) -> None:
    every = {"checkpoint": {"every": 2, "keep": None}, "evaluation": {"seeds": 2, "every": 3}}
    whole = small.train(tmp_path, "whole", **every, steps=6)
    run = small.train(tmp_path, "run", **every, steps=4)
    file = run.folder.checkpoints / "step_000004" / "arrays.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    before = run.metrics()
    with pytest.raises(ValueError, match="is damaged .*load another step"):
        m2flow.resume(run, steps=6, quiet=True)
    assert run.metrics() == before, "nothing was touched"
    assert run.recipe.steps == 4
    resumed = m2flow.resume(run, steps=6, step=2, quiet=True)
    assert small.numbers(resumed) == small.numbers(whole)
    assert [found.step for found in resumed.evaluations()] == [0, 3, 6], "that of step 4 was the end of another past"
    with pytest.raises(FileNotFoundError, match="no complete checkpoint of step 5"):
        m2flow.resume(run, steps=8, step=5, quiet=True)


def test_an_interrupt_after_an_earlier_step_was_resumed_says_which_to_resume(tmp_path: Path) -> None:
    run = small.train(tmp_path, "run", steps=4, checkpoint={"every": 2})
    recipe = read_json(run.folder.config)
    recipe["env"] |= {"name": "tests.integration.parts:InterruptingConfig"}
    write_json(run.folder.config, recipe)
    with pytest.raises(KeyboardInterrupt, match=r"run --step 2` continues it after step 2"):
        m2flow.resume(run, steps=6, step=2, quiet=True)
    assert run.recipe.steps == 4, "no step was taken, so nothing has changed"


def test_a_checkpoint_is_read_once_for_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small.train(tmp_path, "run", steps=2)
    read, seen = checkpoint.read, []
    monkeypatch.setattr(checkpoint, "read", lambda place: seen.append(place.name) or read(place))
    m2flow.resume(run, steps=3, quiet=True)
    assert seen == ["step_000002"]


def test_a_run_goes_on_under_another_plan(tmp_path: Path) -> None:
    whole = small.train(tmp_path, "whole", steps=4)
    run = small.train(tmp_path, "run", steps=2)
    with pytest.raises(ValueError, match="resume with as many replicas of each node as the run had"):
        m2flow.resume(run, steps=4, plan="plans/two_rollouts.yaml", quiet=True)
    assert run.recipe.plan == "collocated", "a plan that does not fit is not kept"
    resumed = m2flow.resume(run, steps=4, plan="disaggregated", quiet=True)
    assert resumed.recipe.plan == "disaggregated"
    assert_same(resumed, whole, 1e-9)
