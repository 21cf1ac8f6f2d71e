"""Permutations without tables, and the order of a run (case A18)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.tasks.order import Order, Permutation


@given(st.integers(1, 700), st.integers())
@settings(max_examples=50, deadline=None)
def test_every_number_comes_once(size: int, key: int) -> None:
    permutation = Permutation(size, key)
    assert sorted(permutation.at(i) for i in range(size)) == list(range(size))


@given(st.integers(2, 2**330), st.integers(), st.data())
@settings(max_examples=50, deadline=None)
def test_large_sizes_stay_inside_and_do_not_collide(size: int, key: int, data: st.DataObject) -> None:
    permutation = Permutation(size, key)
    places = data.draw(st.sets(st.integers(0, size - 1), max_size=20))
    images = {permutation.at(place) for place in places}
    assert len(images) == len(places)
    assert all(0 <= image < size for image in images)


def test_large_sizes_use_their_whole_range() -> None:
    """Of 2**320 numbers, the image of 0..99 has its mean near the middle, and so have its lowest bits."""
    images = [Permutation(2**320, "wide").at(i) for i in range(100)]
    assert 0.4 < sum(image / 2**320 for image in images) / 100 < 0.6
    assert 0.4 < sum((image % 2**160) / 2**160 for image in images) / 100 < 0.6


@pytest.mark.parametrize("size", [2, 3, 6, 10])
def test_every_number_goes_everywhere_equally_often(size: int) -> None:
    """Over 2000 keys, each of the size**2 pairs (number, image) is seen 2000 / size times, within 5 sigma."""
    counts = [[0] * size for _ in range(size)]
    for key in range(2000):
        permutation = Permutation(size, "even", key)
        for number in range(size):
            counts[number][permutation.at(number)] += 1
    expected = 2000 / size
    sigma = (expected * (1 - 1 / size)) ** 0.5
    assert all(abs(count - expected) < 5 * sigma for row in counts for count in row)


def test_all_orders_of_three_occur() -> None:
    orders = {tuple(Permutation(3, key).at(i) for i in range(3)) for key in range(200)}
    assert len(orders) == 6


def test_the_key_decides_and_wrong_numbers_are_refused() -> None:
    a, b, other = Permutation(100, "x", 1), Permutation(100, "x", 1), Permutation(100, "x", 2)
    assert [a.at(i) for i in range(100)] == [b.at(i) for i in range(100)] != [other.at(i) for i in range(100)]
    assert [a.at(i) for i in range(5)] == [39, 57, 49, 60, 38]  # the same on every machine, in every version
    for index in (-1, 100):
        with pytest.raises(ValueError, match="index: 0 to 99"):
            a.at(index)
    with pytest.raises(ValueError, match="size"):
        Permutation(0, "x")


def test_a18_a_resumed_run_goes_on_with_the_same_rows() -> None:
    """10 rows, batch 2: run A takes 12 steps; run B stops after 7 and goes on from its position alone."""

    def steps(first: int, last: int) -> list[list[int]]:
        order = Order(10, seed=4)
        return [[order.index(position) for position in (2 * step, 2 * step + 1)] for step in range(first, last)]

    straight = steps(0, 12)
    assert steps(0, 7) + steps(7, 12) == straight
    flat = [index for step in straight for index in step]
    assert sorted(flat[:10]) == sorted(flat[10:20]) == list(range(10))
    assert flat[:10] != flat[10:20], "every epoch has its own order"
    assert [Order(10, 4).at(p)[0] for p in (0, 9, 10, 23)] == [0, 0, 1, 2]
    assert flat[:10] != [Order(10, 5).index(p) for p in range(10)]


def test_an_order_of_an_endless_source_and_one_that_is_not_shuffled() -> None:
    assert [Order(None, 3).at(p) for p in (0, 7, 10**12)] == [(0, 0), (0, 7), (0, 10**12)]
    assert [Order(3, 3, shuffle=False).index(p) for p in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    with pytest.raises(ValueError, match="position"):
        Order(3, 3).at(-1)
    with pytest.raises(ValueError, match="size"):
        Order(0, 3)
