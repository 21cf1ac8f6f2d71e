"""The contract of tasks, asked of every origin that is shipped."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from m2flow.registry import BUILTIN
from m2flow.tasks.arithmetic import ArithmeticConfig
from m2flow.tasks.countdown import CountdownConfig
from m2flow.tasks.gym import ReasoningGymConfig
from m2flow.tasks.rows import RowsConfig
from tests.contracts.task_suite import CHECKS, Case

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'


@cache
def file() -> str:
    """Rows of every kind, some of them twice."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    rows = [{"prompt": f"{i % 20} + 1 =", "answer": str(i % 20 + 1)} for i in range(30)]
    rows += [{"messages": [{"role": "user", "content": f"{i}?"}], "answer": str(i)} for i in range(10)]
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


CASES = [
    Case("arithmetic", lambda: ArithmeticConfig(operations=("add", "subtract"), negative=True)),
    Case("arithmetic_long", lambda: ArithmeticConfig(digits=9, terms=6, operations=("multiply", "add"))),
    Case("countdown", CountdownConfig),
    Case("reasoning_gym", lambda: ReasoningGymConfig(dataset="chain_sum", options={"max_digits": 1}, held_out=50)),
    Case("rows", lambda: RowsConfig(files=file(), held_out=0.3)),
    Case(
        "tools",
        lambda: ArithmeticConfig(tools=("calculator",), max_turns=3, system="Be short."),
        (CALL, CALL + "<tool_call>" + CALL, "2"),
        (1, 2, 0),
        ("tool_calls", "tool_errors", "tool_broken"),
    ),
]


def test_every_shipped_origin_is_here() -> None:
    shipped = {address.partition(":")[2] for address in BUILTIN["env"].values() if "m2flow.tasks." in address}
    assert {type(case.build()).__name__ for case in CASES} == shipped


@pytest.mark.parametrize(
    ("case", "check"), [pytest.param(c, k, id=f"{c.name}-{k.__name__[6:]}") for c in CASES for k in CHECKS]
)
def test_task_contract(case: Case, check: Callable[[Case], None]) -> None:
    check(case)
