"""A flow as text: one row per node, one arc per edge.

ppo
  rollout  stage, on step  ---.=====.
  policy   service         <--'..   |
  learner  stage, batch 64 <====='=='
"""

from __future__ import annotations

from m2flow.flow.graph import Edge, Flow, Node

_LINE = {"Stream": "=", "Call": "-", "Weights": "."}
_BAR = {"Stream": "|", "Call": "|", "Weights": ":"}


def draw(flow: Flow) -> str:
    """Rows in the order of the streams, each service behind its first caller; below them a list of the edges."""
    rows = _rows(flow)
    at = {name: i for i, name in enumerate(rows)}
    edges = [edge for edge in flow.edges if edge.src in at and edge.dst in at]
    columns = _columns(edges, at)
    width = 3 * (max(columns, default=-1) + 1) + 2
    grid = [[" "] * width for _ in rows]
    for edge, column in zip(edges, columns, strict=True):
        _bar(grid, at[edge.src], at[edge.dst], 3 * column + 3, _BAR[type(edge).__name__])
    for edge, column in zip(edges, columns, strict=True):
        for row, arrow in ((at[edge.src], False), (at[edge.dst], True)):
            top = row == min(at[edge.src], at[edge.dst])
            _arm(grid[row], 3 * column + 3, _LINE[type(edge).__name__], arrow, "." if top else "'")
    labels = {name: f"{name:<{max(map(len, rows))}}  {_about(flow.node(name))}" for name in rows}
    pad = max(map(len, labels.values()), default=0)
    lines = [f"  {labels[name]:<{pad}} {''.join(grid[at[name]])}".rstrip() for name in rows]
    legend = [f"  {2 * _LINE[type(edge).__name__]} {_say(edge)}" for edge in flow.edges]
    return "\n".join([flow.name, *lines, *([""] if legend else []), *legend])


def _rows(flow: Flow) -> list[str]:
    order = [*flow.order(), *(n.name for n in flow.stages if n.name not in flow.order())]
    out: list[str] = []
    for name in order:
        todo = [name]
        while todo:
            here = todo.pop(0)
            if here not in out:
                out.append(here)
                todo += [edge.dst for edge in flow.calls_of(here)]
    return out + [name for name in flow.names if name not in out]


def _columns(edges: list[Edge], at: dict[str, int]) -> list[int]:
    """A column per edge, so that no two arcs in one column meet; short arcs lie inside."""
    taken: list[list[tuple[int, int]]] = []
    columns = [0] * len(edges)
    for i in sorted(range(len(edges)), key=lambda i: (abs(at[edges[i].src] - at[edges[i].dst]), i)):
        low, high = sorted((at[edges[i].src], at[edges[i].dst]))
        column = next((c for c, spans in enumerate(taken) if all(high < a or b < low for a, b in spans)), len(taken))
        taken[column : column + 1] = [[*(taken[column] if column < len(taken) else []), (low, high)]]
        columns[i] = column
    return columns


def _bar(grid: list[list[str]], start: int, end: int, x: int, char: str) -> None:
    for row in range(min(start, end) + 1, max(start, end)):
        grid[row][x] = char


def _arm(cells: list[str], x: int, line: str, arrow: bool, corner: str) -> None:
    for i in range(1, x):
        if cells[i] == " ":
            cells[i] = line
    if arrow:
        cells[0] = "<"
    elif cells[0] == " ":
        cells[0] = line
    cells[x] = corner


def _about(node: Node) -> str:
    parts: list[str] = [node.kind]
    if node.trigger:
        parts.append(f"on {node.trigger}")
    if node.batch:
        parts.append(f"batch {node.batch}")
    if node.labels:
        parts.append(f"needs {'+'.join(node.labels)}")
    return ", ".join(parts)


def _say(edge: Edge) -> str:
    base = f"{type(edge).__name__.lower():<7} {edge.src} -> {edge.dst}"
    more = [getattr(edge, name) for name in ("atom", "channel") if hasattr(edge, name)]
    return f"{base} ({', '.join(more)})" if more else base
