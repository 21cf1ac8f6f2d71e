"""What a run ran on and with: versions, git state, machine, command, seeds; and the state it is in."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from m2flow.observe.layout import STATES, RunFolder, read_json, write_json
from m2flow.observe.rundata import boot_id

PACKAGES = (
    "m2flow",
    "torch",
    "numpy",
    "gymnasium",
    "mujoco",
    "envpool",
    "envpool-assets",
    "metaworld",
    "ray",
    "transformers",
    "vllm",
    "sglang",
    "safetensors",
    "omegaconf",
    "tensorboard",
    "wandb",
    "swanlab",
    "imageio",
    "imageio-ffmpeg",
    "rich",
)


def versions(names: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Installed versions of the packages that can change a result; those not installed are left out. Imports
    nothing."""
    found = {}
    own = getattr(sys.modules.get("m2flow"), "__version__", None)  # also where it runs from a checkout
    if own is not None and "m2flow" in names:
        found["m2flow"] = str(own)
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state(path: Path) -> dict[str, Any]:
    """`{"commit", "dirty", "changed"}` of the repository that holds `path`, or empty if there is none (or no git)."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", *args], cwd=path, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return {}
    changed = (git("status", "--porcelain", "--untracked-files=no") or "").splitlines()
    return {"commit": commit, "dirty": bool(changed), "changed": [line[2:].strip() for line in changed[:50]]}


def machine() -> dict[str, Any]:
    """Operating system, Python, cores usable by this process, memory in bytes, accelerators by name (if torch is
    loaded)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    info: dict[str, Any] = {
        "os": platform.platform(),
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": cores,
        "memory_bytes": _memory(),
    }
    torch = sys.modules.get("torch")  # loading it here would cost seconds
    if torch is not None and torch.cuda.is_available():
        info["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return info


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory() -> int | None:
    """Bytes this process may use: of the machine, or of its control group where that is less."""
    limits = []
    with contextlib.suppress(ValueError, OSError, AttributeError):  # not every system can say
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(file).read_text(encoding="ascii")))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(limits, default=None)


def collect(seeds: Mapping[str, Any], command: Sequence[str] | None = None) -> dict[str, Any]:
    """What `env.json` holds. `seeds` names the run's seed as "run" and may hold what was derived from it. The git state
    is that of the repository this package was loaded from, else that of the working folder."""
    return {
        "time": time.time(),
        "command": list(sys.argv if command is None else command),
        "seeds": dict(seeds),
        "packages": versions(),
        "git": git_state(Path(__file__).parent) or git_state(Path.cwd()),
        "machine": machine(),
    }


def write_env(folder: RunFolder, seeds: Mapping[str, Any], command: Sequence[str] | None = None) -> dict[str, Any]:
    """Collect and write env.json. A resumed run keeps what it started with under "resumed_from"."""
    info = collect(seeds, command)
    earlier = read_json(folder.env)
    if isinstance(earlier, dict):
        info["resumed_from"] = [*earlier.pop("resumed_from", []), earlier]
    write_json(folder.env, info)
    return info


def write_status(
    folder: RunFolder,
    state: str,
    *,
    step: int,
    steps: int,
    seconds: float | None = None,
    error: str | None = None,
    reason: str | None = None,
) -> dict[str, Any]:
    """Write status.json atomically and return it. `reason` says why a run stopped early; `error` why it failed.
    `seconds` of wall time the run has been at work, without the time between a stop and a resume.

    `started` is kept from the first call, `updated` is now, `ended` is set by every state but "running".
    """
    if state not in STATES:
        raise ValueError(f"state: {state!r}; allowed: {', '.join(STATES)}")
    known = read_json(folder.status)
    now = time.time()
    status = {
        "state": state,
        "step": step,
        "steps": steps,
        "seconds": seconds,
        "error": error,
        "reason": reason,
        "started": known["started"] if isinstance(known, dict) and "started" in known else now,
        "updated": now,
        "ended": None if state == "running" else now,
        "pid": os.getpid(),
        "boot": boot_id(),
    }
    write_json(folder.status, status)
    return status
