"""Where a key that nobody knows was probably meant to go: the nearest name in its own section, or in any other."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from m2flow import registry
from m2flow.config.errors import Path, Problem
from m2flow.config.recipe import Recipe
from m2flow.config.typed import hints

ELSEWHERE = 0.75  # likeness from which a name of another section is worth a question; one of its own needs less
SHOWN = 3  # sections that may hold the same name


def hinted(problems: Sequence[Problem], data: Mapping[str, Any]) -> list[Problem]:
    """The same problems; those about unknown keys ask `did you mean ...?` where there is something alike."""
    if all(problem.known is None for problem in problems):
        return list(problems)
    places = _places(data)
    return [problem if problem.known is None else _ask(problem, problem.known, places) for problem in problems]


def _ask(problem: Problem, known: Sequence[str], places: Mapping[Path, str]) -> Problem:
    word = problem.path[-1]
    here = registry.nearest(word, known)
    near = 0.0 if here is None else _likeness(word, here)
    away = {path: score for path, name in places.items() if (score := _likeness(word, name)) >= ELSEWHERE}
    best = max(away.values(), default=0.0)
    if best > near:
        found = [".".join(path) for path, score in away.items() if score == best][:SHOWN]
    elif here is not None:
        found = [here]
    else:
        return problem
    hint = "; did you mean " + " or ".join(map(repr, found)) + "?"
    return replace(problem, message=problem.message.replace("unknown key", "unknown key" + hint, 1))


def _likeness(word: str, name: str) -> float:
    return difflib.SequenceMatcher(None, name.lower(), word.lower()).ratio()


def _places(data: Mapping[str, Any]) -> dict[Path, str]:
    """Every key of the recipe, of its sections (those that are off too) and of the parts that it names."""
    found: dict[Path, str] = {}
    for item in fields(Recipe):
        found[item.name,] = item.name
        for name in _keys(item.metadata, data.get(item.name)):
            found[item.name, name] = name
    return found


def _keys(metadata: Mapping[str, Any], value: Any) -> Iterable[str]:
    try:
        if "target" in metadata:
            return hints(registry.load(metadata["target"]))
        if "kind" in metadata:
            name = value.get("name") if isinstance(value, Mapping) else None
            return hints(registry.resolve(metadata["kind"], name or metadata["default"] or ""))
    except (ValueError, TypeError):  # the part is unknown or no config class, which is told elsewhere
        return ()
    return ()
