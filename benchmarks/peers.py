"""The peers' own environments: `.bench/sb3` and `.bench/sbx`, made on first use from requirements/*.txt."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import venv
from pathlib import Path

REPO = Path(__file__).parents[1]
HOME = REPO / ".bench"
NAMES = ("sb3", "sbx")


def python(name: str) -> Path:
    """The peer's Python; installs the peer if that has not been done with these requirements.

    `PIP_FLAGS` is handed to pip, as in the Makefile (for an index with CPU builds of torch, say).
    """
    pins, home = Path(__file__).parent / "requirements" / f"{name}.txt", HOME / name
    executable, stamp = home / "bin" / "python", home / "installed.txt"
    wanted = pins.read_text(encoding="utf-8")
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return executable
    HOME.mkdir(exist_ok=True)
    (HOME / ".gitignore").write_text("*\n", encoding="ascii")
    print(f"[bench] installing the peer {name} into .bench/{name} (once; about 1 GB)", flush=True)
    base = Path(getattr(sys, "_base_executable", sys.executable))
    if not executable.exists():
        if base.exists():
            subprocess.run([base, "-m", "venv", home], check=True)
        else:
            venv.create(home, with_pip=True)
    flags = shlex.split(os.environ.get("PIP_FLAGS", ""))
    subprocess.run([executable, "-m", "pip", "install", "--quiet", *flags, "-r", pins], check=True)
    stamp.write_text(wanted, encoding="utf-8")
    return executable
