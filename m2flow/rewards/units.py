r"""Units behind a number: `5 cm`, `5\text{ cm}^2`, `5 km/h`, `90^\circ`, `50\%`.

Nothing is converted: 5 m and 500 cm are different. Of bare words only the units below are known; in `\text{}` any word
is one. What people write for the same unit is one spelling here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_SPELLINGS = """
mm millimeter millimetre|cm centimeter centimetre|m meter metre|km kilometer kilometre|in inch inches|ft foot feet
yd yard|mi mile|mg milligram|g gram gramme|kg kilogram|lb pound|oz ounce|t ton tonne|ml milliliter millilitre|l liter
litre|gal gallon|s sec second|min minute|h hr hour|day|week|month|year|dollar usd|cent|euro eur|degree deg|percent|mph
|kph kmh|rad radian|kw|w watt|v volt|n newton|j joule|pa pascal|hz hertz|unit|square|cubic
"""
_SAME = {
    word: words[0]
    for words in (group.split() for group in _SPELLINGS.replace("\n", " ").split("|"))
    for name in words
    for word in (name, name + "s")
} | {"ms": "ms", "ins": "in"}  # milliseconds are no meters
_ALIASES = {"mph": "mi/h", "kph": "km/h"}
_KNOWN = "|".join(sorted(_SAME, key=len, reverse=True))
_POWER = r"(?:\^\s*(?:[23]|\{\s*[23]\s*\}))?"
_BARE = rf"(?:(?<![a-zA-Z])(?:{_KNOWN})(?![a-zA-Z])\.?{_POWER})"
_TEXT = rf"(?:\\(?:text|textrm|mbox|mathrm)\s*\{{[^{{}}]*\}}{_POWER})"
# a single letter without a space before it, as in 5m, is a variable
_TAIL = re.compile(
    rf"(?<=[0-9)}}\]])(?:\s*(?P<mark>\^\s*\\circ|\^\s*\{{\s*\\circ\s*\}}|\\circ|\\?%)|\s*(?P<text>{_TEXT}(?:\s*/\s*{_TEXT})*)"
    rf"|(?:\s+|(?=[a-zA-Z]{{2}}))(?P<bare>{_BARE}(?:\s*/\s*{_BARE}|\s+(?:per\s+)?{_BARE})*))$",
    re.IGNORECASE,
)
_WORD = re.compile(r"\\[a-z]+|[a-z]+(?:\.[a-z]+)*|\^[23]|/|[0-9]+", re.IGNORECASE)
_NO_UNIT = re.compile(
    r"\b(?:and|or|not|to|base|hundred|thousand|million|billion|trillion|dozen)\b|(?<!\^)[0-9]", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Split:
    """A text and what it is without its unit. `sure`: that really is a unit, which may be missing in the other text."""

    text: str
    rest: str
    unit: str = ""  # in one spelling
    sure: bool = False


def split(text: str) -> Split:
    r"""Example: `5\text{ square centimeters}` has the rest "5" and the unit "cm^2", `x + 1` has none.

    Not sure are: percents (50 % is also 0.5), single letters that are no `\text{}` (variables too), and several words.
    """
    found = _TAIL.search(text)
    if found is None:
        return Split(text, text)
    rest = text[: found.start()].rstrip()
    if found["mark"]:
        percent = "%" in found["mark"]
        return Split(text, rest, "percent" if percent else "degree", sure=not percent)
    words = re.sub(r"\\(?:text|textrm|mbox|mathrm)\s*\{([^{}]*)\}", r" \1 ", found["text"] or found["bare"])
    words = words.replace("{", "").replace("}", "").strip()
    if _NO_UNIT.search(words):
        return Split(text, text)
    names = [name.casefold() for name in re.findall(r"[a-zA-Z]+(?:\.[a-zA-Z]+)*", words)]
    sure = len(names) <= 1 or all(name in _SAME or name in ("per", "sq", "cu") for name in names)
    variable = found["text"] is None and len(words) == 1
    unit = _spelling(words)
    return Split(text, rest, unit, sure=sure and not variable and unit != "percent")


def differ(one: str, other: str) -> bool:
    """Whether two units cannot both be right. A missing one, and "units" of whatever, agree with all."""
    return bool(one and other) and one != other and not {one, other} & {"unit", "unit^2", "unit^3"}


def _spelling(words: str) -> str:
    parts, power = [], ""
    for word in _WORD.findall(words):
        low = word.casefold()
        if low in ("square", "sq", "cubic", "cu"):
            power = "^2" if low[0] == "s" else "^3"
            continue
        if low == "per":
            parts.append("/")
            continue
        same = _SAME.get(low) or (low.removesuffix("s") if len(low) > 3 else low)
        parts.append(_ALIASES.get(same, same) + power)
        power = ""
    return "".join(part if part[0] in "/^" else f" {part}" for part in parts).replace("/ ", "/").strip()
