"""What stands behind "package.module:name" in a recipe.

The folder where m2flow is run is searched last, and stays on the search path once something was found there: worker
processes inherit that path and must find the same modules. Being last it can hide no installed package.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def module(name: str) -> ModuleType:
    """Import a module. Raises ModuleNotFoundError, also for what is no name of a module."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise ModuleNotFoundError(f"{name!r} is no name of a module", name=name)
    here = str(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}.") or here in sys.path or "" in sys.path:
            raise
    sys.path.append(here)
    try:
        importlib.invalidate_caches()
        return importlib.import_module(name)
    except ModuleNotFoundError:
        sys.path.remove(here)
        raise


def find(target: str) -> Any:
    """The object at "package.module:name", or at "./file.py:name" of a file beside where m2flow is run.

    Raises:
        ImportError: there is no such module or file.
        AttributeError: it has no such name.
    """
    place, _, name = target.rpartition(":")
    found: Any = _file(Path(place)) if place.endswith(".py") else module(place)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _file(path: Path) -> ModuleType:
    """The module in a file, run once per process."""
    full = path.expanduser().resolve()
    name = f"{full.stem}_{hashlib.blake2b(str(full).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, full) if full.is_file() else None
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"there is no file {path}", name=str(path))
    made = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(made)
    except BaseException:
        del sys.modules[name]
        raise
    return made
