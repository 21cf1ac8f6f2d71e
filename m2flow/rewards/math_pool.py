"""Processes that judge answers, each question under a wall limit. They are started when the first one comes.

Any thread may ask; the processes answer one caller at a time. A process that takes too long or dies is replaced, and
the question has its own outcome for that. A fork of this process starts processes of its own.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, TypeAlias

_START = 120.0  # seconds to import sympy in, on a busy machine
_ATTEMPTS = 3  # starts in a row that may fail
Question: TypeAlias = Mapping[str, Any]  # what goes to the worker as JSON
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import importlib; "
    "importlib.import_module(sys.argv[3]).main()"
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a question: `verdict` is "right", "wrong", "scored" with a `score`, or "error" or "timeout" with
    its `why`."""

    verdict: str
    why: str = ""
    score: float = math.nan


class _Process:
    """One verifier, and the question that it has."""

    def __init__(self, worker: str, seconds: float, memory: int) -> None:
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed in end()
        paths, limits = json.dumps([str(entry) for entry in sys.path]), json.dumps([seconds, memory])
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, paths, limits, worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.ready, self.job = False, -1
        self.deadline = time.monotonic() + _START
        self.buffer = bytearray()

    def ask(self, job: int, question: Question, seconds: float) -> bool:
        """Send a question; False where the process is not there any more."""
        assert self.process.stdin is not None
        data = json.dumps(question).encode()
        try:
            self.process.stdin.write(struct.pack(">I", len(data)) + data)
            self.process.stdin.flush()
        except OSError:
            return False
        self.job, self.deadline = job, time.monotonic() + seconds
        return True

    def read(self) -> tuple[bool, Any]:
        """What has come: (the process has ended, a message or None)."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 65536)
        self.buffer += data
        if len(self.buffer) >= 4:
            size = struct.unpack(">I", self.buffer[:4])[0]
            if len(self.buffer) >= 4 + size:
                message = json.loads(bytes(self.buffer[4 : 4 + size]))
                del self.buffer[: 4 + size]
                return False, message
        return not data, None

    def said(self) -> str:
        """The end of what it wrote as errors."""
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace")[-2000:].strip()

    def end(self, *, ours: bool = True) -> None:
        """Kill it, or, where it belongs to the process that this one was forked from, let go of it."""
        if ours:
            self.process.kill()
            self.process.wait()
        else:
            self.process.returncode = 0
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:  # a question that nobody reads any more
                continue


@dataclass(eq=False)
class Pool:
    """At most `workers` processes, each question at most `seconds` long (the start of a process not counted)."""

    workers: int
    seconds: float
    memory: int  # MiB of address space of each
    worker: str = "m2flow.rewards.math_worker"  # the module whose `main` a process runs; it says what a question is
    _there: list[_Process] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        _POOLS.add(self)
        weakref.finalize(self, _end_all, self._there)

    def __call__(self, questions: Sequence[Question]) -> list[Outcome]:
        """The outcome of every question, in order.

        Raises:
            RuntimeError: no process can be started; what it said is in the message.
        """
        with self._lock:
            try:
                return _Round(self, questions).run()
            except BaseException:  # interrupted: what a process still has to say belongs to no later question
                _end_all(self._there)
                raise

    def pids(self) -> list[int]:
        """Ids of the processes that are there now."""
        return [process.process.pid for process in self._there]

    def close(self) -> None:
        """End the processes. A later question starts new ones."""
        with self._lock:
            _end_all(self._there)

    def _forget(self) -> None:
        for process in self._there:
            process.end(ours=False)
        self._there.clear()
        self._lock = threading.Lock()


class _Round:
    """The questions of one call."""

    def __init__(self, pool: Pool, questions: Sequence[Question]) -> None:
        self.pool, self.questions = pool, questions
        self.waiting = deque(range(len(questions)))
        self.outcomes: dict[int, Outcome] = {}
        self.failed_starts = 0

    def run(self) -> list[Outcome]:
        with selectors.DefaultSelector() as selector:
            for process in self.pool._there:
                selector.register(process.process.stdout, selectors.EVENT_READ, process)  # type: ignore[arg-type]
            while len(self.outcomes) < len(self.questions):
                self._hand_out(selector)
                busy = [process for process in self.pool._there if process.job >= 0 or not process.ready]
                wait = min((process.deadline for process in busy), default=0.0) - time.monotonic()
                for key, _ in selector.select(max(wait, 0.0)):
                    self._hear(key.data, selector)
                for process in [p for p in self.pool._there if p.job >= 0 or not p.ready]:
                    if time.monotonic() >= process.deadline:
                        self._drop(process, selector, late=True)
        return [self.outcomes[index] for index in range(len(self.questions))]

    def _hand_out(self, selector: selectors.BaseSelector) -> None:
        """Questions to processes that have none, and new processes where there are more questions than processes."""
        there = self.pool._there
        for process in [p for p in there if p.ready and p.job < 0]:
            if not self.waiting:
                return
            job = self.waiting.popleft()
            if not process.ask(job, self.questions[job], self.pool.seconds):
                self.waiting.appendleft(job)
                self._drop(process, selector)
        starting = sum(not process.ready for process in there)
        while len(there) < self.pool.workers and starting < len(self.waiting):
            process = _Process(self.pool.worker, self.pool.seconds, self.pool.memory)
            there.append(process)
            selector.register(process.process.stdout, selectors.EVENT_READ, process)  # type: ignore[arg-type]
            starting += 1

    def _hear(self, process: _Process, selector: selectors.BaseSelector) -> None:
        ended, message = process.read()
        if ended:
            self._drop(process, selector)
        elif message is not None and message.get("ready"):
            process.ready, self.failed_starts = True, 0
        elif message is not None:
            self.outcomes[process.job] = Outcome(
                message["verdict"], message.get("why", ""), message.get("score", math.nan)
            )
            process.job = -1

    def _drop(self, process: _Process, selector: selectors.BaseSelector, *, late: bool = False) -> None:
        """End a process that is late or has ended by itself; its question is counted, not asked again."""
        selector.unregister(process.process.stdout)  # type: ignore[arg-type]
        self.pool._there.remove(process)
        said = "" if process.ready else process.said()
        process.end()
        if process.job >= 0:
            code = process.process.returncode
            self.outcomes[process.job] = (
                Outcome("timeout", f"longer than {self.pool.seconds:g} s")
                if late
                else Outcome("error", f"the verifier ended with {code}")
            )
        elif not process.ready:
            self.failed_starts += 1
            if self.failed_starts >= _ATTEMPTS:
                how = f"took longer than {_START:g} s" if late else f"ended with {process.process.returncode}"
                raise RuntimeError(f"the verifier ({self.pool.worker}) does not start: it {how}: {said}")


def _end_all(processes: list[_Process]) -> None:
    for process in processes:
        process.end()
    processes.clear()


_POOLS: weakref.WeakSet[Pool] = weakref.WeakSet()


def _after_fork() -> None:
    for pool in _POOLS:
        pool._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
