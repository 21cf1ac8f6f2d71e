"""The package as its own source shows it: modules, imports (also those inside functions), classes, functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPO = Path(__file__).parents[2]
PACKAGE = REPO / "m2flow"


@dataclass(frozen=True)
class Module:
    """One Python file. `name` is dotted, `unit` the part of the package it belongs to (m2flow.flow.plan -> flow)."""

    path: Path
    name: str
    text: str
    tree: ast.Module

    @property
    def unit(self) -> str:
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else ""

    @property
    def where(self) -> str:
        return str(self.path.relative_to(REPO))


@cache
def modules() -> tuple[Module, ...]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(REPO).with_suffix("")
        name = ".".join(relative.parts).removesuffix(".__init__")
        text = path.read_text(encoding="utf-8")
        found.append(Module(path, name, text, ast.parse(text)))
    return tuple(found)


def imports(module: Module) -> Iterator[tuple[str, int]]:
    """(dotted target, line) of every import, wherever it stands. `from m2flow import seeds` is m2flow.seeds."""
    known = {other.name for other in modules()}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.where}:{node.lineno}: relative import"
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield (inside if inside in known else str(node.module)), node.lineno
        elif isinstance(node, ast.Call) and _loads(node.func) and node.args:
            target = node.args[0]
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                yield target.value, node.lineno


def _loads(function: ast.expr) -> bool:
    name = (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
    return name in ("import_module", "__import__")


def functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def classes(module: Module) -> Iterator[ast.ClassDef]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef):
            yield node


def base_names(node: ast.ClassDef) -> list[str]:
    """Last part of each base: `protocols.Trainer` is Trainer, `Generic[T]` is Generic."""
    found = []
    for base in node.bases:
        inner = base.value if isinstance(base, ast.Subscript) else base
        found.append(
            inner.attr if isinstance(inner, ast.Attribute) else inner.id if isinstance(inner, ast.Name) else ""
        )
    return found
