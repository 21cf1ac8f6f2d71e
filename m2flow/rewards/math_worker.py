"""The process that asks math-verify whether two answers are the same: `m2flow.rewards.math_pool` starts and ends it.

    arguments        sys.path, [seconds per question, MiB of address space]
    standard input   questions, standard output answers; each a length (4 bytes, big endian) and that much JSON
    question         {"gold": text, "answer": text}
    answer           {"ready": true} once, then {"verdict": "right" | "wrong"}, or {"verdict": "error", "why": text}

It ends when its input ends. The kernel's timer ends it in the middle of a question that takes longer than the pool
waits, in C code too, so that it outlives nobody who was killed. No text is evaluated: sympy's parser of Python
expressions, which does, is replaced by one that reads digits; and nothing here may start a program or a connection.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

_GRACE = 2.0  # seconds that the timer waits longer than the pool
_REFUSED = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.", "socket.", "pty.")
_EQUALS = re.compile(r"(?<![<>!=\\])=(?!=)")


def send(pipe: BinaryIO, message: Any) -> None:
    """Write one message."""
    data = json.dumps(message).encode()
    pipe.write(struct.pack(">I", len(data)) + data)
    pipe.flush()


def receive(pipe: BinaryIO) -> Any:
    """Read one message; None at the end."""
    head = pipe.read(4)
    if len(head) < 4:
        return None
    return json.loads(pipe.read(struct.unpack(">I", head)[0]))


def main(make: Callable[[], Any] | None = None) -> None:
    """Entry of the process; `make` gives what answers in place of `Judge`."""
    seconds, memory = json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not stand among the answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asks decides what it means
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    judge = (make or Judge)()
    logging.disable(logging.CRITICAL)  # math-verify warns of every answer that it cannot read
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = memory * 2**20 if hard == resource.RLIM_INFINITY else min(memory * 2**20, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    sys.addaudithook(_refuse)
    send(answers, {"ready": True})
    while (question := receive(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_REAL, seconds + _GRACE)
        answer, broken = judge.answer(**question)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(answers, answer)
        if broken:
            return  # out of memory or stack: the next question deserves a new process


def _refuse(event: str, _arguments: tuple[Any, ...]) -> None:
    if event.startswith(_REFUSED):
        raise PermissionError(f"{event} is refused in a verifier")


class Judge:
    """math-verify, without its own extraction and without anything that evaluates text."""

    def __init__(self) -> None:
        import latex2sympy2_extended
        import math_verify
        from math_verify import grader
        from sympy.core.relational import Relational
        from sympy.parsing import sympy_parser

        from m2flow.rewards.equations import claims

        self._convert, self._normalize = latex2sympy2_extended.latex2sympy, latex2sympy2_extended.normalize_latex
        self._normal = math_verify.LatexExtractionConfig().normalization_config
        self._complex, self._verify, self._relation = grader.should_treat_as_complex, math_verify.verify, Relational
        self._claims = claims
        self._swallowed: Exception | None = None
        grader.simplify = self._watched(grader.simplify)
        self.answer("(x+1)^2", "x^2+2x+1")  # imports what is imported at first use, before memory is limited
        sympy_parser.parse_expr = literal  # sympify looks it up at each call

    def answer(self, gold: str, answer: str) -> tuple[dict[str, str], bool]:
        """The verdict as it is sent, and whether this process is of no more use."""
        self._swallowed = None
        try:
            ours = self._parse(gold)
            theirs = None if ours is None else self._parse(answer)
            if ours is None or theirs is None:
                return {"verdict": "wrong"}, False  # what cannot be read is equal to nothing
            # math-verify takes the last side of any equation for what it says: 8 = 7 would be 7
            sides = [theirs] if _has(ours, self._relation) else self._claims(theirs)
            same = bool(sides) and all(self._same(ours, side) for side in sides)
            failed = None if same else self._swallowed
        except Exception as error:  # noqa: BLE001  a library's: any, and it is counted
            failed = error
        if failed is None:
            return {"verdict": "right" if same else "wrong"}, False
        why = f"{type(failed).__name__}: {str(failed)[:200]}"
        return {"verdict": "error", "why": why}, isinstance(failed, MemoryError | RecursionError)

    def _same(self, ours: Any, theirs: Any) -> bool:
        return bool(self._verify(ours, theirs, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True))

    def _watched(self, simplify: Any) -> Any:
        """math-verify takes two expressions for different where sympy fails to simplify; here that is remembered."""

        def watched(expression: Any) -> Any:
            try:
                return simplify(expression)
            except Exception as error:
                self._swallowed = error
                raise

        return watched

    def _parse(self, text: str) -> Any:
        """A sympy object, or None. Not `math_verify.parse`, which takes the last side where an equation makes no
        sense, and so calls two of them equal."""
        text = as_latex(text)
        try:
            normal = self._normalize(text, config=self._normal)
            real = not self._complex(normal)
            found = self._convert(normal, is_real=real, convert_degrees=False, normalization_config=None)
        except (MemoryError, RecursionError):
            raise
        except Exception:  # noqa: BLE001  a parser's: any; the text is not LaTeX that it knows
            return None
        if _EQUALS.search(normal) and "," not in normal and not _has(found, self._relation):
            return None
        return found


def literal(text: str, *_: Any, **__: Any) -> Any:
    """In place of sympy's parse_expr, which calls eval: an integer, decimal, fraction or name, and nothing else."""
    import sympy

    text = text.strip()
    if re.fullmatch(r"[-+]?[0-9]+", text):
        return sympy.Integer(int(text))
    if re.fullmatch(r"[-+]?[0-9]+/[0-9]+", text):
        return sympy.Rational(text)
    if re.fullmatch(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?", text):
        return sympy.Float(text)
    if re.fullmatch(r"[a-zA-Z][a-zA-Z0-9_]*", text):
        return sympy.Symbol(text)
    raise ValueError(f"neither a number nor a name: {text[:40]!r}")


def _has(found: Any, kind: type) -> bool:
    return isinstance(found, kind) or any(_has(part, kind) for part in getattr(found, "args", ()))


def as_latex(text: str) -> str:
    r"""Plain mathematics as LaTeX: `sqrt(2)/x^10` as `\sqrt{2}/x^{10}`. LaTeX stays what it is."""
    text = text.replace("**", "^").replace("\\%", "%").replace("%", "\\%")
    text = text.replace("<=", "\\le ").replace(">=", "\\ge ").replace("\u00b0", "^\\circ").replace("\u03c0", "\\pi ")
    text = re.sub(r"\^(-?[0-9]{2,}|-[0-9a-zA-Z]|\([^()]*\))", r"^{\1}", text)
    text = re.sub(r"(?<![a-zA-Z\\])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    return re.sub(r"(?<![a-zA-Z\\])(pi|sin|cos|tan|log|ln|exp|sqrt|infty)(?![a-zA-Z])", r"\\\1", text)
