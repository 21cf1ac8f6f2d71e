"""Worker processes: what happens when they die, hang or raise, and that none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from m2flow.envs.gymnasium import GymnasiumConfig
from m2flow.envs.workers import WorkerFailed

TROUBLE = GymnasiumConfig(id="tests.unit.envs.worlds:Trouble-v0", workers=2, success=None, timeout=20.0)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Any, seconds: float = 10.0) -> bool:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if condition():
            return True
        time.sleep(0.05)
    return False


def step(env: Any) -> Any:
    env.send(np.zeros(len(env.lanes), np.int64))
    return env.recv()


def pids(env: Any) -> list[int]:
    return [worker.process.pid for worker in env._workers]


def test_workers_give_what_this_process_gives() -> None:
    here = GymnasiumConfig(id="Pendulum-v1", max_episode_steps=7).build([0, 1, 2], 5)
    there = GymnasiumConfig(id="Pendulum-v1", max_episode_steps=7, workers=2).build([0, 1, 2], 5)
    np.testing.assert_array_equal(here.reset()["state"], there.reset()["state"])
    for action in np.random.default_rng(0).uniform(-2, 2, (20, 3, 1)).astype(np.float32):
        here.send(action)
        there.send(action)
        a, b = here.recv(), there.recv()
        for name in ("reward", "terminated", "truncated", "valid"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        np.testing.assert_array_equal(a.obs["state"], b.obs["state"])
        np.testing.assert_array_equal(a.final_obs["state"], b.final_obs["state"])
    there.close()


def test_a_killed_worker_is_named_with_its_lanes_and_close_leaves_none() -> None:
    env = TROUBLE.build([0, 1, 2, 3], 0)
    env.reset()
    processes = pids(env)
    os.kill(processes[1], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match=rf"lanes 2\.\.3, process {processes[1]}, died \(exit status -9\)"):
        step(env)
    assert time.monotonic() - began < 10
    env.close()
    assert not any(alive(pid) for pid in processes)


def test_a_worker_that_ends_itself_is_reported_with_what_it_printed() -> None:
    env = TROUBLE.build([7, 9], 0)
    env.reset()
    env.send(np.array([0, 3]))
    with pytest.raises(WorkerFailed, match=r"(?s)lane 9,.*exit status 7.*about to die"):
        env.recv()
    env.close()


def test_an_exception_in_an_environment_reaches_the_caller_with_its_traceback() -> None:
    env = TROUBLE.build([7, 9], 0)
    env.reset()
    env.send(np.array([1, 0]))
    with pytest.raises(WorkerFailed, match=r"(?s)lane 7 failed.*worlds\.py.*the gripper is stuck"):
        env.recv()
    env.close()


def test_a_hung_worker_is_an_error_within_the_limit_and_is_killed() -> None:
    env = GymnasiumConfig(id=TROUBLE.id, workers=2, success=None, timeout=0.5).build([7, 9], 0)
    env.reset()
    processes = pids(env)
    env.send(np.array([0, 2]))
    with pytest.raises(WorkerFailed, match=r"lane 9, process \d+, did not answer within 0\.5 s"):
        env.recv()
    env.close()
    assert not any(alive(pid) for pid in processes)


def test_a_long_episode_is_played_again_with_the_limit_of_one_step_for_each_step() -> None:
    """Together the steps take longer than the limit; none does alone."""

    def build(seconds: float) -> Any:
        kwargs = {"seconds": seconds}
        return GymnasiumConfig(
            id="tests.unit.envs.worlds:Slow-v0", workers=2, kwargs=kwargs, success=None, timeout=2.0
        ).build([7, 9], 0)

    env, slow = build(0.0), build(0.05)
    env.reset()
    for _ in range(60):
        env.send(np.zeros((2, 1), np.float32))
        last = env.recv()
    np.testing.assert_array_equal(slow.restore(env.snapshot())["state"], last.obs["state"])
    env.close()
    slow.close()


def test_an_environment_that_cannot_be_made_fails_at_build_and_leaves_no_process() -> None:
    with pytest.raises(WorkerFailed, match=r"(?s)no Gymnasium environment"):
        GymnasiumConfig(id="NoSuch-v0", workers=2).build([0, 1], 0)


def test_workers_end_with_a_parent_that_is_killed() -> None:
    """Also while an environment hangs inside a step."""
    script = (
        "import numpy as np, time\n"
        "from m2flow.envs.gymnasium import GymnasiumConfig\n"
        f"env = GymnasiumConfig(id={TROUBLE.id!r}, workers=2, success=None).build([0, 1], 0)\n"
        "env.reset(); env.send(np.array([0, 2]))\n"
        "print(*[w.process.pid for w in env._workers], flush=True)\n"
        "time.sleep(100)\n"  # no `if __name__ == '__main__'`: a worker must not run this script again
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    children = [int(word) for word in parent.stdout.readline().split()]
    assert len(children) == 2
    assert all(alive(pid) for pid in children)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_for(lambda: not any(alive(pid) for pid in children)), "workers outlived their parent"


def test_workers_outlive_the_thread_that_started_them() -> None:
    """The parent-death signal of Linux follows the thread; an env may be built in one thread and used in another."""
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(TROUBLE.build([0, 1], 0)))
    thread.start()
    thread.join()
    time.sleep(0.2)
    env = made[0]
    env.reset()
    env.send(np.zeros(2, np.int64))
    assert env.recv().valid.all()
    env.close()


def test_workers_end_when_the_env_is_forgotten() -> None:
    env = TROUBLE.build([0, 1], 0)
    processes = pids(env)
    del env
    assert wait_for(lambda: not any(alive(pid) for pid in processes))
