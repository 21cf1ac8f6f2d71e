"""What every measurement needs: the peers' environments, fresh processes, the machine's description, results on disk."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HERE = Path(__file__).parent
VENVS = ROOT / ".bench"
RESULTS = HERE / "results"

# One thread for everybody, no GPU, nothing on the network.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONDONTWRITEBYTECODE": "1",
}
_PINS = """
import sys
from importlib.metadata import PackageNotFoundError, version
for pin in sys.argv[1:]:
    name, _, wanted = pin.partition("==")
    try:
        found = version(name.partition("[")[0])
    except PackageNotFoundError:
        sys.exit(1)
    if found.partition("+")[0] != wanted:
        sys.exit(1)
"""


class JobFailed(RuntimeError):
    """A measured process ended without a result."""


# ---- peers


def peer_python(peer: str) -> Path:
    """The interpreter of a peer's environment, `.bench/<peer>`; made where it is missing or not at its pins.

    The environment variable PIP_FLAGS is given to pip, as by the Makefile.
    """
    home, listing = VENVS / peer, HERE / "requirements" / f"{peer}.txt"
    python = home / "bin" / "python"
    pins = [line for line in listing.read_text(encoding="ascii").splitlines() if line and not line.startswith("#")]
    if python.exists() and subprocess.run([python, "-c", _PINS, *pins], check=False).returncode == 0:
        return python
    print(f"[bench] installing {peer} into .bench/{peer} (a few minutes; once)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
    flags = shlex.split(os.environ.get("PIP_FLAGS", ""))
    subprocess.run([python, "-m", "pip", "install", "-q", *flags, "-r", listing], check=True)
    return python


# ---- processes


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a measured process."""
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), **(extra or {})}


def run_job(job: Mapping[str, Any], peer: str | None = None, limit: float = 3600.0) -> dict[str, Any]:
    """Run one job in a fresh process, of the product or of `peer`, and return its result.

    Raises:
        JobFailed: it ended without a result; the end of its output is in the message.
    """
    python = Path(sys.executable) if peer is None else peer_python(peer)
    module = "benchmarks.jobs" if peer is None else "benchmarks.peer_jobs"
    argument = json.dumps(dict(job))
    load = os.getloadavg()[0]
    try:
        ended = subprocess.run(
            [python, "-m", module, argument],
            cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, timeout=limit,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise JobFailed(f"{module} {argument} took longer than {limit:g} s") from error
    for line in ended.stdout.splitlines():
        if line.startswith("RESULT "):
            result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return result | {"load": round(load, 2), "at": now()}
    tail = (ended.stdout + ended.stderr)[-2000:]
    raise JobFailed(f"{module} {argument} ended with code {ended.returncode} and no result:\n{tail}")


# ---- results


def now() -> str:
    """UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    model = "unknown"
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit of the product, with + where tracked files of it differ."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "m2flow"], cwd=ROOT, check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if dirty else "")


def load(path: Path) -> dict[str, Any] | None:
    """A stored result, or None where there is none yet."""
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def store(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result in one move, so that an interrupted benchmark leaves the last complete one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def command() -> str:
    """How this process was started, without the interpreter's path."""
    return shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])


def timed(arguments: Sequence[str], cwd: Path, extra: Mapping[str, str] | None = None) -> tuple[float, float, str]:
    """Wall seconds, CPU seconds and output of a command that must succeed."""
    before, began = os.times(), time.perf_counter()
    ended = subprocess.run(arguments, cwd=cwd, env=environment(extra), capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - began, os.times()
    if ended.returncode != 0:
        raise JobFailed(f"{shlex.join(map(str, arguments))} ended with code {ended.returncode}: {ended.stderr[-2000:]}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, cpu, ended.stdout
