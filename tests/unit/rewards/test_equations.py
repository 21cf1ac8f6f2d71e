"""What an answer that is an equation says."""

from __future__ import annotations

import pytest

from m2flow.rewards.math import MathReward
from tests.unit.rewards.samples import boxed

EQUATIONS = [
    ("7", "8=7", 0),
    ("7", "7=8", 0),
    ("7", "x=8=7", 0),
    ("7", "3=x=7", 0),
    ("7", "7=8=7", 0),
    ("7", "(8=7)", 0),
    ("7", "\\left(8=7\\right)", 0),
    ("7", "\\{8=7\\}", 0),
    ("7", "8==7", 0),
    ("7", "8\\equiv 7", 0),
    ("7", "2x=7", 0),
    ("7", "x+1=7", 0),
    ("7", "x^2=7", 0),
    ("7", "\\pi=7", 0),
    ("7", "x=y=8", 0),
    ("7", "x=y", 0),
    ("7", "x=8\\le 7", 0),
    ("7", "x=7\\ne 7", 0),
    ("x+1", "2=x+1", 0),
    ("\\sqrt{2}", "8=\\sqrt{2}", 0),
    ("x=7", "8=7", 0),
    ("1,2", "8=1,9=2", 0),
    ("1,2", "x=1,3=2", 0),
    ("\\{1,2\\}", "8=\\{1,2\\}", 0),
    ("7", "x=7", 1),
    ("7", "7=x", 1),
    ("7", "x=y=7", 1),
    ("7", "3+4=7", 1),  # every side is right
    ("5", "x=10/2=5", 1),
    ("7", "AB=7", 1),
    ("7", "n_1=7", 1),
    ("7", "\\theta=7", 1),
    ("7", "f(3)=7", 1),
    ("7", "|AB|=7", 1),
    ("7", "\\text{total}=7", 1),
    ("7", "7=7", 1),
    ("x=7", "7", 1),
    ("x+1", "f(x)=x+1", 1),
    ("\\sqrt{2}", "x=\\sqrt2", 1),
    ("y=2x+1", "2x+1", 1),
    ("1,2", "x=1,x=2", 1),
    ("(1,2)", "(x,y)=(1,2)", 1),
]


@pytest.mark.parametrize(("gold", "answer", "expected"), EQUATIONS)
def test_an_equation_is_right_only_where_all_its_sides_but_names_are(
    reward: MathReward, gold: str, answer: str, expected: int
) -> None:
    assert boxed(reward, gold, answer) == (expected, 0)
