"""Countdown: reach a target by calculating with given numbers. Small enough for a model trained from nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, Literal

from m2flow.protocols import TaskSource
from m2flow.seeds import derive
from m2flow.tasks.base import Side, Source, Split, TextTasks, fill, split
from m2flow.tasks.order import multiset, multisets
from m2flow.tools.calculator import CalculationError, Node, parse, value
from m2flow.types import Sample

Operation = Literal["add", "subtract", "multiply", "divide"]
SIGNS: Mapping[str, str] = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}
_STRENGTH = {"+": 1, "-": 1, "*": 2, "/": 2}
_TRIES = 100  # random expressions before the sum of all numbers is taken, which is always a solution


@dataclass(frozen=True, kw_only=True, slots=True)
class CountdownConfig(TextTasks):
    """Fields of a task: numbers, target, question ("3 7 2 = 17"), prompt, completion (a solution, "3*(7-2)+2"), answer
    (the target as text), operations, exact.

    Every task has a solution, by how it is made: an expression is drawn, and its value is the target. All results on
    the way are whole numbers from 1 on. The sets of numbers that are held out never occur in training, with any target.
    The reward is `m2flow.tasks.countdown:verify`.
    """

    offers: ClassVar[tuple[str, ...]] = ("numbers", "target", "question")
    judge: ClassVar[Mapping[str, str]] = {"name": "function", "function": "m2flow.tasks.countdown:verify"}

    max_tokens: int = 32  # sampled tokens of one answer
    count: int = 3  # numbers of a task
    low: int = 1  # smallest number
    high: int = 20  # largest number
    operations: tuple[Operation, ...] = ("add", "subtract", "multiply")  # allowed in a solution; "add" always is
    max_target: int = 100  # largest target
    exact: bool = True  # every number is used exactly once; False: at most once
    held_out: int | None = None  # sets of numbers for evaluation only, with one task each; null: a fifth of all

    def __post_init__(self) -> None:
        TextTasks.__post_init__(self)
        if not 2 <= self.count <= 8:
            raise ValueError(f"count: from 2 to 8 numbers, got {self.count}")
        if not 1 <= self.low < self.high <= 10_000:
            raise ValueError(f"high: 1 <= low < high <= 10000, got low {self.low} and high {self.high}")
        given = [*self.operations]
        if "add" not in given or len(set(given)) != len(given) or {*given} - {*SIGNS}:
            raise ValueError(f"operations: 'add' and others of {', '.join(SIGNS)}, each once, got {given}")
        if self.max_target < self.count * self.high:
            raise ValueError(
                f"max_target: at least {self.count * self.high}, the largest sum of numbers (count x high), so that "
                f"every set of numbers has a solution; got {self.max_target}"
            )
        self._split()
        self._payload(0, Random(0))

    def tasks(self, split: Side, seed: int) -> TaskSource:
        """`train`: without end, each position drawn by (seed, position). `held_out`: one task for every set of numbers
        that is held out, the same for every seed."""
        sets = self._split()
        if split == "held_out":
            return Source(sets.size(split), lambda i: self._payload(sets.at(split, 0, i), Random(f"held out {i}")))
        return Source(None, lambda i: self._train(sets, derive(seed, "countdown"), i))

    def _split(self) -> Split:
        return split(multisets(self.high - self.low + 1, self.count), self.held_out, "sets of numbers")

    def _train(self, sets: Split, seed: int, index: int) -> Mapping[str, Any]:
        epoch, place = divmod(index, sets.size("train"))  # so that all sets occur equally often
        return self._payload(sets.at("train", derive(seed, epoch), place), Random(f"{seed} {index}"))

    def _payload(self, rank: int, random: Random) -> Mapping[str, Any]:
        numbers = [self.low + place for place in multiset(rank, self.count)]
        random.shuffle(numbers)
        target, solution = self._solvable(numbers, random)
        row = {"numbers": numbers, "target": target, "question": f"{' '.join(map(str, numbers))} = {target}"}
        answers = {"answer": str(target), "completion": solution}
        rules = {"operations": [SIGNS[name] for name in self.operations], "exact": self.exact}
        return {**row, "prompt": fill(self.template or "{question}", row), **answers, **rules}

    def _solvable(self, numbers: list[int], random: Random) -> tuple[int, str]:
        for _ in range(_TRIES):
            drawn = self._draw(numbers, random)
            if drawn is not None and drawn[0] <= self.max_target:
                return drawn
        return sum(numbers), "+".join(map(str, numbers))

    def _draw(self, numbers: list[int], random: Random) -> tuple[int, str] | None:
        """A random expression of the numbers, or of two or more of them, with its value; None where a result on the
        way is not a whole number from 1 on."""
        used = len(numbers) if self.exact else random.randint(2, len(numbers))
        parts = [(number, str(number), 3) for number in random.sample(numbers, used)]
        while len(parts) > 1:
            left, right = (parts.pop(random.randrange(len(parts))) for _ in range(2))
            joined = _join(left, right, SIGNS[random.choice(self.operations)])
            if joined is None:
                return None
            parts.append(joined)
        return parts[0][0], parts[0][1]


def verify(sample: Sample) -> float:
    """1 where the answer is an expression that keeps the rules of its task and reaches the target, else 0.

    Read is what stands in the last <answer>...</answer>, else the last line that is not empty; "= 17" at its end is
    ignored. Only the operations of the task are allowed, no signs before numbers, and no number oftener than given.
    """
    payload = sample.task.payload
    try:
        tree = parse(_expression(sample.text))
        if not _keeps_rules(tree, payload):
            return 0.0
        return float(value(tree) == payload["target"])
    except CalculationError:
        return 0.0


def _expression(text: str) -> str:
    tagged = text.rpartition("<answer>")[2].partition("</answer>")
    if "<answer>" in text and tagged[1]:
        text = tagged[0]
    lines = text.split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return re.sub(r"=\s*[0-9]+\s*$", "", last[-2000:])


def _keeps_rules(tree: Node, payload: Mapping[str, Any]) -> bool:
    used: Counter[str] = Counter()
    for node in tree.walk():
        if node.parts and node.sign not in payload["operations"]:
            return False
        if not node.parts:
            used[node.text] += 1
    given = Counter(str(number) for number in payload["numbers"])
    return used == given if payload["exact"] else used <= given


def _join(left: tuple[int, str, int], right: tuple[int, str, int], sign: str) -> tuple[int, str, int] | None:
    """(value, text, how strongly its last sign binds) of two such parts, with brackets only where they are needed."""
    (a, a_text, a_strength), (b, b_text, b_strength) = left, right
    if (sign == "-" and a <= b) or (sign == "/" and a % b):
        return None
    strength = _STRENGTH[sign]
    if a_strength < strength:
        a_text = f"({a_text})"
    if b_strength < strength or (b_strength == strength and sign in "-/"):
        b_text = f"({b_text})"
    result = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[sign]
    return result, f"{a_text}{sign}{b_text}", strength
