"""Layers of a recipe: base files, the file, overrides; merged into one mapping that remembers where each key came from.

YAML is read by the 1.2 rules: `1e-4` is a number, `yes`/`on` and `12:30` are text. A key given twice is an error.
Merging: mappings merge key by key, everything else (lists too) is replaced. Where a section changes its `name`, the
whole section is replaced, because the keys of one class mean nothing to another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as File
from typing import Any

import yaml

from m2flow.config.errors import ConfigError, Path, Problem

_RESOLVERS = (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", "~nN\0"),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
)


class _Loader(yaml.SafeLoader):
    """SafeLoader with the YAML 1.2 core schema."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  PyYAML's own layout


class _Dumper(yaml.SafeDumper):
    """Quotes text that either YAML 1.1 or 1.2 would read as something else."""


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "")
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text.lstrip("+"))
    base = {"0o": 8, "0x": 16}.get(digits[:2], 10)
    return sign * int(digits[2:] if base != 10 else digits, base)


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Line breaks are written as escapes, so that a value stays on its line."""
    one_line = text.splitlines() in ([], [text])
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if one_line else '"')


for _tag, _pattern, _first in _RESOLVERS:
    _regex = re.compile(rf"^(?:{_pattern})$")
    _keys = ["" if letter == "\0" else letter for letter in _first]
    _Loader.add_implicit_resolver(_tag, _regex, _keys)
    _Dumper.add_implicit_resolver(_tag, _regex, _keys)
_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Dumper.add_representer(str, _text)


@dataclass(frozen=True, slots=True)
class Layer:
    """One source of settings: a label for messages, its values, and the line of every key where there is one."""

    label: str
    values: Mapping[str, Any]
    lines: Mapping[Path, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers in rising order of importance."""

    layers: tuple[Layer, ...]

    def where(self, path: Path) -> str:
        """`recipe.yaml:7` for the layer that set this key (or the nearest key above it), "" where none did."""
        for end in range(len(path), 0, -1):
            for layer in reversed(self.layers):
                if _has(layer.values, path[:end]):
                    line = layer.lines.get(path[:end])
                    return layer.label if line is None else f"{layer.label}:{line}"
        return next((layer.label for layer in self.layers if layer.label), "")

    def merged(self, named: frozenset[str]) -> dict[str, Any]:
        """One mapping. `named` sections may be given as a bare name: `env: count` is `env: {name: count}`."""
        result: dict[str, Any] = {}
        for layer in self.layers:
            values = {
                key: {"name": value} if key in named and isinstance(value, str) else value
                for key, value in layer.values.items()
            }
            result = {**result, **{key: _merge(result.get(key), value) for key, value in values.items()}}
        return result


def _has(values: Any, path: Path) -> bool:
    for key in path:
        if not isinstance(values, Mapping) or key not in values:
            return False
        values = values[key]
    return True


def _merge(under: Any, over: Any) -> Any:
    if not isinstance(under, Mapping) or not isinstance(over, Mapping):
        return over
    if "name" in over and over["name"] != under.get("name", over["name"]):
        return over
    return {**under, **{key: _merge(under.get(key), value) for key, value in over.items()}}


def parse_yaml(text: str, label: str) -> Layer:
    """Read one YAML mapping. Syntax errors and repeated keys name the line."""
    lines: dict[Path, int] = {}
    try:
        values = _construct(text, lambda node: _index(node, (), lines, label))
    except yaml.YAMLError as error:
        raise ConfigError([Problem((), f"{label} is not valid YAML: {error}")]) from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ConfigError([Problem((), f"{label} must hold `key: value` lines, it holds {type(values).__name__}")])
    return Layer(label, values, lines)


def _construct(text: str, look: Callable[[yaml.Node], None]) -> Any:
    """The value of a YAML text, None for an empty one. `look` sees the tree of nodes first."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_circles(node, ())
        look(node)
        return loader.construct_document(node)
    except RecursionError as error:
        raise yaml.YAMLError("nested too deeply") from error
    finally:
        loader.dispose()


def _refuse_circles(node: yaml.Node, above: tuple[yaml.Node, ...]) -> None:
    """Raise YAMLError for an anchor that is used within itself: what it stands for would have no end."""
    if any(node is other for other in above):
        line = node.start_mark.line + 1
        raise yaml.YAMLError(f"the anchor in line {line} is used inside of what it names, so it has no end")
    if isinstance(node, yaml.MappingNode):
        inside = [part for pair in node.value for part in pair]
    else:
        inside = node.value if isinstance(node, yaml.SequenceNode) else []
    for part in inside:
        _refuse_circles(part, (*above, node))


def _index(node: yaml.Node, path: Path, lines: dict[Path, int], label: str) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        here = (*path, str(key.value))
        line = key.start_mark.line + 1
        if here in lines and key.value != "<<":
            message = f"given twice, in lines {lines[here]} and {line}"
            raise ConfigError([Problem(here, message)], lambda _: label)
        lines[here] = line
        _index(value, here, lines, label)


def read_file(path: File) -> tuple[Layer, ...]:
    """A recipe file and, before it, the files named by `base:` (relative to it), most basic first."""
    return _read(path, ())


def _read(path: File, children: tuple[File, ...]) -> tuple[Layer, ...]:
    full = path.resolve()
    if full in children:
        chain = " -> ".join(child.name for child in (*children, full))
        raise ConfigError([Problem(("base",), f"recipes refer to each other in a circle: {chain}")])
    asked = f" (base of {children[-1].name})" if children else ""
    layer = parse_yaml(read_text(path, asked), str(path))
    base = layer.values.get("base")
    if base is None:
        return (layer,)
    if not isinstance(base, str):
        raise ConfigError([Problem(("base",), f"must be the path of one recipe, got {base!r}")], Stack((layer,)).where)
    rest = {key: value for key, value in layer.values.items() if key != "base"}
    return (*_read(path.parent / base, (*children, full)), Layer(layer.label, rest, layer.lines))


def read_text(path: File, asked: str = "") -> str:
    """The text of a file; ConfigError where it cannot be read or is no text. `asked`: who wants it, for the message."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([Problem((), f"cannot read {path}{asked}: {error.strerror or error}")]) from error
    except UnicodeDecodeError as error:
        message = f"{path}{asked} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        raise ConfigError([Problem((), message)]) from error


def parse_overrides(overrides: Sequence[str]) -> tuple[Layer, ...]:
    """`a.b=value` items, each a layer of its own; the value is YAML (numbers, true, null, [lists], {mappings})."""
    layers, problems = [], []
    for item in overrides:
        key, equals, text = item.partition("=")
        path = tuple(key.strip().split("."))
        if not equals or not all(path):
            problems.append(Problem((), f"override {item!r} must look like section.key=value"))
            continue
        if not text.strip():
            problems.append(Problem(path, "override has no value; write key=null for none, key='\"\"' for empty text"))
            continue
        try:
            value = _construct(text, lambda _: None)
        except yaml.YAMLError as error:
            problems.append(Problem(path, f"override value {text!r} is not valid YAML: {error}"))
            continue
        for part in reversed(path):
            value = {part: value}
        layers.append(Layer("override", value))
    if problems:
        raise ConfigError(problems)
    return tuple(layers)


def to_yaml(values: Mapping[str, Any]) -> str:
    """YAML text that `parse_yaml` reads back equal."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def inline_yaml(value: Any) -> str:
    """Any value as one line of YAML. Example: `{"a": (1, 2)}` is `{a: [1, 2]}`."""
    text: str = yaml.dump(
        [value], Dumper=_Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9
    )
    return text.strip()[1:-1]
