"""The process in which the scorers of reasoning-gym read a model's answer, started as `math_worker` is.

    question         {"dataset": name, "options": JSON, "seed": int, "index": int, "question": text, "answer": text,
                      "entry": what the dataset says, or null: made again from seed and index}
    answer           {"verdict": "scored", "score": 0 to 1}, or {"verdict": "error", "why": text}

Some of these scorers hand the answer to Python's `eval`, or to sympy's `parse_expr`, which calls it. While they run,
both are replaced by readers of literals and arithmetic, and text that is evaluated all the same is refused. Nothing
here may write a file, start a program or a connection.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from m2flow.rewards import math_worker

SIZE = 2**20  # of every dataset, which numbers its entries by seed + index
BITS = 4096  # of an integer that arithmetic may make
_NO_NUMBERS = (str, bytes, list, tuple, set, dict)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_REFUSED = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.chmod", "os.chown", "os.link", "os.symlink",
            "os.truncate", "os.kill", "os.utime", "shutil.", "ctypes.")  # fmt: skip
_BINARY: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
}  # fmt: skip
_UNARY: Mapping[type, Callable[[Any], Any]] = {
    ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Invert: operator.invert, ast.Not: operator.not_,
}  # fmt: skip
_FUNCTIONS = ("sqrt", "exp", "log", "ln", "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "Abs",
              "sinh", "cosh", "tanh")  # fmt: skip


def main() -> None:
    """Entry of the process."""
    math_worker.main(Scorer)


class Scorer:
    """See `math_worker.Judge`."""

    def __init__(self) -> None:
        import reasoning_gym
        import sympy
        from sympy.parsing import sympy_parser

        self.create = lru_cache(maxsize=64)(
            lambda name, options, seed: reasoning_gym.create_dataset(name, seed=seed, size=SIZE, **json.loads(options))
        )
        self.sympy, self.parser, self.parse_expr = sympy, sympy_parser, sympy_parser.parse_expr
        self.scoring = False
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):  # what stands there is a file, and from here on no file may grow
            os.dup2(nowhere, stream)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        sys.addaudithook(self._guard)

    def answer(
        self, *, dataset: str, options: str, seed: int, index: int, question: str, entry: Any, answer: str
    ) -> tuple[dict[str, Any], bool]:
        """The score as it is sent, and whether this process is of no more use."""
        try:
            made, entry = self._entry(dataset, options, seed, index, question, entry)
            with self._nothing_evaluated():
                score = _finite(made.score_answer(answer, entry))
        except Exception as error:  # noqa: BLE001  a library's: any, and it is counted
            why = f"{type(error).__name__}: {str(error)[:200]}"
            return {"verdict": "error", "why": why}, isinstance(error, MemoryError | RecursionError)
        return {"verdict": "scored", "score": score}, False

    def _entry(self, dataset: str, options: str, seed: int, index: int, question: str, entry: Any) -> tuple[Any, Any]:
        """(the dataset, the entry)"""
        if entry is not None:
            return self.create(dataset, options, 0), entry
        made = self.create(dataset, options, seed)
        entry = made[index]
        if str(entry["question"]).strip() != question:
            raise ValueError("the dataset does not make the same question again")
        return made, entry

    @contextmanager
    def _nothing_evaluated(self) -> Iterator[None]:
        """Everything that a scorer could call to evaluate text reads it instead."""
        changes: list[tuple[dict[str, Any], str, Any]] = []
        own = [m for name, m in list(sys.modules.items()) if m is not None and name.startswith("reasoning_gym")]
        for module in (*own, self.sympy, self.parser, sys.modules["sympy.parsing"]):
            names = vars(module)
            if names.get("parse_expr") is self.parse_expr:  # propositional_logic has a parser of its own by that name
                changes.append((names, "parse_expr", self._expression))
            if module in own:
                changes += [(names, "eval", plain), (names, "exec", refuse)]
        kept = [(names, name, name in names, names.get(name)) for names, name, _ in changes]
        for names, name, new in changes:
            names[name] = new
        self.scoring = True
        try:
            yield
        finally:
            self.scoring = False
            for names, name, there, old in kept:
                if there:
                    names[name] = old
                else:
                    del names[name]

    def _guard(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Audit hook: files are read at most, and a scorer evaluates no text."""
        if event == "open" and (set("wax+") & {*str(arguments[1] or "")} or int(arguments[2] or 0) & _WRITES):
            raise PermissionError("files cannot be written in a scorer")
        if event.startswith(_REFUSED):
            raise PermissionError(f"{event} is refused in a scorer")
        if event == "exec" and self.scoring and getattr(arguments[0], "co_filename", "") == "<string>":
            raise PermissionError("text is not evaluated in a scorer")

    def _expression(self, text: Any, *_: Any, **__: Any) -> Any:
        """In place of sympy's parse_expr."""
        sympy = self.sympy

        def name(found: str) -> Any:
            return {"pi": sympy.pi, "E": sympy.E, "e": sympy.E}.get(found, sympy.Symbol(found))

        def call(found: str, arguments: list[Any]) -> Any:
            if found not in _FUNCTIONS or len(arguments) != 1:
                raise ValueError(f"no function {found!r} is known here")
            return getattr(sympy, found)(*arguments)

        return _read(_tree(str(text)), number=sympy.sympify, name=name, call=call)


def plain(text: Any, *_: Any) -> Any:
    """In place of eval: literals, lists of them, and arithmetic of bounded size."""
    return _read(_tree(str(text)))


def refuse(*_: Any, **__: Any) -> Any:
    """In place of exec."""
    raise PermissionError("exec is refused in a scorer")


def _tree(text: str) -> ast.expr:
    if len(text) > 10_000:
        raise ValueError(f"{len(text)} characters are too many to read")
    return ast.parse(text.strip(), mode="eval").body


def _read(
    node: ast.expr,
    number: Callable[[Any], Any] = lambda value: value,
    name: Callable[[str], Any] | None = None,
    call: Callable[[str, list[Any]], Any] | None = None,
) -> Any:
    def read(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            numeric = isinstance(node.value, int | float) and not isinstance(node.value, bool)
            return number(node.value) if numeric else node.value
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            parts = [read(part) for part in node.elts]
            return parts if isinstance(node, ast.List) else tuple(parts) if isinstance(node, ast.Tuple) else set(parts)
        if isinstance(node, ast.Dict):
            return {read(k): read(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None}
        if isinstance(node, ast.UnaryOp):
            return _UNARY[type(node.op)](read(node.operand))
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            return _bounded(type(node.op), read(node.left), read(node.right))
        if isinstance(node, ast.Name) and name is not None:
            return name(node.id)
        if isinstance(node, ast.Call) and call is not None and isinstance(node.func, ast.Name) and not node.keywords:
            return call(node.func.id, [read(part) for part in node.args])
        raise ValueError(f"{type(node).__name__} is neither a literal nor arithmetic")

    return read(node)


def _bounded(kind: type, left: Any, right: Any) -> Any:
    """The result of an operator, or ValueError where it would be huge."""
    if isinstance(left, _NO_NUMBERS) or isinstance(right, _NO_NUMBERS):
        raise ValueError("arithmetic is for numbers")  # noqa: TRY004  of the text, not of an argument
    if kind in (ast.Pow, ast.LShift):
        size, by = _bits(left), abs(float(right)) if _is_number(right) else 0.0
        if (size * by if kind is ast.Pow else size + by) > BITS:
            raise ValueError("the number would be too large")
    return _BINARY[kind](left, right)


def _finite(score: Any) -> float:
    if not math.isfinite(score):
        raise ValueError(f"the score is {score}")
    return float(score)


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) or bool(getattr(x, "is_number", False))


def _bits(x: Any) -> float:
    if isinstance(x, int) or getattr(x, "is_Integer", False):
        return float(max(1, int(x).bit_length()))
    return 64.0
