"""Reads tool calls out of what a model wrote, in the form that Qwen and Hermes models are trained on:

    <tool_call>
    {"name": "calculator", "arguments": {"expression": "2 + 2"}}
    </tool_call>

A call that cannot be read is counted and is no call; the text stays what it is, and nothing in it is evaluated. The
first `MOST` tags of an answer are read, so that the time grows with the length of the text and no faster.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MOST = 16  # calls of one answer, readable or not
_TYPES: Mapping[str, tuple[type, ...]] = {
    "array": (list,),
    "object": (dict,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


@dataclass(frozen=True, slots=True)
class Call:
    """One call. Example: `Call("calculator", {"expression": "2 + 2"})`."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """The calls of an answer in their order, how many more were begun and cannot be read, and how many tags stand
    behind the first `MOST`, which are not looked at."""

    calls: tuple[Call, ...] = ()
    broken: int = 0
    more: int = 0


def parse(text: str) -> Found:
    """The tool calls of an answer. Never raises."""
    calls: list[Call] = []
    broken, at = 0, text.find(OPEN)
    while at >= 0 and len(calls) + broken < MOST:
        call, end = _one(text, at + len(OPEN))
        if call is None:
            broken += 1
        else:
            calls.append(call)
        at = text.find(OPEN, end)
    return Found(tuple(calls), broken, text.count(OPEN, at) if at >= 0 else 0)


def coerce(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with text turned into what the schema of a tool's parameters asks for, where it is JSON of that
    type; other text stays text.

    Example: for an array parameter "[1, 2, 3]" becomes the list, and '__import__("os")' stays the text it is.
    """
    properties = schema.get("properties", {})
    return {name: _as(value, properties.get(name, {}).get("type")) for name, value in arguments.items()}


def describe(specs: Sequence[Mapping[str, Any]]) -> str:
    """What a system prompt says of the tools, each with its JSON schema. Works with every chat template."""
    listed = "\n".join(json.dumps(spec, ensure_ascii=False) for spec in specs)
    return (
        "You can call these tools, each described by its name and a JSON schema of its parameters:\n"
        f"<tools>\n{listed}\n</tools>\n"
        f'To call one, write {OPEN}{{"name": "...", "arguments": {{...}}}}{CLOSE} and end your answer. '
        "Its result is then shown to you."
    )


def _one(text: str, start: int) -> tuple[Call | None, int]:
    """The call whose opening tag ends at `start`, and where to look for the next one."""
    begin = start + len(text[start:]) - len(text[start:].lstrip())
    try:
        data, end = _DECODER.raw_decode(text, begin)
        after = text[end:].lstrip()
        if not after.startswith(CLOSE):
            return None, start
        return _call(data), len(text) - len(after) + len(CLOSE)
    except (ValueError, RecursionError):
        return None, start


def _call(data: Any) -> Call | None:
    if isinstance(data, dict) and isinstance(data.get("function"), dict):  # as the chat APIs of some services say it
        data = data["function"]
    if not isinstance(data, dict) or not isinstance(data.get("name"), str) or not data["name"]:
        return None
    arguments = data.get("arguments", data.get("parameters"))
    if isinstance(arguments, str):
        arguments = _DECODER.decode(arguments)
    if arguments is None:
        arguments = {}
    return Call(data["name"], arguments) if isinstance(arguments, dict) else None


def _as(value: Any, kind: Any) -> Any:
    wanted = _TYPES.get(kind) if isinstance(kind, str) else None
    if not isinstance(value, str) or wanted is None:
        return value
    try:
        read = _DECODER.decode(value)
    except (ValueError, RecursionError):
        return value
    fits = isinstance(read, wanted) and (kind == "boolean" or not isinstance(read, bool))
    return read if fits else value


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_constant)
