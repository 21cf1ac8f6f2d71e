from __future__ import annotations

import logging
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces as gym_spaces

from m2flow.envs import spaces
from m2flow.envs.gymnasium import GymnasiumConfig
from m2flow.seeds import derive
from m2flow.types import Field

WORLDS = "tests.unit.envs.worlds:"


def config(name: str, **kwargs: Any) -> GymnasiumConfig:
    return GymnasiumConfig(id=WORLDS + name, **kwargs)


def step(env: Any, action: Any) -> Any:
    env.send(action)
    return env.recv()


def test_steps_are_those_of_the_raw_environment_reset_from_the_stated_seeds() -> None:
    """An independent loop over gymnasium's own CartPole: same observations, rewards and ends, bit by bit."""
    env = GymnasiumConfig(id="CartPole-v1", max_episode_steps=30).build([5, 2], seed=3)
    raw = [gymnasium.make("CartPole-v1", max_episode_steps=30) for _ in range(2)]
    episodes = [0, 0]
    shown = [e.reset(seed=derive(3, "env", lane, 0))[0] for e, lane in zip(raw, (5, 2), strict=True)]
    np.testing.assert_array_equal(env.reset()["state"], shown)
    rng, terminated, truncated = np.random.default_rng(0), 0, 0
    for t in range(200):
        action = rng.integers(2, size=2) if t > 80 else np.array([t % 2, t % 2])  # random falls, alternating stands
        got = step(env, action)
        for row, (e, lane) in enumerate(zip(raw, (5, 2), strict=True)):
            obs, reward, term, trunc, _ = e.step(int(action[row]))
            assert (got.reward[row], got.terminated[row], got.truncated[row]) == (reward, term, trunc)
            np.testing.assert_array_equal(got.final_obs["state"][row], obs)
            terminated, truncated = terminated + term, truncated + trunc
            if term or trunc:
                episodes[row] += 1
                obs, _ = e.reset(seed=derive(3, "env", lane, episodes[row]))
            np.testing.assert_array_equal(got.obs["state"][row], obs)
    assert terminated > 2
    assert truncated > 2


def test_a14_each_episode_is_reset_exactly_once_and_ends_with_its_true_observation() -> None:
    env = config("Counting-v0", success=None).build([0], seed=0)
    seen = [env.reset()["state"][0].tolist()]
    for _ in range(11):
        got = step(env, np.zeros((1, 1), np.float32))
        if got.terminated[0]:
            assert got.final_obs["state"][0].tolist() == [len(seen) - 1, 4]
            seen.append(got.obs["state"][0].tolist())
    assert seen == [[0, 0], [1, 0], [2, 0]]  # a second reset per episode would show 0, 2, 4


@pytest.mark.parametrize("workers", [0, 2])
def test_an_environment_that_reuses_its_array_still_shows_its_true_final_observation(workers: int) -> None:
    env = config("Reusing-v0", workers=workers).build([0, 1], seed=0)
    first = env.reset()["state"]
    steps = [step(env, np.zeros((2, 1), np.float32)) for _ in range(4)]
    np.testing.assert_array_equal(steps[2].final_obs["state"], np.stack([first[:, 0], [3, 3]], 1))
    assert (steps[2].obs["state"][:, 1] == 0).all()
    assert (steps[2].obs["state"][:, 0] != first[:, 0]).all()
    assert first[:, 1].tolist() == [0, 0]
    env.close()


def test_a14_an_environment_wrapped_to_reset_itself_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Autoreset.*every second initial state skipped"):
        config("Autoresetting-v0").build([0], seed=0)


def test_nested_observations_become_named_arrays_and_discrete_values_count_from_zero() -> None:
    env = config("Mixed-v0").build([0, 1], seed=0)
    assert env.spec.observation == {
        "arm_pos": Field((3,), "float64", -1.0, 1.0),
        "arm_grip": Field((), "int64", categories=3),
        "image": Field((4, 5, 3), "uint8", 0.0, 255.0),
    }
    assert env.spec.action == Field((), "int64", categories=3)
    obs = env.reset()
    assert obs["arm_grip"].tolist() == [0, 0]
    got = step(env, np.array([0, 1]))  # the environment itself counts its actions from 1
    assert got.reward.tolist() == [1.0, 2.0]
    assert got.obs["arm_grip"].tolist() == [1, 2]
    assert (got.obs["image"][1] == 2).all()


def test_success_is_found_in_info_and_other_numbers_are_handed_on_by_name() -> None:
    env = config("Mixed-v0", info=("total",)).build([0, 1], seed=0)
    env.reset()
    step(env, np.array([2, 2]))
    got = step(env, np.array([2, 1]))
    assert got.info["success"].tolist() == [True, False]
    assert got.info["total"].tolist() == [6.0, 5.0]
    without = config("Counting-v0").build([0], seed=0)
    without.reset()
    assert "success" not in step(without, np.zeros((1, 1), np.float32)).info


def test_info_that_does_not_exist_is_an_error_that_lists_what_does() -> None:
    env = config("Mixed-v0", info=("force",)).build([0], seed=0)
    env.reset()
    with pytest.raises(ValueError, match=r"nothing called 'force'; it says \['is_success', 'total'\]"):
        step(env, np.array([0]))


def test_an_environment_that_is_not_deterministic_is_not_resumed_silently() -> None:
    env = config("Forgetful-v0").build([3], seed=0)
    env.reset()
    for _ in range(10):
        step(env, np.zeros((1, 1), np.float32))
    state = env.snapshot()
    fresh = config("Forgetful-v0").build([3], seed=0)
    fresh.reset()
    with pytest.raises(ValueError, match=r"cannot be resumed exactly.*lanes \[3\].*env.resume=cut"):
        fresh.restore(state)
    assert config("Forgetful-v0", resume="cut").build([3], seed=0) is not None


def test_the_action_log_is_pruned_and_still_restores_long_running_lanes() -> None:
    """Lanes that end at different times keep only what a running episode needs."""
    env = GymnasiumConfig(id="CartPole-v1", max_episode_steps=500).build([0, 1, 2], seed=1)
    env.reset()
    rng = np.random.default_rng(1)
    for _ in range(1500):
        got = step(env, rng.integers(2, size=3))
    assert len(env.log.rows) < 1500  # type: ignore[attr-defined]
    fresh = GymnasiumConfig(id="CartPole-v1", max_episode_steps=500).build([0, 1, 2], seed=1)
    fresh.reset()
    np.testing.assert_array_equal(fresh.restore(env.snapshot())["state"], got.obs["state"])


@pytest.mark.parametrize("workers", [0, 2])
def test_actions_that_nobody_will_play_again_are_not_kept(workers: int) -> None:
    """Without a time limit they would add up for ever."""
    for env in (
        config("Slow-v0", success=None, workers=workers, resume="cut").build([0, 1], 0),
        config("Slow-v0", success=None, workers=workers).build_seeded([0, 1]),
    ):
        env.reset()
        for _ in range(5):
            step(env, np.zeros((2, 1), np.float32))
        assert not env.log.rows  # type: ignore[attr-defined]
        env.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cut_env_that_was_stepped_after_its_snapshot_goes_back_to_it(workers: int) -> None:
    """Also where the observation does not tell that a step was taken."""
    env = config("Hidden-v0", success=None, workers=workers, resume="cut").build([0, 1], 0)
    env.reset()
    state = env.snapshot()
    env.restore(state)
    ahead = [step(env, np.zeros((2, 1), np.float32)).reward.tolist() for _ in range(2)]
    env.restore(state)
    assert [step(env, np.zeros((2, 1), np.float32)).reward.tolist() for _ in range(2)] == ahead == [[1, 1], [2, 2]]
    env.close()


@pytest.mark.parametrize(
    ("space", "field"),
    [
        (gym_spaces.Box(-2.0, 3.0, (2,), np.float32), Field((2,), "float32", -2.0, 3.0)),
        (
            gym_spaces.Box(np.array([0.0, -1.0]), np.array([1.0, 1.0]), dtype=np.float64),
            Field((2,), "float64", (0.0, -1.0), 1.0),
        ),
        (gym_spaces.Box(-np.inf, np.inf, (2, 2)), Field((2, 2), "float32")),
        (gym_spaces.Box(-1.7e308, 1.7e308, (1,), np.float64), Field((1,), "float64")),
        (gym_spaces.Discrete(7, start=-3), Field((), "int64", categories=7)),
        (gym_spaces.MultiDiscrete([4, 4]), Field((2,), "int64", categories=4)),
        (gym_spaces.MultiDiscrete([4, 2]), Field((2,), "int64", 0, (3.0, 1.0))),
        (gym_spaces.MultiBinary(3), Field((3,), "int64", categories=2)),
    ],
)
def test_spaces_become_fields(space: Any, field: Field) -> None:
    assert spaces.field_of(space, "x") == field


def test_spaces_without_a_fixed_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="no fixed shape"):
        spaces.leaves(gym_spaces.Dict({"words": gym_spaces.Text(5)}))
    with pytest.raises(ValueError, match="two parts would be called"):
        spaces.leaves(
            gym_spaces.Dict({"a_b": gym_spaces.Discrete(2), "a": gym_spaces.Dict({"b": gym_spaces.Discrete(2)})})
        )


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (gym_spaces.Dict({"a": gym_spaces.Discrete(2)}), "one array per action"),
        (gym_spaces.MultiDiscrete([3, 4]), "categories of unequal count"),
        (gym_spaces.MultiDiscrete([3, 3], start=[1, 1]), "does not start at 0"),
        (gym_spaces.Box(0, 255, (2,), np.uint8), "no policy emits whole numbers"),
        (gym_spaces.Text(5), "no fixed shape"),
    ],
)
def test_actions_that_no_policy_emits_are_refused(space: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spaces.spec_of(gym_spaces.Box(-1.0, 1.0, (2,)), space)


def test_unknown_ids_are_errors_that_say_how_to_name_an_environment_of_another_package() -> None:
    for name in ("NoSuchThing-v0", "no_such_package:Thing-v0"):
        with pytest.raises(ValueError, match=r"'package\.module:Id'"):
            GymnasiumConfig(id=name).spec()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"workers": -1}, "workers: must not be negative, got -1"),
        ({"max_episode_steps": 0}, "max_episode_steps: must be at least 1, got 0"),
        ({"resume": "never"}, "resume: must be 'replay' or 'cut'"),
        ({"timeout": 0.0}, "timeout: must be positive"),
    ],
)
def test_config_errors_name_the_field(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GymnasiumConfig(id="CartPole-v1", **wrong)


def test_time_limit_is_the_registered_one_unless_given() -> None:
    assert GymnasiumConfig(id="CartPole-v1").time_limit() == 500
    assert GymnasiumConfig(id="CartPole-v1", max_episode_steps=7).time_limit() == 7
    assert config("Counting-v0").time_limit() is None


def test_mujoco_warnings_go_to_the_log_once_and_not_to_the_terminal(
    capfd: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import mujoco

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("m2flow.envs.render._LOG", logging.getLogger("quiet"))
    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(None)
    try:
        GymnasiumConfig(id="HalfCheetah-v5").build(range(3), 0).close()
        assert len([r for r in caplog.records if "mujoco" in r.message]) == 1
    finally:
        mujoco.set_mju_user_warning(before)
    assert "WARNING" not in capfd.readouterr().err
    assert not list(tmp_path.iterdir())
