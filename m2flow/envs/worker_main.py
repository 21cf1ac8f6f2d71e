"""Gymnasium envs in worker processes: the worker's side. `m2flow.envs.workers` starts one process per lane group."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from typing import Any

from m2flow.envs.gym_lanes import Answer, GymLanes
from m2flow.envs.workers import Block

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until the parent closes the socket."""
    handle, memory, start, stop, total, parent = json.loads(sys.argv[2])
    channel = socket.socket(fileno=handle)
    _end_with_parent(channel, parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    server = _Server(memory, start, stop, total)
    with contextlib.suppress(OSError):  # the parent is gone, which is how a worker is told to end
        _serve(channel, server)
    server.close()


def _serve(channel: socket.socket, server: _Server) -> None:
    while kind := channel.recv(1):
        try:
            if kind == b"s":
                server.step()
                channel.sendall(b"k")
                continue
            size = struct.unpack("<q", _read(channel, 8))[0]
            result = server.handle(*pickle.loads(_read(channel, size)))  # noqa: S301 (from the parent)
            _reply(channel, b"m", result) if result is not None else channel.sendall(b"k")
        except OSError:
            raise
        except BaseException:  # noqa: BLE001 whatever an environment raises is told to the parent, which decides
            _reply(channel, b"e", traceback.format_exc())


def _reply(channel: socket.socket, kind: bytes, content: Any) -> None:
    data = pickle.dumps(content)
    channel.sendall(kind + struct.pack("<q", len(data)) + data)


def _read(channel: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = channel.recv(size - len(data))
        if not part:
            raise ConnectionError("the parent closed the socket in the middle of a message")
        data += part
    return data


class _Server:
    """The lanes of this worker, writing into its rows of the shared block."""

    def __init__(self, memory: int, start: int, stop: int, total: int) -> None:
        self.memory, self.rows, self.total = memory, slice(start, stop), total
        self.lanes: GymLanes | None = None
        self.answer: Answer | None = None
        self.block: Block | None = None

    def handle(self, what: str, *args: Any) -> Any:
        """Anything but a step."""
        if what == "make":
            world, seeds, render = args
            self.lanes = GymLanes(world, seeds, render)
            return self.lanes.spec, self.lanes.info_names
        assert self.lanes is not None
        if what == "map":
            self._map(*args)
        elif what == "start":
            for row, episode in enumerate(args[0]):
                self.lanes.start(row, episode, self._answer.obs)
        elif what == "play":
            for row, actions in enumerate(args[0]):
                self.lanes.play(row, actions, self._answer.obs)
        elif what == "render":
            return self.lanes.render(args[0])
        else:
            raise ValueError(f"unknown message {what!r}")
        return None

    def _map(self, spec: Any, info: tuple[str, ...], size: int) -> None:
        block = Block(mmap.mmap(self.memory, size), spec, info, self.total)
        rows = self.rows
        self.answer = Answer(
            {name: array[rows] for name, array in block.obs.items()},
            block.reward[rows],
            block.flags[rows, 0],
            block.flags[rows, 1],
            block.flags[rows, 2],
            {name: array[rows] for name, array in block.info.items()},
            {name: array[rows] for name, array in block.final.items()},
        )
        self.block = block

    @property
    def _answer(self) -> Answer:
        assert self.answer is not None, "no shared memory yet"
        return self.answer

    def step(self) -> None:
        """One step of every lane, into shared memory."""
        out, block, lanes = self._answer, self.block, self.lanes
        assert block is not None
        assert lanes is not None
        out.terminated[:] = out.truncated[:] = False
        out.valid[:] = True
        out.reward[:] = 0
        for array in out.info.values():
            array[:] = 0
        lanes.step(block.action[self.rows], out)

    def close(self) -> None:
        if self.lanes is not None:
            self.lanes.close()


def _end_with_parent(channel: socket.socket, parent: int) -> None:
    """End when the parent does: by its kill signal on Linux, and by its closed socket while an env computes."""
    if sys.platform.startswith("linux") and parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    def watch() -> None:
        poll = select.poll()
        poll.register(channel.fileno(), 0)  # no events asked for: only a hang-up is reported
        poll.poll()
        threading.Event().wait(1.0)  # a worker that is not busy ends by itself, with its envs closed
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
