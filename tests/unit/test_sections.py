"""What the sections of a recipe must offer: the shipped configs do, and one that does not is refused at once."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import pytest

from m2flow import registry, sections
from m2flow.algorithms.onpolicy import GRPO, PPO
from m2flow.backends.torch.trainer import TorchTrainerConfig
from m2flow.config.recipe import Recipe
from m2flow.envs.envpool import EnvPoolConfig
from m2flow.envs.gymnasium import GymnasiumConfig
from m2flow.envs.toy import CountConfig, PointReachConfig
from m2flow.models.mlp import MLPConfig
from m2flow.prepare import Refused, prepare
from m2flow.protocols import Levelled, NeedsGroups

SHIPPED = [(section, name) for section in sections.REQUIRED for name in registry.BUILTIN[section]]


@pytest.mark.parametrize(("section", "name"), SHIPPED)
def test_a_shipped_config_offers_what_its_section_asks_for_with_the_same_arguments(section: str, name: str) -> None:
    cls = registry.resolve(section, name)
    protocol = sections.TaskConfig if hasattr(cls, "tasks") else sections.REQUIRED[section]
    sections.check(section, cls)
    for method, wanted in vars(protocol).items():
        if inspect.isfunction(wanted) and not method.startswith("_"):
            assert list(inspect.signature(getattr(cls, method)).parameters) == list(
                inspect.signature(wanted).parameters
            ), method


@dataclass(frozen=True)
class Half:
    """An environment's config whose author stopped half way."""

    def spec(self) -> Any:
        raise AssertionError("nothing is asked of a config that is refused")

    def build(self, lanes: Any, seed: int) -> Any:
        raise AssertionError


def test_a_config_that_lacks_something_is_refused_with_all_that_it_lacks() -> None:
    whole = Recipe(env=Half(), policy=object(), objective=PPO())
    with pytest.raises(Refused) as caught:
        prepare(whole)
    env, policy = caught.value.problems
    assert env.startswith(
        "env: Half has no build_seeded, renderable, time_limit; m2flow/sections.py says what EnvConfig"
    )
    assert policy.startswith("policy: object has no build;")
    fine = replace(whole, env=PointReachConfig(), policy=MLPConfig())
    assert prepare(fine).recipe is fine


@pytest.mark.parametrize(
    ("env", "late"),
    [
        (PointReachConfig(autoreset="next"), True),
        (PointReachConfig(), False),
        (CountConfig(), True),
        (EnvPoolConfig(task="CartPole-v1"), True),  # cuts episodes, and says nothing of resets
        (GymnasiumConfig(id="CartPole-v1"), False),
    ],
)
def test_when_a_finished_lane_resets(env: Any, late: bool) -> None:
    assert sections.resets_late(env) is late


def test_what_is_optional_is_found_by_what_a_config_has() -> None:
    assert isinstance(GRPO(), NeedsGroups)
    assert not isinstance(PPO(), NeedsGroups)
    assert isinstance(PPO(), Levelled)
    assert isinstance(TorchTrainerConfig(), sections.GroupRates)
    assert isinstance(TorchTrainerConfig(), sections.TrainerConfig)
    assert isinstance(EnvPoolConfig(task="CartPole-v1"), sections.StepLimited)
    assert isinstance(PointReachConfig(), sections.HorizonLimited)
