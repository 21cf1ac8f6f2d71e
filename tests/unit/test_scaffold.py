"""`m2flow init`: what it writes passes `check`, or it says which parts do not go together."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from m2flow import api, config, registry, scaffold
from m2flow.config.layers import parse_yaml
from m2flow.types import Field, Spec

COMBINATIONS = list(itertools.product(*(registry.BUILTIN[kind] for kind in ("env", "policy", "objective"))))
TASKS = ("arithmetic", "countdown", "reasoning_gym", "rows")
UNFIT = {
    **{(env, policy): "is no language model" for env in TASKS for policy in ("mlp", "flow")},
    **{(env, "causal_lm"): "is a language model, and env" for env in registry.BUILTIN["env"] if env not in TASKS},
    **{(env, "sft"): "flow: SFT learns demonstrations" for env in registry.BUILTIN["env"] if env not in TASKS},
    **{(env, "sac"): "SAC learns from a replay buffer" for env in TASKS},
    ("flow", "sac"): "SAC needs a policy that can propose, and FlowPolicy cannot",
    ("bandit", "flow"): "a flow policy emits vectors of numbers",
    ("bandit", "sac"): "policy.dist: squashed cannot emit one of 4 categories",
    ("envpool", "grpo"): "rollout.group: EnvPool takes a step to reset a lane",
}


@pytest.mark.parametrize("parts", COMBINATIONS, ids="/".join)
def test_init_from_any_parts_passes_check_or_says_why_not(parts: tuple[str, str, str]) -> None:
    start = "/".join(parts)
    if "envpool" in parts:
        pytest.importorskip("envpool")
    reasons = [text for pair, text in UNFIT.items() if set(pair) <= set(parts)]
    if reasons:
        with pytest.raises(ValueError, match=f"^--from {start}: these parts do not go together") as caught:
            scaffold.init_text(start, "r.yaml")
        assert any(reason in str(caught.value) for reason in reasons)
        return
    values = parse_yaml(scaffold.init_text(start, "r.yaml"), "r.yaml").values
    assert [values[kind]["name"] for kind in ("env", "policy", "objective")] == list(parts)
    report = api.check(values)
    if parts[0] == "rows":  # the rows are the user's to bring
        assert [problem[:10] for problem in report.problems] == ["env.files:"]
        return
    assert report.ok, str(report)


def test_what_a_language_model_begins_with_is_per_token_and_may_be_a_folder(tmp_path: Path) -> None:
    text = scaffold.init_text("arithmetic/causal_lm/ppo", "r.yaml")
    assert parse_yaml(text, "r.yaml").values["objective"]["gamma"] == 1.0
    config.load(parse_yaml(text, "r.yaml").values).policy.build(Spec({}, Field((), "int64")), 0).save_pretrained(
        tmp_path
    )
    made = parse_yaml(scaffold.init_text("arithmetic/causal_lm/grpo", "r.yaml", f"policy.path={tmp_path}"), "r.yaml")
    policy = made.values["policy"]
    assert (policy["path"], policy["config"], policy["tokenizer"]) == (str(tmp_path), {}, None)


def test_several_starts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--from: given 2 times \(count/mlp, bandit/mlp\)"):
        scaffold.init_text(["count/mlp", "bandit/mlp"], "r.yaml")
    assert scaffold.init_text(["count/mlp"], "r.yaml") == scaffold.init_text("count/mlp", "r.yaml")
    assert scaffold.init_text([], "r.yaml") == scaffold.init_text(None, "r.yaml")


@pytest.mark.parametrize("env", ["rows", "arithmetic", "countdown"])
def test_tasks_of_a_language_model_begin_with_one(env: str) -> None:
    text = scaffold.init_text(env, "r.yaml")
    assert "name: causal_lm" in text
    assert "name: grpo" in text


def test_a_whole_recipe_is_no_start() -> None:
    with pytest.raises(ValueError, match=r"is a whole recipe, .* m2flow config point_reach_grpo > r.yaml"):
        scaffold.init_text("point_reach_grpo", "r.yaml")
