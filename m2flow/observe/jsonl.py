"""JSON lines that stay valid JSON: NaN is null, infinities are the strings "Infinity" and "-Infinity".

JSON has no NaN; Python's default writes it all the same and most readers then refuse the line. The rule holds for every
file that m2flow writes, at every depth. `decode` turns a stored number back into a float.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def encode(value: Any) -> Any:
    """A copy of `value` that `json.dumps(allow_nan=False)` takes: numbers by the rule above, paths as text, numpy
    scalars and arrays as numbers and lists, dataclasses as objects. Anything else is a TypeError that names its
    type."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return None if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((encode(item) for item in value), key=str)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if callable(getattr(value, "tolist", None)):
        return encode(value.tolist())
    raise TypeError(f"cannot write a {type(value).__name__} as JSON: {value!r:.200}")


def decode(value: Any) -> float:
    """A stored number as a float: null is NaN, "Infinity" and "-Infinity" are infinities."""
    return math.nan if value is None else float(value)


def dumps(value: Any, indent: int | None = None) -> str:
    """JSON text by the rule of this module."""
    return json.dumps(encode(value), allow_nan=False, ensure_ascii=False, indent=indent)


def rows(path: Path, tail: int | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file; none if there is no file. `tail`: only those that begin in its last so many bytes.

    A last line that a crash cut short is left out. A broken line elsewhere is a ValueError that names file and line.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = 0 if tail is None else max(0, size - tail - 1)
            file.seek(start)
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return
    if start:
        lines[0] = b""  # the end of a row that began earlier
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):  # no newline at its end: the writer died inside this line
                return
            raise ValueError(f"{path}:{number}: not valid JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: expected an object, got {type(row).__name__}")  # noqa: TRY004 - it is a fault of the file
        yield row


def keep_until(path: Path, step: int) -> int:
    """Drop rows of later steps than `step`, and a torn last line, so that a resumed run can append. Rows dropped."""
    if not path.exists():
        return 0
    kept, dropped = [], 0
    for row in rows(path):
        if int(row["step"]) <= step:
            kept.append(dumps(row))
        else:
            dropped += 1
    replace_text(path, "".join(line + "\n" for line in kept))
    return dropped


def replace_text(path: Path, text: str) -> Path:
    """Write a file so that a reader, also one after a crash, sees the old text or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
    return path


class Appender:
    """Appends whole lines to a file, each in one write, so that several processes can share the file.

    The file is opened at the first row. `O_APPEND` puts a write at the current end whoever wrote last.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def write(self, *items: Any) -> None:
        """Append one line per item; on disk (in the kernel's hands) when this returns."""
        if not items:
            return
        if self._fd is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        data = "".join(dumps(item) + "\n" for item in items).encode()
        written = os.write(self._fd, data)
        if written != len(data):
            raise OSError(f"{self.path}: wrote {written} of {len(data)} bytes (disk full?)")

    def close(self) -> None:
        """Close the file; a later `write` opens it again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
