"""The page of cases names tests that exist, and says of each case how far they go."""

from __future__ import annotations

import ast
import re

from tests.architecture.source import REPO

PAGE = REPO / "docs" / "cases.md"
AUDITED = [f"A{n:02d}" for n in (*range(1, 17), 18, 19, 20, *range(24, 31))]


def table() -> dict[str, tuple[list[tuple[str, str]], str]]:
    """Case -> (tests as (file, name), state)."""
    found = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if re.match(r"\| A\d\d ", line):
            case, tests, state = (part.strip() for part in line.strip("|").split("|"))
            found[case[:3]] = (re.findall(r"`([\w/]+\.py)::(\w+)`", tests), state)
    return found


def functions(file: str) -> set[str]:
    path = REPO / "tests" / file
    if not path.exists():
        return set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_named_test_exists() -> None:
    there: dict[str, set[str]] = {}
    gone = []
    for case, (tests, _) in table().items():
        assert tests, f"{case} names no test"
        for file, name in tests:
            if name not in there.setdefault(file, functions(file)):
                gone.append(f"{case}: tests/{file}::{name}")
    assert not gone, "not there any more; mend docs/cases.md:\n" + "\n".join(gone)


def test_every_case_has_a_row_that_says_how_far_it_is_covered() -> None:
    rows = table()
    assert list(rows) == AUDITED
    assert not [case for case, (_, state) in rows.items() if not re.match(r"covered|partly: ", state)]
