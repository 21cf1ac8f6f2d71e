"""The local runtime: workers as threads of this process, or as spawned processes pinned to their cores.

Links between threads pass references; links to or between processes go through shared memory. Spawned workers die with
their parent (parent-death signal), write to their own log file and leave interrupts to the driver.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

from m2flow.comm.transport import Location, choose
from m2flow.protocols import Transport
from m2flow.runtime.cluster import core_of
from m2flow.runtime.wiring import DRIVER, WorkerSpec
from m2flow.runtime.worker import Program, Worker

PR_SET_PDEATHSIG = 1


class LocalRuntime:
    """Starts the workers of a program and hands out the driver's links to them."""

    def __init__(self, program: Program, logs: Path) -> None:
        self.program, self.logs = program, logs
        self.threads: dict[str, threading.Thread] = {}
        self.processes: dict[str, BaseProcess] = {}

    def start(self) -> dict[str, Transport]:
        """Start every worker; the driver's end of the link to each, by worker id."""
        specs = {spec.id: spec for spec in self.program.wiring.workers}
        ends: dict[str, dict[str, Transport]] = {name: {} for name in (*specs, DRIVER)}
        pairs = [*self.program.wiring.links, *((DRIVER, name) for name in specs)]
        places = {name: Location("this host", i) for i, (name, spec) in enumerate(specs.items(), 1) if spec.process}
        home = Location("this host", 0)  # the driver's process, and that of all threads
        for left, right in pairs:
            kind = choose(places.get(left, home), places.get(right, home))
            ends[left][right], ends[right][left] = kind.pair(name=f"{left} - {right}", ends=(left, right))
        for spec in specs.values():
            if spec.process:
                self._spawn(spec, ends[spec.id])
            else:
                worker = Worker(spec, self.program, ends[spec.id])
                thread = threading.Thread(target=worker.run, name=f"m2flow:{spec.id}", daemon=True)
                thread.start()
                self.threads[spec.id] = thread
        return ends[DRIVER]

    def _spawn(self, spec: WorkerSpec, links: Mapping[str, Transport]) -> None:
        cores = [core_of(device) for device in spec.devices if device.startswith("cpu:")]
        log = self.logs / f"{spec.id.replace('/', '-')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("spawn")
        process = context.Process(
            target=child_main, args=(spec, self.program, dict(links), cores, str(log), os.getpid()), name=spec.id
        )
        threads = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = str(max(len(cores), 1))  # read when the child loads its maths libraries
        try:
            process.start()
        finally:
            if threads is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = threads
        for link in links.values():
            link.detach()  # type: ignore[attr-defined]  # this process keeps no copy, so that a death is seen
        self.processes[spec.id] = process

    def exit_reason(self, worker: str) -> str:
        """How a worker ended, in words."""
        process = self.processes.get(worker)
        if process is None:
            return "its thread ended"
        process.join(5.0)
        code = process.exitcode
        if code is None:
            return "its link closed while the process still runs"
        return f"killed by signal {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def stop(self, limit: float) -> list[str]:
        """Wait for every worker up to `limit` seconds, then kill. Ids of workers that had to be killed."""
        stubborn = []
        for name, process in self.processes.items():
            process.join(limit)
            if process.is_alive():
                stubborn.append(name)
                process.kill()
                process.join(10.0)
            process.close()
        for name, thread in self.threads.items():
            thread.join(limit)
            if thread.is_alive():  # cannot be killed; it ends with this process
                stubborn.append(name)
        return stubborn


def child_main(
    spec: WorkerSpec, program: Program, links: Mapping[str, Transport], cores: list[int], log: str, parent: int
) -> None:
    """Entry of a spawned worker."""
    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the driver decides what they mean
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    Worker(spec, program, links).run()


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends (Linux); elsewhere the closed link ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the parent ended before the kernel was asked
