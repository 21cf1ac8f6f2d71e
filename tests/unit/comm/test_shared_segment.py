"""Segments and their pool. That they travel between processes is asked in tests/contracts/test_transports.py."""

from __future__ import annotations

import os

import pytest

from m2flow.comm.shared_segment import SMALLEST, Pool, SharedSegment


@pytest.fixture
def pool():
    made = Pool()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("least", "size"),
    [(1, SMALLEST), (SMALLEST, SMALLEST), (SMALLEST + 1, 2 * SMALLEST), (3 * SMALLEST, 4 * SMALLEST)],
)
def test_sizes_are_powers_of_two_and_large_enough(least, size):
    segment = SharedSegment.create(least)
    assert segment.size == os.fstat(segment.fd).st_size == len(segment.map) == size
    segment.close()


def test_whoever_maps_the_descriptor_sees_the_same_bytes():
    here = SharedSegment.create(10)
    there = SharedSegment(os.dup(here.fd), here.size)
    here.map[5:8] = b"abc"
    assert there.map[5:8] == b"abc"
    here.close()
    there.map[5:6] = b"x"  # it lives as long as anybody holds it
    assert there.map[5:8] == b"xbc"
    there.close()


def test_the_descriptor_is_closed_once_and_only_once():
    segment = SharedSegment.create(10)
    fd = segment.fd
    segment.introduced()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    other = os.open(os.devnull, os.O_RDONLY)  # takes the number that became free
    assert other == fd
    segment.introduced()
    segment.close()
    os.fstat(other)
    os.close(other)


def test_a_segment_that_is_still_looked_at_can_be_closed():
    segment = SharedSegment.create(10)
    view = memoryview(segment.map)
    segment.close()
    assert view[0] == 0


def test_the_smallest_that_is_large_enough_is_used_again(pool):
    numbers = {size: pool.take(size * SMALLEST)[0] for size in (4, 1, 2)}
    assert len({*numbers.values()}) == 3
    for number in numbers.values():
        pool.give_back(number)
    for size in (1, 2, 4):
        number, segment = pool.take(size * SMALLEST)
        assert (number, segment.size) == (numbers[size], size * SMALLEST)
    assert not pool.free
    assert len(pool.busy) == 3


def test_one_that_is_too_small_makes_room_and_is_announced_only_where_it_is_known(pool):
    unknown, _ = pool.take(1)
    pool.give_back(unknown)
    second, segment = pool.take(2 * SMALLEST)  # in place of the first, of which the receiver has never heard
    assert unknown not in pool.free
    assert not pool.dropped
    segment.introduced()
    pool.give_back(second)
    third, _ = pool.take(4 * SMALLEST)
    assert list(pool.dropped) == [second]
    assert {unknown, second, third} == {1, 2, 3}  # a number is never given twice
    assert list(pool.busy) == [third]
