"""Which tools there are. A recipe names them; "package.module:Class" is a tool of your own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from m2flow import addresses
from m2flow.tools.calls import Call, coerce

TABLE: Mapping[str, str] = {"calculator": "m2flow.tools.calculator:Calculator"}
LIMIT = 30.0  # seconds that a call may take
SHOWN = 64  # characters of a name that the model made up, where it is told so

_LOG = logging.getLogger("m2flow.tools")


class Tool(Protocol):
    """Something that a model can call.

    `spec` is shown to the model: "name", "description", "parameters" (a JSON schema of an object).
    """

    spec: Mapping[str, Any]

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """The result as text. A ValueError says what is wrong with the arguments, in words for the model."""


def build(names: Sequence[str]) -> dict[str, Tool]:
    """The tools by the name that the model calls them by.

    Raises:
        ValueError: "tools: ..." for one that does not exist, is no tool, or shares its name with another.
    """
    tools: dict[str, Tool] = {}
    for name in names:
        target = name if ":" in name else TABLE.get(name)
        if target is None:
            raise ValueError(f"tools: unknown {name!r} (known: {', '.join(TABLE)}; or give 'package.module:Class')")
        try:
            tool: Tool = addresses.find(target)()
            called = str(tool.spec["name"])
        except (ImportError, AttributeError, TypeError, KeyError) as error:
            raise ValueError(
                f"tools: {name!r} is no tool ({error}); m2flow.tools.table.Tool says what one is"
            ) from error
        if called in tools:
            raise ValueError(f"tools: {called!r} is there twice")
        tools[called] = tool
    return tools


async def run(tools: Mapping[str, Tool], call: Call) -> tuple[str, bool]:
    """What a call is answered with, and whether it went well. Never raises: the model is told what was wrong."""
    tool = tools.get(call.name)
    if tool is None:
        return f"error: there is no tool {call.name[:SHOWN]!r}, only {', '.join(tools)}", False
    schema = tool.spec.get("parameters", {})
    lacking = [name for name in schema.get("required", ()) if name not in call.arguments]
    if lacking:
        return f"error: {call.name} needs {', '.join(lacking)}", False
    try:
        return str(await asyncio.wait_for(tool.call(coerce(call.arguments, schema)), LIMIT)), True
    except TimeoutError:
        return f"error: {call.name} took more than {LIMIT:g} seconds", False
    except ValueError as error:
        return f"error: {error}", False
    except Exception:  # noqa: BLE001 (told to the model and logged: a tool that fails is no reason to end a run)
        _LOG.exception("tool %s failed; the model is told so", call.name)
        return f"error: {call.name} failed", False
