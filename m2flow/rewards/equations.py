"""What an equation says its value is, as expressions of sympy. Imported by a verifier's process only: sympy is slow."""

from __future__ import annotations

from typing import Any

from sympy import Abs, Eq, FiniteSet, Mul, Symbol, Tuple
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import And

_MOST = 8  # sides of a chain; each is compared with the right answer


def claims(answer: Any) -> list[Any]:
    """What must all be the right answer: of an equation every side that is no name, else the answer itself. Empty
    where it says nothing of one value: `x = y`, `x = 8 <= 7`, `8 = 1` in a list, more than eight sides.

    Examples: `x = 10/2 = 5` gives [5, 5], so that it is right for 5; `8 = 7` gives [8, 7], right for nothing.
    """
    parts = answer.args if isinstance(answer, And) else (answer,)
    equal = [part for part in parts if isinstance(part, Eq)]
    if not equal:  # a list of equations, or no equation at all
        return [answer] if _assigns(answer) else []
    if len(equal) < len(parts):
        return []
    sides = [side for part in equal for side in part.args]
    values = [side for side in dict.fromkeys(sides) if not is_name(side)]
    odd = len(values) > _MOST or any(_relates(value) for value in values)
    return [] if odd else values


def is_name(side: Any) -> bool:
    r"""`x`, `n_1`, `AB` (which is read as a product), `f(3)`, `|AB|`, `(x, y)`: what an answer may be called."""
    if isinstance(side, Mul | Tuple):
        return all(isinstance(part, Symbol) for part in side.args)
    if isinstance(side, Abs):
        return is_name(side.args[0])
    return isinstance(side, Symbol | AppliedUndef)


def _assigns(answer: Any) -> bool:
    """Whether every equation in a list gives a name its value."""
    if not isinstance(answer, FiniteSet | Tuple | list | tuple):
        return True
    parts = getattr(answer, "args", answer)
    return all(
        is_name(part.lhs) and not _relates(part.rhs) if isinstance(part, Eq) else not isinstance(part, And)
        for part in parts
    )


def _relates(expression: Any) -> bool:
    return bool(getattr(expression, "has", lambda _: False)(Relational))
