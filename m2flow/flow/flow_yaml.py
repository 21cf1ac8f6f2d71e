"""Flow to YAML and back.

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

from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from m2flow.flow.text import dump_yaml, integer, items, load_yaml, mapping, names, read, text

if TYPE_CHECKING:
    from m2flow.flow.graph import Edge, Flow, Node

EDGES = ("stream", "call", "weights")
_NODE = {
    "kind": text,
    "trigger": text,
    "atom": text,
    "scope": text,
    "batch": integer,
    "unknown_denominators": integer,
    "labels": names,
    "note": text,
}


def ends(value: Any) -> tuple[str, str]:
    """The two names of "a -> b"."""
    parts = tuple(part.strip() for part in text(value).split("->"))
    if len(parts) != 2 or not all(parts):
        raise ValueError(f"expected 'from -> to', got {value!r}")
    return parts


def write(flow: Flow) -> str:
    """YAML of a flow, defaults left out."""
    nodes = {node.name: _given(node, skip=("name",)) for node in flow.nodes}
    edges = [
        {type(edge).__name__.lower(): f"{edge.src} -> {edge.dst}", **_given(edge, skip=("src", "dst"))}
        for edge in flow.edges
    ]
    return dump_yaml({"flow": flow.name, "nodes": nodes, **({"edges": edges} if edges else {})})


def _given(item: Node | Edge, skip: tuple[str, ...]) -> dict[str, Any]:
    out = {}
    for part in fields(item):
        value = getattr(item, part.name)
        if part.name not in skip and (part.default is MISSING or value != part.default):
            out[part.name] = list(value) if isinstance(value, tuple) else value
    return out


@dataclass(slots=True)
class Parsed:
    """What a flow file says: the arguments of every node and edge, and what is wrong with the text."""

    name: str = "?"
    nodes: list[dict[str, Any]] = field(default_factory=list)
    edges: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # (kind, arguments)
    problems: list[str] = field(default_factory=list)


def parse(source: str) -> Parsed:
    """Read a flow file; every problem of the text is listed."""
    out = Parsed()
    top = read(load_yaml(source), {"flow": text, "nodes": mapping, "edges": items}, "flow file", out.problems)
    if not out.problems:
        out.problems += [f"flow file: {key!r} is missing" for key in ("flow", "nodes") if key not in top]
    out.name = top.get("flow", out.name)
    for name, body in top.get("nodes", {}).items():
        out.nodes.append({"name": name, **read(body or {}, _NODE, name, out.problems)})
    for entry in top.get("edges", ()):
        _edge(entry, out)
    return out


def _edge(entry: Any, out: Parsed) -> None:
    kinds = [kind for kind in EDGES if isinstance(entry, dict) and kind in entry]
    if len(kinds) != 1:
        out.problems.append(f"edges: expected one of {', '.join(EDGES)} in {entry!r}")
        return
    [kind] = kinds
    readers = {kind: ends, **({"atom": text, "channel": text} if kind == "stream" else {})}
    values = read(entry, readers, f"edges.{kind}", out.problems)
    if kind in values:
        src, dst = values.pop(kind)
        out.edges.append((kind, {"src": src, "dst": dst, **values}))
