"""Leases: all devices at once, first come first served, owners that die lose theirs."""

from __future__ import annotations

import pytest

from m2flow.runtime.lease import LeaseManager


def test_second_owner_waits_until_the_first_releases() -> None:
    manager, order = LeaseManager(), []
    manager.acquire("a/0", ("gpu:0", "gpu:1"), lambda: order.append("a"))
    manager.acquire("b/0", ("gpu:1",), lambda: order.append("b"))
    assert order == ["a"]
    manager.release("a/0")
    assert order == ["a", "b"]
    assert manager.switches == {"gpu:1": 1}


def test_later_request_does_not_overtake_on_a_device_that_is_waited_for() -> None:
    manager, order = LeaseManager(), []
    manager.acquire("a/0", ("gpu:0",), lambda: order.append("a"))
    manager.acquire("b/0", ("gpu:0", "gpu:1"), lambda: order.append("b"))
    manager.acquire("c/0", ("gpu:1",), lambda: order.append("c"))
    manager.acquire("d/0", ("gpu:2",), lambda: order.append("d"))
    assert order == ["a", "d"]
    manager.release("a/0")
    assert order == ["a", "d", "b"]
    manager.release("b/0")
    assert order == ["a", "d", "b", "c"]


def test_dead_owner_loses_lease_and_place_in_the_queue() -> None:
    manager, order = LeaseManager(), []
    manager.acquire("a/0", ("gpu:0",), lambda: order.append("a"))
    manager.acquire("b/0", ("gpu:0",), lambda: order.append("b"))
    manager.acquire("c/0", ("gpu:0",), lambda: order.append("c"))
    manager.drop("b/0")
    manager.drop("a/0")
    assert order == ["a", "c"]


def test_asking_twice_is_an_error() -> None:
    manager = LeaseManager()
    manager.acquire("a/0", ("gpu:0",), lambda: None)
    with pytest.raises(RuntimeError, match="a/0 asked again"):
        manager.acquire("a/0", ("gpu:1",), lambda: None)


def test_overdue_says_who_waits_for_whom() -> None:
    manager = LeaseManager(limit=-1.0)
    manager.acquire("a/0", ("gpu:0",), lambda: None)
    assert manager.overdue() is None
    manager.acquire("b/0", ("gpu:0",), lambda: None)
    text = manager.overdue()
    assert text is not None and text.startswith("b/0 has waited") and "gpu:0 held by a/0" in text
