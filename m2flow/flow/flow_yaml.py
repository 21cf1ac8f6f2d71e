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

from dataclasses import MISSING, fields
from typing import Any

from m2flow.flow.graph import Call, Edge, Flow, FlowError, Node, Stream, Weights
from m2flow.flow.text import boolean, dump_yaml, integer, items, load_yaml, mapping, names, read, text

EDGES: dict[str, type[Edge]] = {"stream": Stream, "call": Call, "weights": Weights}
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


def ends(value: Any) -> tuple[str, str]:
    """The two names of "a -> b"."""
    parts = tuple(part.strip() for part in text(value).split("->"))
    if len(parts) != 2 or not all(parts):
        raise ValueError(f"expected 'from -> to', got {value!r}")
    return parts


def write(flow: Flow) -> str:
    """YAML that `parse` reads back to an equal flow. Defaults are left out."""
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


def parse(source: str) -> Flow:
    """Read a flow. Unknown keys are refused with the nearest name; FlowError lists every problem of the text."""
    problems: list[str] = []
    top = read(load_yaml(source), {"flow": text, "nodes": mapping, "edges": items}, "flow file", problems)
    if not problems:
        problems += [f"flow file: {key!r} is missing" for key in ("flow", "nodes") if key not in top]
    nodes = [Node(name, **read(body or {}, _NODE, name, problems)) for name, body in top.get("nodes", {}).items()]
    edges = [_edge(entry, problems) for entry in top.get("edges", ())]
    if problems:
        raise FlowError(f"flow {top.get('flow', '?')!r}", problems)
    return Flow(top["flow"], tuple(nodes), tuple(edge for edge in edges if edge is not None))


def _edge(entry: Any, problems: list[str]) -> Edge | None:
    kinds = [kind for kind in EDGES if isinstance(entry, dict) and kind in entry]
    if len(kinds) != 1:
        problems.append(f"edges: expected one of {', '.join(EDGES)} in {entry!r}")
        return None
    [kind] = kinds
    readers = {kind: ends, **({"atom": text, "channel": text} if kind == "stream" else {})}
    values = read(entry, readers, f"edges.{kind}", problems)
    return EDGES[kind](*values.pop(kind), **values) if kind in values else None
