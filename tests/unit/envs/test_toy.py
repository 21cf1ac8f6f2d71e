from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from m2flow.envs.toy import BanditConfig, CountConfig, PointReachConfig


def step(env: Any, action: Any) -> Any:
    env.send(np.asarray(action))
    return env.recv()


def test_a14_count_resets_once_per_episode_and_shows_starts_0_1_2() -> None:
    """14 calls with next-step reset: 1 reset, 4 steps, then twice a step that resets and 4 (3) steps."""
    env = CountConfig(every=4).build([0], seed=0)
    shown = [env.reset()["state"][0].tolist()]
    last = []
    for _ in range(13):
        got = step(env, np.zeros((1, 1)))
        shown.append(got.obs["state"][0].tolist())
        if got.terminated[0]:
            last.append(got.final_obs["state"][0].tolist())
    assert [s for s in shown if s[1] == 0] == [[0, 0], [1, 0], [2, 0]]  # the fault showed 0, 2, 4
    assert last == [[0, 4], [1, 4]]


def test_count_by_hand_with_reset_in_the_same_step() -> None:
    env = CountConfig(every=2, end="truncated", autoreset="same").build([0], seed=0)
    env.reset()
    got = [step(env, np.zeros((1, 1))) for _ in range(4)]
    assert [g.obs["state"][0].tolist() for g in got] == [[0, 1], [1, 0], [1, 1], [2, 0]]
    assert [g.final_obs["state"][0].tolist() for g in got] == [[0, 1], [0, 2], [1, 1], [1, 2]]
    assert [bool(g.truncated[0]) for g in got] == [False, True, False, True]
    assert not any(g.terminated[0] for g in got)
    assert [float(g.reward[0]) for g in got] == [1.0, 2.0, 1.0, 2.0]


def test_point_reach_moves_rewards_and_succeeds_by_hand() -> None:
    env = PointReachConfig(horizon=5, speed=0.2, radius=0.3, dtype="float64").build([0], seed=0)
    start = env.reset()["state"][0]
    env.state[0] = [0.5, 0.0, 0.5, 0.6]  # x, y, goal
    got = step(env, [[0.0, 1.0]])
    np.testing.assert_allclose(got.obs["state"][0], [0.5, 0.2, 0.5, 0.6], rtol=0, atol=1e-15)
    assert got.reward[0] == pytest.approx(-0.4, abs=1e-15)
    assert not got.info["success"][0]
    got = step(env, [[0.0, 9.0]])  # clipped to 1
    assert got.reward[0] == pytest.approx(-0.2, abs=1e-15)
    assert got.info["success"][0]
    assert not got.terminated[0]
    got = step(env, [[1.0, 0.0]])
    assert got.reward[0] == pytest.approx(-np.hypot(0.2, 0.2), abs=1e-15)
    for _ in range(9):
        got = step(env, [[1.0, 1.0]])
        if got.truncated[0]:
            break
    assert (abs(got.final_obs["state"]) <= 1).all()  # walls
    assert (got.obs["state"][0] != start).any()  # another episode, another start


def test_point_reach_terminates_on_success_only_where_asked() -> None:
    env = PointReachConfig(radius=3.0, terminate=True).build([0, 1], seed=0)
    env.reset()
    got = step(env, np.zeros((2, 2)))
    assert got.terminated.all()
    assert not got.truncated.any()
    both = PointReachConfig(horizon=1, radius=3.0, terminate=True).build([0], seed=0)
    both.reset()
    got = step(both, np.zeros((1, 2)))
    assert (got.terminated[0], got.truncated[0]) == (True, False)  # a true end is not also a time limit


def test_heading_straight_for_the_goal_succeeds_everywhere() -> None:
    env = PointReachConfig().build_seeded(range(200))
    obs, success = env.reset()["state"], np.zeros(200, bool)
    for _ in range(30):
        got = step(env, np.clip((obs[:, 2:] - obs[:, :2]) / 0.1, -1, 1))
        obs, success = got.obs["state"], success | got.info["success"]
    assert success.all()


def test_bandit_pays_the_best_arm_of_the_context_shown() -> None:
    env = BanditConfig(contexts=3, arms=3, horizon=4).build(range(50), seed=0)
    obs = env.reset()["state"]
    seen = set()
    for t in range(1, 13):
        context = obs.argmax(1)
        seen |= set(context.tolist())
        best = (context + 1) % 3
        action = np.where(np.arange(50) % 2, best, context)
        got = step(env, action)
        np.testing.assert_array_equal(got.reward, np.arange(50) % 2)
        np.testing.assert_array_equal(got.info["success"], np.arange(50) % 2 == 1)
        assert got.terminated.all() == (t % 4 == 0)
        obs = got.obs["state"]
    assert seen == {0, 1, 2}


def test_float64_is_kept_throughout() -> None:
    env = PointReachConfig(dtype="float64").build([0], 0)
    obs = env.reset()
    got = step(env, np.full((1, 2), 1e-9))
    assert (obs["state"].dtype, got.reward.dtype) == (np.float64, np.float64)
    assert 0 < got.obs["state"][0, 0] - obs["state"][0, 0] < 1e-8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PointReachConfig(horizon=0), "horizon"),
        (lambda: PointReachConfig(speed=0.0), "speed"),
        (lambda: PointReachConfig(autoreset="never"), "autoreset"),  # type: ignore[arg-type]
        (lambda: BanditConfig(arms=1), "arms"),
        (lambda: CountConfig(end="done"), "end"),  # type: ignore[arg-type]
        (lambda: CountConfig(dtype="float16"), "dtype"),  # type: ignore[arg-type]
    ],
)
def test_config_errors_name_the_field(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}: "):
        make()
