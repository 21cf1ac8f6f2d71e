"""Checkpoints on disk: complete or not there at all.

    <directory>/step_000123/arrays.safetensors   every array of the state
                            policy.safetensors   the policy's weights alone, to act with
                            hf/                  a language model, as from_pretrained opens it (see backends.export)
                            state.json           everything else, and the caller's notes (meta)
                            manifest.json        sizes and hashes of the files above
    <directory>/latest                           the name of the newest complete one

A checkpoint is written into a hidden folder beside its place, flushed to disk, and renamed. `latest` is replaced after
that, and old ones are retired last. So a process that dies at any moment leaves the previous checkpoint loadable.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from m2flow.backends import codec
from m2flow.types import Tree

Export: TypeAlias = Callable[[Path, Mapping[str, Any]], None]
FORMAT = 1
LATEST = "latest"
MANIFEST = "manifest.json"
NEW, ASIDE, GONE = ".new-", ".aside-", ".gone-"  # being written, being replaced, being deleted


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """What is saved and kept."""

    every: int = 50  # training steps between checkpoints; 0 or less: only the final one
    keep: int | None = 3  # newest ones kept, besides the best; null: all
    best_metric: str | None = None  # number of an evaluation; the checkpoint with its best value is kept; null: none
    best_mode: Literal["max", "min"] = "max"  # whether more or less of it is better

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep: must be at least 1, or null to keep all, got {self.keep}")

    def due(self, step: int, *, final: bool = False) -> bool:
        """Whether to save after `step` training steps."""
        return final or (self.every > 0 and step % self.every == 0)

    def build(self, directory: Path | str, export: Export | None = None) -> CheckpointStore:
        """The store in `directory`, which is made when something is saved. See `CheckpointStore` about `export`."""
        return CheckpointStore(Path(directory), self, export)


class CheckpointStore:
    """See `protocols.Store`.

    The metric that decides about the best checkpoint is read from `meta["metrics"][best_metric]` at `save`.
    `export(folder, arrays)` writes more files into a checkpoint's folder before it gets its name, from the policy's
    arrays (torch tensors by name, those of `policy.safetensors`); where it raises, there is no checkpoint.
    """

    def __init__(self, directory: Path, config: CheckpointConfig | None = None, export: Export | None = None) -> None:
        self.directory, self.export = directory, export
        self.config = config or CheckpointConfig()

    def save(self, step: int, state: Tree, meta: Mapping[str, Any]) -> None:
        """Write atomically, then retire old ones.

        Raises:
            TypeError: the state or meta holds something that cannot be restored exactly.
            OSError: the disk is full or cannot be written; earlier checkpoints are as they were.
        """
        if step < 0:
            raise ValueError(f"step: must be 0 or more, got {step}")
        self.directory.mkdir(parents=True, exist_ok=True)
        self._clean()
        number = 1 + max((entry.number for entry in self._complete().values()), default=0)
        place, temporary = self._place(step), self.directory / f"{NEW}{_name(step)}"
        temporary.mkdir()
        try:
            _write(temporary, step, state, meta, (number, self._score(meta)), self.export)
            if place.exists():
                place.rename(self.directory / f"{ASIDE}{place.name}")
            temporary.rename(place)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        _sync(self.directory)
        self._point(place.name)
        self._retire(step)
        self._clean()

    def load(self, step: int | None = None) -> tuple[int, Tree, Mapping[str, Any]]:
        """The given or the latest complete checkpoint: (step, state, meta).

        Raises:
            FileNotFoundError: there is none.
            ValueError: a file is damaged (its hash differs).
        """
        return read(self.path(step))

    def path(self, step: int | None = None) -> Path:
        """The folder of the given or the latest complete checkpoint."""
        complete = self._complete()
        if step is None and complete:
            pointer = self.directory / LATEST
            named = pointer.read_text().strip() if pointer.is_file() else ""
            pointed = [s for s in complete if _name(s) == named]
            step = pointed[0] if pointed else max(complete, key=lambda s: complete[s].number)
        if step not in complete:
            wanted = "no complete checkpoint" if step is None else f"no complete checkpoint of step {step}"
            raise FileNotFoundError(f"{wanted} in {self.directory}; there are {sorted(complete) or 'none'}")
        return complete[step].place

    def steps(self) -> Iterable[int]:
        """Steps of complete checkpoints, ascending."""
        return sorted(self._complete())

    def best(self) -> int | None:
        """The step with the best `best_metric`, the later one of equals; None if no checkpoint has it."""
        sign = 1.0 if self.config.best_mode == "max" else -1.0
        scores = {s: entry.score for s, entry in self._complete().items() if entry.score is not None}
        return max(scores, key=lambda s: (sign * scores[s], s), default=None)

    def _score(self, meta: Mapping[str, Any]) -> float | None:
        value = meta.get("metrics", {}).get(self.config.best_metric)
        return float(value) if value is not None and math.isfinite(value) else None

    def _place(self, step: int) -> Path:
        return self.directory / _name(step)

    def _complete(self) -> dict[int, _Entry]:
        """Every checkpoint whose files are all there, in their full size.

        One that was moved aside by a process that died before the new one of the same step took its place counts too.
        """
        found: dict[int, _Entry] = {}
        for prefix in ("", ASIDE):
            for place in self.directory.glob(f"{prefix}step_*"):
                match = re.fullmatch(r"step_(\d+)", place.name.removeprefix(prefix))
                manifest = _manifest(place) if match and int(match[1]) not in found else None
                if match and manifest is not None:
                    found[int(match[1])] = _Entry(place, int(manifest["number"]), manifest["score"])
        return found

    def _point(self, name: str) -> None:
        """Replace the pointer in one move."""
        temporary = self.directory / f"{NEW}{LATEST}"
        _write_text(temporary, name + "\n")
        temporary.replace(self.directory / LATEST)
        _sync(self.directory)

    def _retire(self, saved: int) -> None:
        """Delete all but the newest `keep` (by when they were written) and the best; never the one just saved."""
        if self.config.keep is None:
            return
        complete = self._complete()
        newest = sorted(complete, key=lambda s: complete[s].number)[-self.config.keep :]
        for step in set(complete) - {*newest, saved, self.best()}:
            # Renamed first: a folder that is half deleted no longer has the name of a checkpoint.
            complete[step].place.rename(self.directory / f"{GONE}{_name(step)}")

    def _clean(self) -> None:
        """Put right what a process that died left behind, and remove half-written and half-deleted folders."""
        for step, entry in self._complete().items():
            if entry.place != self._place(step):
                shutil.rmtree(self._place(step), ignore_errors=True)
                entry.place.rename(self._place(step))
        for prefix in (NEW, ASIDE, GONE):
            for leftover in self.directory.glob(f"{prefix}*"):
                if leftover.is_dir():
                    shutil.rmtree(leftover)
                else:
                    leftover.unlink()


@dataclass(frozen=True, slots=True)
class _Entry:
    """A complete checkpoint: its folder, its place in the order of writing, its value of the best metric."""

    place: Path
    number: int
    score: float | None


def read(place: Path) -> tuple[int, Tree, Mapping[str, Any]]:
    """(step, state, meta) of one checkpoint folder, after checking every hash."""
    from safetensors.torch import load_file

    manifest = _manifest(place)
    if manifest is None:
        raise FileNotFoundError(f"{place} is no complete checkpoint")
    for name, entry in manifest["files"].items():
        if _hash(place / name) != entry["sha256"]:
            raise ValueError(
                f"checkpoint {place}: {name} is damaged (its hash differs); "
                "load another step (m2flow resume RUN --step N)"
            )
    document = json.loads((place / "state.json").read_text())
    arrays = load_file(place / "arrays.safetensors")
    return int(manifest["step"]), codec.decode(document["state"], arrays), codec.decode(document["meta"], arrays)


def read_policy(place: Path) -> dict[str, Any]:
    """The policy's weights (torch tensors by name) from a checkpoint folder or a `policy.safetensors` file."""
    from safetensors.torch import load_file

    file = place / "policy.safetensors" if place.is_dir() else place
    if not file.is_file():
        raise FileNotFoundError(f"{file}: not found; give a checkpoint folder (step_...) or its policy.safetensors")
    return dict(load_file(file))


def policies(state: Tree) -> Iterator[dict[str, Any]]:
    """The policy's arrays in every trainer state within `state`: a dict with `model` and `optimizer`."""
    if isinstance(state, Mapping):
        if {"model", "optimizer"} <= state.keys():
            model = state["model"]
            found = {name.removeprefix("policy."): x for name, x in model.items() if name.startswith("policy.")}
            if found:
                yield found
            return
        state = list(state.values())
    if isinstance(state, list | tuple):
        for item in state:
            yield from policies(item)


def _write(
    place: Path,
    step: int,
    state: Tree,
    meta: Mapping[str, Any],
    rank: tuple[int, float | None],
    export: Export | None,
) -> None:
    """All files of a checkpoint into an empty folder, flushed to disk; the manifest last."""
    from safetensors.torch import save_file

    skeleton, arrays = codec.encode({"state": state, "meta": dict(meta)})
    save_file(arrays, place / "arrays.safetensors")
    _write_text(place / "state.json", json.dumps({"format": FORMAT, **skeleton["map"]}, allow_nan=False))
    for i, policy in enumerate(policies(state)):
        file = place / (f"policy_{i}.safetensors" if i else "policy.safetensors")
        _, weights = codec.encode(policy)
        save_file(weights, file)
        _verify(file, weights)
        if export is not None and not i:
            export(place, weights)
    files = {}
    for file in sorted(place.rglob("*")):
        _sync(file)
        if file.is_file():
            files[file.relative_to(place).as_posix()] = {"bytes": file.stat().st_size, "sha256": _hash(file)}
    manifest = {"format": FORMAT, "step": step, "number": rank[0], "score": rank[1], "files": files}
    _write_text(place / MANIFEST, json.dumps(manifest, indent=1, allow_nan=False))
    _sync(place)


def _verify(file: Path, weights: Mapping[str, Any]) -> None:
    """Raise OSError unless reading the file back gives the same bits."""
    import torch
    from safetensors.torch import load_file

    again = load_file(file)
    for name, x in weights.items():
        y = again.get(name)
        same = y is not None and y.dtype == x.dtype and y.shape == x.shape
        if not same or not torch.equal(_bits(x), _bits(y)):
            raise OSError(f"checkpoint: {file.name} read back differs in {name}; is the disk sound?")


def _bits(x: Any) -> Any:
    import torch

    return x.reshape(-1).view(torch.uint8)  # NaN is not equal to itself, its bytes are


def _manifest(place: Path) -> dict[str, Any] | None:
    """The manifest of a complete checkpoint, else None."""
    try:
        manifest: dict[str, Any] = json.loads((place / MANIFEST).read_text())
        whole = all((place / name).stat().st_size == entry["bytes"] for name, entry in manifest["files"].items())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    if manifest["format"] > FORMAT:
        raise ValueError(f"checkpoint {place}: format {manifest['format']} is newer than this m2flow reads ({FORMAT})")
    return manifest if whole else None


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_text(file: Path, text: str) -> None:
    file.write_text(text)
    _sync(file)


def _sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
