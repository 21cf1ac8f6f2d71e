"""Conversations: prompts, templates, tools (case A27 as far as one tool reaches)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2flow.tasks.arithmetic import ArithmeticConfig
from m2flow.tasks.base import TextTasks, fill
from m2flow.types import Task

TASK = Task(3, {"prompt": "1+1?", "answer": "2"})


def call(expression: Any, name: str = "calculator") -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'expression': expression}})}</tool_call>"


def test_a_single_answer_is_the_end() -> None:
    dialogue = TextTasks().dialogue(TASK)
    assert list(dialogue.open()) == [{"role": "user", "content": "1+1?"}]
    assert list(asyncio.run(dialogue.reply(call("1+1")))) == []
    assert dialogue.info() == {}


def test_the_system_prompt_stands_first_unless_the_task_has_one() -> None:
    config = TextTasks(system="Be short.")
    assert [m["role"] for m in config.dialogue(TASK).open()] == ["system", "user"]
    own = Task(0, {"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "q"}]})
    assert list(config.dialogue(own).open()) == own.payload["messages"]


def with_tools(**options: Any) -> TextTasks:
    return TextTasks(tools=("calculator",), max_turns=3, **options)


def test_a27_calls_are_answered_in_order_and_counted() -> None:
    dialogue = with_tools().dialogue(TASK)
    text = f"Let me see. {call('6*7')} {call('1/0')}<tool_call>{{</tool_call>{call('1', 'abacus')}"
    assert [(m["role"], m["name"], m["content"]) for m in asyncio.run(dialogue.reply(text))] == [
        ("tool", "calculator", "42"),
        ("tool", "calculator", "error: division by zero"),
        ("tool", "abacus", "error: there is no tool 'abacus', only calculator"),
    ]
    assert dialogue.info() == {"tool_calls": 3, "tool_errors": 2, "tool_broken": 1}
    assert asyncio.run(dialogue.reply("It is 42.")) == ()
    assert asyncio.run(dialogue.reply("<tool_call>{</tool_call>")) == ()
    assert dialogue.info() == {"tool_calls": 3, "tool_errors": 2, "tool_broken": 2}
    assert with_tools().dialogue(TASK).info() == {"tool_calls": 0, "tool_errors": 0, "tool_broken": 0}


def test_a27_code_in_an_argument_is_text_that_the_calculator_refuses() -> None:
    dialogue = with_tools().dialogue(TASK)
    [message] = asyncio.run(dialogue.reply(call('__import__("os").system("true")')))
    assert message["content"].startswith("error: unexpected '_'")
    assert dialogue.info()["tool_errors"] == 1


def test_the_tools_stand_in_the_system_message() -> None:
    system, user = with_tools().dialogue(TASK).open()
    assert (system["role"], user["content"]) == ("system", "1+1?")
    assert '"name": "calculator"' in system["content"]
    both, _ = with_tools(system="Be short.").dialogue(TASK).open()
    assert both["content"] == f"Be short.\n\n{system['content']}"


def test_tools_are_a_key_of_every_origin() -> None:
    config = ArithmeticConfig(tools=("calculator",), max_turns=2)
    task = config.tasks("train", 0).task(0)
    [message] = asyncio.run(config.dialogue(task).reply(call(task.payload["question"])))
    assert message["content"] == task.payload["answer"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{q} = ?", "1+1 = ?"),
        ("{q}{q}", "1+11+1"),
        ("{{q}} {q}", "{q} 1+1"),
        ("\\boxed{} \\boxed{{}}", "\\boxed{} \\boxed{}"),
        ("\\frac{1}{2} {q.real} {q!r} {q[0]} {q:>9}", "\\frac{1}{2} {q.real} {q!r} {q[0]} {q:>9}"),
        ("{evil}", "{q} {evil}"),
        ("{list}", "1, 2"),
        ("{n}", "7"),
    ],
)
def test_a_template_fills_in_names_and_nothing_else(template: str, expected: str) -> None:
    assert fill(template, {"q": "1+1", "evil": "{q} {evil}", "list": [1, 2], "n": 7}) == expected


@given(st.text(alphabet="{}ab\\ ", max_size=30))
def test_no_template_does_more_than_fill(template: str) -> None:
    try:
        text = fill(template, {"a": "X"})
    except ValueError as error:
        assert str(error).startswith("template: no field {")  # noqa: PT017
    else:
        assert len(text) <= len(template)
