"""Every recipe and plan that is shipped loads, passes its checks, and survives a round trip."""

from __future__ import annotations

import json

import pytest

from m2flow import config
from tests.architecture.source import REPO

RECIPES = sorted((REPO / "recipes").glob("*.yaml"))
PLANS = sorted((REPO / "plans").glob("*.yaml"))


def test_recipes_are_shipped() -> None:
    assert config.shipped("recipes").keys() == {path.stem for path in RECIPES}
    assert "metaworld_button_ppo" in config.shipped("recipes")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_loads_and_its_resolved_form_loads_back_equal(path) -> None:
    recipe = config.load(path)
    assert config.load(config.dump(recipe)) == recipe
    assert config.load(json.loads(config.dump_json(recipe))) == recipe


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_passes_check(path) -> None:
    from m2flow import api

    report = api.check(path)
    assert report.ok, str(report)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_shipped_plan_reads_and_writes_back_equal(path) -> None:
    from m2flow.flow.plan import Plan

    plan = Plan.from_yaml(path.read_text(encoding="utf-8"))
    assert Plan.from_yaml(plan.to_yaml()) == plan
