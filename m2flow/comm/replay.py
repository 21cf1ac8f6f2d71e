"""Replay: a channel with a sampling rule. Trajectories go in, batches of single steps come out while credits last.

    put(Trajectory) -> staged -> ring of `capacity` steps -> draw number 0, 1, 2, ... -> get: Batch of `batch` rows

Every step inserted after the first `start` earns `update_to_data` draws. A draw is a pure function of (seed, its
number, content), and the next trajectory is inserted only when the credits of the last are spent: so what is drawn
depends on the order of trajectories alone, never on timing, and a restored channel goes on exactly. A Batch holds

    obs, next_obs   next_obs is the true successor, at the end of an episode its final observation
    record          what the policy recorded
    columns         reward [rows, C], terminated [rows], valid [rows, C]

Rows without any valid action are not stored. Observation and successor are both stored, which costs twice the memory of
sharing them; images will want to share.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from m2flow import seeds
from m2flow.comm import tree
from m2flow.comm.waiting import Ticket, WaitingRoom
from m2flow.types import Array, Batch, Trajectory

Rows = dict[str, np.ndarray[Any, Any]]
_BLOCK = 64  # draws whose random numbers are made at once
_GROUPS = ("obs", "next_obs", "record", "columns")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayConfig:
    """A replay buffer and its sampling rule."""

    capacity: int = 1_000_000  # steps kept; the oldest are overwritten
    batch: int = 256  # rows per drawn batch
    update_to_data: float = 1.0  # batches drawn per step inserted
    start: int = 1_000  # steps inserted before the first draw; they earn no credits

    def __post_init__(self) -> None:
        for name in ("capacity", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}")
        if not 0 < self.update_to_data < math.inf:
            raise ValueError(f"update_to_data: must be above 0 and finite, got {self.update_to_data}")
        if not 0 <= self.start <= self.capacity:
            raise ValueError(f"start: must be between 0 and capacity {self.capacity}, got {self.start}")

    def build(self, seed: int, name: str = "replay") -> ReplayChannel:
        """An empty channel whose draws depend on `seed`."""
        return ReplayChannel(self, seed, name=name)


class Ring:
    """`capacity` rows of named columns, written round and round. `cursor`: the next slot; `total`: rows ever added."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.columns: Rows = {}
        self.cursor = self.size = self.total = 0

    @property
    def full(self) -> bool:
        """Whether every slot holds a row."""
        return self.size == self.capacity

    def add(self, rows: Rows) -> int:
        """Write rows [n, ...] of every column; the number n. Of more rows than slots the last stay."""
        count = len(next(iter(rows.values())))
        if not self.columns:
            self.columns = {name: np.empty((self.capacity, *v.shape[1:]), v.dtype) for name, v in rows.items()}
        self._same(rows)
        kept = min(count, self.capacity)
        start = (self.cursor + count - kept) % self.capacity
        first = min(kept, self.capacity - start)
        for name, values in rows.items():
            column, last = self.columns[name], values[count - kept :]
            column[start : start + first] = last[:first]
            if first < kept:
                column[: kept - first] = last[first:]
        self.cursor = (self.cursor + count) % self.capacity
        self.size = min(self.size + count, self.capacity)
        self.total += count
        return count

    def _same(self, rows: Rows) -> None:
        """ValueError where rows do not look like those before; numpy would broadcast or cast them in silence."""
        there = {name: (column.shape[1:], column.dtype) for name, column in self.columns.items()}
        here = {name: (values.shape[1:], values.dtype) for name, values in rows.items()}
        if there != here:
            odd = sorted(name for name in {*there, *here} if there.get(name) != here.get(name))
            raise ValueError(f"replay: {odd[0]!r} is {here.get(odd[0])}, the rows before had {there.get(odd[0])}")

    def state(self) -> dict[str, Any]:
        """Rows by slot (the filled part), and where writing goes on."""
        columns = {name: column[: self.size].copy() for name, column in self.columns.items()}
        return {
            "capacity": self.capacity,
            "columns": columns,
            "cursor": self.cursor,
            "size": self.size,
            "total": self.total,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. One without `total` gets the smallest that agrees with cursor and size."""
        if int(state["capacity"]) != self.capacity:
            raise ValueError(
                f"capacity: the saved replay has {state['capacity']}, this one {self.capacity}; make them equal"
            )
        self.size, self.cursor = int(state["size"]), int(state["cursor"])
        smallest = self.size if self.size < self.capacity else self.capacity + self.cursor
        self.total = int(state.get("total", smallest))
        self.columns = {}
        for name, saved in state["columns"].items():
            values = _numpy(saved)
            self.columns[name] = np.empty((self.capacity, *values.shape[1:]), values.dtype)
            self.columns[name][: self.size] = values


@dataclass(slots=True)
class _Piece:
    """A trajectory that waits to be inserted: its columns as [T, B, ...]."""

    step: int
    lane: np.ndarray[Any, Any]
    keep: np.ndarray[Any, Any]  # bool [T, B]
    rows: Rows


class ReplayChannel(WaitingRoom):
    """See the module. A get of weight w waits for batches of w rows in all.

    A put that begins a training step waits while `capacity` rows of earlier ones are staged and can be worked off.
    """

    def __init__(
        self,
        config: ReplayConfig,
        seed: int,
        *,
        name: str = "replay",
        producer: str = "a producer",
        consumer: str = "a consumer",
        limit: float | None = None,
    ) -> None:
        super().__init__(name, producer=producer, consumer=consumer, limit=limit)
        self.config, self.seed = config, seeds.derive(seed, "replay")
        self.ring = Ring(config.capacity)
        self.draws = 0
        self._owed = 0.0  # draws earned and not made
        self._staged: list[_Piece] = []
        self._drawn: deque[Batch] = deque()  # made for a get that needs more
        self._block: tuple[int, np.ndarray[Any, Any]] = (-1, np.empty(0))

    def __len__(self) -> int:
        return self.ring.size

    def ready(self) -> list[Batch]:
        """The caller says that a step is complete: insert all that is staged, draw all that is earned. Never waits.

        Trajectories of one training step are inserted together in lane order, however they were cut.
        """
        with self._mutex:
            while True:
                while self._owed >= 1.0 - 1e-9:
                    self._drawn.append(self._draw())
                if not self._staged:
                    break
                self._insert([piece for piece in self._staged if piece.step == self._staged[0].step])
            out = list(self._drawn)
            self._drawn.clear()
            self._serve("")
            return out

    def state(self) -> dict[str, Any]:
        """Content, credits, the number of the next draw, and what is staged or drawn ahead."""
        with self._mutex:
            staged = [
                {"step": p.step, "lane": p.lane.copy(), "keep": p.keep.copy(), "rows": tree.copy(p.rows)}
                for p in self._staged
            ]
            drawn = [{group: tree.copy(getattr(batch, group)) for group in _GROUPS} for batch in self._drawn]
            return {
                "ring": self.ring.state(),
                "owed": self._owed,
                "draws": self.draws,
                "staged": staged,
                "drawn": drawn,
                "closed": self._closed,
            }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on exactly from `state`."""
        with self._mutex:
            self.ring.restore(state["ring"])
            self._owed, self.draws = float(state["owed"]), int(state["draws"])
            self._staged = [
                _Piece(
                    int(s["step"]), _numpy(s["lane"]), _numpy(s["keep"]), {k: _numpy(v) for k, v in s["rows"].items()}
                )
                for s in state["staged"]
            ]
            self._drawn = deque(Batch(**tree.copy(dict(batch))) for batch in state["drawn"])
            self._closed = bool(state["closed"])
            self._serve("")

    # ---- the waiting room's questions

    def _new(self, key: str, weight: int, item: Any = None) -> Ticket:
        if key:
            raise ValueError(f"channel {self.name!r}: a replay channel has no keys, got {key!r}")
        ticket = super()._new(key, weight, item)
        if item is not None:
            ticket.item = _piece(item, self.name)
        return ticket

    def _admit(self, ticket: Ticket) -> bool:
        # A training step is never cut by a wait.
        begun = bool(self._staged) and self._staged[-1].step == ticket.item.step
        full = sum(piece.keep.size for piece in self._staged) >= self.config.capacity
        if full and not begun:
            return False
        self._staged.append(ticket.item)
        return True

    def _take(self, _key: str, weight: int, /) -> list[tuple[int, Any]] | None:
        need = -(-weight // self.config.batch)
        while len(self._drawn) < need:
            if self._owed >= 1.0 - 1e-9:
                self._drawn.append(self._draw())
                continue
            if not self._staged:
                break
            self._insert(self._staged[:1])
        if len(self._drawn) < need and not self._closed:
            return None
        return [(self.config.batch, self._drawn.popleft()) for _ in range(min(need, len(self._drawn)))]

    def _put_back(self, _key: str, given: list[tuple[int, Any]], /) -> None:
        self._drawn.extendleft(batch for _, batch in reversed(given))

    def _inside(self, _key: str, /) -> str:
        left = max(0, self.config.start - self.ring.total)
        warm = f", {left} more before the first draw" if left else ""
        return f"{self.ring.size} steps, {self._owed:.1f} draws earned{warm}, {len(self._staged)} trajectories staged"

    # ---- inserting and drawing

    def _insert(self, pieces: Sequence[_Piece]) -> None:
        self._staged = [piece for piece in self._staged if not any(piece is other for other in pieces)]
        for group in _by_length(pieces):
            before = self.ring.total
            self.ring.add(_rows(group))
            self._owed += self.config.update_to_data * max(0, self.ring.total - max(before, self.config.start))

    def _draw(self) -> Batch:
        index = (self._uniform(self.draws) * self.ring.size).astype(np.int64)
        self.draws += 1
        self._owed -= 1.0
        parts: dict[str, dict[str, Any]] = {group: {} for group in _GROUPS}
        for name, column in self.ring.columns.items():
            group, _, key = name.partition("/")
            parts[group][key] = column.take(index, axis=0)
        return Batch(**parts)

    def _uniform(self, number: int) -> np.ndarray[Any, Any]:
        """[batch] numbers in (0, 1) that belong to draw `number`."""
        block, values = self._block
        if number // _BLOCK != block:
            block = number // _BLOCK
            draws = np.arange(block * _BLOCK, (block + 1) * _BLOCK)
            values = seeds.uniform(self.seed, draws, np.zeros(1, np.int64), (self.config.batch,))[0]
            self._block = (block, values)
        row: np.ndarray[Any, Any] = values[number % _BLOCK]
        return row


def _numpy(array: Array) -> np.ndarray[Any, Any]:
    out: np.ndarray[Any, Any] = np.asarray(array.detach().cpu() if tree.is_tensor(array) else array)
    return out


def _piece(item: Any, name: str) -> _Piece:
    """The columns of a trajectory as [T, B, ...]. Checked here, so that the producer sees what is wrong with it."""
    if not isinstance(item, Trajectory):
        raise TypeError(f"channel {name!r}: expected a Trajectory, got {type(item).__name__}")
    try:
        part = item.transitions().map(_numpy)
    except ValueError as error:
        raise ValueError(f"channel {name!r}: {error}") from error
    rows = {f"{group}/{key}": array for group in _GROUPS for key, array in getattr(part, group).items()}
    keep: np.ndarray[Any, Any] = np.asarray(rows["columns/valid"].any(axis=-1))
    # What the trajectory still refers to may be written to later; obs/ and next_obs/ are copies already.
    owned = {key: v if key.startswith(("obs/", "next_obs/")) else v.copy() for key, v in rows.items()}
    return _Piece(item.step, _numpy(item.lane).copy(), keep, owned)


def _by_length(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Pieces side by side: those that hold different lanes of the same stretch of time. Later stretches come later."""
    if len(pieces) == 1:
        return [list(pieces)]
    rounds: list[list[_Piece]] = []
    for piece in pieces:
        lanes = set(piece.lane.tolist())
        for group in rounds:
            if all(lanes.isdisjoint(other.lane.tolist()) for other in group):
                group.append(piece)
                break
        else:
            rounds.append([piece])
    for group in rounds:
        lengths = {piece.keep.shape[0] for piece in group}
        if len(lengths) > 1:
            raise ValueError(
                f"replay: trajectories of lengths {sorted(lengths)} in step {group[0].step}; cut them alike"
            )
    return rounds


def _rows(pieces: Sequence[_Piece]) -> Rows:
    """Rows in the order (time, lane), those that count."""
    if len(pieces) == 1 and pieces[0].keep.all() and (np.diff(pieces[0].lane) > 0).all():
        return {key: v.reshape(-1, *v.shape[2:]) for key, v in pieces[0].rows.items()}
    order = np.argsort(np.concatenate([piece.lane for piece in pieces]), kind="stable")
    keep = np.concatenate([piece.keep for piece in pieces], axis=1)[:, order]
    out = {}
    for key in pieces[0].rows:
        grid = np.concatenate([piece.rows[key] for piece in pieces], axis=1)[:, order]
        out[key] = grid[keep]
    return out
