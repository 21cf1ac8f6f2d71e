"""Texts of special tokens in what users, data and tools say, broken up so that they stay text.

A tokenizer reads `<|im_end|>` as the control token wherever it stands. In a prompt or in a tool's result it is a forged
turn; only the chat template may write one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

BREAK = "\u200b"  # a zero-width space; put behind the first character of a special token's text
OWN = "assistant"  # the role of the model itself: what it says, or should say, is kept as it is

_LOG = logging.getLogger("m2flow.models.lm")


class Inert:
    """Breaks up special tokens of a tokenizer. `found` counts them; the first is logged.

    A text without any is given back as it is. A special token of one character cannot be broken, and is left alone.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = [str(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special]
        names = sorted({t for t in [*added, *tokenizer.all_special_tokens] if len(t) > 1}, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, names))) if names else None
        self._break = BREAK if _says(tokenizer, BREAK) else ""
        self.found = 0

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The messages with everything but roles and what the model says made inert."""
        return [m if m.get("role") == OWN else self._value(m) for m in messages]

    def text(self, text: str) -> str:
        """The text without any special token's."""
        if self._control is None or not self._control.search(text):
            return text
        if not self.found:
            _LOG.warning("special tokens in the text of prompts or tools are broken up, first in %.80r", text)
        count = 1
        while count:  # they may overlap
            text, count = self._control.subn(self._broken, text)
            self.found += count
        return text

    def _broken(self, match: re.Match[str]) -> str:
        first, rest = match[0][0], match[0][1:]
        return first + (self._break or rest[0]) + rest  # a tokenizer of few characters has its own alone

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {name: x if name == "role" else self._value(x) for name, x in value.items()}
        return [self._value(x) for x in value] if isinstance(value, list | tuple) else value


def _says(tokenizer: Any, text: str) -> bool:
    try:
        tokenizer(text, add_special_tokens=False)
    except Exception:  # noqa: BLE001  the tokenizers package raises a plain Exception for an unknown token
        return False
    return True
