"""Finding, loading and storing recipes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path as File
from types import SimpleNamespace
from typing import Any

import m2flow
from m2flow import registry
from m2flow.config.errors import ConfigError, Problem
from m2flow.config.hints import hinted
from m2flow.config.layers import Layer, Stack, parse_overrides, parse_yaml, read_file, read_text, to_yaml
from m2flow.config.recipe import PLANS, Recipe
from m2flow.config.rules import broken, unwritten
from m2flow.config.typed import INVALID, convert_fields, freeze, make, plain

_NAMED = frozenset(field.name for field in fields(Recipe) if "kind" in field.metadata)


def load(source: str | File | Mapping[str, Any] | Recipe, *overrides: str) -> Recipe:
    """A checked recipe from a file (or shipped name, mapping, recipe) and dotted overrides `section.key=value`.

    Every fault is reported at once by `ConfigError`: unknown keys with the nearest name, wrong types and ranges, and
    what does not hold between sections.
    """
    base, folder = _layers(source)
    stack = Stack((*base, *parse_overrides(overrides)))
    data = stack.merged(_NAMED)
    problems: list[Problem] = []
    _inline_plan(data, folder, problems)
    values, failed = convert_fields(Recipe, data, (), problems)
    for item in fields(Recipe):
        if item.name in failed and item.default is MISSING and item.default_factory is MISSING:
            failed.remove(item.name)  # reported; this stands in for it while the rest is checked
            values[item.name] = INVALID
    recipe = make(Recipe, values, failed, (), problems)
    if recipe is not INVALID:
        filled = {item.name: getattr(recipe, item.name) for item in fields(Recipe)} | values
        problems += broken(SimpleNamespace(**filled), problems)
        problems += unwritten(SimpleNamespace(**filled), data, problems)
    if problems:
        problems = hinted(problems, data)
        order = {item.name: index for index, item in enumerate(fields(Recipe))}
        raise ConfigError(sorted(problems, key=lambda p: order.get(p.path[0] if p.path else "", -1)), stack.where)
    return recipe  # type: ignore[no-any-return]


def _layers(source: Any) -> tuple[tuple[Layer, ...], File]:
    if isinstance(source, Recipe):
        return (Layer("", dump(source)),), File()
    if isinstance(source, Mapping):
        return (Layer("", source),), File()
    if not isinstance(source, str | File):
        kind = "null" if source is None else type(source).__name__
        raise ConfigError([Problem((), f"must be a file, a mapping or a Recipe, got {kind}")])
    path = find(source)
    return read_file(path), path.parent


def _inline_plan(data: dict[str, Any], folder: File, problems: list[Problem]) -> None:
    """Read a plan given as a path (beside the recipe, else from here) or as the name of a shipped one: the recipe that
    is stored with a run is complete."""
    plan = data.get("plan")
    if not isinstance(plan, str) or plan in PLANS:
        return
    named = [shipped("plans")[plan]] if plan in shipped("plans") else []
    for path in dict.fromkeys((folder / plan, File(plan), *(root / plan for root in _roots()), *named)):
        if path.is_file():
            try:
                data["plan"] = freeze(parse_yaml(read_text(path), str(path)).values)
            except ConfigError as error:
                problems += [Problem(("plan", *problem.path), problem.message) for problem in error.problems]
            return


def dump(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain mappings, lists, numbers and text, every default written out; `load` reads it back equal."""
    result: dict[str, Any] = plain(recipe)
    return result


def dump_yaml(recipe: Recipe) -> str:
    """`dump` as YAML."""
    return to_yaml(dump(recipe))


def dump_json(recipe: Recipe) -> str:
    """`dump` as JSON (infinities, which JSON lacks, as text that loads back as numbers)."""
    return json.dumps(_finite(dump(recipe)), indent=2, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def find(source: str | File) -> File:
    """The file of a recipe: a path, or the name of a shipped recipe with or without its folder and `.yaml`."""
    path = File(source)
    if path.is_file():
        return path
    known = shipped("recipes")
    name = path.name.removesuffix(".yaml")
    if name in known and str(path.parent) in (".", "recipes"):
        return known[name]
    near = registry.suggest(name, known)
    names = f" (shipped: {', '.join(known)})" if known else ""
    raise ConfigError([Problem((), f"no recipe at {source}{near}{names}")])


def shipped(folder: str) -> dict[str, File]:
    """Name -> file of the YAML files that come with the package, in `recipes` or `plans`."""
    found = {path.stem: path for root in reversed(_roots()) for path in (root / folder).glob("*.yaml")}
    return dict(sorted(found.items()))


def _roots() -> tuple[File, ...]:
    """Where `recipes/` and `plans/` lie: beside the package in a checkout, inside it in an installed wheel."""
    package = File(m2flow.__file__).parent
    checkout = package.parent
    return (checkout, package) if (checkout / "pyproject.toml").is_file() else (package,)
