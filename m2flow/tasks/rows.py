"""Rows of files as tasks: JSON lines, Parquet, folders of them, and folders saved by `datasets`."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from m2flow.protocols import TaskSource
from m2flow.tasks.base import SECRET, Side, TextTasks, fill
from m2flow.tasks.checks import BadRow, conversation, example, filled, number_as_text, text_of
from m2flow.tasks.tables import ENDINGS, EXAMPLE, JsonLines, Parquet, Row, Table
from m2flow.types import Task

_LOG = logging.getLogger("m2flow.tasks")
_SAVED = ("dataset_info.json", "state.json", "dataset_dict.json")  # what `datasets` puts into a folder
_CACHE: dict[str, _Loaded] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsConfig(TextTasks):
    """Each row is a task; all its columns are kept as fields of it. Two equal rows are two tasks.

    Fields with a meaning: `prompt` (text, or a list of messages), `messages` (a chat; an answer at its end becomes the
    `completion`), `answer` (what is right), `completion` (what the model should have said). `fields` says in which
    column they are. Every row is checked before anything starts. A prompt of nothing but spaces is an error; every
    other text is kept as it is.
    """

    files: str | tuple[str, ...] = field(metadata={"example": "data/train.jsonl"})  # to train on: files or folders
    held_out_files: str | tuple[str, ...] = ()  # to evaluate on; none: a part of `files`
    held_out: float = 0.1  # that part, where there are no held_out_files; equal prompts are never in both; 0: none
    fields: Mapping[str, str] = field(default_factory=dict)  # field -> column, for instance {answer: gold.value}
    required: tuple[str, ...] | None = None  # fields of every row; null: of answer and completion those of the first
    max_prompt_chars: int | None = None  # longest prompt, in characters; null: any
    too_long: Literal["drop", "error"] = "drop"  # what becomes of longer ones; dropped rows are counted and logged

    def __post_init__(self) -> None:
        TextTasks.__post_init__(self)
        if not _listed(self.files):
            raise ValueError("files: at least one file or folder")
        if not 0.0 <= self.held_out < 1.0:
            raise ValueError(f"held_out: at least 0 and less than 1, got {self.held_out}")
        if self.max_prompt_chars is not None and self.max_prompt_chars < 1:
            raise ValueError(f"max_prompt_chars: at least 1, or null for no limit, got {self.max_prompt_chars}")

    def tasks(self, split: Side, seed: int) -> TaskSource:  # noqa: ARG002  files are what they are
        """The rows of a side in the order of the files.

        Raises:
            ValueError: a file or a row is not as it should be; names file, row and field, and shows a valid row.
        """
        loaded = _load(self)
        if split == "held_out" and not len(loaded.held_out.at):
            raise ValueError(
                "held_out: no row is held out; give held_out_files, or a larger part of at least two prompts"
            )
        return loaded.held_out if split == "held_out" else loaded.train

    def read(self, row: Row, required: Sequence[str]) -> Mapping[str, Any]:
        """The payload of a row. Raises BadRow (a ValueError) naming the field that is wrong."""
        payload = dict(row)
        for name, column in self.fields.items():
            payload[name] = _column(row, column)
        if self.template is not None:
            filled(self.template, payload)
            payload["prompt"] = fill(self.template, payload)
            payload.pop("messages", None)
        elif isinstance(payload.get("prompt"), list):
            payload["messages"] = payload.pop("prompt")
        if payload.get("messages") is not None:
            payload["messages"], shown = conversation(payload["messages"])
            if shown is not None and payload.get("completion") is None:
                payload["completion"] = shown
        else:
            payload.pop("messages", None)
            payload["prompt"] = text_of("prompt", payload)
        for name in ("answer", "completion"):
            payload[name] = number_as_text(name, payload.get(name))
            if payload[name] is None:
                del payload[name]
        for name in required:
            if payload.get(name) in (None, "", [], {}) or str(payload[name]).strip() == "":
                raise BadRow(name, "is missing or empty")
        return payload


class RowSource:
    """Some rows of some tables. `dropped`: rows that were left out because their prompt is too long."""

    def __init__(
        self, config: RowsConfig, tables: Sequence[Table], at: NDArray[np.int64], required: Sequence[str]
    ) -> None:
        self.config, self.tables, self.at, self.required = config, tables, at, required
        self.size: int | None = len(at)
        self.dropped = 0

    def task(self, index: int) -> Task:
        if not 0 <= index < len(self.at):
            raise ValueError(f"index: there is no task {index}, only 0 to {len(self.at) - 1}")
        table, row = (int(x) for x in self.at[index])
        return Task(index, self.config.read(self.tables[table].row(row), self.required))

    def label(self, index: int) -> str:
        """File and row of a task, for messages."""
        table, row = (int(x) for x in self.at[index])
        return self.tables[table].label(row)

    def example(self, index: int) -> str:
        """Its row as it stands in the file, long texts shortened."""
        table, row = (int(x) for x in self.at[index])
        return example(self.tables[table].row(row))


@dataclass(frozen=True, slots=True)
class _Loaded:
    train: RowSource
    held_out: RowSource


@dataclass(slots=True)
class _Scan:
    """What one look at every row has found."""

    tables: list[Table]
    at: list[tuple[int, int]] = field(default_factory=list)  # (table, row) of the rows that are kept
    prompts: list[int] = field(default_factory=list)  # hash of each prompt
    required: tuple[str, ...] = ()
    dropped: int = 0


class _Saved:
    """A folder that `datasets` has saved: one split."""

    def __init__(self, path: Path) -> None:
        try:
            import datasets
        except ModuleNotFoundError as error:
            raise ValueError(f"{path} needs the package 'datasets': pip install 'm2flow[datasets]'") from error
        self.path = path
        if (path / "dataset_dict.json").exists():
            splits = ", ".join(str(inner) for inner in sorted(path.iterdir()) if inner.is_dir())
            raise ValueError(f"{path} holds several splits; name one of them: {splits}")
        try:
            self._data: Any = datasets.load_from_disk(str(path))
        except Exception as error:  # of whatever reads its files
            raise ValueError(f"{path}: `datasets` cannot open it ({type(error).__name__}: {error})") from error

    def rows(self) -> Iterator[Row]:
        yield from self._data

    def row(self, index: int) -> Row:
        row: Row = self._data[index]
        return row

    def label(self, index: int) -> str:
        return f"{self.path} row {index + 1}"


def _load(config: RowsConfig) -> _Loaded:
    """Both sides; scanned again only where a file has changed."""
    files, others = (_paths(key, getattr(config, key)) for key in ("files", "held_out_files"))
    stamps = [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in (*files, *others)]
    key = f"{config!r} {stamps}"
    if key not in _CACHE:
        if len(_CACHE) >= 4:
            _CACHE.clear()
        _CACHE[key] = _divide(config, _scan(config, "files", files, ()), others)
    return _CACHE[key]


def _divide(config: RowsConfig, first: _Scan, others: Sequence[Path]) -> _Loaded:
    """Which rows are held out. Where a prompt is on both sides, training goes without it."""
    at, prompts = np.array(first.at, np.int64).reshape(-1, 2), np.array(first.prompts, np.uint64)
    if others:
        second = _scan(config, "held_out_files", others, first.required)
        kept = ~np.isin(prompts, np.array(second.prompts, np.uint64))
        if not kept.all():
            _LOG.warning("%d rows to train on are left out, because their prompts are held out", int((~kept).sum()))
        if not kept.any():
            raise ValueError("files: every prompt is also in held_out_files; nothing is left to train on")
        held = RowSource(config, second.tables, np.array(second.at, np.int64).reshape(-1, 2), first.required)
        held.dropped = second.dropped
    else:
        unique = np.unique(prompts)  # ascending hashes: an order that only the prompts' texts decide
        count = min(max(1, round(config.held_out * len(unique))), len(unique) - 1) if config.held_out else 0
        kept = ~np.isin(prompts, unique[:count])
        held = RowSource(config, first.tables, at[~kept], first.required)
    train = RowSource(config, first.tables, at[kept], first.required)
    train.dropped = first.dropped
    return _Loaded(train, held)


def _scan(config: RowsConfig, key: str, paths: Sequence[Path], required: tuple[str, ...]) -> _Scan:
    """One look at every row. Raises ValueError naming the key, the file, and the row with its field."""
    try:
        return _look(config, paths, required)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def _look(config: RowsConfig, paths: Sequence[Path], required: tuple[str, ...]) -> _Scan:
    found = _Scan([_open(path) for path in paths], required=config.required or required)
    bad, first_bad, valid = 0, "", ""
    for number, table in enumerate(found.tables):
        for index, row in enumerate(table.rows()):
            try:
                payload = config.read(row, found.required)
                if not found.required and config.required is None:
                    found.required = _schema(payload)
                _take(config, found, (number, index), payload)
                valid = valid or example(row)
            except ValueError as error:
                bad += 1
                first_bad = first_bad or f"{table.label(index)}: {_told(config, error)}"
    if bad:
        more = f" ({bad} rows are wrong, this is the first)" if bad > 1 else ""
        raise ValueError(f"{first_bad}{more}; a valid row: {valid or EXAMPLE}")
    if not found.at:
        where = ", ".join(map(str, paths))
        if found.dropped:
            raise ValueError(f"all {found.dropped} rows have longer prompts than max_prompt_chars in {where}")
        raise ValueError(f"no rows in {where}; a valid row: {EXAMPLE}")
    if found.dropped:
        _LOG.warning("%d rows dropped: prompts of more than %s characters", found.dropped, config.max_prompt_chars)
    return found


def _told(config: RowsConfig, error: ValueError) -> str:
    """The error, with the column where env.fields has another name for it than we have."""
    column = config.fields.get(error.name) if isinstance(error, BadRow) else None
    if not isinstance(error, BadRow) or column in (None, error.name):
        return str(error)
    return f"field {error.name!r} (column {column!r}) {error.what}"


def _take(config: RowsConfig, found: _Scan, place: tuple[int, int], payload: Mapping[str, Any]) -> None:
    """Keep a row, or drop it for its length."""
    texts = [str(message["content"]) for message in payload.get("messages", ())] or [payload["prompt"]]
    length = sum(map(len, texts))
    if config.max_prompt_chars is not None and length > config.max_prompt_chars:
        if config.too_long == "error":
            raise BadRow("prompt", f"has {length} characters, more than max_prompt_chars ({config.max_prompt_chars})")
        found.dropped += 1
        return
    found.at.append(place)
    digest = hashlib.blake2b("\0".join(texts).encode(errors="surrogatepass"), digest_size=8).digest()
    found.prompts.append(int.from_bytes(digest, "little"))


def _schema(payload: Mapping[str, Any]) -> tuple[str, ...]:
    names = tuple(name for name in SECRET[:2] if name in payload)
    if not names:
        raise BadRow("answer", "is missing; a row has an 'answer' or a 'completion' (env.fields says in which column)")
    return names


def _column(row: Row, name: str) -> Any:
    """A column, or with dots a value inside one: "reward_model.ground_truth". None where there is none."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _listed(paths: str | Sequence[str]) -> Sequence[str]:
    return (paths,) if isinstance(paths, str) else paths


def _paths(key: str, names: str | Sequence[str]) -> list[Path]:
    """Files, folders replaced by the files in them; folders of `datasets` stay."""
    found = []
    for path in map(Path, _listed(names)):
        if not path.exists():
            raise ValueError(f"{key}: there is no {path} (paths start at the folder where m2flow is run)")
        if path.is_dir() and not any((path / name).exists() for name in _SAVED):
            inside = sorted(inner for inner in path.iterdir() if inner.suffix in ENDINGS)
            if not inside:
                kinds = f"no {', '.join(ENDINGS)} in the folder {path}, and it is none of `datasets`"
                raise ValueError(f"{key}: {kinds}; a valid row of a .jsonl file: {EXAMPLE}")
            found += inside
        else:
            found.append(path)
    return found


def _open(path: Path) -> Table:
    if path.is_dir():
        return _Saved(path)
    if path.suffix not in ENDINGS:
        convert = (
            f"pandas.read_csv({str(path)!r}).to_json({str(path.with_suffix('.jsonl'))!r}, orient='records', lines=True)"
        )
        more = f" ({convert} makes one of it)" if path.suffix == ".csv" else ""
        raise ValueError(
            f"{path} ends with none of {', '.join(ENDINGS)}; a valid row of a .jsonl file: {EXAMPLE}{more}"
        )
    return Parquet(path) if path.suffix == ".parquet" else JsonLines(path)
