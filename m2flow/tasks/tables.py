"""Files of rows: JSON lines and Parquet. Each is read once from front to end, and afterwards row by row."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Row = Mapping[str, Any]
EXAMPLE = '{"prompt": "2 + 2 =", "answer": "4"}'  # a valid row
_FORM = f"write one object a line, for instance {EXAMPLE}"
_LIST = 'pandas.read_json(OLD).to_json(NEW, orient="records", lines=True) turns a list of objects into that'
ENDINGS = (".jsonl", ".ndjson", ".json", ".parquet")


class Table(Protocol):
    """Rows of one file, numbered from 0."""

    path: Path

    def rows(self) -> Iterator[Row]:
        """All rows in their order. Raises ValueError naming file and row where one cannot be read."""

    def row(self, index: int) -> Row:
        """One row, after `rows` has come to it."""

    def label(self, index: int) -> str:
        """File and row for messages, counted from 1."""


class JsonLines:
    """One JSON object a line; empty lines are skipped. Kept are only the places where rows begin."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin, self._line = array("q"), array("q")  # of each row: its first byte; its line, from 1

    def rows(self) -> Iterator[Row]:
        self._begin, self._line = array("q"), array("q")
        at = 0
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip(b" \t\r\n\xef\xbb\xbf"):
                    self._begin.append(at)
                    self._line.append(number)
                    yield self._read(raw, len(self._begin) - 1)
                at += len(raw)

    def row(self, index: int) -> Row:
        with self.path.open("rb") as file:
            file.seek(self._begin[index])
            return self._read(file.readline(), index)

    def label(self, index: int) -> str:
        return f"{self.path} row {index + 1} (line {self._line[index]})"

    def _read(self, raw: bytes, index: int) -> Row:
        try:
            row = json.loads(raw.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            more = f" ({_LIST})" if raw.lstrip(b" \t\xef\xbb\xbf")[:1] == b"[" else ""
            raise ValueError(f"{self.label(index)}: no JSON object ({error}); {_FORM}{more}") from error
        if not isinstance(row, dict):
            more = f" ({_LIST})" if isinstance(row, list) else ""
            text = f"{self.label(index)}: a {type(row).__name__}, not an object; {_FORM}{more}"
            raise ValueError(text)  # noqa: TRY004 a user's error, in the form of all of them
        return row


class Parquet:
    """A Parquet file, mapped into memory as it lies on the disk."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet

        self.path = path
        try:
            self._table = pyarrow.parquet.read_table(path, memory_map=True)
        except (OSError, ValueError) as error:  # pyarrow's own errors are among these
            raise ValueError(f"{path}: no Parquet file ({error}); a valid row: {EXAMPLE}") from error

    def rows(self) -> Iterator[Row]:
        for batch in self._table.to_batches(max_chunksize=1000):
            yield from batch.to_pylist()

    def row(self, index: int) -> Row:
        row: Row = self._table.slice(index, 1).to_pylist()[0]
        return row

    def label(self, index: int) -> str:
        return f"{self.path} row {index + 1}"


def json_line(row: Row) -> str:
    """A row as one line of valid JSON: numpy numbers and arrays become plain ones, NaN and infinity become null.

    Example: `json_line({"n": np.int64(3)})` is '{"n": 3}'.
    """
    return json.dumps(_plain(row), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
