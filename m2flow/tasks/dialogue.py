"""Conversations about one task: a single answer, or answers with calls of tools between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from m2flow.tools import table
from m2flow.tools.calls import MOST, describe, parse

Message = Mapping[str, Any]


class SingleAnswer:
    """The model answers once, and that is all."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = tuple(messages)

    def open(self) -> Sequence[Message]:
        return self._messages

    async def reply(self, text: str) -> Sequence[Message]:  # noqa: ARG002  whatever it says, it is over
        return ()

    def info(self) -> Mapping[str, float]:
        return {}


class ToolDialogue:
    """The model may call tools in an answer, and answers again when it has seen the results.

    The tools stand in the system message as plain text (`tools.calls.describe`), so that every chat template works.
    Calls of one answer are run in their order; each gets one message {"role": "tool", "name", "content"}. Those behind
    the first `tools.calls.MOST` are not run, and get one error together. An answer without a readable call ends the
    conversation.
    """

    def __init__(self, messages: Sequence[Message], tools: Mapping[str, table.Tool]) -> None:
        self._messages = with_system(messages, describe([tool.spec for tool in tools.values()]))
        self._tools = tools
        self._info = {"tool_calls": 0.0, "tool_errors": 0.0, "tool_broken": 0.0}

    def open(self) -> Sequence[Message]:
        return self._messages

    async def reply(self, text: str) -> Sequence[Message]:
        found = parse(text)
        self._info["tool_calls"] += len(found.calls)
        self._info["tool_broken"] += found.broken + found.more
        messages = []
        for call in found.calls:
            content, well = await table.run(self._tools, call)
            self._info["tool_errors"] += not well
            messages.append({"role": "tool", "name": call.name[: table.SHOWN], "content": content})
        if messages and found.more:
            content = f"error: only the first {MOST} calls of an answer are read; the {found.more} behind them are not"
            messages.append({"role": "tool", "name": messages[-1]["name"], "content": content})
        return tuple(messages)

    def info(self) -> Mapping[str, float]:
        """`tool_calls` read, `tool_errors` of them answered with an error, `tool_broken` begun and not read."""
        return dict(self._info)


def with_system(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    """The conversation with `text` behind what its system message says, or as its system message."""
    first, *rest = messages
    if first["role"] != "system":
        return ({"role": "system", "content": text}, *messages)
    return ({**first, "content": f"{first['content']}\n\n{text}"}, *rest)
