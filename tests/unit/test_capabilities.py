"""What parts may offer is asked for by its Protocol, never by a string that nobody checks."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from m2flow import capabilities
from m2flow.models.mlp import MLPConfig
from m2flow.rewards.math import MathReward
from m2flow.tasks.rows import RowSource
from m2flow.types import Field, Spec
from tests.architecture.source import PACKAGE, modules
from tests.unit.models.lm.small import policy

SPEC = Spec({"obs": Field((3,))}, Field((2,)))
PROTOCOLS = [x for x in vars(capabilities).values() if isinstance(x, type) and getattr(x, "_is_protocol", False)]
OTHERS = {capabilities.ChecksTasks: MathReward, capabilities.LabelsTasks: RowSource}
KNOWN = [x for x in PROTOCOLS if x.__module__ == capabilities.__name__ and x not in OTHERS]


@pytest.mark.parametrize(("protocol", "offers"), OTHERS.items(), ids=lambda x: x.__name__)
def test_a_reward_or_a_source_of_tasks_offers_it(protocol: Any, offers: type) -> None:
    assert issubclass(offers, protocol)
    assert not isinstance(policy(), protocol)


@pytest.mark.parametrize("protocol", KNOWN, ids=lambda x: x.__name__)
def test_a_language_model_offers_it_and_a_plain_policy_does_not(protocol: Any) -> None:
    assert isinstance(policy(), protocol)
    plain = MLPConfig().build(SPEC, 0)
    assert not isinstance(plain, protocol)
    assert capabilities.constants(plain) == frozenset()


def test_nobody_asks_for_one_by_a_string() -> None:
    names = {name for x in KNOWN for name in {*vars(x), *x.__annotations__} if not name.startswith("_")}
    assert names == {"sharing", "reference", "constant", "sizes", "autocast", "casts", "feature_size"}
    asked = []
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
                name, owner = node.args[1], ast.unparse(node.args[0])
                if isinstance(name, ast.Constant) and name.value in names and owner.endswith("policy"):
                    asked.append(f"{module.path.relative_to(PACKAGE)}:{node.lineno}")
    assert not asked
