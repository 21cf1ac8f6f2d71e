"""Tool calls in text (case A27), and how a call is answered."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2flow.tasks.dialogue import ToolDialogue
from m2flow.tools import table
from m2flow.tools.calls import MOST, Call, Found, coerce, describe, parse


def said(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_a27_two_calls_in_one_answer_are_two_calls_in_order() -> None:
    text = f"First {said('a', {'x': 1})} and then {said('b', {'y': [2]})}."
    assert parse(text) == Found((Call("a", {"x": 1}), Call("b", {"y": [2]})), 0)


def test_a27_arguments_as_a_json_string_become_a_dict() -> None:
    assert parse(said("a", '{"x": {"y": "z"}}')).calls == (Call("a", {"x": {"y": "z"}}),)


EVIL = '__import__("os").system("touch m2flow_a27")'


def test_a27_code_in_an_array_parameter_stays_text_and_a_list_becomes_one() -> None:
    schema = {"properties": {name: {"type": "array"} for name in ("evil", "list", "wrong", "deep")}}
    given_ = {"evil": EVIL, "list": "[1, 2, 3]", "wrong": '{"a": 1}', "deep": "[" * 100_000, "free": "[1]"}
    assert coerce(given_, schema) == given_ | {"list": [1, 2, 3]}


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("integer", "3", 3),
        ("integer", "3.5", "3.5"),
        ("integer", "true", "true"),
        ("number", "3.5", 3.5),
        ("boolean", "true", True),
        ("boolean", "1", "1"),
        ("object", '{"a": 1}', {"a": 1}),
        ("string", "3", "3"),
        (["integer", "null"], "3", "3"),
        (None, "3", "3"),
    ],
)
def test_a27_text_is_read_only_as_what_the_schema_asks_for(kind: Any, text: str, expected: Any) -> None:
    got = coerce({"x": text}, {"properties": {"x": {"type": kind}}})
    assert got == {"x": expected}
    assert type(got["x"]) is type(expected)


@pytest.mark.parametrize(
    "inside",
    [
        "{",
        "",
        '{"name": "a", "arguments": {"x": 1}',
        '{"name": "a", "arguments": {"x": 1}} more',
        '{"name": "", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "a", "arguments": [1]}',
        '{"name": "a", "arguments": "no json"}',
        '{"name": "a", "arguments": "[1]"}',
        '{"name": "a", "arguments": {"x": NaN}}',
        "[" * 100_000,
        '{"name": "a", "arguments": {"x": ' + "1" * 5000 + "}}",
        EVIL,
    ],
)
def test_a27_a_broken_call_is_no_call_and_is_counted(inside: str) -> None:
    assert parse(f"text <tool_call>{inside}</tool_call> text") == Found((), 1)
    both = parse(f"<tool_call>{inside}</tool_call>{said('a', {})}")
    assert both == Found((Call("a", {}),), 1)


def test_a27_a_call_that_was_cut_off_is_broken_and_closing_tags_in_text_are_text() -> None:
    assert parse(said("a", {}).removesuffix("</tool_call>")) == Found((), 1)
    assert parse(said("a", {"x": "</tool_call>"})).calls == (Call("a", {"x": "</tool_call>"}),)
    assert parse("no call, </tool_call>") == Found((), 0)


def test_other_spellings_of_the_same_call() -> None:
    inner = {"name": "a", "arguments": '{"x": 1}'}
    for data in (inner, {"type": "function", "function": inner}, {"name": "a", "parameters": {"x": 1}}):
        assert parse(f"<tool_call>{json.dumps(data)}</tool_call>").calls == (Call("a", {"x": 1}),)
    assert parse('<tool_call>{"name": "a"}</tool_call>').calls == (Call("a", {}),)


@given(
    st.text(max_size=80),
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "a"}', "{", '"']), max_size=8),
)
def test_no_text_raises(text: str, parts: list[str]) -> None:
    for whole in (text + "".join(parts), "".join(parts) + text):
        found = parse(whole)
        assert len(found.calls) + found.broken == whole.count("<tool_call>") or '"' in whole


@pytest.mark.parametrize("part", ["<tool_call>", '<tool_call>{"name": ["', "<tool_call>  ", said("a", {})])
def test_a_long_answer_of_calls_is_read_at_once(part: str) -> None:
    began = time.process_time()
    found = parse(part * 20_000)
    assert time.process_time() - began < 0.5  # 4 s where each tag looks at all that follows
    assert len(found.calls) + found.broken == MOST
    assert found.more == 20_000 - MOST


def test_calls_behind_the_most_of_an_answer_are_told_so_and_not_run() -> None:
    talk = ToolDialogue([{"role": "user", "content": "?"}], table.build(["calculator"]))
    messages = asyncio.run(talk.reply(said("calculator", {"expression": "1+1"}) * (MOST + 3)))
    assert [m["content"] for m in messages[:MOST]] == ["2"] * MOST
    assert [m["content"] for m in messages[MOST:]] == [
        "error: only the first 16 calls of an answer are read; the 3 behind them are not"
    ]
    assert talk.info() == {"tool_calls": float(MOST), "tool_errors": 0.0, "tool_broken": 3.0}
    assert asyncio.run(talk.reply("<tool_call>" * 99)) == ()  # without a readable call it is over


def test_a_name_that_the_model_made_up_is_shown_in_part_and_quoted() -> None:
    talk = ToolDialogue([{"role": "user", "content": "?"}], table.build(["calculator"]))
    [message] = asyncio.run(talk.reply(said("x\n" * 5000, {})))
    assert message["name"] == "x\n" * 32
    assert message["content"] == f"error: there is no tool {message['name']!r}, only calculator"


class Echo:
    """A tool that gives back its arguments, or fails as it is told."""

    spec: Mapping[str, Any] = {
        "name": "echo",
        "description": "",
        "parameters": {"type": "object", "properties": {"x": {"type": "array"}}, "required": ["x"]},
    }

    async def call(self, arguments: Mapping[str, Any]) -> str:
        if arguments["x"] == "fail":
            raise RuntimeError("inside")
        if arguments["x"] == "wait":
            await asyncio.sleep(60)
        return repr(arguments["x"])


@pytest.mark.parametrize(
    ("call", "answer", "well"),
    [
        (Call("calculator", {"expression": "6*7"}), "42", True),
        (
            Call("calculator", {"expression": EVIL}),
            "error: unexpected '_'; only numbers, + - * / // % ** and brackets",
            False,
        ),
        (Call("calculator", {}), "error: calculator needs expression", False),
        (Call("abacus", {}), "error: there is no tool 'abacus', only calculator, echo", False),
        (Call("echo", {"x": "[1, 2, 3]"}), "[1, 2, 3]", True),
        (Call("echo", {"x": EVIL}), repr(EVIL), True),
        (Call("echo", {"x": "fail"}), "error: echo failed", False),
        (Call("echo", {"x": "wait"}), "error: echo took more than 0.05 seconds", False),
    ],
)
def test_a27_every_call_has_an_answer(call: Call, answer: str, well: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "LIMIT", 0.05)
    tools = table.build(["calculator", "tests.unit.tools.test_calls:Echo"])
    assert asyncio.run(table.run(tools, call)) == (answer, well)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["calculater"], "tools: unknown 'calculater' (known: calculator;"),
        (["calculator", "calculator"], "tools: 'calculator' is there twice"),
        (["nowhere:Tool"], "tools: 'nowhere:Tool' is no tool (No module named 'nowhere')"),
        (["m2flow.tools.calls:Call"], "tools: 'm2flow.tools.calls:Call' is no tool"),
        (["m2flow.tools.table:LIMIT"], "is no tool"),
    ],
)
def test_tools_that_are_none_are_refused(names: list[str], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        table.build(names)
    assert words in str(caught.value)


def test_the_description_names_every_tool_with_its_schema() -> None:
    spec = table.build(["calculator"])["calculator"].spec
    text = describe([spec])
    assert json.loads(text.partition("<tools>\n")[2].partition("\n</tools>")[0]) == spec
    # what the text shows as the form of a call is read as one
    assert parse('<tool_call>{"name": "...", "arguments": {}}</tool_call>').calls
