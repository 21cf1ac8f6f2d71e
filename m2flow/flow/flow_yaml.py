"""Reading a flow from plain values; the form of a flow file:

flow: ppo
nodes:
  rollout: {trigger: step}
  policy: {kind: service}
  learner: {batch: 64}
edges:
- stream: rollout -> learner
- call: rollout -> policy
- weights: learner -> policy
"""

from __future__ import annotations

from typing import Any

from m2flow.flow.text import boolean, integer, items, mapping, names, read, text

EDGES = ("stream", "call", "weights")
_NODE = {
    "kind": text,
    "trigger": text,
    "atom": text,
    "scope": text,
    "batch": integer,
    "unknown_denominators": integer,
    "resident": boolean,
    "labels": names,
    "note": text,
}


def parse(data: Any, problems: list[str]) -> dict[str, Any]:
    """Name, arguments of each node, and (kind, arguments) of each edge; every problem of the text is added to
    `problems`."""
    top = read(data, {"flow": text, "nodes": mapping, "edges": items}, "flow file", problems)
    if not problems:
        problems += [f"flow file: {key!r} is missing" for key in ("flow", "nodes") if key not in top]
    nodes = [{"name": name, **read(body or {}, _NODE, name, problems)} for name, body in top.get("nodes", {}).items()]
    edges = [_edge(entry, problems) for entry in top.get("edges", ())]
    return {"name": top.get("flow", "?"), "nodes": nodes, "edges": edges}


def _edge(entry: Any, problems: list[str]) -> tuple[str, dict[str, Any]]:
    kinds = [kind for kind in EDGES if isinstance(entry, dict) and kind in entry]
    if len(kinds) != 1:
        problems.append(f"edges: expected one of {', '.join(EDGES)} in {entry!r}")
        return "", {}
    [kind] = kinds
    readers = {kind: _ends, **({"atom": text, "channel": text} if kind == "stream" else {})}
    values = read(entry, readers, f"edges.{kind}", problems)
    src, dst = values.pop(kind, ("", ""))
    return kind, {"src": src, "dst": dst, **values}


def _ends(value: Any) -> tuple[str, str]:
    """The two names of "a -> b"."""
    parts = tuple(part.strip() for part in text(value).split("->"))
    if len(parts) != 2 or not all(parts):
        raise ValueError(f"expected 'from -> to', got {value!r}")
    return parts
