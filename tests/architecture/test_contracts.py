"""Every seam of protocols.py has a contract: a file in tests/contracts that claims it and is run on real parts.

The convention: a suite says `PROTOCOLS = ("Objective", ...)`. One without tests of its own (`*_suite.py`) is used by a
`test_*.py` beside it.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from tests.architecture.source import PACKAGE, REPO, base_names

FOLDER = REPO / "tests" / "contracts"
SEAMS = {"protocols", "types"}  # of m2flow: what a contract speaks of, not what it is asked of


@dataclass(frozen=True)
class Suite:
    """A file of tests/contracts that claims protocols."""

    name: str
    claims: tuple[str, ...]
    names: frozenset[str]  # of attributes that it reads or calls, anywhere
    imports: frozenset[str]  # modules


def protocols() -> dict[str, set[str]]:
    """Protocol -> its methods."""
    tree = ast.parse((PACKAGE / "protocols.py").read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and "Protocol" in base_names(node)]
    return {node.name: {item.name for item in node.body if isinstance(item, ast.FunctionDef)} for node in found}


def read(path: str) -> Suite:
    tree = ast.parse((FOLDER / path).read_text(encoding="utf-8"))
    claims: tuple[str, ...] = ()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PROTOCOLS":
            claims = tuple(ast.literal_eval(node.value))
    names, imports = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)  # a method that is reached by its name
        elif isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imports |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return Suite(path.removesuffix(".py"), claims, frozenset(names), frozenset(imports))


FILES = [read(path.name) for path in sorted(FOLDER.glob("*.py"))]
SUITES = [file for file in FILES if file.claims]


def users(suite: Suite) -> list[Suite]:
    """The tests that run a suite; a file of tests runs itself."""
    if suite.name.startswith("test_"):
        return [suite]
    return [f for f in FILES if f.name.startswith("test_") and f"tests.contracts.{suite.name}" in f.imports]


def helped(user: Suite) -> set[str]:
    """What is imported by the files beside it that it takes its parts from."""
    beside = [f for f in FILES if f"tests.contracts.{f.name}" in user.imports and not f.claims]
    return set().union(*(file.imports for file in beside))


def test_every_protocol_is_claimed_by_one_contract_and_nothing_else_is() -> None:
    claimed = [name for suite in SUITES for name in suite.claims]
    assert len(claimed) == len(set(claimed)), "a protocol has two contracts"
    assert set(claimed) == set(protocols()), "a protocol without a contract, or a contract of nothing"


def test_every_suite_claims_what_it_is_of() -> None:
    assert not [file.name for file in FILES if file.name.endswith("_suite") and not file.claims]


def test_every_contract_is_run_on_a_real_implementation() -> None:
    idle = []
    for suite in SUITES:
        known = set().union(*(user.imports | helped(user) for user in users(suite)))
        if not {name.split(".")[1] for name in known if name.startswith("m2flow.")} - SEAMS:
            idle.append(suite.name)
    assert not idle, "suites that no test runs on a part of m2flow: " + ", ".join(idle)


def test_every_contract_calls_every_method_of_its_protocols() -> None:
    """It says nothing of how well; it finds a method that was added to a protocol and to no contract."""
    silent = []
    for suite in SUITES:
        said = suite.names.union(*(user.names for user in users(suite)))
        silent += [f"{suite.name}: {name}.{m}" for name in suite.claims for m in sorted(protocols()[name] - said)]
    assert not silent, "\n".join(silent)
