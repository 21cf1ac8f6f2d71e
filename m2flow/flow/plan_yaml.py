"""Reading a plan from plain values; the form of a plan file:

plan: split
lag: 0
places:
  rollout: {devices: cpu:0-2, replicas: 3, process: true}
  policy: cpu:0-2            # short for {devices: cpu:0-2}
  arm: {label: franka}
chunks: {rollout -> learner: 64}
shifts: [[rollout], [learner]]
sub_batches: {rollout -> policy: 2}
"""

from __future__ import annotations

from typing import Any

from m2flow.flow.cluster import expand
from m2flow.flow.text import boolean, integer, items, mapping, names, read, text


def parse(data: Any, problems: list[str]) -> dict[str, Any]:
    """The arguments of a Plan, with those of each Place; every problem of the text is added to `problems`."""
    readers = {
        "plan": text,
        "lag": integer,
        "places": mapping,
        "chunks": mapping,
        "shifts": lambda value: tuple(names(group) for group in items(value)),
        "sub_batches": mapping,
    }
    top = read(data, readers, "plan file", problems)
    if "places" not in top and not problems:
        problems.append("plan file: 'places' is missing")
    top["places"] = {name: _place(name, body, problems) for name, body in top.get("places", {}).items()}
    for key in {"chunks", "sub_batches"} & set(top):
        top[key] = read(top[key], dict.fromkeys(top[key], integer), key, problems)
    if "plan" in top:
        top["name"] = top.pop("plan")
    return top


def _place(name: str, body: Any, problems: list[str]) -> dict[str, Any]:
    readers = {
        "devices": lambda value: expand(names(value)),
        "replicas": integer,
        "ranks": integer,
        "process": boolean,
        "label": text,
        "offload": boolean,
    }
    short = isinstance(body, (str, list))
    return read({"devices": body} if short else body, readers, f"places.{name}", problems)
