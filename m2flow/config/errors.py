"""One error for everything that is wrong with a recipe, so that it can be mended in one go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Path: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong at a dotted key. Example: `Problem(("learner", "epochs"), "must be at least 1, got 0")`."""

    path: Path
    message: str
    known: tuple[str, ...] | None = None  # keys that would have been right here, where the last of `path` is none

    def text(self, where: str = "") -> str:
        """`learner.epochs (recipe.yaml:7): must be at least 1, got 0`."""
        key = ".".join(self.path) or "recipe"
        return f"{key} ({where}): {self.message}" if where else f"{key}: {self.message}"


class ConfigError(ValueError):
    """A recipe that cannot run. `problems` holds every fault that was found, in the order of the recipe's keys."""

    def __init__(self, problems: Sequence[Problem], where: Callable[[Path], str] = lambda _: "") -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = [f"  {problem.text(where(problem.path))}" for problem in self.problems]
        super().__init__("\n".join([f"{count} configuration error{'s' if count > 1 else ''}:", *lines]))
