"""Sums, differences and products of whole numbers, made from a number: every problem of the chosen kind exists once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from m2flow import seeds
from m2flow.protocols import TaskSource
from m2flow.tasks.base import Side, Source, Split, TextTasks, fill, split
from m2flow.tasks.order import Permutation, multiset, multisets
from m2flow.tools.calculator import calculate, show

T = TypeVar("T")
Operation = Literal["add", "subtract", "multiply"]
SIGNS: Mapping[str, str] = {"add": "+", "subtract": "-", "multiply": "*"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ArithmeticConfig(TextTasks):
    """Problems like "12 + 34". Fields of a task: question ("12 + 34"), prompt, answer and completion ("46"), numbers.

    All of them are numbered, and a fixed pseudo-random part is held out (`Split`). 12 + 34 and 34 + 12 count as one
    problem, so that neither is trained on where the other is held out; one of the two is asked. With three or more
    terms this holds for every order of the same numbers and the same signs, whatever the signs.
    """

    offers: ClassVar[tuple[str, ...]] = ("question", "numbers")

    max_tokens: int = 16  # sampled tokens of one answer
    digits: int = 2  # of every number
    smaller: bool = False  # numbers with fewer digits too, from 0 on; one digit always starts at 0
    terms: int = 2  # numbers of a problem
    operations: tuple[Operation, ...] = (
        "add",
    )  # that stand between the numbers, as often as there are problems of each
    negative: bool = False  # whether a difference may be below zero; False: the larger number comes first
    held_out: int | None = None  # problems for evaluation only; null: a fifth of all

    def __post_init__(self) -> None:
        TextTasks.__post_init__(self)
        if not 1 <= self.digits <= 12:
            raise ValueError(f"digits: from 1 to 12, got {self.digits}")
        if not 2 <= self.terms <= 8:
            raise ValueError(f"terms: from 2 to 8, got {self.terms}")
        if not self.operations or len(set(self.operations)) != len(self.operations) or {*self.operations} - {*SIGNS}:
            raise ValueError(f"operations: different ones of {', '.join(SIGNS)}, got {list(self.operations)}")
        if self.terms > 2 and "subtract" in self.operations and not self.negative:
            raise ValueError("negative: with more than two terms a result may be below zero; set it to true")
        self._split()
        self._payload(0)

    def tasks(self, split: Side, seed: int) -> TaskSource:
        """All problems of a side; of `train`, the order depends on `seed`."""
        whole = self._split()
        return Source(whole.size(split), lambda index: self._payload(whole.at(split, seed, index)))

    def _range(self) -> tuple[int, int]:
        """The smallest number, and how many there are."""
        low = 0 if self.smaller or self.digits == 1 else 10 ** (self.digits - 1)
        return low, 10**self.digits - low

    def _split(self) -> Split:
        _, many = self._range()
        if self.terms > 2:
            total = multisets(many, self.terms) * multisets(len(self.operations), self.terms - 1)
        else:
            total = sum(_pairs(many, self._ordered(name)) for name in self.operations)
        return split(total, self.held_out, "problems")

    def _ordered(self, operation: str) -> bool:
        """Whether the order of two numbers makes two problems of them."""
        return operation == "subtract" and self.negative

    def _payload(self, number: int) -> Mapping[str, Any]:
        low, many = self._range()
        places, signs = self._pair(number, many) if self.terms == 2 else self._chain(number, many)
        numbers = [low + place for place in places]
        question = str(numbers[0]) + "".join(f" {sign} {x}" for sign, x in zip(signs, numbers[1:], strict=True))
        answer = show(calculate(question))
        row = {"question": question, "numbers": numbers}
        prompt = fill(self.template or "What is {question}? Give the number only.", row)
        return {**row, "prompt": prompt, "answer": answer, "completion": answer}

    def _chain(self, number: int, many: int) -> tuple[list[int], list[str]]:
        """A set of numbers and one of signs, each in an order that is always the same for the problem."""
        rank, sign_rank = number % multisets(many, self.terms), number // multisets(many, self.terms)
        places = multiset(rank, self.terms)
        signs = [SIGNS[self.operations[k]] for k in multiset(sign_rank, self.terms - 1)]
        return _arranged(places, "numbers", number), _arranged(signs, "signs", number)

    def _pair(self, number: int, many: int) -> tuple[list[int], list[str]]:
        rest = number
        for operation in self.operations:
            count = _pairs(many, self._ordered(operation))
            if rest < count:
                break
            rest -= count
        if self._ordered(operation):
            return list(divmod(rest, many)), [SIGNS[operation]]
        larger = (isqrt(8 * rest + 1) - 1) // 2  # pairs with larger first number k start at k * (k + 1) / 2
        pair = [larger, rest - larger * (larger + 1) // 2]
        if operation != "subtract" and _coin(number):
            pair.reverse()
        return pair, [SIGNS[operation]]


def _pairs(many: int, ordered: bool) -> int:
    return many * many if ordered else many * (many + 1) // 2


def _arranged(items: list[T], what: str, number: int) -> list[T]:
    """The items in a pseudo-random order, a function of the number of the problem."""
    order = Permutation(len(items), "arithmetic", what, number)
    return [items[order.at(place)] for place in range(len(items))]


def _coin(number: int) -> bool:
    """Which of two numbers is written first, always the same for a problem."""
    zero = np.zeros(1, np.int64)
    return bool(seeds.bits(number & (2**62 - 1), zero, zero, 1)[0, 0, 0] & np.uint64(1))
