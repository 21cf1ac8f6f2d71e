"""From plain mappings to frozen dataclasses and back. Every fault is collected, none is repaired silently.

A dataclass field may carry metadata: `kind` (a section whose class is found by its `name` in the registry) or `target`
(the address of its class, imported when the section is read). Other annotations are read from the class; single values
are checked by pydantic.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import PurePath
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

from m2flow import registry
from m2flow.config.errors import Path, Problem

INVALID: Any = type("Invalid", (), {"__repr__": lambda _: "INVALID"})()
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}


class FrozenDict(dict[str, Any]):
    """A dict that cannot be changed after it was made."""

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError("a recipe is immutable; use dataclasses.replace, or load it again with overrides")

    __setitem__ = __delitem__ = __ior__ = update = pop = popitem = clear = setdefault = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)


def freeze(value: Any) -> Any:
    """Mappings become `FrozenDict`, lists become tuples, all the way down."""
    if isinstance(value, Mapping):
        return FrozenDict({key: freeze(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    return value


def plain(value: Any, kind: str | None = None) -> Any:
    """The inverse of `construct`: dataclasses become mappings (with `name` where there is a `kind`), tuples lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        head = {"name": registry.name_of(kind, type(value))} if kind else {}
        fields = [field for field in dataclasses.fields(value) if field.init]
        return head | {f.name: plain(getattr(value, f.name), f.metadata.get("kind")) for f in fields}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(plain(item) for item in value)
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "dtype") and hasattr(value, "tolist"):  # numpy scalars and arrays
        return value.tolist()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f"{value!r} ({type(value).__name__}) cannot be written to a recipe")


def hints(cls: type) -> dict[str, Any]:
    """Field name -> annotation, for the fields that `__init__` takes."""
    known = typing.get_type_hints(cls, include_extras=True)
    return {field.name: known[field.name] for field in dataclasses.fields(cls) if field.init}


def construct(cls: type, data: Mapping[str, Any], path: Path, problems: list[Problem], skip: str | None = None) -> Any:
    """An instance of dataclass `cls` from a mapping; what is wrong is added to `problems`.

    Wrong keys then stand at their defaults, so that rules about the others can still be checked; INVALID where there is
    no default. `skip` is a key that belongs to the loader (`name` of a registered section) and not to the class.
    """
    values, failed = convert_fields(cls, data, path, problems, skip)
    return make(cls, values, failed, path, problems)


def make(cls: type, values: Mapping[str, Any], failed: set[str], path: Path, problems: list[Problem]) -> Any:
    """`cls(**values)` without the `failed` ones. A range error is added to `problems`, and the next one looked for."""
    while True:
        try:
            made = cls(**{key: value for key, value in values.items() if key not in failed})
        except ValueError as error:
            culprit = _blame(str(error), values, failed)
            if culprit is None:
                if not failed:
                    problems.append(Problem(path, str(error)))
                return INVALID
            message = re.sub(rf"^{culprit}: ?", "", str(error))
            problems.append(Problem((*path, culprit), message))
            failed.add(culprit)  # try again with its default, to see what else is wrong
        except TypeError:
            if not failed:
                raise
            return INVALID  # a required field is among the failed ones, and has been reported
        else:
            return made


def convert_fields(
    cls: type, data: Mapping[str, Any], path: Path, problems: list[Problem], skip: str | None = None
) -> tuple[dict[str, Any], set[str]]:
    """Typed values of the fields of `cls`, and the names of those that are wrong or missing (each reported)."""
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    known = hints(cls)
    values: dict[str, Any] = {}
    failed: set[str] = set()
    for key, value in data.items():
        if key == skip and key not in fields:
            continue
        if key not in fields:
            message = f"unknown key (keys of {cls.__name__}: {', '.join(fields) or 'none'})"
            problems.append(Problem((*path, str(key)), message, tuple(fields)))
            continue
        before = len(problems)
        values[key] = convert(known[key], value, (*path, key), problems, fields[key].metadata)
        if len(problems) > before:
            failed.add(key)
    for name, field in fields.items():
        if name not in data and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(Problem((*path, name), f"is required ({describe(known[name], field.metadata)})"))
            failed.add(name)
    return values, failed


def _blame(message: str, values: Mapping[str, Any], failed: set[str]) -> str | None:
    """The given field that a range error is about, unless a default that stands in for another may have caused it."""
    if any(re.search(rf"\b{name}\b", message) for name in failed):
        return None
    head = message.partition(":")[0].strip()
    return head if head in values and head not in failed else None


def convert(annotation: Any, value: Any, path: Path, problems: list[Problem], metadata: Mapping[str, Any]) -> Any:
    """`value` as `annotation` wants it, or INVALID with a problem added."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return value if _numbers(plain(value), path, problems) else INVALID  # from Python: already typed
    if value is None and _allows_none(annotation, metadata):
        return None
    if "kind" in metadata:
        return _registered(metadata, value, path, problems)
    if "target" in metadata:
        return _nested(registry.load(metadata["target"]), value, path, problems)
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    classes = [option for option in options if isinstance(option, type) and dataclasses.is_dataclass(option)]
    if classes and (len(classes) == len([o for o in options if o is not type(None)]) or isinstance(value, Mapping)):
        return _nested(_fitting(classes, value), value, path, problems)
    element = _element(annotation)
    if element is not None and isinstance(value, Mapping):
        items = {key: convert(element, item, (*path, str(key)), problems, {}) for key, item in value.items()}
        return FrozenDict(items)
    if element is not None and isinstance(value, list | tuple):
        return tuple(convert(element, item, (*path, str(i)), problems, {}) for i, item in enumerate(value))
    return _single(annotation, value, path, problems, metadata)


def _allows_none(annotation: Any, metadata: Mapping[str, Any]) -> bool:
    if "kind" in metadata or "target" in metadata:
        return bool(metadata.get("optional"))
    return annotation is type(None) or type(None) in get_args(annotation)


def _registered(metadata: Mapping[str, Any], value: Any, path: Path, problems: list[Problem]) -> Any:
    kind = metadata["kind"]
    data = {"name": value} if isinstance(value, str) else value
    if isinstance(data, Mapping) and "name" not in data and metadata.get("default"):
        data = {"name": metadata["default"], **data}
    if not isinstance(data, Mapping) or not isinstance(data.get("name"), str):
        known = ", ".join(registry.names(kind))
        problems.append(Problem((*path, "name"), f"is required: which {kind}? (known: {known})"))
        return INVALID
    try:
        cls = registry.resolve(kind, data["name"])
    except ValueError as error:
        problems.append(Problem((*path, "name"), str(error)))
        return INVALID
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        problems.append(Problem((*path, "name"), f"{data['name']!r} is {cls!r}, which is no config dataclass"))
        return INVALID
    return construct(cls, data, path, problems, skip="name")


def _nested(cls: type, value: Any, path: Path, problems: list[Problem]) -> Any:
    if not isinstance(value, Mapping):
        keys = ", ".join(hints(cls))
        problems.append(Problem(path, f"got {value!r}, expected a mapping with keys {keys}"))
        return INVALID
    return construct(cls, value, path, problems)


def _fitting(classes: Sequence[type], value: Any) -> type:
    """Of several dataclasses, the first that knows every given key, else the first."""
    keys = set(value) if isinstance(value, Mapping) else set()
    return next((cls for cls in classes if keys <= set(hints(cls))), classes[0])


def _element(annotation: Any) -> Any:
    """The dataclass inside `tuple[X, ...]`, `list[X]`, `Mapping[str, X]`; None for anything else."""
    args = [arg for arg in get_args(annotation) if arg is not Ellipsis]
    origin = get_origin(annotation)
    if not isinstance(origin, type) or not issubclass(origin, Sequence | Mapping) or not args:
        return None
    last = args[-1]
    inner = [option for option in (get_args(last) or (last,)) if isinstance(option, type)]
    return last if any(dataclasses.is_dataclass(option) for option in inner) else None


def _single(annotation: Any, value: Any, path: Path, problems: list[Problem], metadata: Mapping[str, Any]) -> Any:
    from pydantic import ValidationError

    try:
        made = freeze(_adapter(annotation).validate_python(value))
        return made if _numbers(made, path, problems) else INVALID
    except ValidationError as error:
        location = error.errors()[0]["loc"]
        inside = tuple(str(part) for part in location) if isinstance(value, list | tuple | Mapping) else ()
        at = f" (first at {'.'.join(inside)})" if inside else ""
        hint = ""
        if isinstance(value, str):
            hint = registry.suggest(value, [arg for arg in _literals(annotation) if isinstance(arg, str)])
        elif str in (get_args(annotation) or (annotation,)) and isinstance(value, int | float):
            hint = f"; quote it to make it text: '\"{value}\"'"
        problems.append(Problem(path, f"got {_show(value)}{at}, expected {describe(annotation, metadata)}{hint}"))
        return INVALID


def _numbers(value: Any, path: Path, problems: list[Problem]) -> bool:
    """Whether every number in `value` is one that can be computed with.

    NaN compares false with every bound, so no range check would see it. Infinity is a bound that never acts: an
    environment, an alarm or an early stop may have one; where losses and weights are made of it, it becomes NaN.
    """
    found = [
        Problem(
            at,
            f"is {'NaN' if math.isnan(number) else 'infinite'}, which is no number to train with; give one, or none",
        )
        for at, number in _odd(value, path)
        if math.isnan(number) or at[0] not in _MAY_BE_INFINITE
    ]
    problems += found
    return not found


_MAY_BE_INFINITE = ("env", "alarms", "early_stop")


def _odd(value: Any, path: Path) -> Iterator[tuple[Path, float]]:
    """Where NaN and infinities stand."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _odd(item, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _odd(item, (*path, str(i)))
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, value


def _show(value: Any) -> str:
    return (
        {True: "true", False: "false"}[value] if isinstance(value, bool) else "null" if value is None else repr(value)
    )


def _literals(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(found for arg in get_args(annotation) for found in _literals(arg))


@lru_cache(maxsize=512)
def _adapter(annotation: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(_strict(annotation), config=ConfigDict(arbitrary_types_allowed=True))


def _strict(annotation: Any) -> Any:
    """The annotation with numbers that refuse `true` and `false`, which Python would take for 1 and 0."""
    from pydantic import BeforeValidator

    if annotation in (int, float):
        return Annotated[annotation, BeforeValidator(_no_bool)]
    origin, args = get_origin(annotation), get_args(annotation)
    if not args or origin in (Literal, Annotated):
        return annotation
    inner = tuple(arg if arg is Ellipsis else _strict(arg) for arg in args)
    if origin in (Union, types.UnionType):
        return Union[inner]  # noqa: UP007  built at run time
    try:
        return origin[inner]
    except TypeError:
        return annotation


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers")  # noqa: TRY004  pydantic turns a ValueError into a report
    return value


def describe(annotation: Any, metadata: Mapping[str, Any] | None = None) -> str:
    """What a field takes, in words. Example: `float | None` is "a number or null"."""
    metadata = metadata or {}
    if "kind" in metadata:
        return f"one of {', '.join(registry.names(metadata['kind']))}, with its keys"
    if "target" in metadata:
        return "a mapping"
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe(args[0])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(arg) for arg in args))
    if origin is Literal:
        return "one of " + ", ".join(repr(arg) for arg in args)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping" if len(args) < 2 or args[1] is Any else f"a mapping of {describe(args[1])}"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        if Ellipsis in args or len(args) == 1:
            return f"a list of {describe(args[0]).removeprefix('a ')}"
        return "a list of " + ", ".join(describe(arg) for arg in args)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return f"a mapping with keys {', '.join(hints(annotation))}"
    return _WORDS.get(
        annotation, "any value" if annotation is Any else getattr(annotation, "__name__", str(annotation))
    )
