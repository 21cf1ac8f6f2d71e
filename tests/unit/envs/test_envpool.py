from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from m2flow.envs.envpool import EnvPoolConfig
from m2flow.envs.render import gl_available, without_shadows
from m2flow.seeds import derive

BUTTON = "MetaWorld/ButtonPressTopdown-v3"


def step(env: Any, action: Any) -> Any:
    env.send(action)
    return env.recv()


def zeros(env: Any) -> Any:
    return np.zeros((len(env.lanes), *env.spec.action.shape), env.spec.action.dtype)


def test_the_kth_start_of_a_lane_depends_on_its_seed_and_k_only() -> None:
    """Whatever was done before, however long the episodes were, and on however many threads."""
    starts = []
    for horizon, scale, threads in ((5, 0.0, 1), (9, 1.0, 2)):
        env = EnvPoolConfig(task=BUTTON, max_episode_steps=horizon, threads=threads).build([4, 1, 3], seed=2)
        found = [env.reset()["state"]]
        while len(found) < 4:
            got = step(env, zeros(env) + scale)
            if not got.valid.any():
                found.append(got.obs["state"])
        starts.append(np.array(found))
    np.testing.assert_array_equal(starts[0], starts[1])
    assert len(np.unique(starts[0].reshape(12, -1), axis=0)) == 12


def test_lane_seeds_are_derived_from_the_run_seed_and_the_global_lane() -> None:
    import envpool

    raw = envpool.make_gymnasium(
        BUTTON, num_envs=2, num_threads=1, partially_observable=False, seed=[derive(9, "env", lane) for lane in (6, 2)]
    )
    env = EnvPoolConfig(task=BUTTON).build([6, 2], seed=9)
    np.testing.assert_array_equal(env.reset()["state"], raw.reset()[0])
    rng = np.random.default_rng(0)
    for _ in range(20):
        action = rng.uniform(-1, 1, (2, 4)).astype(np.float32)
        obs, reward, terminated, truncated, info = raw.step(action)
        got = step(env, action)
        np.testing.assert_array_equal(got.obs["state"], obs)
        np.testing.assert_array_equal(got.reward, reward)
        np.testing.assert_array_equal(got.terminated, terminated)
        np.testing.assert_array_equal(got.truncated, truncated)
        np.testing.assert_array_equal(got.info["success"], info["success"] > 0)


def test_a14_the_step_after_an_end_ignores_the_action_and_shows_the_first_observation_once() -> None:
    a, b = (EnvPoolConfig(task=BUTTON, max_episode_steps=4).build([0], seed=0) for _ in range(2))
    a.reset()
    b.reset()
    valid, firsts = [], []
    for t in range(14):
        x = step(a, zeros(a))
        y = step(b, zeros(b) + (1.0 if t % 5 == 4 else 0.0))  # differs only in steps that reset
        np.testing.assert_array_equal(x.obs["state"], y.obs["state"])
        valid.append(bool(x.valid[0]))
        if not x.valid[0]:
            firsts.append(x.obs["state"][0])
    assert valid == [True] * 4 + [False] + [True] * 4 + [False] + [True] * 4
    expected = EnvPoolConfig(task=BUTTON, max_episode_steps=2).build([0], seed=0)
    found = [expected.reset()["state"][0]]
    while len(found) < 3:
        got = step(expected, zeros(expected))
        if not got.valid[0]:
            found.append(got.obs["state"][0])
    np.testing.assert_array_equal(firsts, found[1:])  # starts 1 and 2: none is skipped


def test_the_last_observation_of_a_fallen_pole_is_the_fallen_pole() -> None:
    env = EnvPoolConfig(task="CartPole-v1").build(range(8), seed=0)
    env.reset()
    ends = 0
    for _ in range(40):
        got = step(env, np.ones(8, np.int64))
        fallen = (abs(got.final_obs["state"][:, 2]) > 12 * np.pi / 180) | (abs(got.final_obs["state"][:, 0]) > 2.4)
        np.testing.assert_array_equal(fallen, got.terminated)
        assert not got.truncated.any()
        ends += int(got.terminated.sum())
    assert ends > 8


def test_meta_world_shows_its_goal_unless_told_otherwise() -> None:
    shown = EnvPoolConfig(task="MetaWorld/Reach-v3").build([0, 1], 0).reset()["state"][:, -3:]
    hidden = EnvPoolConfig(task="MetaWorld/Reach-v3", options={"partially_observable": True}).build([0, 1], 0)
    assert (shown != 0).all()
    assert (hidden.reset()["state"][:, -3:] == 0).all()


def test_goal_tasks_show_named_observations_and_success() -> None:
    env = EnvPoolConfig(task="FetchReach-v4", info=("distance",)).build([0, 1], 0)
    obs = env.reset()
    assert {name: array.shape for name, array in obs.items()} == {
        "observation": (2, 10),
        "achieved_goal": (2, 3),
        "desired_goal": (2, 3),
    }
    got = step(env, zeros(env))
    distance = np.linalg.norm(got.obs["achieved_goal"] - got.obs["desired_goal"], axis=1)
    np.testing.assert_allclose(got.info["distance"], distance, rtol=1e-6)
    np.testing.assert_array_equal(got.info["success"], distance < 0.05)


def test_send_returns_while_the_simulator_works() -> None:
    """The time a step needs is spent between send and recv: after waiting outside, recv returns at once."""
    env = EnvPoolConfig(task=BUTTON).build(range(48), seed=0)
    env.reset()
    waits, waited = [], []
    for _ in range(6):
        env.send(zeros(env))
        began = time.perf_counter()
        env.recv()
        waits.append(time.perf_counter() - began)
        env.send(zeros(env))
        time.sleep(0.1)
        began = time.perf_counter()
        env.recv()
        waited.append(time.perf_counter() - began)
    assert min(waited) < 0.5 * min(waits)


def test_a_snapshot_starts_a_new_pool_with_seeds_of_its_number_and_says_so() -> None:
    env = EnvPoolConfig(task=BUTTON).build([3, 5], seed=1)
    env.reset()
    step(env, zeros(env))
    first = env.snapshot()
    assert first == {"cut": True, "epoch": 1}
    expected = EnvPoolConfig(task=BUTTON).build_seeded([derive(1, "env", lane, "epoch", 1) for lane in (3, 5)]).reset()
    np.testing.assert_array_equal(env.restore(first)["state"], expected["state"])
    assert env.snapshot()["epoch"] == 2


def test_unknown_tasks_and_options_are_errors_with_what_exists() -> None:
    with pytest.raises(ValueError, match="did you mean MetaWorld/ButtonPressTopdown-v3"):
        EnvPoolConfig(task="MetaWorld/ButtonPresTopdown-v3").spec()
    with pytest.raises(ValueError, match=r"options: .* does not know \['frame_skp'\]; it knows .*'frame_skip'"):
        EnvPoolConfig(task=BUTTON, options={"frame_skp": 2}).spec()
    with pytest.raises(ValueError, match=r"options: \['seed'\] are set by m2flow"):
        EnvPoolConfig(task=BUTTON, options={"seed": 3})
    with pytest.raises(ValueError, match=r"nothing called \['force'\]; it says .*'near_object'"):
        EnvPoolConfig(task=BUTTON, info=("force",)).build([0], 0)
    with pytest.raises(ValueError, match=r"seeds: must be between 0 and 2\*\*31 - 1, got 2147483648"):
        EnvPoolConfig(task=BUTTON).build_seeded([2**31])


def test_spec_and_time_limit_are_known_without_a_simulator() -> None:
    config = EnvPoolConfig(task="HalfCheetah-v5")
    assert config.time_limit() == 1000
    assert EnvPoolConfig(task="HalfCheetah-v5", max_episode_steps=5).time_limit() == 5
    assert config.spec() == config.build([0], 0).spec
    unbounded = EnvPoolConfig(task="CheetahRun-v1").spec().observation  # written as limits of the number type
    assert {(field.low, field.high) for field in unbounded.values()} == {(None, None)}


def test_closing_frees_the_threads() -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = threads()
    env = EnvPoolConfig(task="CartPole-v1", threads=3).build(range(4), 0)
    env.reset()
    assert threads() >= before + 3
    env.close()
    assert threads() <= before


def test_frames_show_the_state_and_cheap_shadows_change_no_physics() -> None:
    plain = EnvPoolConfig(task=BUTTON).build_seeded([1, 2])
    ready, why = EnvPoolConfig(task=BUTTON).renderable()
    assert (ready, why) == gl_available()
    if not ready:
        assert "apt-get install" in why
        return
    drawn = EnvPoolConfig(task=BUTTON, width=64, height=48).build_seeded([1, 2], render=True)
    np.testing.assert_array_equal(plain.reset()["state"], drawn.reset()["state"])
    first = drawn.render(0)
    assert (first.shape, first.dtype) == ((48, 64, 3), np.uint8)
    assert len(np.unique(first.reshape(-1, 3), axis=0)) > 50  # a picture, not a colour
    assert (first != drawn.render(1)).any()
    for t in range(25):
        action = np.sin(np.arange(8) + t).reshape(2, 4).astype(np.float32)
        x, y = step(plain, action), step(drawn, action)
        np.testing.assert_array_equal(x.obs["state"], y.obs["state"])
        np.testing.assert_array_equal(x.reward, y.reward)
    assert (first != drawn.render(0)).any()
    with pytest.raises(ValueError, match="render=True"):
        plain.render(0)


def test_tasks_that_need_no_opengl_are_drawn_everywhere() -> None:
    config = EnvPoolConfig(task="CartPole-v1", width=60, height=40)
    assert config.renderable() == (True, "")
    env = config.build_seeded([0], render=True)
    env.reset()
    assert env.render(0).shape == (40, 60, 3)


def test_an_envpool_imported_before_libegl_is_found_out_instead_of_ending_the_process() -> None:
    script = (
        "import envpool\n"
        "from m2flow.envs.envpool import EnvPoolConfig\n"
        f"ready, why = EnvPoolConfig(task={BUTTON!r}).renderable()\n"
        "assert not ready and ('imported before' in why or 'apt-get' in why), why\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_asset_copies_differ_in_visual_quality_only(tmp_path: Any) -> None:
    models = tmp_path / "mujoco" / "family"
    models.mkdir(parents=True)
    (models / "scene.xml").write_text('<mujoco model="x"><worldbody/></mujoco>')
    (models / "part.xml").write_text("<mujocoinclude></mujocoinclude>")
    (models / "mesh.stl").write_bytes(b"\0mesh")
    copy = without_shadows(str(tmp_path))
    family = os.path.join(copy, "mujoco", "family")
    with open(os.path.join(family, "scene.xml")) as file:
        assert file.read() == (
            '<mujoco model="x"><worldbody/><visual><quality shadowsize="0" offsamples="0"/></visual></mujoco>'
        )
    assert os.path.islink(os.path.join(family, "part.xml"))
    assert os.path.islink(os.path.join(family, "mesh.stl"))
    assert without_shadows(str(tmp_path)) == copy
