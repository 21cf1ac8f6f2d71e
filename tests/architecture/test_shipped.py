"""Every recipe and plan that is shipped loads, passes its checks, and survives a round trip."""

from __future__ import annotations

import json

import pytest

from m2flow import config
from tests.architecture import lm_files
from tests.architecture.source import REPO

RECIPES = sorted((REPO / "recipes").glob("*.yaml"))
FOR_GPUS = sorted((REPO / "recipes" / "gpu").glob("*.yaml"))
PLANS = sorted((REPO / "plans").glob("*.yaml"))


def test_recipes_are_shipped() -> None:
    assert config.shipped("recipes").keys() == {path.stem for path in RECIPES}
    assert "metaworld_button_ppo" in config.shipped("recipes")


@pytest.mark.parametrize("path", RECIPES + FOR_GPUS, ids=lambda path: path.stem)
def test_a_shipped_recipe_loads_and_its_resolved_form_loads_back_equal(path) -> None:
    recipe = config.load(path)
    assert config.load(config.dump(recipe)) == recipe
    assert config.load(json.loads(config.dump_json(recipe))) == recipe


@pytest.mark.parametrize("path", RECIPES + FOR_GPUS, ids=lambda path: path.stem)
def test_a_shipped_recipe_passes_check(path, tmp_path) -> None:
    """With the files that it names; and on this machine's CPU where it asks for a GPU."""
    from m2flow import api

    changes = lm_files.stand_ins(config.load(path), tmp_path) if lm_files.speaks(path) else []
    if path in FOR_GPUS:
        changes.append("trainer.device=cpu")
    report = api.check(path, *changes)
    wrong = [problem for problem in report.problems if "needs the package 'vllm'" not in problem]
    assert not wrong, str(report)


@pytest.mark.parametrize("path", [p for p in RECIPES + FOR_GPUS if lm_files.speaks(p)], ids=lambda path: path.stem)
def test_a_recipe_whose_model_is_not_there_says_so_before_anything_starts(path, tmp_path) -> None:
    from m2flow import api

    if config.load(path).policy.path is None:
        return
    report = api.check(path, f"policy.path={tmp_path / 'nothing'}", "trainer.device=cpu")
    assert any("policy.path" in problem and "no folder on this machine" in problem for problem in report.problems)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_shipped_plan_reads_and_writes_back_equal(path) -> None:
    from m2flow.flow.plan import Plan

    plan = Plan.from_yaml(path.read_text(encoding="utf-8"))
    assert Plan.from_yaml(plan.to_yaml()) == plan
