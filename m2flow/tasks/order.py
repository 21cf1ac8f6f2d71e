"""From a position in a run to a task: every task once per epoch, in an order of its own each epoch.

Nothing is kept but the position, so a resumed run needs only that number to go on with the same tasks (pain 18).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

ROUNDS = 10  # a few more than the four that make a Feistel network look random, since small sizes need them


class Permutation:
    """A pseudo-random one-to-one map of 0 .. size-1 onto itself, a pure function of its key, for any size.

    A Feistel network over pairs (left, right) with left < a, right < b, a * b >= size (Black and Rogaway 2002,
    "Ciphers with arbitrary finite domains": what falls outside the size goes through it again). It holds no table.
    Example: `sorted(Permutation(10, "key").at(i) for i in range(10)) == list(range(10))`.
    """

    def __init__(self, size: int, *key: str | int) -> None:
        if not 1 <= size <= 2**900:
            raise ValueError(f"size: a permutation of 1 to 2**900 numbers, got {size}")
        self.size = size
        self._right = math.isqrt(size - 1) + 1
        self._left = -(-size // self._right)
        self._key = hashlib.blake2b(repr(key).encode(), digest_size=32).digest()

    def at(self, index: int) -> int:
        """Where `index` goes. Raises ValueError outside 0 .. size-1."""
        if not 0 <= index < self.size:
            raise ValueError(f"index: 0 to {self.size - 1}, got {index}")
        if self.size == 1:
            return 0
        while True:
            index = self._once(index)
            if index < self.size:
                return index

    def _once(self, x: int) -> int:
        left, right = divmod(x, self._right)
        for turn in range(ROUNDS):
            if turn % 2 == 0:
                left = (left + self._hash(turn, right)) % self._left
            else:
                right = (right + self._hash(turn, left)) % self._right
        return left * self._right + right

    def _hash(self, turn: int, half: int) -> int:
        data = half.to_bytes(half.bit_length() // 8 + 1, "little") + bytes((turn,))
        return int.from_bytes(hashlib.blake2b(data, digest_size=64, key=self._key).digest(), "little")


def multiset(rank: int, count: int) -> list[int]:
    """The rank-th set of `count` numbers from 0 on, repetition allowed, smallest first.

    Sets without repetition are ranked by the combinatorial number system (rank = sum of C(c_i, i), Knuth, The Art of
    Computer Programming 4A, 7.2.1.3); taking i - 1 from the i-th member allows repetition. Those of the first n numbers
    come before all others, so that there are C(n + count - 1, count) of them.
    """
    members = []
    for place in range(count, 0, -1):
        low, high = place - 1, place
        while math.comb(high, place) <= rank:
            low, high = high, 2 * high
        while high - low > 1:  # comb(low) <= rank < comb(high)
            middle = (low + high) // 2
            low, high = (middle, high) if math.comb(middle, place) <= rank else (low, middle)
        rank -= math.comb(low, place)
        members.append(low - (place - 1))
    return members[::-1]


def multisets(numbers: int, count: int) -> int:
    """How many sets of `count` of so many numbers there are, repetition allowed."""
    return math.comb(numbers + count - 1, count)


@dataclass(frozen=True, slots=True)
class Order:
    """The order in which a run goes through `size` tasks; None: a source without end, taken as it comes.

    Example: with `order = Order(10, seed=3)`, positions 0 .. 9 are the first epoch and 10 .. 19 the second;
    `order.at(13)` is `(1, index)`.
    """

    size: int | None
    seed: int
    shuffle: bool = True  # False: epoch after epoch in the source's own order

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise ValueError(f"size: there must be a task, got {self.size}")

    def index(self, position: int) -> int:
        """Index in the source of the position-th task of a run."""
        return self.at(position)[1]

    def at(self, position: int) -> tuple[int, int]:
        """(epoch, index in the source) of the position-th task of a run, counted from 0."""
        if position < 0:
            raise ValueError(f"position: 0 or more, got {position}")
        if self.size is None:
            return 0, position
        epoch, place = divmod(position, self.size)
        return epoch, Permutation(self.size, "order", self.seed, epoch).at(place) if self.shuffle else place
