"""The peers' own environments, `.bench/NAME`, made on first use from requirements/NAME.txt."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[1]
HOME = REPO / ".bench"
NAMES = ("sb3", "sbx", "trl")
_HAS_PINS = """
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


def python(name: str) -> Path:
    """The peer's Python; installs the peer where it is missing or not at its pins.

    `PIP_FLAGS` is handed to pip, as in the Makefile (for an index with CPU builds of torch, say).
    """
    listing, home = Path(__file__).parent / "requirements" / f"{name}.txt", HOME / name
    executable = home / "bin" / "python"
    pins = [line for line in listing.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    if executable.exists() and subprocess.run([executable, "-c", _HAS_PINS, *pins], check=False).returncode == 0:
        return executable
    print(f"[bench] installing the peer {name} into .bench/{name} (once; about 1 GB)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
    flags = shlex.split(os.environ.get("PIP_FLAGS", ""))
    subprocess.run([executable, "-m", "pip", "install", "--quiet", *flags, "-r", listing], check=True)
    return executable
