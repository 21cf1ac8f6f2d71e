"""Recipes written out with a meaning beside every key: `m2flow init`, `m2flow config`, and the reference page.

The meanings are the comments beside the fields of the config classes, so there is no second text to keep in step.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
import tokenize
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from m2flow import registry
from m2flow.config import Recipe, dump, load, shipped
from m2flow.config.layers import inline_yaml
from m2flow.config.typed import describe, hints, plain
from m2flow.prepare import prepare
from m2flow.protocols import NeedsGroups

_DEFAULT = "point_reach/mlp/ppo"
_DEFAULT_TEXT = "arithmetic/causal_lm/grpo"  # of an env that has tasks for a language model
_HEAD = """\
# A recipe for m2flow. Change what you like, then:   m2flow check {path}   and   m2flow train {path}
# Every key is listed with its default; keys you delete keep that default. On the command line: section.key=value.
"""


def meanings(cls: type) -> Mapping[str, str]:
    """Field name -> one line: the comment beside or above a field, its docstring, or `name: ...` in the class's."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            found.update(_own_meanings(base))
    return found


def _own_meanings(cls: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):  # made at run time, or shipped without its source: keys without meanings
        return {}
    comments = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    code = {node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)}
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    doc = ast.get_docstring(body) or ""
    found = {}
    for node, after in zip(body.body, [*body.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        beside = [comments[line] for line in range(node.lineno, (node.end_lineno or 0) + 1) if line in comments]
        line, above = node.lineno - 1, list[str]()
        while line in comments and line not in code:
            above.insert(0, comments[line])
            line -= 1
        below = after.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
        listed = re.search(rf"^\s*[`*-]*\s*{node.target.id}`?\s*:\s*(.+)$", doc, re.MULTILINE)
        text = " ".join(beside or above) or (str(below.value) if below else "") or (listed[1] if listed else "")
        found[node.target.id] = " ".join(text.split())
    return found


def commented(recipe: Recipe) -> str:
    """The resolved recipe as YAML, each key with its meaning. Sections that are off are listed as comments."""
    return "\n".join(_block(recipe, dump(recipe), 0)) + "\n"


def _block(value: Any, data: Mapping[str, Any], depth: int, kind: str = "") -> list[str]:
    notes, pad, lines = meanings(type(value)), "  " * depth, []
    if "name" in data and "name" not in {field.name for field in dataclasses.fields(value)}:
        lines.append(f"{pad}name: {data['name']}{_others(kind)}")
    for field in dataclasses.fields(value):
        if not field.init:
            continue
        inner, note = getattr(value, field.name), notes.get(field.name, "")
        note = f"  # {note}" if note else ""
        if dataclasses.is_dataclass(inner):
            lines += ["", f"{pad}{field.name}:{note}"] if depth == 0 else [f"{pad}{field.name}:{note}"]
            inside = _block(inner, data[field.name], depth + 1, field.metadata.get("kind", ""))
            lines += inside or [f"{pad}  {{}}"]
            continue
        lines.append(f"{pad}{field.name}: {inline_yaml(data[field.name])}{note}")
        if depth == 0 and inner is None:
            lines[-1:] = ["", lines[-1], *_off(field)]
    return lines


def _others(kind: str) -> str:
    return f"  # known: {', '.join(registry.names(kind))}" if kind else ""


def _off(field: dataclasses.Field[Any]) -> list[str]:
    """The keys of an optional section that is null, as comments."""
    if "target" not in field.metadata:
        return []
    cls = registry.load(field.metadata["target"])
    notes = meanings(cls)
    lines = [f"# {field.name}:  # take away the # signs to switch it on"]
    for inner in dataclasses.fields(cls):
        default = inner.metadata.get("example", _default(inner))
        if inner.init and default is not dataclasses.MISSING:
            note = f"  # {notes[inner.name]}" if notes.get(inner.name) else ""
            lines.append(f"#   {inner.name}: {inline_yaml(plain(default))}{note}")
    return lines


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def init_text(start: str | Sequence[str] | None, path: str, *overrides: str) -> str:
    """A commented recipe for `env/policy/objective` (each may be left out from the end), ready to check and train.

    Raises:
        ValueError: several starts, or parts that do not go together.
    """
    given = [start] if isinstance(start, str) else [*(start or ())]
    if len(given) > 1:
        raise ValueError(
            f"--from: given {len(given)} times ({', '.join(given)}), and a recipe begins with one; use one"
        )
    begin = given[0] if given else _DEFAULT
    if begin in shipped("recipes"):
        raise ValueError(f"--from: {begin} is a whole recipe, not parts of one; use m2flow config {begin} > {path}")
    try:
        _parts(begin)
    except ValueError as error:
        raise ValueError(f"--from: {error}") from error
    try:
        recipe = load(_start(begin, overrides), *overrides)
        if not awaited(recipe):
            prepare(recipe)
    except ValueError as error:
        raise ValueError(f"--from {begin}: these parts do not go together, or not as they are: {error}") from error
    return _HEAD.format(path=path) + "\n" + commented(recipe)


def awaited(recipe: Recipe) -> tuple[str, ...]:
    """Files of rows that the recipe names and that are not there yet: its own data, which `check` will ask for."""
    if registry.name_of("env", type(recipe.env)) != "rows":
        return ()
    named = (recipe.env.files, recipe.env.held_out_files)
    paths = [path for given in named for path in ((given,) if isinstance(given, str) else given)]
    return tuple(path for path in paths if not Path(path).exists())


def _start(start: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The keys that these parts need besides their defaults."""
    parts = {kind: {"name": name, **_examples(kind, name)} for kind, name in _parts(start).items()}
    if any(text.split("=")[0].strip() == "policy.path" and text.split("=", 1)[-1] != "null" for text in overrides):
        for key in ("config", "tokenizer"):  # of a model with random weights; a folder brings both
            parts["policy"].pop(key, None)
    objective = registry.resolve("objective", parts["objective"]["name"])
    recipe: dict[str, Any] = {**parts, "evaluation": {}}
    if hasattr(registry.resolve("env", parts["env"]["name"]), "tasks"):
        return recipe | _text(parts, objective)
    if "propose" in objective.requires:
        recipe |= {"flow": "offpolicy", "replay": {}}
        if "dist" in _names("policy", parts):
            parts["policy"]["dist"] = "squashed"  # the one that can be drawn from with a gradient
    if isinstance(objective, NeedsGroups) and objective.needs_groups:
        if "autoreset" in _names("env", parts):
            parts["env"]["autoreset"] = "same"
        recipe["rollout"] = {
            "lanes": 32,
            "group": 8,
            "length": load({**recipe, "objective": "ppo"}).env.time_limit() or 128,
        }
    return recipe


def _text(parts: Mapping[str, dict[str, Any]], objective: Any) -> dict[str, Any]:
    """What tasks of a language model need: a reward, one conversation per decision, ratios per token."""
    judge = getattr(registry.resolve("env", parts["env"]["name"]), "judge", {"name": "math"})
    rollout: dict[str, Any] = {"lanes": 64, "length": 1}
    if getattr(objective, "imitates", False):
        return {"flow": "supervised", "reward": judge, "rollout": rollout, "learner": {"epochs": 1}}
    if "level" in _names("objective", parts):
        parts["objective"] |= {"level": "action"} | ({"gamma": 1.0} if getattr(objective, "critic", False) else {})
    if isinstance(objective, NeedsGroups):
        rollout["group"] = 8
    return {"reward": judge, "rollout": rollout, "learner": {"epochs": 1, "microbatch_tokens": 4096}}


def _names(kind: str, parts: Mapping[str, Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(registry.resolve(kind, parts[kind]["name"]))}


def _parts(start: str) -> dict[str, str]:
    given, default = start.split("/"), _DEFAULT.split("/")
    if len(given) > len(default) or not all(given):
        raise ValueError(
            f"expected ENV/POLICY/OBJECTIVE (the end may be left out), for instance {_DEFAULT}, got {start!r}"
        )
    if hasattr(registry.resolve("env", given[0]), "tasks"):
        default = _DEFAULT_TEXT.split("/")
    return dict(zip(("env", "policy", "objective"), given + default[len(given) :], strict=True))


def _examples(kind: str, name: str) -> dict[str, Any]:
    """Values for required fields, which have no default: `field(metadata={"example": ...})` beside the field."""
    cls = registry.resolve(kind, name)
    return {field.name: field.metadata["example"] for field in dataclasses.fields(cls) if "example" in field.metadata}


def reference() -> str:
    """Markdown: every key of a recipe and of every built-in part, with type, default and meaning."""
    lines = ["# Recipe keys", "", "Made by `make docs` from the config classes; do not edit by hand.", ""]
    lines += _table("Recipe", Recipe)
    for field in dataclasses.fields(Recipe):
        if "target" in field.metadata:
            lines += _table(field.name, registry.load(field.metadata["target"]))
        elif "kind" in field.metadata:
            for name in sorted(registry.BUILTIN[field.metadata["kind"]]):
                lines += _table(f"{field.name}: {name}", registry.resolve(field.metadata["kind"], name))
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _table(title: str, cls: type) -> list[str]:
    notes, known = meanings(cls), hints(cls)
    summary = (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")
    lines = [f"## {title}", "", summary, "", "| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        default = _default(field)
        if default is dataclasses.MISSING:
            shown = "required"
        elif dataclasses.is_dataclass(default):
            shown = "its defaults"
        else:
            shown = f"`{inline_yaml(plain(default))}`"
        takes = _cell(describe(known[field.name], field.metadata))
        if "kind" in field.metadata:  # whatever else is installed here is not part of the page
            takes = "one of " + ", ".join(sorted(registry.BUILTIN[field.metadata["kind"]]))
        lines.append(f"| `{field.name}` | {takes} | {shown} | {_cell(notes.get(field.name, ''))} |")
    return [*lines, ""]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
