"""The VectorEnv contract, asked of every environment adapter."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from m2flow.envs.envpool import EnvPoolConfig
from m2flow.envs.gymnasium import GymnasiumConfig
from m2flow.envs.toy import BanditConfig, CountConfig, PointReachConfig
from tests.contracts.env_suite import CHECKS, Case, check_final_observation_is_the_true_one

METAWORLD = "MetaWorld/ButtonPressTopdown-v3"
MIXED = "tests.unit.envs.worlds:Mixed-v0"

CASES = [
    Case("point_reach", PointReachConfig(horizon=9), PointReachConfig(horizon=90)),
    Case("point_reach_next", PointReachConfig(horizon=9, autoreset="next", dtype="float64"), autoreset="next"),
    Case("point_reach_terminates", PointReachConfig(radius=0.5, horizon=9, terminate=True)),
    Case("bandit", BanditConfig(horizon=3)),
    Case("count", CountConfig(), autoreset="next", random=False),
    Case("count_same", CountConfig(end="truncated", autoreset="same"), CountConfig(every=99), random=False),
    Case("gymnasium_cartpole", GymnasiumConfig(id="CartPole-v1", max_episode_steps=12)),
    Case(
        "gymnasium_halfcheetah",
        GymnasiumConfig(id="HalfCheetah-v5", max_episode_steps=9),
        GymnasiumConfig(id="HalfCheetah-v5", max_episode_steps=90),
    ),
    Case("gymnasium_mixed", GymnasiumConfig(id=MIXED, info=("total",))),
    Case("gymnasium_cut", GymnasiumConfig(id=MIXED, resume="cut"), cut=True),
    Case(
        "workers_pendulum",
        GymnasiumConfig(id="Pendulum-v1", max_episode_steps=9, workers=2),
        GymnasiumConfig(id="Pendulum-v1", max_episode_steps=90, workers=2),
    ),
    Case("workers_mixed", GymnasiumConfig(id=MIXED, workers=2, info=("total",))),
    Case("workers_cut", GymnasiumConfig(id=MIXED, workers=2, resume="cut"), cut=True),
    Case("envpool_cartpole", EnvPoolConfig(task="CartPole-v1", max_episode_steps=12), autoreset="next", cut=True),
    Case(
        "envpool_halfcheetah",
        EnvPoolConfig(task="HalfCheetah-v5", max_episode_steps=9),
        EnvPoolConfig(task="HalfCheetah-v5", max_episode_steps=90),
        autoreset="next",
        cut=True,
    ),
    Case(
        "envpool_metaworld",
        EnvPoolConfig(task=METAWORLD, max_episode_steps=9),
        EnvPoolConfig(task=METAWORLD, max_episode_steps=90),
        autoreset="next",
        cut=True,
    ),
    Case(
        "envpool_fetch",
        EnvPoolConfig(task="FetchReach-v4", max_episode_steps=9, info=("distance",)),
        autoreset="next",
        cut=True,
    ),
]


# Starting processes is what takes time, so the further worker cases are asked what only they can answer.
ONLY = {
    "workers_mixed": ("shapes_and_dtypes", "snapshot_law"),
    "workers_cut": ("snapshot_law",),
}


def _applies(case: Case, check: Callable[[Case], None]) -> bool:
    if case.name in ONLY:
        return check.__name__.removeprefix("check_") in ONLY[case.name]
    return case.longer is not None or check is not check_final_observation_is_the_true_one


@pytest.mark.parametrize(
    ("case", "check"),
    [pytest.param(c, k, id=f"{c.name}-{k.__name__[6:]}") for c in CASES for k in CHECKS if _applies(c, k)],
)
def test_env_contract(case: Case, check: Callable[[Case], None]) -> None:
    check(case)
