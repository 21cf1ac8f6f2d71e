"""What the tasks of all origins share: prompts, templates, conversations, and the split of a finite set of problems."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from m2flow.protocols import Dialogue
from m2flow.tasks.dialogue import Message, SingleAnswer, ToolDialogue
from m2flow.tasks.order import Permutation
from m2flow.tools import table
from m2flow.types import Field, Spec, Task

Side = Literal["train", "held_out"]
MOST = 2**62  # tasks of one source, so that their numbers fit into int64
SECRET = ("answer", "completion", "entry")  # fields of a payload that say what is right
_NAME = re.compile(r"\{\{(\w*)\}\}|\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTasks:
    """Keys that all tasks of language models have. A subclass adds `tasks(split, seed)`."""

    offers: ClassVar[tuple[str, ...]] = ()  # fields that a template may ask for; empty: the data says which

    max_tokens: int = 64  # sampled tokens of one answer
    max_turns: int = 1  # answers of one conversation; with tools 2 or more
    system: str | None = None  # system prompt, put before every conversation that has none
    template: str | None = None  # the user's message, with {names} of the row's fields; null: the origin's own
    tools: tuple[str, ...] = ()  # what the model may call: calculator, "package.module:Class" or "./file.py:Class"

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: at least 1, got {self.max_tokens}")
        if self.max_turns < 1:
            raise ValueError(f"max_turns: at least 1, got {self.max_turns}")
        if self.tools and self.max_turns < 2:
            raise ValueError("max_turns: with tools 2 or more, because the model answers again when it sees a result")
        table.build(self.tools)
        if self.template is not None:
            _check_template(self.template, self.offers)

    def spec(self) -> Spec:
        """Token ids in and out, one at a time; only the policy knows how many different ones there are."""
        return Spec({"tokens": Field((), "int64")}, Field((), "int64"))

    def dialogue(self, task: Task) -> Dialogue:
        """A new conversation: one answer, or with `tools` up to `max_turns` of them."""
        messages = self.opening(task)
        if not self.tools:
            return SingleAnswer(messages)
        return ToolDialogue(messages, table.build(self.tools))

    def opening(self, task: Task) -> tuple[Message, ...]:
        """The conversation before the first answer: the payload's `messages`, or its `prompt` as the user's message,
        behind the `system` prompt where they have none."""
        payload = task.payload
        messages: tuple[Message, ...] = tuple(
            payload.get("messages") or ({"role": "user", "content": payload["prompt"]},)
        )
        if self.system is None or messages[0]["role"] == "system":
            return messages
        return ({"role": "system", "content": self.system}, *messages)


def _check_template(template: str, offers: tuple[str, ...]) -> None:
    """Raise ValueError where the template gives right answers away, asks for no field, or for more than a name."""
    known = ", ".join(f"{{{name}}}" for name in offers) or "the columns of the rows, as {column}"
    names = names_in(template)
    for name in names:
        if name in SECRET:
            raise ValueError(
                f"template: {{{name}}} would show the model what is right; write {{{{{name}}}}} where the "
                f"text itself shall have {{{name}}}"
            )
    rest = _NAME.sub("", template)
    odd = next((found for name in offers if (found := re.search(rf"\{{{name}\b[^{{}}\s]*\}}?", rest))), None)
    if odd is not None:
        raise ValueError(f"template: {odd[0]!r} is no {{name}} of a field, which is all that is filled in ({known})")
    if not names:
        raise ValueError(f"template: has no field, so every task would ask the same; there are: {known}")


def names_in(template: str) -> list[str]:
    """The fields that a template asks for."""
    return [found[2] for found in _NAME.finditer(template) if found[2] is not None]


def fill(template: str, row: Mapping[str, Any]) -> str:
    """The template with every {name} replaced by that field of the row; {{name}} becomes {name}, {{}} becomes {}, and
    every other brace stays as it is ("\\boxed{}" too). Names only: no attributes, indices or formats.

    Example: `fill("What is {question}?", {"question": "1 + 2"})` is "What is 1 + 2?".

    Raises:
        ValueError: "template: ..." for a name that the row has not.
    """

    def put(found: re.Match[str]) -> str:
        if found[1] is not None:
            return f"{{{found[1]}}}"
        if found[2] not in row:
            raise ValueError(f"template: no field {{{found[2]}}} (fields: {', '.join(map(str, row))})")
        value = row[found[2]]
        return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

    return _NAME.sub(put, template)


class Source:
    """Tasks made one by one by a function of their position. `size` None: without end."""

    def __init__(self, size: int | None, make: Callable[[int], Mapping[str, Any]]) -> None:
        self.size, self._make = size, make

    def task(self, index: int) -> Task:
        if index < 0 or (self.size is not None and index >= self.size):
            limit = "0 or more" if self.size is None else f"0 to {self.size - 1}"
            raise ValueError(f"index: there is no task {index}, only {limit}")
        return Task(index, self._make(index))


@dataclass(frozen=True, slots=True)
class Split:
    """A finite set of `total` problems, `held_out` of which are for evaluation only.

    Which ones they are, and their order, never changes: neither with the seed of a run nor with how it goes on, so that
    no model is ever evaluated on what another run trained it on. The order of the others depends on the seed.
    """

    total: int
    held_out: int

    def size(self, side: Side) -> int:
        """How many problems a side has."""
        return min(self.held_out if side == "held_out" else self.total - self.held_out, MOST)

    def at(self, side: Side, seed: int, index: int) -> int:
        """The number (0 .. total-1) of the problem at a position of a side."""
        place = index
        if side == "train":
            place = self.held_out + Permutation(self.total - self.held_out, "train", seed).at(index)
        return Permutation(self.total, "split").at(place)


def split(total: int, held_out: int | None, what: str) -> Split:
    """`held_out` problems for evaluation, or a fifth of all. Raises ValueError where a side would be empty.

    Example: `split(100, None, "additions")` holds out 20.
    """
    count = max(1, total // 5) if held_out is None else held_out
    if not 1 <= count < total:
        raise ValueError(f"held_out: from 1 to {total - 1}, since there are {total} {what}; got {held_out}")
    return Split(total, min(count, MOST))
