"""What a row of a data set must be like."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from m2flow.tasks.base import names_in
from m2flow.tasks.tables import Row, json_line

ROLES = ("system", "user", "assistant", "tool")
_SHOWN = 300  # characters of an example row
_CHAT = 'for instance [{"role": "user", "content": "2 + 2 ="}]'


class BadRow(ValueError):
    """A field of a row is not as it should be."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"field {name!r} {what}")
        self.name, self.what = name, what


def text_of(name: str, payload: Mapping[str, Any]) -> str:
    """The text of a field. Raises BadRow where there is none, or only spaces."""
    value = payload.get(name)
    if value is None:
        ways = "env.fields says in which column it is, env.template makes it from others"
        there = ", ".join(str(column) for column, held in payload.items() if held is not None)
        raise BadRow(name, f"is missing ({ways}; there are: {there or 'none'})")
    if not isinstance(value, str):
        raise BadRow(name, f"is a {type(value).__name__}, not text")
    if not value.strip():
        raise BadRow(name, "is empty")
    return value


def filled(template: str, payload: Mapping[str, Any]) -> None:
    """Raise BadRow where a field that the template asks for is missing or no text, or where all of them are empty."""
    names = names_in(template)
    for name in names:
        value = payload.get(name)
        if value is None:
            raise BadRow(name, f"is missing, and env.template asks for it (columns: {', '.join(map(str, payload))})")
        _finite(name, value)
        if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            raise BadRow(name, "is a list of messages, and env.template can only take text")
    if names and all(isinstance(payload[name], str) and not payload[name].strip() for name in names):
        raise BadRow(names[0], "is empty")


def number_as_text(name: str, value: Any) -> Any:
    """Numbers as text, since rewards compare texts; None for empty text; everything else as it is.

    Raises:
        BadRow: NaN or infinity, which JSON files of Python hold and which is also how tables write "none".
    """
    _finite(name, value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return None if isinstance(value, str) and not value.strip() else value


def _finite(name: str, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRow(name, f"is {value}, which is no number")


def conversation(value: Any) -> tuple[list[dict[str, Any]], str | None]:
    """(the messages up to where the model answers, the answer that follows them or None).

    Raises:
        BadRow: no list of messages with a role and a content, or nothing in it that asks for an answer.
    """
    if not isinstance(value, list) or not value:
        raise BadRow("messages", f"is no list of messages, {_CHAT}")
    messages = [_message(place, message) for place, message in enumerate(value)]
    answer = str(messages.pop()["content"]) if messages[-1]["role"] == "assistant" else None
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise BadRow("messages", f"has no message of a user or a tool to answer, {_CHAT}")
    return messages, answer


def _message(place: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadRow(f"messages.{place}", f"is a {type(message).__name__}, not a message, {_CHAT}")
    if message.get("role") not in ROLES:
        raise BadRow(f"messages.{place}.role", f"is {message.get('role')!r}, not one of {', '.join(ROLES)}")
    if not isinstance(message.get("content"), str):
        raise BadRow(f"messages.{place}.content", "is no text")
    if message["role"] == "user" and not message["content"].strip():
        raise BadRow(f"messages.{place}.content", "is empty")
    return {name: item for name, item in message.items() if item is not None}  # Parquet fills gaps with null


def example(row: Row) -> str:
    """A row as it would stand in a file of JSON lines, long texts shortened."""
    try:
        line = json_line({name: _short(value) for name, value in row.items()})
    except (TypeError, ValueError):  # a value that JSON does not know: dates, bytes
        line = str(dict(row))
    return line if len(line) <= _SHOWN else line[:_SHOWN] + "..."


def _short(value: Any) -> Any:
    return value[:60] + "..." if isinstance(value, str) and len(value) > 60 else value
