"""The waiting room behind every channel: who waits for what since when, and handing over without polling.

Whoever changes a channel serves the waiting on the spot, first come first served per key, and wakes exactly those that
got something. So any number of blocked getters costs nothing, threads and event loops can be mixed, and a wait that
ends by timeout or cancellation gives back what it had been handed. A timeout is an argument (also of coroutines), so
that its error can say who waited for whom.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Any


class Closed(Exception):
    """Nothing can come any more, or nobody is there to take it."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One call in the waiting room: a `put` with its item, or a `get` that wants weight and is handed `given`."""

    key: str
    weight: int
    item: Any = None
    given: list[tuple[int, Any]] | None = None
    served: bool = False
    error: BaseException | None = None
    since: float = field(default_factory=time.monotonic)
    who: str = ""
    _lock: threading.Lock | None = None
    _future: asyncio.Future[None] | None = None

    def arm(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Make ready to wait, in a thread or in an event loop."""
        if loop is None:
            self._lock = threading.Lock()
            self._lock.acquire()
        else:
            self._future = loop.create_future()

    def wake(self) -> bool:
        """Let the waiting call go on. False if it cannot, because its event loop has ended."""
        if self._lock is not None:
            self._lock.release()
        elif self._future is not None:
            try:
                self._future.get_loop().call_soon_threadsafe(_finish, self._future)
            except RuntimeError:  # the loop is closed
                return False
        return True

    def wait(self, timeout: float | None) -> None:
        """Block this thread until woken or out of time."""
        assert self._lock is not None
        self._lock.acquire(timeout=-1 if timeout is None else max(0.0, timeout))

    async def wait_async(self, seconds: float | None) -> None:
        """The same for a coroutine."""
        assert self._future is not None
        loop = self._future.get_loop()
        alarm = None if seconds is None else loop.call_later(max(0.0, seconds), _finish, self._future)
        try:
            await self._future
        finally:
            if alarm is not None:
                alarm.cancel()


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class WaitingRoom(ABC):
    """Bounded hand-over between producers and consumers. A subclass says what may enter and what may be taken.

    `limit` seconds bound a wait whose caller names no timeout (None: for ever; the driver's own limit then holds).
    """

    def __init__(self, name: str, *, producer: str, consumer: str, limit: float | None) -> None:
        self.name, self.producer, self.consumer, self.limit = name, producer, consumer, limit
        self._mutex = threading.RLock()
        self._getters: dict[str, deque[Ticket]] = {}
        self._putters: dict[str, deque[Ticket]] = {}
        self._closed = False
        self._failure: BaseException | None = None
        self._last_put: float | None = None

    # ---- what a subclass decides; all called with the lock held

    @abstractmethod
    def _admit(self, ticket: Ticket) -> bool:
        """Take in the ticket's item if there is room."""

    @abstractmethod
    def _take(self, key: str, weight: int, /) -> list[tuple[int, Any]] | None:
        """Items for a get, as (order, weight, item); None while there are too few; after `close` what is left."""

    @abstractmethod
    def _put_back(self, key: str, given: list[tuple[int, Any]], /) -> None:
        """Undo `_take`: the caller went away before it could pick them up."""

    @abstractmethod
    def _inside(self, key: str, /) -> str:
        """What is there now, in words."""

    # ---- the calls

    def put(self, item: Any, *, key: str = "", weight: int = 1, timeout: float | None = None) -> None:
        """Add an item; blocks while there is no room. Raises Closed, TimeoutError, or what `fail` was given."""
        self._wait_thread(self._new(key, weight, item), self._putters, timeout)

    async def aput(self, item: Any, *, key: str = "", weight: int = 1, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """`put` for coroutines, of any event loop."""
        await self._wait_loop(self._new(key, weight, item), self._putters, timeout)

    def get(self, weight: int = 1, *, key: str = "", timeout: float | None = None) -> list[Any]:
        """Items in order until their weights reach `weight`. After `close` what is left, then Closed."""
        return self._answer(self._wait_thread(self._new(key, weight), self._getters, timeout))

    async def aget(self, weight: int = 1, *, key: str = "", timeout: float | None = None) -> list[Any]:  # noqa: ASYNC109
        """`get` for coroutines, of any event loop."""
        return self._answer(await self._wait_loop(self._new(key, weight), self._getters, timeout))

    def close(self) -> None:
        """No more puts: blocked ones raise Closed, gets take what is left. May be called again."""
        with self._mutex:
            self._closed = True
            for tickets in self._putters.values():
                for ticket in tickets:
                    self._refuse(ticket, Closed(f"channel {self.name!r} was closed while {ticket.who} waited to put"))
            self._putters.clear()
            for key in list(self._getters):
                self._serve(key)

    def fail(self, error: BaseException) -> None:
        """The first failure wins: every blocked and later call raises this very exception."""
        with self._mutex:
            if self._failure is None:
                self._failure = error
                for room in (self._getters, self._putters):
                    for tickets in room.values():
                        for ticket in tickets:
                            self._refuse(ticket, error)
                    room.clear()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def waiting(self) -> list[str]:
        """Who waits for what, in words; for reports of a stall."""
        now = time.monotonic()
        with self._mutex:
            rooms = [("get", self._getters), ("put", self._putters)]
            return [
                f"{self.name}: {t.who} has waited {now - t.since:.1f} s to {verb} weight {t.weight}{_of(key)}"
                for verb, room in rooms
                for key, tickets in room.items()
                for t in tickets
            ]

    # ---- waiting

    def _new(self, key: str, weight: int, item: Any = None) -> Ticket:
        if weight < 1:
            raise ValueError(f"channel {self.name!r}: weight must be at least 1, got {weight}")
        return Ticket(key, weight, item)

    def _wait_thread(self, ticket: Ticket, room: dict[str, deque[Ticket]], timeout: float | None) -> Ticket:
        if not self._enter(ticket, room, None):
            try:
                ticket.wait(self.limit if timeout is None else timeout)
            except BaseException:  # an interrupt must not lose what was handed over meanwhile
                self._abandon(ticket, room)
                raise
            self._leave(ticket, room)
        return ticket

    async def _wait_loop(self, ticket: Ticket, room: dict[str, deque[Ticket]], seconds: float | None) -> Ticket:
        if not self._enter(ticket, room, asyncio.get_running_loop()):
            try:
                await ticket.wait_async(self.limit if seconds is None else seconds)
            except asyncio.CancelledError:
                self._abandon(ticket, room)
                raise
            self._leave(ticket, room)
        return ticket

    def _enter(self, ticket: Ticket, room: dict[str, deque[Ticket]], loop: asyncio.AbstractEventLoop | None) -> bool:
        """Queue up and serve; True if that was all."""
        with self._mutex:
            if self._failure is not None:
                raise self._failure
            if self._closed and room is self._putters:
                raise Closed(f"channel {self.name!r} is closed, nothing can be put")
            room.setdefault(ticket.key, deque()).append(ticket)
            self._serve(ticket.key)
            if ticket.error is not None:
                raise ticket.error
            if ticket.served:
                return True
            ticket.who = (self.producer if room is self._putters else self.consumer) + f" ({_me(loop)})"
            ticket.arm(loop)
            return False

    def _leave(self, ticket: Ticket, room: dict[str, deque[Ticket]]) -> None:
        """After the wait: raise what there is to raise, or return served."""
        with self._mutex:
            if ticket.error is not None:
                raise ticket.error
            if ticket.served:
                return
            self._forget(ticket, room)
            story = self._story(ticket, getting=room is self._getters)
            self._serve(ticket.key)  # those behind may be content with less
            raise TimeoutError(story)

    def _abandon(self, ticket: Ticket, room: dict[str, deque[Ticket]]) -> None:
        """A cancelled wait: nothing that was handed over may be lost."""
        with self._mutex:
            if ticket.given is not None:
                self._put_back(ticket.key, ticket.given)
                self._serve(ticket.key)
            elif not ticket.served:
                self._forget(ticket, room)
                self._serve(ticket.key)

    def _forget(self, ticket: Ticket, room: dict[str, deque[Ticket]]) -> None:
        tickets = room.get(ticket.key)
        if tickets is not None and ticket in tickets:
            tickets.remove(ticket)
            if not tickets:
                del room[ticket.key]

    def _serve(self, key: str) -> None:
        """Let in and hand out as long as anything moves. Called with the lock held after every change of this key."""
        moved = True
        while moved:
            moved = self._let_in(key)
            moved = self._hand_out(key) or moved
        for room in (self._getters, self._putters):
            if key in room and not room[key]:
                del room[key]

    def _let_in(self, key: str) -> bool:
        tickets, moved = self._putters.get(key, ()), False
        while tickets and self._admit(tickets[0]):
            ticket = self._putters[key].popleft()
            self._last_put = time.monotonic()
            ticket.served = moved = True
            ticket.wake()
        return moved

    def _hand_out(self, key: str) -> bool:
        tickets, moved = self._getters.get(key, ()), False
        while tickets:
            ticket = tickets[0]
            given = self._take(key, ticket.weight)
            if given is None:
                break
            self._getters[key].popleft()
            if given:
                ticket.given, ticket.served, moved = given, True, True
                if not ticket.wake():
                    self._put_back(key, given)
            else:
                self._refuse(ticket, Closed(f"channel {self.name!r} is closed and nothing is left{_of(key)}"))
        return moved

    def _refuse(self, ticket: Ticket, error: BaseException) -> None:
        ticket.error = error
        ticket.wake()

    @staticmethod
    def _answer(ticket: Ticket) -> list[Any]:
        assert ticket.given is not None
        return [item for _, item in ticket.given]

    def _wanted(self, key: str) -> int:
        """The weight that the first waiting get of this key needs."""
        tickets = self._getters.get(key)
        return tickets[0].weight if tickets else 0

    def _story(self, ticket: Ticket, *, getting: bool) -> str:
        now = time.monotonic()
        start = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - ticket.since)))
        last = (
            "nothing was ever put" if self._last_put is None else f"the last put was {now - self._last_put:.1f} s ago"
        )
        what = f"get weight {ticket.weight} from {self.producer}"
        if not getting:
            what = f"put weight {ticket.weight} for {self.consumer}"
        return (
            f"channel {self.name!r}: {ticket.who} has waited {now - ticket.since:.1f} s (since {start}) to {what}"
            f"{_of(ticket.key)}; inside: {self._inside(ticket.key)}; {last}"
        )


def _of(key: str) -> str:
    return f" of key {key!r}" if key else ""


def _me(loop: asyncio.AbstractEventLoop | None) -> str:
    task = asyncio.current_task(loop) if loop is not None else None
    return f"task {task.get_name()}" if task is not None else f"thread {threading.current_thread().name}"
