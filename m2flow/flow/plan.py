"""What is done with plans: check, compare, explain, and make them. The value itself is in place.py.

`collocated`, `disaggregated` and `hybrid` are functions that return such values, nothing else:

    collocated      everything on all devices; stages take turns
    disaggregated   rollout side and learner side on disjoint devices; turns only within a side
    hybrid          callers and the services they call on disjoint devices, with sub-batches in flight between them; the
                    learner side on all of them, in turns with both
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from m2flow.flow.cluster import Cluster, compress, expand
from m2flow.flow.graph import Flow, Node
from m2flow.flow.place import Place, Plan, PlanError, spaced
from m2flow.flow.sharing import shifts_for, turns
from m2flow.flow.text import Change, changes
from m2flow.flow.validity import plan_problems

__all__ = [
    "Place",
    "Plan",
    "PlanError",
    "check",
    "collocated",
    "diff",
    "disaggregated",
    "explain",
    "hybrid",
    "learner_side",
]

COMPUTE = ("gpu", "fake", "cpu")  # the first kind that a cluster has is what the functions share out


def check(flow: Flow, plan: Plan, cluster: Cluster, memory: Mapping[str, int] | None = None) -> None:
    """Raise PlanError with every problem, or return. `memory`: bytes that one rank of a node holds, by node name.

    The rules are in validity.py. A flow that makes no sense raises FlowError first.
    """
    flow.check()
    problems = plan_problems(flow, plan, cluster, memory)
    if problems:
        raise PlanError(f"plan {plan.name!r} for flow {flow.name!r} on cluster {cluster.name!r}", problems)


def diff(old: Plan, new: Plan) -> tuple[Change, ...]:
    """What changes from `old` to `new`: per node what moves, then chunks, sub-batches, shifts and lag."""
    out: list[Change] = []
    for name in dict.fromkeys((*old.places, *new.places)):
        if name in old.places and name in new.places:
            out += changes(name, *(_place_values(plan.places[name]) for plan in (old, new)))
        else:
            was, now = (_where(plan.places.get(name)) for plan in (old, new))
            out.append(Change(name, "place", was, now))
    out += changes("chunks", old.chunks, new.chunks)
    out += changes("sub_batches", old.sub_batches, new.sub_batches)
    whole = ({"shifts": tuple("/".join(g) for g in p.shifts), "lag": p.lag, "name": p.name} for p in (old, new))
    return (*out, *changes("plan", *whole))


def explain(flow: Flow, plan: Plan) -> str:
    """A table: who sits where, and when."""
    use = turns(flow)
    rows = [("node", "kind", "devices", "workers", "runs in", "when")]
    for node in flow.nodes:
        place = plan.places.get(node.name)
        if place is None:
            rows.append((node.name, node.kind, "not placed", "", "", ""))
            continue
        workers = f"{place.replicas}" if place.ranks == 1 else f"{place.replicas} x {place.ranks}"
        where = _where(place) or ""
        runs = "processes" if place.process else "threads"
        if node.kind == "service":
            when = f"with {', '.join(s for s in flow.names if s in use[node.name])}"
        else:
            when = _when(flow, plan, node.name)
        rows.append((node.name, node.kind, where, workers, runs, when + (", off-loads" if place.offload else "")))
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    extra = [f"sub-batches {spaced(key)}: {n}" for key, n in plan.sub_batches.items()]
    return "\n".join([f"plan {plan.name} (lag {plan.lag})", *lines, *extra])


def _when(flow: Flow, plan: Plan, name: str) -> str:
    node, parts = flow.node(name), []
    if node.trigger:
        parts.append(f"on each {node.trigger} tick")
    for stream in flow.streams_into(name):
        chunk = plan.chunks.get(stream.key)
        parts.append(f"per {chunk} of {stream.src}" if chunk else f"as {stream.src} yields")
    if any(name in group for group in plan.shifts):
        own = next(i for i, group in enumerate(plan.shifts) if name in group)
        parts.append(f"shift {own + 1} of {len(plan.shifts)}")
    return ", ".join(parts)


def _where(place: Place | None) -> str | None:
    return None if place is None else compress(place.devices) or f"all with {place.label}"


def _place_values(place: Place) -> dict[str, Any]:
    return {f.name: getattr(place, f.name) for f in fields(place)}


# ---- three ways to place any flow
#
# They look at edges, never at names. The learner side is every stage that sends weights (without any: the sinks), the
# stages behind it, and the services that only it calls. All else is the rollout side.


def collocated(
    flow: Flow, cluster: Cluster, *, devices: Sequence[str] | None = None, lag: int = 0, process: bool = False
) -> Plan:
    """Everything on all devices, in turns. `devices`: those to use instead of all of the best kind."""
    flow.check()
    pool = _pool(cluster, devices, "collocated", least=1)
    return _finish(flow, cluster, "collocated", dict.fromkeys(flow.names, pool), process, lag)


def disaggregated(
    flow: Flow,
    cluster: Cluster,
    *,
    devices: Sequence[str] | None = None,
    learner: int | None = None,
    lag: int = 0,
    process: bool = True,
) -> Plan:
    """Rollout side and learner side on disjoint devices. `learner`: how many the learner side gets (default: half)."""
    flow.check()
    pool = _pool(cluster, devices, "disaggregated", least=2)
    right = learner_side(flow)
    if not right or len(right) == len(flow.nodes):
        raise _refused("disaggregated", flow, "has only one side: nothing sends weights or streams to another stage")
    size = len(pool) // 2 if learner is None else learner
    if not 0 < size < len(pool):
        raise _refused("disaggregated", flow, f"learner: {size} of {len(pool)} devices; take 1 to {len(pool) - 1}")
    cut = len(pool) - size
    where = {name: pool[cut:] if name in right else pool[:cut] for name in flow.names}
    return _finish(flow, cluster, "disaggregated", where, process, lag)


def hybrid(
    flow: Flow,
    cluster: Cluster,
    *,
    devices: Sequence[str] | None = None,
    services: int | None = None,
    sub_batches: int = 2,
    lag: int = 0,
    process: bool = True,
) -> Plan:
    """Callers | services on disjoint devices, the learner side on all. `services`: how many they get (default: half).

    A rollout side without calls is cut behind its sources instead.
    """
    flow.check()
    pool = _pool(cluster, devices, "hybrid", least=2)
    right = learner_side(flow)
    left = [node for node in flow.nodes if node.name not in right]
    back = {node.name for node in left if node.kind == "service"}
    back = back or {node.name for node in left if flow.streams_into(node.name)}
    if not back or not right:
        raise _refused("hybrid", flow, "has no service and no second stage before the learner; use collocated")
    size = len(pool) // 2 if services is None else services
    if not 0 < size < len(pool):
        raise _refused("hybrid", flow, f"services: {size} of {len(pool)} devices; take 1 to {len(pool) - 1}")
    cut = len(pool) - size
    # A caller on all devices would overlap in part with a service of the rollout side: then it keeps off those.
    reaches = any(edge.src in right and edge.dst not in right for edge in flow.calls)
    wide = pool[:cut] if reaches else pool
    where = {name: wide if name in right else pool[cut:] if name in back else pool[:cut] for name in flow.names}
    cuts = {e.key: sub_batches for e in flow.calls if e.src not in right and not set(where[e.src]) & set(where[e.dst])}
    return _finish(flow, cluster, "hybrid", where, process, lag, cuts)


def learner_side(flow: Flow) -> frozenset[str]:
    """Stages that send weights (without any: sinks fed by a stream), those behind them, and services only they call."""
    roots = {edge.src for edge in flow.weights} or {n.name for n in flow.sinks() if flow.streams_into(n.name)}
    stages = flow.downstream(roots)
    use = turns(flow)
    return stages | {node.name for node in flow.services if use[node.name] <= stages}


def _pool(cluster: Cluster, devices: Sequence[str] | None, mode: str, least: int) -> tuple[str, ...]:
    if devices is None:
        pool = next((ids for ids in map(cluster.labelled, COMPUTE) if ids), ())
    else:
        pool = expand([devices] if isinstance(devices, str) else devices)
        if cluster.missing(pool):
            raise PlanError(f"{mode} on cluster {cluster.name!r}", [f"devices: {cluster.missing(pool)}"])
    if len(pool) < least:
        wants = f"wants {least} or more devices of one kind ({', '.join(COMPUTE)})"
        there = f"available: {len(pool)} ({', '.join(pool) or 'none'})"
        raise PlanError(f"{mode} on cluster {cluster.name!r}", [f"{wants}, {there}"])
    return pool


def _home(node: Node, pool: tuple[str, ...], cluster: Cluster) -> tuple[str, ...]:
    """The devices of `pool` that carry the node's labels, else all in the cluster that do, else the pool."""
    for choice in (pool, cluster.ids):
        able = tuple(d for d in choice if all(cluster.device(d).has(label) for label in node.labels))
        if able:
            return able
    return pool  # nothing carries them all: `check` says so


def _finish(
    flow: Flow,
    cluster: Cluster,
    mode: str,
    where: Mapping[str, tuple[str, ...]],
    process: bool,
    lag: int,
    cuts: Mapping[str, int] | None = None,
) -> Plan:
    homes = {node.name: _home(node, where[node.name], cluster) for node in flow.nodes}
    places = {name: Place(home, process=process) for name, home in homes.items()}
    plan = Plan(places, {}, shifts_for(flow, homes), cuts or {}, lag, mode)
    check(flow, plan, cluster)
    return plan


def _refused(mode: str, flow: Flow, why: str) -> PlanError:
    return PlanError(f"{mode} for flow {flow.name!r}", [why])
