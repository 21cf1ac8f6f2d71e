"""Where the answer stands in what a language model wrote. Pure text work: linear in its length, and nothing is run."""

from __future__ import annotations

import re
from typing import Literal

Extract = Literal["auto", "boxed", "last_number", "whole"]
LONGEST = 1000  # characters of an answer; more than that is prose, and would be work without bound for a verifier

_TOKEN = re.compile(r"\\[\\{}]|\\(?:boxed|fbox)(?![a-zA-Z])\s*|[{}]")
_BARE = re.compile(r"[^\s$\\{},;]+")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_PHRASE = re.compile(r"(?:answer(?:\s+is|:|\s*=)|####)[ \t:*]*", re.IGNORECASE)
# ASCII digits only: what int() would also read, digits of other scripts, is not how a data set writes its answers
_NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z_)\]}.,])[-+])?(?<![0-9A-Za-z_.])"
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)?(?:(?<=[0-9])\.[0-9]+|(?<![0-9])\.[0-9]+|(?<=[0-9]))"
    r"(?:/[0-9]+(?![0-9]|\.[0-9]))?"
)
_PROSE = re.compile(
    r"(?<![a-zA-Z\\])(?!(?:sin|cos|tan|log|exp|sqrt|arcsin|arccos|arctan)(?![a-zA-Z]))[a-zA-Z]{3,}"
    r"|\b(?:so|is|it|we|to|of|in|as|be|by|or|an|at|if|no|on|I|my)\b|</?[a-zA-Z]+>"
)
_WORDS = re.compile(r"\\(?:text|mbox|mathrm)\s*\{[^{}]*\}")
_MINUS = str.maketrans({"\u2212": "-", "\u2013": "-", "\u00a0": " "})


def extract(text: str, policy: Extract, unclosed: Literal["refuse", "take"] = "refuse") -> str | None:
    """The answer in `text`, without the box around it; None where there is none, "" never.

    Policies: `boxed`, the last box. `last_number`, the last number in the text. `whole`, all of it. `auto`, the first
    of these that the text has: a box, the last <answer> tag, what stands after the last "answer is", "answer:" or
    "####", all of it where that is one line without words, the last number.
    Of boxes the one that begins last counts, with those around it: one in another is one. Where its closing brace is
    missing (the text was cut) there is no answer, or, by `unclosed`, what stands after it up to the end of its line.
    What is thought is not looked at (`said`), by any policy.
    """
    answered = said(text)
    if answered is None:
        return None
    text = answered.translate(_MINUS)
    if policy == "last_number":
        return last_number(text)
    if policy == "whole":
        return _sized(text)
    found = last_box(text)
    if found is not None:
        inside, closed = found
        if not closed:
            inside = inside.partition("\n")[0] if unclosed == "take" else ""
        return _sized(_BOX.sub("", inside))
    return None if policy == "boxed" else _unboxed(text)


def said(text: str) -> str | None:
    """What follows the last </think>, all of a text without thoughts; None where the last <think> has no end, because
    the model never came to its answer.

    A first <think> may stand in the prompt: then "3</think> 4" says " 4", and a text cut before </think> looks like one
    without thoughts.
    """
    after = text.rpartition("</think>")[2]
    return None if "<think>" in after else after


def last_tag(text: str) -> str | None:
    """What stands in the last <answer> tag that is closed; None where there is none."""
    lower = text.lower()
    end = lower.rfind("</answer>") if len(lower) == len(text) else text.rfind("</answer>")
    begin = -1 if end < 0 else (lower if len(lower) == len(text) else text).rfind("<answer>", 0, end)
    return None if begin < 0 else text[begin + len("<answer>") : end]


def _unboxed(text: str) -> str | None:
    tagged = last_tag(text)
    if tagged is not None:
        return _sized(tagged)
    begin = max((match.end() for match in _PHRASE.finditer(text)), default=None)
    if begin is not None:
        phrase = text[begin:].partition("\n")[0].strip()
        return _sized(phrase) if bare(phrase) else last_number(phrase) or _sized(phrase)
    return _sized(text) if bare(text) else last_number(text)


def bare(text: str) -> bool:
    """Whether a text is one short line of mathematics: no words but LaTeX commands, and what these mark as text."""
    text = text.strip()
    return 0 < len(text) <= LONGEST and "\n" not in text and not _PROSE.search(_WORDS.sub(" ", text))


def _sized(text: str) -> str | None:
    text = text.strip()
    return text if 0 < len(text) <= LONGEST else None


def last_number(text: str) -> str | None:
    r"""The last integer, decimal or fraction a/b of a text. Example: "12-7 = 5, so $1,005.50." has "1,005.50".

    A sign belongs to it where no digit, letter or bracket stands before; commas only in groups of three digits.
    """
    last = None
    for last in _NUMBER.finditer(text):  # noqa: B007  the last one is what is wanted
        pass
    return None if last is None or len(last[0]) > LONGEST else last[0]


def last_box(text: str) -> tuple[str, bool] | None:
    r"""What is inside the box that begins last, and whether it is closed; None without a box.

    One pass over the braces, so that thousands of nested or unclosed boxes cost no more than their length.
    """
    boxes: list[list[int]] = []  # [first character inside, end or -1, box around it or -1]
    opened: list[int] = []  # for every open brace the box that it opens, or -1
    around: list[int] = []  # boxes that are open, innermost last
    pending = -1  # where a box has just begun, its brace to come
    for token in _TOKEN.finditer(text):
        kind = token[0]
        if kind == "{":
            mine = -1
            if pending == token.start():
                boxes.append([token.end(), -1, around[-1] if around else -1])
                mine = len(boxes) - 1
                around.append(mine)
            opened.append(mine)
        elif kind == "}" and opened:
            mine = opened.pop()
            if mine >= 0:
                boxes[mine][1] = token.start()
                around.pop()
        elif len(kind) > 2:
            pending = token.end()
            if text[pending : pending + 1] != "{":  # \boxed 7
                word = _BARE.match(text, pending)
                boxes.append([pending, word.end() if word else pending, around[-1] if around else -1])
    if not boxes:
        return None
    start, end, outer = boxes[-1]
    while end >= 0 and outer >= 0 and boxes[outer][1] >= 0:
        start, end, outer = boxes[outer]
    return (text[start:end], True) if end >= 0 else (text[start : start + 2 * LONGEST], False)
