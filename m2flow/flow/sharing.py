"""Who uses which device in whose turn.

A turn belongs to a stage. A service is used in the turns of the stages that call it. Two stages conflict on a device
when both use it, themselves or through a service, and are no co-residents: then they work in different shifts.
Co-residents are a caller and its service, or two services of one caller; they are loaded together and their memory adds
up. A service that is also sent weights (or a stage fed by a stream) is no co-resident of the sender.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from m2flow.flow.graph import Call, Flow


@dataclass(frozen=True, slots=True)
class Conflict:
    """Stages `first` and `second` must take turns, because nodes `a` and `b` that they use share `devices`."""

    first: str
    second: str
    a: str
    b: str
    devices: tuple[str, ...]


def turns(flow: Flow) -> dict[str, frozenset[str]]:
    """For every node the stages in whose turns it is used: a stage its own, a service those of its callers."""
    out = {node.name: {node.name} if node.kind == "stage" else set() for node in flow.nodes}
    for _ in flow.services:  # a service may call a service: as many rounds as there can be links in a chain
        for edge in flow.calls:
            out[edge.dst] |= out[edge.src]
    return {name: frozenset(stages) for name, stages in out.items()}


def conflicts(flow: Flow, devices: Mapping[str, tuple[str, ...]]) -> list[Conflict]:
    """Every pair of stages that must take turns under these devices per node."""
    use = turns(flow)
    order = {name: i for i, name in enumerate(flow.names)}
    out = []
    for a, b in combinations([name for name in flow.names if name in devices], 2):
        shared = tuple(d for d in devices[a] if d in devices[b])
        if not shared or coresident(flow, a, b):
            continue
        pairs = {(s, t) for s in use[a] for t in use[b] if s != t}
        out += [Conflict(s, t, a, b, shared) for s, t in sorted(pairs, key=lambda p: (order[p[0]], order[p[1]]))]
    return out


def coresident(flow: Flow, a: str, b: str) -> bool:
    """Whether two nodes are loaded together: caller and service, or services of one caller; no data edge between."""
    direct = [edge for edge in flow.edges if {edge.src, edge.dst} == {a, b}]
    if direct:
        return all(isinstance(edge, Call) for edge in direct)
    callers = [{edge.src for edge in flow.callers_of(name)} for name in (a, b)]
    return bool(callers[0] & callers[1])


def shifts_for(flow: Flow, devices: Mapping[str, tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Shifts that settle every conflict. In stream order each stage joins the first shift that it has no conflict with.

    Stages without a conflict are in none.
    """
    pairs = {frozenset((c.first, c.second)) for c in conflicts(flow, devices)}
    shifts: list[list[str]] = []
    for stage in flow.order():
        if not any(stage in pair for pair in pairs):
            continue
        free = (shift for shift in shifts if not any(frozenset((stage, other)) in pairs for other in shift))
        shift = next(free, None)
        if shift is None:
            shifts.append([stage])
        else:
            shift.append(stage)
    return tuple(map(tuple, shifts))
