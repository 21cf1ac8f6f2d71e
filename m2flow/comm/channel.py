"""Channels between stages: bounded, keyed queues, first in first out.

    put(item, key, weight)  ->  [key ""   ] #3 #2 #1  ->  get(weight, key)
                                [key "7"  ] #5 #4

Room is counted in weight and per key, so one slow key does not block the others. A put is let in while the weight
inside is below `capacity`, or below what the first waiting get asks for: so a get for more than the capacity, and items
that do not fit exactly, cannot lock each other out. At most one item too many is inside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from m2flow.comm import tree
from m2flow.comm.waiting import Closed, Ticket, WaitingRoom

__all__ = ["Channel", "Closed"]

Entry = tuple[int, Any]  # (weight, item)


class _Lane:
    """The entries of one key and their total weight."""

    __slots__ = ("entries", "total")

    def __init__(self) -> None:
        self.total = 0
        self.entries: deque[Entry] = deque()

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, entry: Entry) -> None:
        self.total += entry[0]
        self.entries.append(entry)

    def restore(self, given: Sequence[Entry]) -> None:
        """Back to where they were taken from."""
        self.entries.extendleft(reversed(given))
        self.total += sum(weight for weight, _ in given)

    def pop(self) -> Entry:
        entry = self.entries.popleft()
        self.total -= entry[0]
        return entry


class Channel(WaitingRoom):
    """A queue with keys and weights.

    Order is kept per producer and key. `capacity` is weight per key (None: no bound). Example:
    `Channel("rollout->learner", capacity=64, producer="rollout", consumer="learner")`.
    """

    def __init__(
        self,
        name: str = "channel",
        *,
        capacity: int | None = None,
        producer: str = "a producer",
        consumer: str = "a consumer",
        limit: float | None = None,
    ) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"channel {name!r}: capacity must be at least 1 or None, got {capacity}")
        super().__init__(name, producer=producer, consumer=consumer, limit=limit)
        self.capacity = capacity
        self._lanes: dict[str, _Lane] = {}

    def size(self, key: str = "") -> int:
        """Number of items of this key that nobody has taken."""
        with self._mutex:
            return len(self._lanes.get(key, ()))

    def weight(self, key: str = "") -> int:
        """Weight of the items of this key that nobody has taken."""
        with self._mutex:
            return self._lanes[key].total if key in self._lanes else 0

    def state(self) -> dict[str, Any]:
        """Items that nobody has taken, in order, as copies. Puts that still wait outside belong to their producers."""
        with self._mutex:
            lanes = {
                key: [{"weight": weight, "item": tree.copy(item)} for weight, item in lane.entries]
                for key, lane in self._lanes.items()
            }
            return {"lanes": lanes, "closed": self._closed}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Hold exactly the items of `state`."""
        with self._mutex:
            self._lanes.clear()
            for key, entries in state["lanes"].items():
                for entry in entries:
                    self._add(key, int(entry["weight"]), tree.copy(entry["item"]))
            self._closed = bool(state["closed"])
            for key in {*self._lanes, *self._getters}:
                self._serve(key)

    def _add(self, key: str, weight: int, item: Any) -> None:
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane()
        lane.add((weight, item))

    def _admit(self, ticket: Ticket) -> bool:
        lane = self._lanes.get(ticket.key)
        if (
            lane is not None
            and self.capacity is not None
            and lane.total >= max(self.capacity, self._wanted(ticket.key))
        ):
            return False
        self._add(ticket.key, ticket.weight, ticket.item)
        return True

    def _take(self, key: str, weight: int, /) -> list[Entry] | None:
        lane = self._lanes.get(key)
        total = 0 if lane is None else lane.total
        if total < weight and not self._closed:
            return None
        given: list[Entry] = []
        reached = 0
        while lane is not None and len(lane) and reached < weight:
            entry = lane.pop()
            given.append(entry)
            reached += entry[0]
        if lane is not None and not len(lane):
            del self._lanes[key]
        return given

    def _put_back(self, key: str, given: list[Entry], /) -> None:
        if key not in self._lanes:
            self._lanes[key] = _Lane()
        self._lanes[key].restore(given)

    def _inside(self, key: str, /) -> str:
        lane = self._lanes.get(key)
        here = f"weight {lane.total} in {len(lane)} item(s)" if lane is not None else "nothing"
        others = sorted(repr(k) for k in self._lanes if k != key)
        return here + (f" (other keys hold items: {', '.join(others[:5])})" if others else "")
