"""Faults of a recipe that are easy to make and hard to see: misplaced keys, NaN, files that are no recipe."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from m2flow import config
from m2flow.config import ConfigError
from m2flow.envs.toy import PointReachConfig

START: dict[str, Any] = {"env": "point_reach", "policy": "mlp", "objective": "ppo"}


def refused(source: Any, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config.load(source, *overrides)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(caught.value.problems) + 1, "a line for each problem"
    return [line.strip() for line in lines[1:]]


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("lerning_rate=1e-3", "did you mean 'trainer.learning_rate'?"),
        ("learning_rate=1e-3", "did you mean 'trainer.learning_rate'?"),
        ("trainer.lerning_rate=1e-3", "did you mean 'learning_rate'?"),
        ("stepz=3", "did you mean 'steps'?"),
        ("rollout.minibatch=3", "did you mean 'learner.minibatch'?"),
        ("lanes=8", "did you mean 'rollout.lanes' or 'evaluation.lanes'?"),
        ("capacity=8", "did you mean 'replay.capacity'?"),
        ("speed=1", "did you mean 'env.speed'?"),
        ("trainr.learning_rate=1", "did you mean 'trainer'?"),
    ],
)
def test_a20_a_misspelt_or_misplaced_key_is_answered_with_the_nearest_wherever_it_lives(
    override: str, hint: str
) -> None:
    (line,) = refused(START, override)
    assert f"unknown key; {hint} (keys of " in line


def test_a_key_like_no_other_gets_no_suggestion() -> None:
    assert "unknown key (keys of Recipe" in refused(START, "qqq=1")[0]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("env.speed=.nan", "env.speed"),
        ("policy.log_std_init=.nan", "policy.log_std_init"),
        ("policy.log_std_bounds=[.nan, 1]", "policy.log_std_bounds.0"),
        ("trainer.group_learning_rates={all: .nan}", "trainer.group_learning_rates.all"),
        ("early_stop={metric: eval/return, threshold: .nan}", "early_stop.threshold"),
        ("trainer.weight_decay=nan", "trainer.weight_decay"),
    ],
)
def test_nan_is_refused_wherever_it_stands(override: str, key: str) -> None:
    lines = refused({**START, "evaluation": {"every": 1}}, override)
    assert [line.partition(" ")[0] for line in lines] == [key]
    assert "is NaN, which is no number" in lines[0]


@pytest.mark.parametrize(
    "override",
    ["objective.reward_scale=.inf", "objective.value_coef=1e400", "policy.log_std_init=-.inf", "stall_limit=.inf",
     "policy.std_schedule=[[0,.inf]]", "trainer.weight_decay=.inf", "stall_limit=1e30", "trainer.threads=99999"],
)  # fmt: skip
def test_numbers_that_nothing_can_be_computed_with_are_refused(override: str) -> None:
    assert refused(START, override)[0].startswith(override.partition("=")[0])


def test_a_bound_of_an_alarm_or_an_environment_may_be_infinite() -> None:
    config.load(START, "alarms.kl_max=.inf", "env.radius=.inf")


def test_nan_given_from_python_is_refused_too() -> None:
    (line,) = refused({**START, "env": PointReachConfig(speed=math.nan)})
    assert line.startswith("env.speed: is NaN")
    recipe = config.Recipe(
        **{**vars_of(config.load(START)), "stall_limit": 5.0, "env": PointReachConfig(radius=math.nan)}
    )
    assert refused(recipe)[0].startswith("env.radius: is NaN")


def vars_of(recipe: config.Recipe) -> dict[str, Any]:
    import dataclasses

    return {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}


def test_a_learning_rate_of_a_group_that_is_not_there_is_refused() -> None:
    (line,) = refused(START, "trainer.group_learning_rates={al: 1e-3}")
    assert line.endswith("PPO has no parameter group 'al'; did you mean 'all'? (all)")
    assert line.startswith("trainer.group_learning_rates.al ")
    sac = {**START, "objective": "sac", "flow": "offpolicy", "replay": {}}
    assert config.load(sac, "trainer.group_learning_rates={q: 1e-3, policy: 0, log_alpha: 1e-4}")
    assert "'critic'" in refused(sac, "trainer.group_learning_rates={critic: 1e-3}")[0]
    assert "'log_alpha'" in refused(sac, "objective.temperature=0.1", "trainer.group_learning_rates={log_alpha: 1}")[0]


@pytest.mark.parametrize(
    "text", ["env: &a {name: count, more: *a}\n", "env: &a [1, *a]\n", "&a a: {b: 1}\nc: &d [[*d]]\n"]
)
def test_an_anchor_that_holds_itself_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    (line,) = refused(path)
    assert "not valid YAML: the anchor in line" in line
    assert "has no end" in line


def test_anchors_that_end_are_fine_and_overrides_are_looked_at_too(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        "env: point_reach\npolicy: {name: mlp, hidden: &h [8, 8]}\nobjective: {name: ppo, critic_hidden: *h}\n"
    )
    assert config.load(path).objective.critic_hidden == (8, 8)
    assert "has no end" in refused(START, "policy.hidden=&a [*a]")[0]
    assert "nested too deeply" in refused(START, "policy.hidden=" + "[" * 3000 + "]" * 3000)[0]


def test_a_file_that_is_no_text_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"name: caf\xe9\n")
    (line,) = refused(path)
    assert f"{path} is not UTF-8 text" in line
    (line,) = refused({**START, "plan": str(path)})
    assert line.startswith("plan:")
    assert "is not UTF-8 text" in line
    (tmp_path / "child.yaml").write_text("base: r.yaml\n")
    assert "r.yaml (base of child.yaml) is not UTF-8" in refused(tmp_path / "child.yaml")[0]


@pytest.mark.parametrize("source", [None, 7, [1]])
def test_what_is_no_recipe_at_all_is_refused(source: Any) -> None:
    assert "must be a file, a mapping or a Recipe" in refused(source)[0]


TEXT: dict[str, Any] = {
    "env": {"name": "arithmetic", "digits": 1},
    "reward": {"name": "math"},
    "policy": {"name": "causal_lm", "config": {"model_type": "llama"}, "tokenizer": {"characters": "0123456789+ "}},
    "objective": {"name": "grpo", "level": "action"},
    "rollout": {"lanes": 4, "length": 1, "group": 2},
    "evaluation": {"seeds": 4},
}
CUT = {"places": {"rollout": "cpu:0", "policy": "cpu:0", "learner": "cpu:0"}, "sub_batches": {"rollout -> policy": 2}}


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("evaluation.first_seed=7", "use evaluation.seeds"),
        ("evaluation.seed_list=[3, 4]", "use evaluation.seeds"),
        ("evaluation.success=end", "remove it"),
        ("evaluation.traces=0", "remove it"),
        ("evaluation.stride=1", "remove it"),
    ],
)
def test_a_key_that_only_episodes_have_is_refused_for_text_tasks(override: str, fix: str) -> None:
    (line,) = refused(TEXT, override)
    key = override.partition("=")[0]
    assert line.startswith(f"{key} (override): ")
    assert line.endswith(fix)
    assert "is of episodes, and env has text tasks" in line
    assert config.load({**START, "evaluation": {"seeds": 2}}, override), "of a robot it is accepted"


def test_a_plan_that_cuts_a_rollout_of_text_tasks_is_refused() -> None:
    (line,) = refused({**TEXT, "plan": CUT})
    assert line.startswith("plan.sub_batches: cuts the lanes of a robot's rollout, and env has text tasks")
    assert config.load({**TEXT, "plan": CUT | {"sub_batches": {"rollout -> policy": 1}}})
    assert config.load({**START, "plan": CUT})


def test_what_text_tasks_are_evaluated_by_is_accepted_at_its_defaults() -> None:
    recipe = config.load(TEXT)
    assert config.load(config.dump(recipe)) == recipe
    assert config.load({**TEXT, "evaluation": None})
