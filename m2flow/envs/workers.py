"""Gymnasium envs in worker processes: the parent's side.

Observations, rewards, flags and actions lie in one block of shared memory; a step is one byte to each worker and one
byte back. Workers are started by `subprocess`, so the caller's script needs no `if __name__ == "__main__"`. They end
with the parent, however it ends: the operating system kills them (Linux), and a closed socket tells them everywhere.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import mmap
import os
import pickle
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from m2flow.comm.shared_segment import anonymous_file
from m2flow.envs.action_log import ActionLog, check_replayed, same_epoch
from m2flow.envs.gym_lanes import World
from m2flow.envs.lanes import LaneSeeds, check_action
from m2flow.types import Array, Observation, Spec, Step, Tree

START_LIMIT = 120.0  # seconds to import the environment's packages and make the envs
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from m2flow.envs.worker_main import main; main()"


class WorkerFailed(RuntimeError):
    """A worker process died, hung, or its environment raised."""


class Block:
    """Named arrays [B, ...] in shared memory, laid out from the spec in the same order on both sides."""

    def __init__(self, memory: Any, spec: Spec, info: Sequence[str], lanes: int) -> None:
        offset = 0

        def take(shape: tuple[int, ...], dtype: str) -> Array:
            nonlocal offset
            count = lanes * int(np.prod(shape, dtype=np.int64))
            start, offset = offset, offset + -(-count * np.dtype(dtype).itemsize // 64) * 64
            if memory is None:
                return None
            return np.frombuffer(memory, dtype, count, start).reshape(lanes, *shape)

        self.obs = {name: take(field.shape, field.dtype) for name, field in spec.observation.items()}
        self.final = {name: take(field.shape, field.dtype) for name, field in spec.observation.items()}
        self.action = take(spec.action.shape, spec.action.dtype)
        self.reward = take((), "float32")
        self.flags = take((3,), "bool")  # terminated, truncated, valid
        self.info = {name: take((), "bool" if name == "success" else "float64") for name in info}
        self.size = max(offset, 64)


class WorkerEnv:
    """A VectorEnv over worker processes. Made by `GymnasiumConfig.build` with `workers` > 0."""

    def __init__(
        self, world: World, seeds: LaneSeeds, render: bool = False, *, workers: int, timeout: float, cut: bool = False
    ) -> None:
        self.world, self.seeds, self.lanes = world, seeds, seeds.ids
        self.timeout, self.cut = timeout, cut
        count = min(workers, len(seeds.lanes))
        edges = [len(seeds.lanes) * i // count for i in range(count + 1)]
        self._fd = anonymous_file("m2flow-env")
        self._workers = [
            _Worker(seeds.take(a, b), a, b, self._fd, len(seeds.lanes)) for a, b in itertools.pairwise(edges)
        ]
        self._end = weakref.finalize(self, _stop, self._workers, self._fd)
        try:
            self.spec, self._info = self._start(render)
        except BaseException:
            self._end()
            raise
        size = Block(None, self.spec, self._info, len(self.lanes)).size
        os.ftruncate(self._fd, size)
        self._block = Block(mmap.mmap(self._fd, size), self.spec, self._info, len(self.lanes))
        self._all(("map", self.spec, self._info, size))
        self.log = ActionLog(len(self.lanes), keep=not (cut or seeds.single))
        self.episodes = [0] * len(self.lanes)
        self.obs: Observation = {}
        self._finished = np.zeros(len(self.lanes), bool)
        self._pending = False

    def _start(self, render: bool) -> tuple[Spec, tuple[str, ...]]:
        world = dataclasses.replace(self.world, kwargs=_plain(self.world.kwargs))  # so that workers import little
        for worker in self._workers:
            worker.tell(("make", world, worker.seeds, render))
        answers = [worker.answer(time.monotonic() + START_LIMIT, START_LIMIT) for worker in self._workers]
        spec, info = answers[0]
        return spec, info

    def _all(self, message: tuple[Any, ...]) -> list[Any]:
        return self._each([message] * len(self._workers))

    def _each(self, messages: Sequence[tuple[Any, ...]]) -> list[Any]:
        for worker, message in zip(self._workers, messages, strict=True):
            worker.tell(message)
        limit = time.monotonic() + self.timeout
        return [worker.answer(limit, self.timeout) for worker in self._workers]

    def reset(self) -> Observation:
        """Start every lane at its first episode."""
        self._finished[:] = False
        return self._begin([0] * len(self.lanes))

    def _begin(self, episodes: Sequence[int]) -> Observation:
        self._pending = False
        self.episodes = list(episodes)
        self._each([("start", self.episodes[w.start : w.stop]) for w in self._workers])
        self.log.clear()
        self.obs = {name: array.copy() for name, array in self._block.obs.items()}
        return self.obs

    def send(self, action: Array) -> None:
        """Write the action and wake the workers."""
        assert not self._pending, "send: the last step has not been received"
        self._block.action[:] = check_action(action, len(self.lanes), self.spec.action.shape)
        for worker in self._workers:
            worker.wake()
        self._pending = True
        self.log.add(self._block.action)

    def recv(self) -> Step:
        """Wait for every worker. Raises `WorkerFailed` with its lanes where one died, hung or raised."""
        assert self._pending, "recv: nothing was sent"
        self._pending = False
        limit = time.monotonic() + self.timeout
        for worker in self._workers:
            worker.answer(limit, self.timeout)
        block = self._block
        obs = {name: array.copy() for name, array in block.obs.items()}
        terminated, truncated, valid = block.flags.T.copy()
        info = {name: array.copy() for name, array in block.info.items()}
        final = self.obs = obs
        done = terminated | truncated
        if done.any() and not self.seeds.single:
            final = {name: array.copy() for name, array in obs.items()}
            for name, array in block.final.items():
                final[name][done] = array[done]
            for row in np.flatnonzero(done):
                self.episodes[row] += 1
                self.log.ended(int(row))
        return Step(obs, block.reward.copy(), terminated, truncated, final, valid, info)

    def snapshot(self) -> Tree:
        """Episode numbers and the actions since each lane's reset; see `GymnasiumConfig.resume`."""
        assert not self.seeds.single, "an evaluation env holds one episode per lane and is not saved"
        if self.cut:
            self._begin([k + 1 for k in self.episodes])
        return self.log.state(self.episodes, self.obs, cut=self.cut)

    def restore(self, state: Tree) -> Observation:
        """Continue from a snapshot."""
        if same_epoch(state, self.episodes, self.obs, self.log):
            return self.obs
        self._begin([int(k) for k in state["episode"]])
        actions = state["actions"]
        for t in range(max(map(len, actions))):  # one step per message: an answer takes no longer than any other
            step = [lane[t : t + 1] for lane in actions]
            self._each([("play", step[w.start : w.stop]) for w in self._workers])
        obs = {name: array.copy() for name, array in self._block.obs.items()}
        check_replayed(obs, state, self.lanes, self.world.id)
        self.log.load(state["actions"])
        self.obs = obs
        return obs

    def render(self, lane: int) -> Array:
        """uint8 [H, W, 3] of the lane in row `lane`."""
        worker = next(w for w in self._workers if w.start <= lane < w.stop)
        worker.tell(("render", lane - worker.start))
        return worker.answer(time.monotonic() + self.timeout, self.timeout)

    def close(self) -> None:
        """End the workers and free the shared memory."""
        self._end()


class _Worker:
    """One process and the socket to it."""

    def __init__(self, seeds: LaneSeeds, start: int, stop: int, fd: int, total: int) -> None:
        self.seeds, self.start, self.stop = seeds, start, stop
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by _stop)
        self.socket, theirs = socket.socketpair()
        self._poll = select.poll()
        self._poll.register(self.socket, select.POLLIN)
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        # The kill signal follows the thread that started a process, so it is only asked for from the main thread.
        main = threading.current_thread() is threading.main_thread()
        layout = [theirs.fileno(), fd, start, stop, total, os.getpid() if main else 0]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(sys.path), json.dumps(layout)],
            pass_fds=(theirs.fileno(), fd),
            stdin=subprocess.DEVNULL,
            stderr=self.errors,
            env=environ,
        )
        theirs.close()

    def tell(self, message: tuple[Any, ...]) -> None:
        """Send a message; its answer is read by `answer`."""
        data = pickle.dumps(message)
        self._send(b"m" + struct.pack("<q", len(data)) + data)

    def wake(self) -> None:
        """Ask for one step."""
        self._send(b"s")

    def _send(self, data: bytes) -> None:
        try:
            self.socket.settimeout(START_LIMIT)
            self.socket.sendall(data)
        except OSError as error:
            raise self._failed("died") from error

    def answer(self, limit: float, seconds: float) -> Any:
        """The worker's next answer; `limit` is a time of the monotonic clock."""
        kind = self._read(1, limit, seconds)
        if kind == b"k":
            return None
        size = struct.unpack("<q", self._read(8, limit, seconds))[0]
        content = pickle.loads(self._read(size, limit, seconds))  # noqa: S301 (from our own worker)
        if kind == b"e":
            raise WorkerFailed(f"environment worker of {self._lanes()} failed:\n{content}")
        return content

    def _read(self, size: int, limit: float, seconds: float) -> bytes:
        parts = []
        while size:
            if not self._poll.poll(max(0.0, limit - time.monotonic()) * 1000):
                raise self._failed(f"did not answer within {seconds:g} s (env.timeout)")
            try:
                part = self.socket.recv(size)
            except ConnectionError:
                part = b""
            if not part:
                raise self._failed("died")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _lanes(self) -> str:
        lanes = self.seeds.lanes
        return f"lane {lanes[0]}" if len(lanes) == 1 else f"lanes {lanes[0]}..{lanes[-1]}"

    def _failed(self, what: str) -> WorkerFailed:
        if what == "died":
            try:
                what = f"died (exit status {self.process.wait(5)})"
            except subprocess.TimeoutExpired:
                what = "closed its socket but did not end"
        self.errors.seek(0)
        tail = self.errors.read().decode(errors="replace").strip().splitlines()[-12:]
        printed = "; it printed:\n  " + "\n  ".join(tail) if tail else ""
        return WorkerFailed(f"environment worker of {self._lanes()}, process {self.process.pid}, {what}{printed}")


def _plain(value: Any) -> Any:
    """Mappings as dicts, all the way down."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def _stop(workers: Sequence[_Worker], fd: int) -> None:
    """End all processes: asked first, then killed."""
    for worker in workers:
        worker.socket.close()
    limit = time.monotonic() + 2.0
    for worker in workers:
        try:
            worker.process.wait(max(0.0, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
        worker.errors.close()
    os.close(fd)
