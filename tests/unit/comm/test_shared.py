"""Corners of the shared memory link. What every transport must do is asked in tests/contracts/test_transports.py."""

from __future__ import annotations

import os
import resource

import numpy as np
import pytest
import torch

from m2flow.comm.shared import MAX_SEGMENTS
from m2flow.comm.transport import Closed, SharedMemory
from tests.contracts.channel_suite import WAIT, Background

LARGE = 1 << 20  # bytes that need a segment


def pair(**settings):
    return SharedMemory.pair(ends=("me", "peer"), name="l", **settings)


@pytest.fixture
def link():
    ends = pair()
    yield ends
    for end in ends:
        end.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 7, 1 << 20])
def test_a24_tensors_of_any_dtype_size_and_strides_arrive_bit_for_bit(link, dtype, count):
    a, b = link
    whole = torch.arange(2 * count, dtype=torch.int64).to(dtype).reshape(2, count)  # up to 16 MB
    tree = {"c": whole, "strided": whole.t(), "scalar": whole.sum().to(dtype), "every other": whole[:, ::2]}
    sending = Background(lambda: a.send(tree, timeout=WAIT))
    got = b.recv(timeout=WAIT)
    assert sending.result() is None
    for name, tensor in tree.items():
        assert got[name].dtype == dtype
        assert torch.equal(got[name], tensor)
        assert not count or got[name].data_ptr() != tensor.data_ptr()


def test_a_large_message_that_waited_in_vain_has_sent_nothing_and_its_memory_is_used_again(link):
    a, b = pair(messages=1)
    a.send("first", timeout=WAIT)
    with pytest.raises(TimeoutError, match="me has waited 0.1 s to send; peer has not received"):
        a.send(np.zeros(LARGE, np.uint8), timeout=0.05)
    files = open_files()
    for n in range(3):
        with pytest.raises(TimeoutError):
            a.send(np.full(LARGE, n, np.uint8), timeout=0.01)
    assert open_files() == files  # no segment was made for each attempt
    assert b.recv(timeout=WAIT) == "first"
    a.send(np.full(LARGE, 9, np.uint8), timeout=WAIT)
    assert (b.recv(timeout=WAIT) == 9).all()
    a.close()
    b.close()


def test_so_many_large_messages_may_wait_and_no_more(link):
    a, b = link
    for n in range(MAX_SEGMENTS):
        a.send(np.full(LARGE, n, np.uint8), timeout=WAIT)
    with pytest.raises(TimeoutError):
        a.send(np.zeros(LARGE, np.uint8), timeout=0.05)
    assert [int(b.recv(timeout=WAIT)[-1]) for _ in range(MAX_SEGMENTS)] == list(range(MAX_SEGMENTS))


def test_who_waits_behind_another_thread_of_the_same_end_has_a_limit_too(link):
    a, b = link
    first = Background(b.recv)
    assert first.waits
    with pytest.raises(TimeoutError, match="peer has waited 0.1 s for a message from me"):
        b.recv(timeout=0.05)
    a.send("x", timeout=WAIT)
    assert first.result() == "x"


def test_both_ends_send_large_messages_at_the_same_time(link):
    a, b = link
    count = 3 * MAX_SEGMENTS

    def talk(end, first):
        for n in range(count):
            end.send(np.full(LARGE, first + n, np.uint8), timeout=WAIT)

    talking = [Background(lambda: talk(a, 0)), Background(lambda: talk(b, 100))]
    listening = [Background(lambda e=e: [int(e.recv(timeout=WAIT)[-1]) for _ in range(count)]) for e in (b, a)]
    assert [x.result() for x in talking] == [None, None]
    assert [x.result() for x in listening] == [list(range(count)), list(range(100, 100 + count))]


def test_two_hundred_messages_of_four_threads_all_arrive_in_each_threads_order(link):
    a, b = link
    senders = [
        Background(lambda p=p: [a.send((p, n, np.zeros(50 if n % 3 else LARGE)), timeout=WAIT) for n in range(50)])
        for p in range(4)
    ]
    got = [b.recv(timeout=WAIT)[:2] for _ in range(200)]
    for p, sender in enumerate(senders):
        assert len(sender.result()) == 50
        assert [n for q, n in got if q == p] == list(range(50))


def test_a_lost_descriptor_ends_the_link_and_says_what_to_look_at(link):
    a, b = link
    a.send(np.zeros(LARGE, np.uint8), timeout=WAIT)
    lowest = os.dup(0)  # the number that the descriptor would get
    os.close(lowest)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(Closed, match="descriptor did not arrive.*ulimit -n"):
            b.recv(timeout=WAIT)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_end_that_closes_with_messages_unread_keeps_no_file_open():
    before = open_files()
    a, b = pair()
    a.send("x", timeout=WAIT)
    for _ in range(MAX_SEGMENTS):
        a.send(np.zeros(LARGE, np.uint8), timeout=WAIT)
    assert b.recv(timeout=WAIT) == "x"  # descriptors of the others are here by now, unclaimed
    assert open_files() > before
    b.close()
    a.close()
    assert open_files() == before


def test_what_is_unread_when_the_sender_closes_can_still_be_read_and_acknowledged(link):
    a, b = link
    for n in range(3):
        a.send((n, np.full(LARGE, n, np.uint8)), timeout=WAIT)
    a.close()
    for n in range(3):
        number, x = b.recv(timeout=WAIT)
        assert number == n
        assert (x == n).all()
    with pytest.raises(Closed, match="me is gone"):
        b.recv(timeout=WAIT)
    with pytest.raises(Closed, match="me is gone"):
        b.send("anybody?", timeout=WAIT)
