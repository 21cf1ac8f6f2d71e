"""The calculator: right where Python is, and nothing else ever runs."""

from __future__ import annotations

import asyncio
import contextlib
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2flow.tools.calculator import BITS, CalculationError, Calculator, calculate, parse, show


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2+3*4", Fraction(14)),
        ("(2+3)*4", Fraction(20)),
        ("8-3-2", Fraction(3)),
        ("8/4/2", Fraction(1)),
        ("1/3", Fraction(1, 3)),
        ("0.1 + 0.2", Fraction(3, 10)),
        ("-2**2", Fraction(-4)),
        ("2**-1", Fraction(1, 2)),
        ("2**3**2", Fraction(512)),
        ("-7//2", Fraction(-4)),
        ("-7%3", Fraction(2)),
        ("2^10", Fraction(1024)),
        ("--5", Fraction(5)),
        ("1e3", Fraction(1000)),
        (".5", Fraction(1, 2)),
        (" ( 3 ) ", Fraction(3)),
        ("6 \u00d7 7 \u2212 2 \u00f7 1", Fraction(40)),
        ("2**0.5", 2**0.5),
        ("(-1)**(10**9)", Fraction(1)),
    ],
)
def test_values(text: str, expected: Fraction | float) -> None:
    assert calculate(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "ends too early"),
        ("1+", "ends too early"),
        ("(1", "not closed"),
        ("1)", "unexpected ')'"),
        ("1 2", "unexpected '2'"),
        ("1,000", "unexpected ','"),
        ('__import__("os").system("true")', "unexpected '_'"),
        ("abs(-1)", "unexpected 'a'"),
        ("1/0", "division by zero"),
        ("1//(2-2)", "division by zero"),
        ("1%0", "division by zero"),
        ("0**-1", "division by zero"),
        ("9**9**9", "too large"),
        ("9**99999", "too large"),
        ("(1/9)**99999", "too large"),
        ("9.5**999.5", "too large"),
        ("(-8)**(1/3)", "no real number"),
        ("(" * 300 + "1" + ")" * 300, "at most"),
        ("(" * 100 + "1" + ")" * 100, "inside each other"),
        ("-" * 100 + "1", "inside each other"),
        ("1+" * 300 + "1", "at most 400"),
        ("1" * 5000, "at most 1000"),
        ("\u0661+\u0661", "unexpected"),  # digits of another script
    ],
)
def test_what_has_no_value_is_an_error_in_words(text: str, words: str) -> None:
    with pytest.raises(CalculationError) as caught:
        calculate(text)
    assert words in str(caught.value)


def test_the_longest_expressions_that_are_allowed_have_values() -> None:
    assert calculate("+".join(["1"] * 200)) == 200
    assert calculate("(" * 39 + "1" + ")" * 39) == 1
    assert calculate(f"2**{BITS - 1}") == 2 ** (BITS - 1)


def expressions() -> st.SearchStrategy[str]:
    numbers = st.integers(0, 50).map(str)

    def join(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        pairs = st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map("".join)
        return pairs | inner.map("({})".format) | inner.map("-{}".format)

    return st.recursive(numbers, join, max_leaves=12)


@given(expressions())
def test_whole_numbers_agree_with_python(text: str) -> None:
    try:
        expected = eval(text)
    except ZeroDivisionError:
        with pytest.raises(CalculationError, match="division by zero"):
            calculate(text)
    else:
        assert calculate(text) == expected


@given(st.text(max_size=60) | st.text(alphabet="0123456789+-*/%.()e ", max_size=60))
def test_any_text_has_a_value_or_an_error_and_ends(text: str) -> None:
    with contextlib.suppress(CalculationError):
        assert show(calculate(text))


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (Fraction(6, 2), "3"),
        (Fraction(3, 10), "0.3"),
        (Fraction(1, 3), "0.333333333333333"),
        (Fraction(-5, 4), "-1.25"),
        (2.0**70, "1.18059162071741e+21"),
        (Fraction(2**70), "1180591620717411303424"),
    ],
)
def test_results_are_written_short_and_whole_numbers_exactly(number: Fraction | float, text: str) -> None:
    assert show(number) == text


def test_the_tool_answers_and_a_tree_shows_its_numbers() -> None:
    assert asyncio.run(Calculator().call({"expression": "12*(3+4)"})) == "84"
    assert asyncio.run(Calculator().call({"expression": 7})) == "7"
    assert [(node.sign, node.text) for node in parse("2*(3+4)").walk()] == [
        ("*", ""), ("", "2"), ("+", ""), ("", "3"), ("", "4"),
    ]  # fmt: skip
