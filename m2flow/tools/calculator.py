"""Exact arithmetic on text that a model wrote. Nothing of it is ever given to Python to evaluate.

    sum     = product (("+" | "-") product)*
    product = signed (("*" | "/" | "//" | "%") signed)*
    signed  = ("-" | "+")* power
    power   = atom ("**" signed)?            as in Python: -2**2 is -4, and 2**-1 is 1/2
    atom    = number | "(" sum ")"

Numbers are whole numbers or fractions of them ("0.1" is one tenth), so that 0.1 + 0.2 is 0.3; only a power with a
broken exponent makes a float. The length of the text, its nesting and the size of every result are bounded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

Number: TypeAlias = Fraction | float

LONGEST = 1000  # characters of an expression
MOST = 400  # numbers, signs and brackets; a chain of signs is a deep tree, and trees are walked by recursion
DEEPEST = 40  # brackets and signs inside each other
BITS = 4096  # of the numerator and of the denominator of a result, each
_SIGNS = str.maketrans("\u00d7\u00b7\u00f7\u2212\u2013", "**/--")  # times, dot, division, minus and dash of print
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)|(?P<sign>\*\*|//|[-+*/%^()]))"
)


class CalculationError(ValueError):
    """An expression that cannot be read, or has no value. Its text is what the model is told."""


@dataclass(frozen=True, slots=True)
class Node:
    """A number (`sign` is "", `text` as it was written), a signed value ("neg", "pos") or a pair ("+", "**", ...).

    Example: `parse("2*3")` is a Node with sign "*" and two numbers as its parts.
    """

    sign: str
    parts: tuple[Node, ...] = ()
    text: str = ""

    def walk(self) -> Iterator[Node]:
        """This node and all below it, from left to right."""
        yield self
        for part in self.parts:
            yield from part.walk()


def parse(text: str) -> Node:
    """The expression as a tree.

    Raises:
        CalculationError: says what stands where in it, or which bound it breaks.
    """
    if len(text) > LONGEST:
        raise CalculationError(f"the expression has {len(text)} characters, at most {LONGEST} are allowed")
    tokens = _tokens(text.translate(_SIGNS))
    if len(tokens) > MOST:
        raise CalculationError(f"the expression has {len(tokens)} numbers and signs, at most {MOST} are allowed")
    parser = _Parser(tokens)
    tree = parser.sum(0)
    if parser.here is not None:
        raise CalculationError(f"unexpected {parser.here!r}")
    return tree


def value(node: Node) -> Number:
    """What an expression comes to: a Fraction, or a float where a power has a broken exponent.

    Raises:
        CalculationError: a division by zero, a result beyond `BITS`, or a power that is no real number.
    """
    if not node.parts:
        return _bounded(Fraction(node.text))
    left = value(node.parts[0])
    if len(node.parts) == 1:
        return -left if node.sign == "neg" else left
    right = value(node.parts[1])
    try:
        return _bounded(_apply(node.sign, left, right))
    except ZeroDivisionError:
        raise CalculationError("division by zero") from None
    except OverflowError:
        raise CalculationError("the result is too large") from None


def calculate(text: str) -> Number:
    """The value of an expression. Example: `calculate("(1 + 2) / 4")` is `Fraction(3, 4)`."""
    return value(parse(text))


def show(number: Number) -> str:
    """A number as text: whole, or with up to 15 significant digits. Examples: "7", "0.3", "0.333333333333333"."""
    if isinstance(number, Fraction) and number.denominator == 1:
        return str(number.numerator)
    try:
        return f"{float(number):.15g}"
    except OverflowError:
        raise CalculationError("the result is too large") from None


class Calculator:
    """The tool `calculator`: one expression in, its value out."""

    spec: Mapping[str, Any] = {
        "name": "calculator",
        "description": "Computes the value of an arithmetic expression exactly. It knows + - * / // % ** and brackets.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "for example (12 + 30) / 7"}},
            "required": ["expression"],
        },
    }

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """The value of `arguments["expression"]`, as `show` writes it. Raises CalculationError."""
        return show(calculate(str(arguments["expression"])))


class _Parser:
    """Recursive descent over the tokens of one expression; `depth` bounds how far it goes down."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens, self.at = tokens, 0

    @property
    def here(self) -> str | None:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else None

    def take(self) -> str:
        text = self.tokens[self.at][1]
        self.at += 1
        return text

    def sum(self, depth: int) -> Node:
        return self._chain(("+", "-"), self.product, depth)

    def product(self, depth: int) -> Node:
        return self._chain(("*", "/", "//", "%"), self.signed, depth)

    def _chain(self, signs: tuple[str, ...], below: Any, depth: int) -> Node:
        node: Node = below(depth)
        while self.here in signs:
            node = Node(self.take(), (node, below(depth)))
        return node

    def signed(self, depth: int) -> Node:
        if depth > DEEPEST:
            raise CalculationError(f"more than {DEEPEST} brackets or signs inside each other")
        if self.here in ("-", "+"):
            return Node("neg" if self.take() == "-" else "pos", (self.signed(depth + 1),))
        base = self.atom(depth)
        if self.here in ("**", "^"):
            self.take()
            return Node("**", (base, self.signed(depth + 1)))
        return base

    def atom(self, depth: int) -> Node:
        if self.here is None:
            raise CalculationError("the expression ends too early")
        kind, text = self.tokens[self.at]
        if kind == "number":
            return Node("", text=self.take())
        if text != "(":
            raise CalculationError(f"unexpected {text!r}")
        self.take()
        inner = self.sum(depth + 1)
        if self.here != ")":
            raise CalculationError("a bracket is not closed")
        self.take()
        return inner


def _tokens(text: str) -> list[tuple[str, str]]:
    found, at, end = [], 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            raise CalculationError(f"unexpected {text[at:].lstrip()[:1]!r}; only numbers, + - * / // % ** and brackets")
        kind = str(match.lastgroup)
        found.append((kind, match[kind]))
        at = match.end()
    return found


def _apply(sign: str, left: Number, right: Number) -> Number:
    if sign == "+":
        return left + right
    if sign == "-":
        return left - right
    if sign == "*":
        return left * right
    if sign == "/":
        return left / right
    if sign == "//":
        return Fraction(left // right)
    if sign == "%":
        return left % right
    return _power(left, right)


def _power(base: Number, exponent: Number) -> Number:
    """Checked before it is computed, because a power is how few characters make a huge number."""
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if size > 1 and abs(exponent) * (size - 1) > BITS:
            raise OverflowError
        return Fraction(base**exponent.numerator)
    if base < 0:
        raise CalculationError("the power is no real number")
    return float(float(base) ** float(exponent))


def _bounded(number: Number) -> Number:
    if isinstance(number, Fraction):
        if max(number.numerator.bit_length(), number.denominator.bit_length()) > BITS:
            raise OverflowError
    elif not math.isfinite(number):
        raise OverflowError
    return number
