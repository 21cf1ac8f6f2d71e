"""Words shared by flow, plan and cluster: nearest names, lists of problems, changes, strict reading of YAML."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from m2flow import registry


class Invalid(ValueError):
    """A value with problems, all of them listed at once. `problems` holds them one by one."""

    def __init__(self, title: str, problems: Iterable[str]) -> None:
        self.title, self.problems = title, tuple(problems)
        super().__init__(self.title, self.problems)

    def __str__(self) -> str:
        return "\n".join([f"{self.title}: {len(self.problems)} problem(s)", *(f"  - {p}" for p in self.problems)])


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between two values. `old` None: added. `new` None: removed.

    Example: `str(Change("learner", "devices", ("cpu:0",), ("cpu:1",)))` is "learner: devices cpu:0 -> cpu:1".
    """

    subject: str
    what: str
    old: Any
    new: Any

    def __str__(self) -> str:
        if self.old is None:
            return f"{self.subject}: {self.what} added: {_show(self.new)}"
        if self.new is None:
            return f"{self.subject}: {self.what} removed (was {_show(self.old)})"
        return f"{self.subject}: {self.what} {_show(self.old)} -> {_show(self.new)}"


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(_show(v) for v in value) if value else "none"
    return str(value)


def changes(subject: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Entries of two mappings that differ, in the order of `old`, then what only `new` has."""
    names = [*old, *(name for name in new if name not in old)]
    return [Change(subject, n, old.get(n), new.get(n)) for n in names if old.get(n) != new.get(n)]


def nearest(name: str, options: Iterable[str]) -> str:
    """' (did you mean ...?)', or the names there are, to be put behind an unknown name."""
    known = list(options)
    close = registry.nearest(name, known)
    if close is not None:
        return f" (did you mean {close!r}?)"
    return f" (there is: {', '.join(known)})" if known else " (there is none)"


Reader = Callable[[Any], Any]


def text(value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r}")
    return value


def integer(value: Any) -> int:
    """A whole number, not a boolean."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected a whole number, got {value!r}")
    return value


def number(value: Any) -> float:
    """A number, not a boolean."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"expected a number, got {value!r}")
    return float(value)


def boolean(value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise TypeError(f"expected true or false, got {value!r}")
    return value


def names(value: Any) -> tuple[str, ...]:
    """One name or a list of names."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"expected a name or a list of names, got {value!r}")
    return tuple(text(v) for v in value)


def items(value: Any) -> list[Any]:
    """A list."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"expected a list, got {value!r}")
    return list(value)


def mapping(value: Any) -> dict[str, Any]:
    """A mapping with text keys."""
    if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        raise TypeError(f"expected a mapping with text keys, got {value!r}")
    return dict(value)


def read(data: Any, readers: Mapping[str, Reader], where: str, problems: list[str]) -> dict[str, Any]:
    """The entries of `data`, each through its reader. Unknown keys and wrong types are added to `problems`."""
    try:
        given = mapping(data)
    except TypeError as error:
        problems.append(f"{where}: {error}")
        return {}
    out = {}
    for key, value in given.items():
        if key not in readers:
            problems.append(f"{where}: unknown key {key!r}{nearest(key, readers)}")
            continue
        try:
            out[key] = readers[key](value)
        except (TypeError, ValueError) as error:
            problems.append(f"{where}.{key}: {error}")
    return out


def load_yaml(source: str) -> Any:
    """Plain YAML. A key given twice is an error, because the first would silently be lost."""
    import yaml

    try:
        root = yaml.compose(source, Loader=yaml.SafeLoader)
        stack = [root] if root is not None else []
        while stack:
            node = stack.pop()
            if isinstance(node, yaml.MappingNode):
                seen: set[str] = set()
                for key, value in node.value:
                    if key.value in seen:
                        raise ValueError(f"line {key.start_mark.line + 1}: key {key.value!r} is given twice")
                    seen.add(key.value)
                    stack.append(value)
            elif isinstance(node, yaml.SequenceNode):
                stack.extend(node.value)
        return yaml.safe_load(source)
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {error}") from error


def dump_yaml(data: Any) -> str:
    """YAML in the given key order, short lists on one line."""
    import yaml

    out: str = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True)
    return out
