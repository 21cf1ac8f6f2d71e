"""Interrupted waits, and what channels tell about themselves. The rest is asked in tests/contracts/test_channels.py."""

from __future__ import annotations

import signal
import threading

import pytest

from m2flow.comm import waiting
from m2flow.comm.channel import Channel, Closed
from tests.contracts.channel_suite import WAIT, Background, until


class Interrupt(BaseException):
    """What Ctrl-C raises, under a name of its own."""


def interrupt(*_: object) -> None:
    raise Interrupt


@pytest.fixture
def soon():
    """Interrupts the main thread in a moment."""
    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_an_interrupted_get_leaves_the_queue_and_takes_nothing(soon):
    channel = Channel()
    with pytest.raises(Interrupt):
        channel.get(1, timeout=WAIT)
    assert channel.waiting() == []
    channel.put("x", timeout=WAIT)
    assert channel.get(1, timeout=WAIT) == ["x"]


def test_an_interrupted_put_puts_nothing(soon):
    channel = Channel(capacity=1)
    channel.put("x", timeout=WAIT)
    with pytest.raises(Interrupt):
        channel.put("y", timeout=WAIT)
    assert channel.get(1, timeout=WAIT) == ["x"]
    assert channel.size() == 0
    assert channel.waiting() == []


def test_what_was_handed_over_in_the_moment_of_an_interrupt_comes_back_in_its_place(monkeypatch):
    channel = Channel()
    wait = waiting.Ticket.wait

    def handed_over_then_interrupted(ticket, timeout):
        for item in "abc":
            channel.put(item)  # "a" goes to the waiting get
        raise Interrupt

    monkeypatch.setattr(waiting.Ticket, "wait", handed_over_then_interrupted)
    with pytest.raises(Interrupt):
        channel.get(1, timeout=WAIT)
    monkeypatch.setattr(waiting.Ticket, "wait", wait)
    assert [channel.get(1, timeout=WAIT)[0] for _ in range(3)] == ["a", "b", "c"]


def test_the_limit_of_a_channel_bounds_waits_without_a_timeout():
    channel = Channel("c", capacity=1, limit=0.02)
    with pytest.raises(TimeoutError, match=r"has waited 0\.[0-9] s"):
        channel.get(1)
    channel.put("x")
    with pytest.raises(TimeoutError, match="put weight 1"):
        channel.put("y")


def test_size_and_weight_are_those_of_the_key():
    channel = Channel()
    channel.put("x", key="a", weight=2)
    channel.put("y", key="a", weight=3)
    channel.put("z", key="b")
    assert [(channel.size(key), channel.weight(key)) for key in ("a", "b", "c")] == [(2, 5), (1, 1), (0, 0)]
    channel.get(1, key="a", timeout=WAIT)
    assert (channel.size("a"), channel.weight("a")) == (1, 3)


def test_waiting_names_everybody_who_waits_and_for_what():
    channel = Channel("c", capacity=1, producer="rollout", consumer="learner")
    channel.put("x", key="full", timeout=WAIT)
    getting = Background(lambda: channel.get(7, key="k", timeout=WAIT))
    putting = Background(lambda: channel.put("y", key="full", weight=2, timeout=WAIT))
    until(lambda: len(channel.waiting()) == 2)
    get, put = channel.waiting()
    assert get.startswith("c: learner (thread ")
    assert get.endswith("to get weight 7 of key 'k'")
    assert put.startswith("c: rollout (thread ")
    assert put.endswith("to put weight 2 of key 'full'")
    assert not channel.closed
    channel.close()
    assert channel.closed
    assert isinstance(getting.result(), Closed)
    assert isinstance(putting.result(), Closed)


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="capacity must be at least 1 or None, got 0"):
        Channel(capacity=0)
