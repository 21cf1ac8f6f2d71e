r"""Answers compared without a computer algebra system: exact numbers, and texts that are the same but for their looks.

What is read as a number: integers (leading zeros, commas in groups of three), decimals, fractions (`2/3`,
`\frac{2}{3}`, `\frac12`), mixed numbers (`1 1/4`, `2\frac{1}{2}`), powers of ten (`1.5e3`, `1.5\times 10^{3}`),
groups of three digits (`1 000`), repeating decimals (`0.\overline{3}`), each with a sign; in $, behind `x =`, and
before a unit. Nothing is rounded and nothing is evaluated.
"""

from __future__ import annotations

import re
from fractions import Fraction

from m2flow.rewards import units

# an amount of dollars; a $ without a backslash begins mathematics
_DOLLARS = re.compile(r"\$?([-+]?\s*)(?:\\text\{\s*\\\$\s*\}|\\\$)\s*([0-9.][0-9.,{}\\! ]*?)\.?\s*\$?")
_LOOKS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\\(?:displaystyle|left|right|limits|mathbf|bf|mathrm\{~\})(?![a-zA-Z])"), ""),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"(?:\{,\}|,\s*\\!\s*)(?=[0-9]{3})"), ","),
    (re.compile(r"(?<!\\)\\[,!()\[\]$]|\$"), ""),
    (re.compile(r"(?<!\\)\\(?:[;: ]|(?:quad|qquad)(?![a-zA-Z]))|[~\s]+"), " "),
)
_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_GROUPED = r"[1-9][0-9]{0,2}(?: [0-9]{3})+(?![0-9])"
_DECIMAL = rf"(?:(?:{_GROUPED}|{_INTEGER})(?:\.[0-9]*)?|\.[0-9]+)"
_ARGUMENT = rf"(?:\{{\s*([-+]?\s*{_DECIMAL})\s*\}}|([0-9]))"
_FRAC = rf"\\frac\s*{_ARGUMENT}\s*{_ARGUMENT}"
_RATIO = rf"({_DECIMAL})\s*/\s*({_DECIMAL})"
_EXPONENT = r"(?P<power>[-+]?[0-9]{1,3}|\{\s*[-+]?[0-9]{1,3}\s*\})"
_POWER = rf"(?:(?:[eE]|\s*(?:\\times|\\cdot|\*)\s*10\s*\^)\s*{_EXPONENT})?"
_AGAIN = r"\\(?:overline|bar)\s*(?:\{\s*(?P<again>[0-9]+)\s*\}|(?P<digit>[0-9]))"
_REPEATING = rf"(?P<before>[0-9]*)\.(?P<once>[0-9]*){_AGAIN}"
_WHOLE = rf"(?P<whole>{_INTEGER}\s*(?=\\frac)|{_INTEGER}\s+(?=[1-9]))?"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:(?P<decimal>{_DECIMAL}){_POWER}|{_REPEATING}|{_WHOLE}(?:(?P<frac>{_FRAC})|(?P<ratio>{_RATIO})))"
)
_NAMED = re.compile(r"[a-zA-Z](?:_\{?[a-zA-Z0-9]+\}?|\([a-zA-Z]\))?\s*=(?!=)\s*")
_WORDS = re.compile(r"\\(?:text|mbox|mathrm|textbf|operatorname)\s*\{([^{}]*)\}")
_SCALES = re.compile(r"\b(?:hundred|thousand|million|billion|trillion|dozen|percent)", re.IGNORECASE)
_COMMAND = re.compile(r"\\(?:begin|end)\s*\{[a-z]*\}|\\[a-zA-Z]+")
_LETTERS = re.compile(
    r"(?<![a-zA-Z])(?!(?:sin|cos|tan|log|exp|sqrt|arcsin|arccos|arctan|gcd|lcm|max|min)\b)[a-zA-Z]{3,}"
)
_ROW = re.compile(r"[0-9.]\s+[0-9.]")


def tidy(text: str) -> str:
    """The same answer without what does not matter: dollars, sizes of brackets, thin spaces, a full stop at the end."""
    dollars = _DOLLARS.fullmatch(text.strip())
    if dollars:
        text = rf"{dollars[1]}{dollars[2]}\text{{ dollars}}"
    for pattern, instead in _LOOKS:
        text = pattern.sub(instead, text)
    text = text.strip()
    return text[:-1].rstrip() if text.endswith(".") else text


def rhs(text: str) -> str:
    """`x = 5` as `5`, where the left side is one name and there is one equals sign; other texts as they are."""
    named = _NAMED.match(text)
    return text[named.end() :] if named and "=" not in text[named.end() :] else text


def number(text: str) -> Fraction | None:
    """The number that a tidy text is, exactly; None where it is none, or not one of the simple forms."""
    text = rhs(text)
    while text[:1] == "{" and text[-1:] == "}" and "{" not in text[1:]:
        text = text[1:-1].strip()
    found = _NUMBER.fullmatch(text)
    if found is None:
        return None
    sign = -1 if found["sign"] == "-" else 1
    if found["decimal"]:
        return sign * _plain(found["decimal"]) * _power_of_ten((found["power"] or "0").strip("{ }"))
    if found["once"] is not None:
        once, again = found["once"], found["again"] or found["digit"]
        start = int(found["before"] + once or "0")
        rest = Fraction(int(again), 10 ** len(again) - 1)
        return sign * (start + rest) / Fraction(10 ** len(once))
    first = _NUMBER.groupindex["whole"]
    inside = [p for p in found.groups()[first:] if p is not None and p not in (found["frac"], found["ratio"])]
    top, bottom = (_plain(part) for part in inside[-2:])
    if bottom == 0 or (found["whole"] and (top < 0 or bottom < 0)):
        return None
    return sign * ((_plain(found["whole"]) if found["whole"] else 0) + top / bottom)


def _power_of_ten(digits: str) -> Fraction:
    power = int(digits)
    return Fraction(10**power) if power >= 0 else Fraction(1, 10**-power)


def _plain(digits: str) -> Fraction:
    digits = re.sub(r"[,\s]", "", digits).rstrip(".") or "0"
    return Fraction(digits)


def same_text(gold: str, answer: str) -> bool:
    """Whether two tidy texts are the same but for spaces between symbols; words also but for `\\text{}` and case."""
    if not gold or not answer:
        return False
    if _squeezed(gold) == _squeezed(answer):
        return True
    ours, theirs = _words(gold), _words(answer)
    if re.fullmatch(r"[a-zA-Z][a-zA-Z .'-]{2,}", ours):
        return ours.casefold() == theirs.casefold()
    return bool(re.fullmatch(r"[a-zA-Z]+", ours)) and ours == theirs


def prose(text: str) -> bool:
    r"""Whether a tidy text is nothing to compute with: words, a number of millions (a parser takes it for the number),
    digits in `\text{}` (which it skips), or numbers in a row, which LaTeX reads as a product."""
    rest = _COMMAND.sub(" ", _WORDS.sub(" ", text))
    if any(re.search("[0-9]", words) for words in _WORDS.findall(text)):
        return True
    return not rest.strip(" {}()") or bool(_LETTERS.search(rest) or _ROW.search(text) or _SCALES.search(text))


def _words(text: str) -> str:
    text = re.sub(r"\s+", " ", _WORDS.sub(r"\1", text)).strip(" .")
    return re.sub(r"^\((\w+)\)$", r"\1", text)


def _squeezed(text: str) -> str:
    # a space between two digits or letters separates; all others are looks
    return re.sub(r"(?<![0-9a-zA-Z]) | (?![0-9a-zA-Z])", "", text)


def verdict(gold: str, answer: str, tolerance: float = 0.0) -> bool | None:
    """Whether a tidy answer is right, where that can be told for certain here; None where it cannot.

    Two numbers are the same where they are exactly, or differ by at most `tolerance` times the right one.
    """
    if not gold or not answer:
        return False
    found, given = units.split(gold), units.split(answer)
    if units.differ(found.unit, given.unit):
        return False
    same = found.unit == given.unit  # else it is missing on one side, or says "units"
    gold, answer = (part.rest if same or part.sure else part.text for part in (found, given))
    ours, theirs = number(gold), number(answer)
    if ours is not None and theirs is not None:
        return ours == theirs or abs(ours - theirs) <= Fraction(tolerance) * abs(ours)
    if same_text(gold, answer):
        return True
    return False if prose(gold) or prose(answer) else None
