"""What every VectorEnv must do. A new environment adds one `Case` to test_envs.py, and all of this is asked of it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from m2flow.protocols import VectorEnv
from m2flow.types import Step

PROTOCOLS = ("VectorEnv", "Renderer")
LANES = (0, 1, 2, 3)
SEED = 11


@dataclass(frozen=True)
class Case:
    """An env config whose episodes last a few steps, so that every check sees several ends.

    `longer` is the same world with a later time limit, where episodes end by truncation: the true final observation is
    then what the longer world shows at that step.
    """

    name: str
    config: Any
    longer: Any = None
    autoreset: str = "same"
    cut: bool = False  # whether a snapshot starts fresh episodes
    random: bool = True  # whether first observations depend on the seed
    steps: int = 25


def build(case: Case, lanes: Sequence[int] = LANES, seed: int = SEED) -> VectorEnv:
    env: VectorEnv = case.config.build(list(lanes), seed)
    return env


def actions(case: Case, steps: int | None = None, seed: int = 0) -> np.ndarray[Any, Any]:
    """Legal actions [steps, len(LANES), *shape]."""
    field, count = case.config.spec().action, steps or case.steps
    rng = np.random.default_rng(seed)
    shape = (count, len(LANES), *field.shape)
    if field.categories is not None:
        return rng.integers(field.categories, size=shape).astype(field.dtype)
    return rng.uniform(-1.0, 1.0, shape).astype(field.dtype)


def step(env: VectorEnv, action: Any) -> Step:
    env.send(action)
    return env.recv()


def roll(env: VectorEnv, acts: Any) -> list[Step]:
    return [step(env, action) for action in acts]


def assert_same(a: Step, b: Step, rows: Any = slice(None), other: Any = slice(None)) -> None:
    """Steps agree bit by bit in these rows."""
    for name in a.obs:
        np.testing.assert_array_equal(a.obs[name][rows], b.obs[name][other], err_msg=f"obs {name}")
        np.testing.assert_array_equal(a.final_obs[name][rows], b.final_obs[name][other], err_msg=f"final {name}")
    for name in ("reward", "terminated", "truncated", "valid"):
        np.testing.assert_array_equal(getattr(a, name)[rows], getattr(b, name)[other], err_msg=name)
    assert set(a.info) == set(b.info)
    for name in a.info:
        np.testing.assert_array_equal(a.info[name][rows], b.info[name][other], err_msg=f"info {name}")


def assert_same_obs(a: Any, b: Any, rows: Any = slice(None), other: Any = slice(None)) -> None:
    assert set(a) == set(b)
    for name in a:
        np.testing.assert_array_equal(a[name][rows], b[name][other], err_msg=name)


# ---- checks


def check_shapes_and_dtypes(case: Case) -> None:
    env = build(case)
    spec, size = case.config.spec(), len(LANES)
    assert env.spec == spec
    assert env.lanes.dtype == np.int64
    assert list(env.lanes) == list(LANES)

    def check_obs(obs: Any) -> None:
        assert set(obs) == set(spec.observation)
        for name, field in spec.observation.items():
            assert obs[name].shape == (size, *field.shape), name
            assert obs[name].dtype == field.dtype, name

    check_obs(env.reset())
    for got in roll(env, actions(case)):
        check_obs(got.obs)
        check_obs(got.final_obs)
        assert got.reward.shape == (size,)
        assert got.reward.dtype == getattr(case.config, "dtype", "float32")
        for flag in (got.terminated, got.truncated, got.valid):
            assert flag.shape == (size,)
            assert flag.dtype == bool
        for name, column in got.info.items():
            assert column.shape[0] == size, name
            assert name != "success" or column.dtype == bool
    env.close()


def check_lanes_do_not_depend_on_the_split(case: Case) -> None:
    whole, left, right, mixed = build(case), build(case, [0, 1]), build(case, [2, 3]), build(case, [3, 1])
    first = whole.reset()
    assert_same_obs(first, left.reset(), slice(0, 2))
    assert_same_obs(first, right.reset(), slice(2, 4))
    assert_same_obs(first, mixed.reset(), [3, 1])
    for action in actions(case):
        got = step(whole, action)
        assert_same(got, step(left, action[:2]), slice(0, 2))
        assert_same(got, step(right, action[2:]), slice(2, 4))
        assert_same(got, step(mixed, action[[3, 1]]), [3, 1])
    for env in (whole, left, right, mixed):
        env.close()


def check_two_envs_in_flight(case: Case) -> None:
    """send and recv are the two halves of a step: another env's step may lie in between."""
    plain, one, two = build(case), build(case), build(case, [4, 5, 6, 7])
    alone = build(case, [4, 5, 6, 7])
    for env in (plain, one, two, alone):
        env.reset()
    for action in actions(case, 12):
        one.send(action)
        two.send(action)
        assert_same(step(plain, action), one.recv())
        assert_same(step(alone, action), two.recv())
    for env in (plain, one, two, alone):
        env.close()


def check_ends_and_resets(case: Case) -> None:
    """An episode ends once, is reset once, and its final observation is not the first of the next episode."""
    env = build(case)
    env.reset()
    ended, ends, moved = np.zeros(len(LANES), bool), 0, case.autoreset == "next"
    for got in roll(env, actions(case)):
        done = got.terminated | got.truncated
        if case.autoreset == "next":
            np.testing.assert_array_equal(got.valid, ~ended)  # the step after an end only resets
            assert not done[ended].any()
            assert (got.reward[ended] == 0).all()
            assert got.final_obs is got.obs
        else:
            assert got.valid.all()
            if not done.any():
                assert got.final_obs is got.obs
            for name in got.obs:
                np.testing.assert_array_equal(got.obs[name][~done], got.final_obs[name][~done])
                moved = moved or bool((got.obs[name][done] != got.final_obs[name][done]).any())
        ended, ends = done, ends + int(done.sum())
    assert ends >= len(LANES), "the case's episodes are too long for this suite"
    assert moved, "the final observation was never another than the first of the next episode"
    env.close()


def check_final_observation_is_the_true_one(case: Case) -> None:
    """At a time limit the final observation is what the world without that limit shows."""
    assert case.longer is not None
    env, longer = build(case), case.longer.build(list(LANES), SEED)
    env.reset()
    longer.reset()
    for action in actions(case):
        got, beyond = step(env, action), step(longer, action)
        assert not (beyond.terminated | beyond.truncated).any()
        assert_same_obs(got.final_obs, beyond.obs)
        if got.truncated.any():
            assert got.truncated.all()
            assert not got.terminated.any()
            break
    else:
        raise AssertionError("no episode was truncated")
    env.close()
    longer.close()


def check_seeds(case: Case) -> None:
    acts = actions(case, 12)
    a, b, other = build(case), build(case), build(case, seed=SEED + 1)
    first = a.reset()
    assert_same_obs(first, b.reset())
    different = other.reset()
    if case.random:
        assert any((first[name] != different[name]).any() for name in first)
        rows = np.concatenate([array.reshape(len(LANES), -1) for array in first.values()], axis=1)
        assert len(np.unique(rows, axis=0)) > 1, "all lanes start alike"
    for x, y in zip(roll(a, acts), roll(b, acts), strict=True):
        assert_same(x, y)
    for env in (a, b, other):
        env.close()


def check_reset_starts_again(case: Case) -> None:
    env = build(case)
    acts = actions(case, 12)
    first, before = env.reset(), roll(env, acts)
    assert_same_obs(first, env.reset())
    for x, y in zip(before, roll(env, acts), strict=True):
        assert_same(x, y)
    env.close()


def check_snapshot_law(case: Case) -> None:
    """Continuing after `snapshot` is the same as continuing after `restore`, in this env and in a fresh one."""
    acts, later = actions(case, 13), actions(case, case.steps, seed=1)
    env = build(case)
    env.reset()
    last = roll(env, acts)[-1]
    state = env.snapshot()
    assert bool(state["cut"]) == case.cut
    stored = pickle.loads(pickle.dumps(state))
    here = env.restore(state)
    if not case.cut:
        assert_same_obs(here, last.obs)
    went_on = roll(env, later)
    fresh = build(case)
    fresh.reset()
    assert_same_obs(fresh.restore(stored), here)
    assert_same_obs(env.restore(copy.deepcopy(stored)), here)
    for x, y, z in zip(went_on, roll(fresh, later), roll(env, later), strict=True):
        assert_same(x, y)
        assert_same(x, z)
    env.close()
    fresh.close()


def check_two_snapshots_in_a_row(case: Case) -> None:
    """A snapshot changes nothing for the next one, and a restored env can be saved again."""
    env = build(case)
    env.reset()
    roll(env, actions(case, 7))
    env.snapshot()
    roll(env, actions(case, 9, seed=2))
    state = pickle.loads(pickle.dumps(env.snapshot()))
    env.restore(state)
    again = build(case)
    again.reset()
    again.restore(state)
    later = actions(case, 8, seed=3)
    for x, y in zip(roll(env, later), roll(again, later), strict=True):
        assert_same(x, y)
    second = again.snapshot()
    third = build(case)
    third.reset()
    assert_same_obs(third.restore(pickle.loads(pickle.dumps(second))), again.restore(second))
    for used in (env, again, third):
        used.close()


def check_arrays_belong_to_the_caller(case: Case) -> None:
    env = build(case)
    held: list[tuple[Any, Any]] = [(obs := env.reset(), copy.deepcopy(obs))]
    for action in actions(case):
        got = step(env, action)
        held.append((got, copy.deepcopy(got)))
    for kept, copied in held[1:]:
        assert_same(kept, copied)
    assert_same_obs(*held[0])
    env.close()


def check_seeded_lanes_play_one_episode(case: Case) -> None:
    seeds = [907, 31, 500_000]
    env, turned = case.config.build_seeded(seeds), case.config.build_seeded(seeds[::-1])
    single = case.config.build_seeded(seeds[1:2], 1)
    first, mirrored = env.reset(), turned.reset()
    assert_same_obs(first, mirrored, other=[2, 1, 0])
    assert_same_obs(first, single.reset(), [1])
    alive, last = np.ones(3, bool), first
    for action in actions(case)[:, :3]:
        got = step(env, action)
        assert_same(got, step(turned, action[::-1]), other=[2, 1, 0])
        assert_same(got, step(single, action[1:2]), [1])
        np.testing.assert_array_equal(got.valid, alive)
        for name in got.obs:
            np.testing.assert_array_equal(got.obs[name][~alive], last[name][~alive])  # finished lanes stand still
        last, alive = got.obs, alive & ~(got.terminated | got.truncated)
    assert not alive.any()
    for used in (env, turned, single):
        used.close()


def check_wrong_use_is_refused(case: Case) -> None:
    env = build(case)
    env.reset()
    good = actions(case, 1)[0]
    with pytest.raises(ValueError, match="action: got") as caught:
        env.send(good[:2])
    assert str(good[:2].shape) in str(caught.value)
    assert str(good.shape) in str(caught.value)
    env.close()
    for bad in ([], [0, 0], [-1]):
        with pytest.raises(ValueError, match=r"^lanes: "):
            build(case, bad)


def check_config_says_when_episodes_end(case: Case) -> None:
    limit = case.config.time_limit()
    env = build(case)
    env.reset()
    elapsed, seen = np.zeros(len(LANES), int), 0
    for got in roll(env, actions(case)):
        elapsed = elapsed + got.valid
        assert limit is None or (elapsed <= limit).all()
        seen = max(seen, int(elapsed.max()))
        elapsed[got.terminated | got.truncated] = 0
    if case.longer is not None:
        assert seen == limit
    env.close()


def check_frames(case: Case) -> None:
    """Where frames can be drawn: whole, the caller's own, of the state a lane stands at; and the world stays as it is.
    Where they cannot, one line says why."""
    ready, why = case.config.renderable()
    if not ready:
        assert why and "\n" not in why
        return
    env, undrawn = case.config.build_seeded([907, 31], 1, render=True), case.config.build_seeded([907, 31], 1)
    assert_same_obs(env.reset(), undrawn.reset())
    held = [(frame := env.render(0), frame.copy())]
    np.testing.assert_array_equal(env.render(0), frame)
    for action in actions(case, 8)[:, :2]:
        assert_same(step(env, action), step(undrawn, action))
        held.append((frame := env.render(0), frame.copy()))
        assert env.render(1).shape == frame.shape
    for frame, copied in held:
        assert (frame.dtype, frame.ndim, frame.shape[2]) == (np.uint8, 3, 3)
        np.testing.assert_array_equal(frame, copied)
    assert any((frame != held[0][0]).any() for frame, _ in held[1:]), "the picture does not follow the state"
    env.close()
    undrawn.close()


CHECKS = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
