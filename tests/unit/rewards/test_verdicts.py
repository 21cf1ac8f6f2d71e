"""What counts as the same answer: units, and ways to write a number."""

from __future__ import annotations

import pytest

from m2flow.rewards.exact import tidy, verdict
from m2flow.rewards.math import MathReward
from tests.unit.rewards.samples import boxed

UNITS = [
    ("5 cm", "5 m", 0),
    ("5 cm", "5 kg", 0),
    ("5\\text{ cm}", "5\\text{ m}", 0),
    ("5\\text{ cm}", "5 m", 0),
    ("5 cm", "5\\mathrm{ m}", 0),
    ("5\\text{ cm}^2", "5\\text{ cm}", 0),
    ("5\\text{ cm}^2", "5\\text{ cm}^{3}", 0),
    ("5 cm^2", "5 cm^3", 0),
    ("5 hours", "5 minutes", 0),
    ("5\\text{ km/h}", "5\\text{ m/s}", 0),
    ("5\\text{ km per day}", "5\\text{ m per day}", 0),
    ("5\\sqrt{2}\\text{ cm}", "5\\sqrt{2}\\text{ m}", 0),
    ("5\\text{ apples}", "5\\text{ pears}", 0),
    ("10\\text{ a.m.}", "10\\text{ p.m.}", 0),
    ("\\$5", "5\\text{ euros}", 0),
    ("\\$5", "5 cents", 0),
    ("50\\%", "50\\text{ cm}", 0),
    ("90^\\circ", "90\\text{ cm}", 0),
    ("5 cm", "6 cm", 0),
    ("5 hours", "6", 0),
    ("30", "30\\text{ million dollars}", 0),
    ("5", "5\\text{ or }7", 0),
    ("5 cm", "5 cm", 1),
    ("5 cm", "5", 1),
    ("5", "5 cm", 1),
    ("5\\text{ cm}", "5 centimeters", 1),
    ("5\\text{ cm}", "5\\mathrm{cm}", 1),
    ("5\\text{ cm}^2", "5 cm^2", 1),
    ("5\\text{ cm}^2", "5\\text{ square centimeters}", 1),
    ("5\\text{ cm}^2", "5\\text{ sq. cm}", 1),
    ("5\\text{ square units}", "5\\text{ cm}^2", 1),
    ("5 hours", "5", 1),
    ("5\\text{ hours}", "5 hours", 1),
    ("5 hours", "5\\text{ h}", 1),
    ("5 km/h", "5\\text{ km}/\\text{h}", 1),
    ("5\\text{ mph}", "5\\text{ miles per hour}", 1),
    ("5 km/h", "5", 1),
    ("5 dollars", "\\$5", 1),
    ("\\frac{5}{2}\\text{ hours}", "2.5 hours", 1),
    ("5\\text{ apples}", "5\\text{ apple}", 1),
    ("90^\\circ", "90\\text{ degrees}", 1),
    ("90^{\\circ}", "90", 1),
    ("50\\%", "50\\text{ percent}", 1),
    ("50\\%", "0.5", 1),
    ("5\\sqrt{2}\\text{ cm}", "5\\sqrt{2}", 1),
]


@pytest.mark.parametrize(("gold", "answer", "expected"), UNITS)
def test_two_different_units_are_wrong_and_a_missing_one_is_not(
    reward: MathReward, gold: str, answer: str, expected: int
) -> None:
    assert boxed(reward, gold, answer) == (expected, 0)
    assert boxed(reward, answer, gold) == (expected, 0)


NUMBERS = [
    ("5", "\\$5", True),
    ("5", "\\$5.00", True),
    ("5", "\\text{\\$}5", True),
    ("5", "$5", True),
    ("5", "$\\$5$", True),
    ("-5", "-\\$5", True),
    ("5", "\\$6", False),
    ("1005.5", "\\$1,005.50", True),
    ("1500", "1.5e3", True),
    ("1500", "1.5E+3", True),
    ("0.0015", "1.5e-3", True),
    ("1500", "1.5\\times10^3", True),
    ("1500", "1.5 \\cdot 10^{3}", True),
    ("1500", "1.5*10^3", True),
    ("0.0015", "1.5 \\times 10^{-3}", True),
    ("1500", "1.5e4", False),
    ("15", "1.5e3", False),
    ("1000", "1 000", True),
    ("1000", "1{,}000", True),
    ("1000", "1\\,000", True),
    ("1000", "1\\ 000", True),
    ("1000", "1,\\! 000", True),
    ("1000", "1~000", True),
    ("1000", "1\u202f000", True),
    ("1000000.5", "1 000 000.5", True),
    ("1", "1 000", False),
    ("100", "1 00", False),
    ("1000", "01 000", False),
    ("1", "1 000/3", False),
    ("7", "7\\text{8}", False),
    ("7", "\\mathbf{7}\\text{ 8}", False),
    ("3", "3 n", None),
    ("7", "\\$7 million", False),
    ("12000", "1 2 000", False),
    ("1/3", "0.\\overline{3}", True),
    ("1/6", "0.1\\overline{6}", True),
    ("1/6", "0.1\\bar{6}", True),
    ("9/7", "1.\\overline{285714}", True),
    ("1", "0.\\overline{9}", True),
    ("1/3", "0.\\overline{4}", False),
    ("1/3", "0.3", False),
    ("0.\\overline{3}", "0.333", False),
]


@pytest.mark.parametrize(("gold", "answer", "expected"), NUMBERS)
def test_ways_to_write_a_number_are_read_without_a_verifier(gold: str, answer: str, expected: bool | None) -> None:
    assert verdict(tidy(gold), tidy(answer)) is expected
    assert verdict(tidy(answer), tidy(gold)) is expected
