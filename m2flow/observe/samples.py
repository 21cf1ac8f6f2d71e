"""Every sample of a step with all components of its reward, as one Parquet table per step and replica.

    samples/step_000010.parquet        training, columns task, attempt, prompt, text, gold, ..., reward/<component>
    samples/eval_000010.parquet        evaluation after step 10

Without pyarrow they are JSON Lines of the same rows.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m2flow.observe.jsonl import dumps, rows


@dataclass(frozen=True, slots=True)
class SampleFolder:
    """Writes tables into `path`; those of training only every `every` steps. Files are whole or not there."""

    path: Path
    rank: int = 0
    every: int = 1

    def write(self, name: str, table: Sequence[Mapping[str, Any]]) -> None:
        """Store rows of plain values. A table of the same name is replaced: a resumed run writes its steps again."""
        step = re.fullmatch(r"step_(\d+)", name)
        if not table or (step is not None and int(step[1]) % self.every):
            return
        self.path.mkdir(parents=True, exist_ok=True)
        stem = name if self.rank == 0 else f"{name}_r{self.rank}"
        if importlib.util.find_spec("pyarrow") is None:
            place = self.path / f"{stem}.jsonl"
            scratch = place.with_suffix(".new")
            scratch.write_text("".join(dumps(dict(row)) + "\n" for row in table), encoding="utf-8")
        else:
            import pyarrow as pa
            from pyarrow import parquet

            place = self.path / f"{stem}.parquet"
            scratch = place.with_suffix(".new")
            names = list(dict.fromkeys(name for row in table for name in row))
            columns = pa.table({name: [row.get(name) for row in table] for name in names})
            parquet.write_table(columns, scratch)
        scratch.replace(place)


def read_samples(file: Path) -> list[dict[str, Any]]:
    """The rows of one table."""
    if file.suffix == ".jsonl":
        return list(rows(file))
    from pyarrow import parquet

    found: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
    return found


def sample_files(folder: Path, kind: str) -> list[tuple[int, Path]]:
    """(step, file) of the tables of a kind, "step" or "eval", by step; the first replica's only."""
    found = []
    for file in folder.glob(f"{kind}_*"):
        match = re.fullmatch(rf"{kind}_(\d+)\.(parquet|jsonl)", file.name)
        if match:
            found.append((int(match[1]), file))
    return sorted(found)
