"""Who holds a device now. A stage that shares devices takes a lease before it works and gives it back after.

All devices of a lease are taken at once, first come first served, so nobody waits while holding. The manager lives
in the
driver; owners that die lose their leases.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

Grant = Callable[[], None]


@dataclass(slots=True)
class _Request:
    owner: str
    devices: tuple[str, ...]
    grant: Grant
    since: float = field(default_factory=time.monotonic)


class LeaseManager:
    """First come, first served over sets of devices. Not thread-safe: one thread (the driver's) owns it."""

    def __init__(self, limit: float = 3600.0) -> None:
        self.limit = limit
        self.holders: dict[str, tuple[str, float]] = {}  # device -> (owner, since)
        self.waiting: list[_Request] = []
        self.switches: Counter[str] = Counter()  # device -> how often it changed hands
        self._last: dict[str, str] = {}

    def acquire(self, owner: str, devices: tuple[str, ...], grant: Grant) -> None:
        """Ask for all `devices`; `grant` is called when they are yours, perhaps at once."""
        if any(holder == owner for holder, _ in self.holders.values()) or any(r.owner == owner for r in self.waiting):
            raise RuntimeError(f"lease: {owner} asked again before it released; a stage holds one lease at a time")
        self.waiting.append(_Request(owner, devices, grant))
        self._serve()

    def release(self, owner: str) -> None:
        """Give back everything `owner` holds."""
        self.holders = {device: held for device, held in self.holders.items() if held[0] != owner}
        self._serve()

    def drop(self, owner: str) -> None:
        """The owner died: its leases and requests go."""
        self.waiting = [r for r in self.waiting if r.owner != owner]
        self.release(owner)

    def overdue(self) -> str | None:
        """Says who has waited longer than the limit, and for whom."""
        now = time.monotonic()
        for request in self.waiting:
            if now - request.since > self.limit:
                holders = {d: self.holders[d] for d in request.devices if d in self.holders}
                held = ", ".join(
                    f"{d} held by {owner} for {now - since:.0f} s" for d, (owner, since) in holders.items()
                )
                return f"{request.owner} has waited {now - request.since:.0f} s for {request.devices}: {held}"
        return None

    def _serve(self) -> None:
        """Grant from the front; a later request may pass only if it touches none of the devices waited for before
        it."""
        blocked: set[str] = set()
        for request in list(self.waiting):
            if blocked.isdisjoint(request.devices) and not any(d in self.holders for d in request.devices):
                self.waiting.remove(request)
                for device in request.devices:
                    self.holders[device] = (request.owner, time.monotonic())
                    if self._last.get(device) not in (None, request.owner):
                        self.switches[device] += 1
                    self._last[device] = request.owner
                request.grant()
            else:
                blocked.update(request.devices)
