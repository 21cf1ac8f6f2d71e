"""Small files, short functions, flat inheritance, narrow protocols."""

from __future__ import annotations

import ast
import re

from tests.architecture.source import REPO, base_names, classes, functions, modules

MAX_FILE, MAX_FUNCTION, MAX_DEPTH, MAX_METHODS = 400, 60, 2, 6


def test_no_file_is_longer_than_400_lines() -> None:
    long = [f"{m.where}: {n} lines" for m in modules() if (n := len(m.text.splitlines())) > MAX_FILE]
    assert not long, "\n".join(long)


def test_no_function_is_longer_than_60_lines() -> None:
    long = []
    for module in modules():
        for node in functions(module):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION:
                long.append(f"{module.where}:{node.lineno}: {node.name} has {lines} lines")
    assert not long, "\n".join(long)


def test_no_class_stands_on_more_than_one_other_of_ours() -> None:
    bases = {node.name: base_names(node) for module in modules() for node in classes(module)}

    def depth(name: str) -> int:
        return 1 + max((depth(base) for base in bases[name] if base in bases and base != name), default=0)

    deep = [f"{name}: {depth(name)}" for name in bases if depth(name) > MAX_DEPTH]
    assert not deep, "inheritance deeper than 2:\n" + "\n".join(deep)


def test_no_protocol_asks_for_more_than_six_methods() -> None:
    wide = []
    for module in modules():
        for node in classes(module):
            methods = [item.name for item in functions_of(node)]
            if "Protocol" in base_names(node) and len(methods) > MAX_METHODS:
                wide.append(f"{module.where}:{node.lineno}: {node.name} has {len(methods)}")
    assert not wide, "\n".join(wide)


def functions_of(node):
    return [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_nothing_is_left_for_later() -> None:
    pattern = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|NotImplemented" + r"Error)\b")
    left = []
    for folder, kind in (
        ("m2flow", "*.py"),
        ("recipes", "*"),
        ("plans", "*"),
        ("benchmarks", "*.py"),
        ("docs", "*.md"),
    ):
        for path in sorted((REPO / folder).rglob(kind)):
            if path.is_file() and path.suffix in (".py", ".yaml", ".md"):
                lines = path.read_text(encoding="utf-8").splitlines()
                left += [
                    f"{path.relative_to(REPO)}:{i}: {line.strip()}"
                    for i, line in enumerate(lines, 1)
                    if pattern.search(line)
                ]
    assert not left, "\n".join(left)
