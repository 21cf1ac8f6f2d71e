"""The local runtime: workers as threads of this process, or as processes of their own pinned to their cores.

Links between threads pass references; links to or between processes go through shared memory. A worker's process dies
with its parent (parent-death signal), writes to its own log file and leaves interrupts to the driver.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from pathlib import Path

from m2flow.comm.transport import Location, choose
from m2flow.protocols import Transport
from m2flow.runtime import child
from m2flow.runtime.cluster import core_of
from m2flow.runtime.wiring import DRIVER
from m2flow.runtime.worker import Program, Worker


class LocalRuntime:
    """Starts the workers of a program and hands out the driver's links to them."""

    def __init__(self, program: Program, logs: Path) -> None:
        self.program, self.logs = program, logs
        self.threads: dict[str, threading.Thread] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

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
        # All of them before the first process starts: what cannot be sent is refused while nothing runs.
        try:
            parcels = {name: child.wrap(specs[name], self.program, ends[name]) for name in places}
        except BaseException:
            for links in ends.values():
                for link in links.values():
                    link.close()
            raise
        for spec in specs.values():
            if spec.process:
                cores = [core_of(device) for device in spec.devices if device.startswith("cpu:")]
                log = self.logs / f"{spec.id.replace('/', '-')}.log"
                self.processes[spec.id] = child.start(parcels[spec.id], cores, log)
                for link in ends[spec.id].values():
                    link.detach()  # type: ignore[attr-defined]  # this process keeps no copy, so that a death is seen
            else:
                worker = Worker(spec, self.program, ends[spec.id])
                thread = threading.Thread(target=worker.run, name=f"m2flow:{spec.id}", daemon=True)
                thread.start()
                self.threads[spec.id] = thread
        return ends[DRIVER]

    def exit_reason(self, worker: str) -> str:
        """How a worker ended, in words."""
        process = self.processes.get(worker)
        if process is None:
            return "its thread ended"
        try:
            code = process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "its link closed while the process still runs"
        return f"killed by signal {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def stop(self, limit: float) -> list[str]:
        """Wait up to `limit` seconds for all workers together, then kill. Ids of workers that had to be killed."""
        stubborn, deadline = [], time.monotonic() + limit
        for name, process in self.processes.items():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                stubborn.append(name)
                process.kill()
                process.wait()
        for name, thread in self.threads.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():  # cannot be killed; it ends with this process
                stubborn.append(name)
        return stubborn
