"""A worker in a process of its own: how it is started, and what it does first.

It is a plain new Python, not a child of `multiprocessing`: that would run the user's script once more in every child,
so a script would need `if __name__ == "__main__":`, and one read from standard input or typed into a notebook would
have no file to run. The price: what a script defines itself cannot travel, because no other process can import it.

    arguments        sys.path, the parent's id, the cores to stay on
    standard input   a pickle of the worker's spec, program and links; sockets are inherited and named by their number
    output           the worker's log, from the first line on
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import pickle  # only between our own processes
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

from m2flow.protocols import Transport
from m2flow.runtime.wiring import WorkerSpec
from m2flow.runtime.worker import Program, Worker

PR_SET_PDEATHSIG = 1
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from m2flow.runtime.child import main; main()"


@dataclass(frozen=True, slots=True)
class Parcel:
    """What a worker is sent, and the sockets in it. Made for all workers before the first is started."""

    data: bytes
    sockets: Sequence[socket.socket]


class _Pickler(pickle.Pickler):
    """Sockets by number; refuses what only this process can import."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.sockets: list[socket.socket] = []

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, type | FunctionType) and obj.__module__ == "__main__":
            raise ValueError(
                f"{obj.__qualname__} is defined in the script or notebook that was started, which no other process can "
                "import; move it to a module of its own"
            )
        if isinstance(obj, socket.socket):
            self.sockets.append(obj)
            return obj.fileno()
        return None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: int) -> socket.socket:
        os.set_inheritable(pid, False)  # it came by inheritance; what this process starts must not hold it open
        return socket.socket(fileno=pid)


def wrap(spec: WorkerSpec, program: Program, links: Mapping[str, Transport]) -> Parcel:
    """Pickle what a worker needs. ValueError names what cannot be sent, and what to do."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump((spec, program, dict(links)))
    except (ValueError, TypeError, AttributeError, pickle.PicklingError) as error:
        raise ValueError(
            f"plan: {spec.id} runs in a process of its own, and cannot be sent there: {error}; or let it run in a "
            "thread (process: false in the plan's place; `collocated` is such a plan)"
        ) from error
    return Parcel(file.getvalue(), pickler.sockets)


def start(parcel: Parcel, cores: Sequence[int], log: Path) -> subprocess.Popen[bytes]:
    """Start the process of a worker."""
    arguments = [json.dumps([str(entry) for entry in sys.path]), json.dumps([os.getpid(), list(cores)])]
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryFile() as given,
        log.open("ab") as output,
    ):  # a file: writing to a pipe would wait for imports
        given.write(parcel.data)
        given.seek(0)
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, *arguments],
            stdin=given,
            stdout=output,
            stderr=output,
            pass_fds=[end.fileno() for end in parcel.sockets],
            env={**os.environ, "OMP_NUM_THREADS": str(max(len(cores), 1))},
        )


def main() -> None:
    """Entry of the process."""
    parent, cores = json.loads(sys.argv[2])
    del sys.argv[1:]
    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the driver decides what they mean
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    Worker(*_Unpickler(sys.stdin.buffer).load()).run()


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends (Linux); elsewhere the closed link ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the parent ended before the kernel was asked
