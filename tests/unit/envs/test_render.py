from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from m2flow.envs import render
from m2flow.envs.gymnasium import GymnasiumConfig
from m2flow.envs.toy import BanditConfig, CountConfig, PointReachConfig


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    """gl_available without its memory."""
    monkeypatch.setattr(render, "gl_available", render.gl_available.__wrapped__)
    return monkeypatch


def test_the_probe_names_the_renderer_or_what_to_install() -> None:
    ready, text = render.gl_available()
    assert "\n" not in text
    assert text
    assert ready or "apt-get install libegl1" in text


def test_missing_library_and_crashing_driver_are_told_in_one_line(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(render, "_PROBE", "import ctypes; ctypes.CDLL('libNoSuchGL.so.1')")
    ready, why = render.gl_available()
    assert not ready
    assert "apt-get install" in why
    assert "libNoSuchGL" in why
    fresh.setattr(render, "_PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    ready, why = render.gl_available()
    assert not ready
    assert "exit status -11" in why
    assert "\n" not in why


def test_mujoco_frames_are_drawn_where_there_is_opengl() -> None:
    config = GymnasiumConfig(id="HalfCheetah-v5", kwargs={"width": 64, "height": 48})
    ready, why = config.renderable()
    assert ready == render.gl_available()[0]
    if not ready:
        assert "apt-get install" in why
        return
    env: Any = config.build_seeded([3, 4], render=True)
    env.reset()
    a, b = env.render(0), env.render(1)
    assert (a.shape, a.dtype) == ((48, 64, 3), np.uint8)
    assert len(np.unique(a.reshape(-1, 3), axis=0)) > 20
    assert (a != b).any()
    env.close()


def test_environments_without_frames_say_so() -> None:
    ready, why = GymnasiumConfig(id="tests.unit.envs.worlds:Counting-v0").renderable()
    assert not ready
    assert "cannot draw frames" in why
    ready, why = GymnasiumConfig(id="CartPole-v1").renderable()  # gymnasium draws it with pygame, which may be missing
    assert ready == (importlib.util.find_spec("pygame") is not None)
    assert ready or "pygame" in why
    env = GymnasiumConfig(id="CartPole-v1").build([0], 0)
    env.reset()
    with pytest.raises(ValueError, match="render=True"):
        env.render(0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("config", [PointReachConfig(), BanditConfig(horizon=4), CountConfig()])
def test_toys_draw_themselves_and_frames_follow_the_state(config: Any) -> None:
    assert config.renderable() == (True, "")
    env = config.build_seeded([0, 1])
    env.reset()
    before = env.render(0)
    assert (before.shape, before.dtype) == ((96, 96, 3), np.uint8)
    action = np.zeros((2, *env.spec.action.shape), env.spec.action.dtype) + 1
    env.send(action)
    env.recv()
    assert (env.render(0) != before).any()
