"""`m2flow doctor`: what this machine has, what is missing, and which combinations are known not to work.

A `problem` makes the command exit with 1. A `note` is something to know, for instance an optional part that is absent.
To add a pair of versions that do not work together: one line in `BAD_PAIRS`.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import m2flow
from m2flow._version import __version__
from m2flow.registry import EXTRAS

CORE = ("numpy", "torch", "pydantic", "PyYAML", "typer", "rich", "safetensors", "tensorboard")
GIB = 2**30
Versions = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report, and what to do about it."""

    level: Literal["ok", "note", "problem"]
    text: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class BadPair:
    """Versions that install together and fail together."""

    holds: Callable[[Versions], bool]
    text: str
    fix: str


def number(version: str) -> tuple[int, ...]:
    """`(1, 2, 5)` for "1.2.5+cpu"."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _assets_too_new(v: Versions) -> bool:
    return "envpool" in v and any(number(v[name]) >= (0, 4) for name in EXTRAS["envpool"][1:] if name in v)


def _vision_of_another_build(v: Versions) -> bool:
    return "torchvision" in v and "+cpu" in v.get("torch", "") and "+cpu" not in v["torchvision"]


def _gymnasium_before_mujoco(v: Versions) -> bool:
    return "gymnasium" in v and number(v["gymnasium"]) < (1, 0) and number(v.get("mujoco", "0")) >= (3, 0)


BAD_PAIRS: tuple[BadPair, ...] = (
    BadPair(
        _assets_too_new,
        "envpool with asset packages >= 0.4 fails on import (FileNotFoundError)",
        "pip install 'm2flow[envpool]'",
    ),
    BadPair(
        _vision_of_another_build,
        "torchvision of another build beside a CPU torch fails on import (operator torchvision::nms does not exist)",
        "pip uninstall torchvision, or install the torchvision that belongs to this torch",
    ),
    BadPair(
        _gymnasium_before_mujoco,
        "gymnasium < 1.0 cannot drive mujoco >= 3 (its bindings changed)",
        "pip install 'm2flow[gymnasium]'",
    ),
)


def examine(root: Path) -> list[Finding]:
    """Every finding, in the order of the report. `root` is the folder of runs."""
    checks = (
        _python,
        _packages,
        _pairs,
        _torch,
        _devices,
        _extras,
        _graphics,
        lambda: _disk(root),
        lambda: _runs(root),
    )
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check()
        except ImportError as error:  # what the doctor is for: a broken installation is reported, not suffered
            findings.append(Finding("problem", f"cannot look further: {error}", "reinstall m2flow"))
    return findings


def installed() -> dict[str, str]:
    """Distribution -> version, of the packages this module asks about."""
    from m2flow.observe.runinfo import versions

    return versions((*CORE, "torchvision", *(name for group in EXTRAS.values() for name in group)))


def _python() -> Iterator[Finding]:
    where = Path(m2flow.__file__).parent
    yield Finding("ok", f"m2flow {__version__} ({where}), Python {platform.python_version()}, {platform.platform()}")


def _packages() -> Iterator[Finding]:
    have = installed()
    present = ", ".join(f"{name} {have[name]}" for name in CORE if name in have)
    yield Finding("ok", present)
    absent = [name for name in CORE if name not in have]
    if absent:
        yield Finding("problem", f"missing: {', '.join(absent)}", f"pip install {' '.join(absent)}")


def _pairs() -> Iterator[Finding]:
    have = installed()
    for pair in BAD_PAIRS:
        if pair.holds(have):
            yield Finding("problem", pair.text, pair.fix)


def _torch() -> Iterator[Finding]:
    code = (
        "import torch; x = torch.eye(64); assert bool((x @ x == x).all());"
        "print(torch.__version__, torch.get_num_threads(), torch.cuda.device_count())"
    )
    answer = _run([sys.executable, "-c", code], {})
    if answer.returncode:
        yield Finding("problem", f"torch does not work: {_last_line(answer.stderr)}", "reinstall torch")
        return
    version, threads, gpus = answer.stdout.split()
    yield Finding("ok", f"torch {version} computes; {threads} threads, {gpus} GPUs")


def _devices() -> Iterator[Finding]:
    from m2flow.runtime.cluster import detect

    devices = detect().devices
    cores = [device for device in devices if device.kind == "cpu"]
    memory = sum(device.memory or 0 for device in cores)
    yield Finding("ok", f"{len(cores)} CPU cores usable, {memory / GIB:.1f} GiB of memory")
    for device in devices:
        if device.kind != "cpu":
            yield Finding("ok", f"{device.id}: {(device.memory or 0) / GIB:.1f} GiB")
    if memory < 2 * GIB:
        yield Finding("note", "less than 2 GiB of memory: use few lanes and no worker processes")


def _extras() -> Iterator[Finding]:
    have = installed()
    for extra, group in EXTRAS.items():
        present = [f"{name} {have[name]}" for name in group if name in have]
        absent = [name for name in group if name not in have]
        if not absent:
            yield Finding("ok", f"{extra}: {', '.join(present)}")
        elif group[0] in have:  # the others may have come with something else, as jinja2 comes with torch
            yield Finding("problem", f"{extra}: missing {', '.join(absent)}", f"pip install 'm2flow[{extra}]'")
        else:
            yield Finding("note", f"{extra}: not installed", f"pip install 'm2flow[{extra}]'")


def _graphics() -> Iterator[Finding]:
    """Whether MuJoCo can draw here, tried for real in another process (a failed attempt can end the process)."""
    if "mujoco" not in installed():
        return
    code = "import mujoco; context = mujoco.GLContext(64, 64); context.make_current(); context.free()"
    chosen = os.environ.get("MUJOCO_GL")
    for backend in [chosen] if chosen else ["egl", "osmesa"]:
        if _run([sys.executable, "-c", code], {"MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend}).returncode == 0:
            yield Finding("ok", f"graphics: MuJoCo draws with MUJOCO_GL={backend}")
            return
    how = "on Debian or Ubuntu: apt-get install libegl1 libgl1-mesa-dri, or libosmesa6"
    yield Finding("note", "graphics: MuJoCo cannot draw here; training works, videos are left out", how)


def _disk(root: Path) -> Iterator[Finding]:
    place = next(folder for folder in (root.absolute(), *root.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free / GIB
    level: Literal["ok", "problem"] = "ok" if free >= 1 else "problem"
    yield Finding(
        level, f"{free:.1f} GiB of disk free in {place}", "" if free >= 1 else "free some space: checkpoints need it"
    )


def _runs(root: Path) -> Iterator[Finding]:
    """Runs that say they are running while their process is gone."""
    from m2flow.observe.rundata import load_run
    from m2flow.observe.show import find_runs

    for folder in find_runs(root) if root.is_dir() else ():
        run = load_run(folder, spans=False)
        if run.state == "died":
            text = f"{folder} stopped without a word after step {run.step}"
            yield Finding("note", text, f"m2flow resume {folder}, or delete the folder")


def _run(command: list[str], extra: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, env={**os.environ, **extra}, capture_output=True, text=True, timeout=120, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", "no answer within 120 s")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]
