"""Whether a plan fits a flow and a cluster: every rule a plan must keep, each as a function that lists problems."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from m2flow.flow.cluster import Cluster, compress
from m2flow.flow.graph import Flow, Stream
from m2flow.flow.place import Place, Plan
from m2flow.flow.sharing import conflicts, turns
from m2flow.flow.text import nearest


def plan_problems(flow: Flow, plan: Plan, cluster: Cluster, memory: Mapping[str, int] | None = None) -> list[str]:
    """All problems of a plan. `memory`: bytes that one rank of a node holds, by node name.

    Rules: every node is placed on devices that exist and carry its labels; workers divide devices or devices divide
    workers; shifts settle every conflict on a device (see sharing.py); a call edge has the same or disjoint devices; a
    chunk is no smaller than the batch that its consumer needs whole; what is resident at once fits.
    """
    devices = {name: place.on(cluster) for name, place in plan.places.items() if name in flow.names}
    out = _place_problems(flow, plan, cluster)
    out += _shift_problems(flow, plan, devices)
    out += _call_problems(flow, devices)
    out += _chunk_problems(flow, plan)
    for key, value in plan.sub_batches.items():
        out += _edge_number("sub_batches", key, value, [edge.key for edge in flow.calls], "call")
    if plan.lag < 0:
        out.append(f"lag must be at least 0, got {plan.lag}")
    out += memory_problems(flow, plan, cluster, memory or {})
    return out


def _place_problems(flow: Flow, plan: Plan, cluster: Cluster) -> list[str]:
    out = [f"{name}: is not placed" for name in flow.names if name not in plan.places]
    for name, place in plan.places.items():
        if name not in flow.names:
            out.append(f"places: no node {name!r}{nearest(name, flow.names)}")
        missing = cluster.missing(place.devices)
        if missing:
            out.append(f"{name}: {missing}")
        out += [f"{name}: {what}" for what in _size_problems(place, cluster)]
        twice = sorted({d for d in place.devices if place.devices.count(d) > 1})
        if twice:
            out.append(f"{name}: names {compress(twice)} more than once")
        if place.offload and name in flow.names and not flow.node(name).resident:
            able = ", ".join(node.name for node in flow.nodes if node.resident) or "none"
            out.append(f"{name}: cannot leave its devices, so remove offload; nodes of this flow that can: {able}")
        if name in flow.names and not missing:
            out += [f"{name}: {what}" for what in _label_problems(flow.node(name).labels, place, cluster)]
    return out


def _size_problems(place: Place, cluster: Cluster) -> list[str]:
    sizes = {"replicas": place.replicas, "ranks": place.ranks}
    out = [f"{key} must be at least 1, got {n}" for key, n in sizes.items() if n < 1]
    devices = place.on(cluster)
    if not devices and place.label:
        labels = sorted({label for d in cluster.devices for label in (*d.labels, d.kind)})
        return [*out, f"no device carries the label {place.label!r}{nearest(place.label, labels)}"]
    if not devices:
        return [*out, "has neither devices nor a label"]
    if out:
        return out
    workers, size = place.replicas * place.ranks, len(devices)
    asked = f"{place.replicas} replica(s) of {place.ranks} rank(s) are {workers} workers"
    if workers % size and size % workers:
        down, up = max(n for n in range(1, size + 1) if size % n == 0 and n < workers), -(-workers // size) * size
        return [f"{asked} on {size} devices; take {down} or {up} workers, so that each gets the same share"]
    on_gpu = [d for d in devices if d.startswith("gpu:")]
    if on_gpu and place.ranks > 1 and size < workers:
        return [f"{asked} on {compress(on_gpu)}: ranks need a GPU each; take {workers} GPUs or fewer ranks"]
    return []


def _label_problems(labels: tuple[str, ...], place: Place, cluster: Cluster) -> list[str]:
    out = []
    for label in dict.fromkeys((*labels, *([place.label] if place.label and place.devices else []))):
        for worker in place.workers(cluster) or (place.on(cluster),):
            if worker and not any(cluster.device(d).has(label) for d in worker):
                there = compress(cluster.labelled(label)) or "none"
                out.append(f"needs {label!r}, which {compress(worker)} lacks; devices that have it: {there}")
                break
    return out


def _shift_problems(flow: Flow, plan: Plan, devices: Mapping[str, tuple[str, ...]]) -> list[str]:
    out = _shift_names(flow, plan)
    found = conflicts(flow, devices)
    shift_of = {name: i for i, group in enumerate(plan.shifts) for name in group}
    needed = {stage for c in found for stage in (c.first, c.second)}
    out += [
        f"shifts: {name} shares no device with another stage; leave it out"
        for name in flow.names
        if name in shift_of and name not in needed and flow.node(name).kind == "stage"
    ]
    told = set()
    for c in found:
        pair = frozenset((c.first, c.second))
        turns_apart = {shift_of.get(c.first), shift_of.get(c.second)}
        if pair not in told and (None in turns_apart or len(turns_apart) == 1):
            told.add(pair)
            via = "".join(f" ({s} through {n})" for s, n in ((c.first, c.a), (c.second, c.b)) if s != n)
            out.append(
                f"{c.first} and {c.second} both use {compress(c.devices)}{via} but take no turns there; give them "
                f"disjoint devices or put them in different shifts, for instance [[{c.first}], [{c.second}]]"
            )
    return out


def _shift_names(flow: Flow, plan: Plan) -> list[str]:
    out, used = [], turns(flow)
    stages = [node.name for node in flow.stages]
    for i, group in enumerate(plan.shifts):
        for name in dict.fromkeys(group):
            if name not in flow.names:
                out.append(f"shifts: no node {name!r}{nearest(name, flow.names)}")
            elif name in stages and any(name in other for other in plan.shifts[:i]):
                out.append(f"shifts: stage {name} is in more than one shift; it works in one")
            elif name not in stages and not used[name] & set(group):
                callers = ", ".join(sorted(used[name])) or "nobody"
                out.append(f"shifts: service {name} stands in a shift without a caller ({callers}); leave it out there")
    return out


def _call_problems(flow: Flow, devices: Mapping[str, tuple[str, ...]]) -> list[str]:
    out = []
    for edge in flow.calls:
        a, b = devices.get(edge.src, ()), devices.get(edge.dst, ())
        if set(a) & set(b) and set(a) != set(b):
            out.append(
                f"{edge.src} calls {edge.dst}: {compress(a)} and {compress(b)} overlap in part; "
                "co-residents use the same devices, others disjoint ones"
            )
    return out


def _edge_number(what: str, key: str, value: int, known: list[str], kind: str) -> list[str]:
    if key not in known:
        return [f"{what}: no {kind} {key!r}{nearest(key, known)}"]
    return [f"{what}.{key}: must be at least 1, got {value}"] if value < 1 else []


def _chunk_problems(flow: Flow, plan: Plan) -> list[str]:
    out = []
    streams = {edge.key: edge for edge in flow.streams}
    for key, chunk in plan.chunks.items():
        wrong = _edge_number("chunks", key, chunk, list(streams), "stream")
        out += wrong or [f"chunks.{key}: {reason}" for reason in _too_small(flow, streams[key], chunk)]
    return out


def _too_small(flow: Flow, stream: Stream, chunk: int) -> list[str]:
    """Why this stream must not be cut into chunks of this weight."""
    node = flow.node(stream.dst)
    if stream.channel == "replay":
        return ["a replay stream is not cut, its sampling rule decides; remove the chunk"]
    if node.batch is None or chunk >= node.batch:
        return []
    if node.scope == "batch":
        why = "takes statistics over its whole batch"
    elif node.unknown_denominators > 1:
        why = f"has {node.unknown_denominators} denominators that are unknown before the batch is complete"
    else:
        return []
    return [f"{chunk} is less than the {node.batch} that {node.name} needs, because it {why}; use {node.batch} or more"]


def memory_problems(flow: Flow, plan: Plan, cluster: Cluster, memory: Mapping[str, int]) -> list[str]:
    """Where more is resident at one moment than there is.

    A rank's bytes spread evenly over its devices. CPU cores of one host draw on one pool, and what is off-loaded stays
    in it. On other devices an off-loaded node counts in its own turns only, all else in everybody's.
    """
    out = [f"memory: no node {name!r}{nearest(name, flow.names)}" for name in memory if name not in flow.names]
    devices = {name: place.on(cluster) for name, place in plan.places.items() if name in flow.names}
    room: dict[str, int | None] = {}
    load: dict[str, dict[str, float]] = {}
    hosts = set()
    for device in cluster.devices:
        pool = f"the memory of host {device.host}" if device.kind == "cpu" else device.id
        before = room.get(pool, 0)
        hosts |= {pool} if device.kind == "cpu" else set()
        room[pool] = None if device.memory is None or before is None else before + device.memory
        for name, own in devices.items():
            if name in memory and device.id in own:
                share = memory[name] * plan.places[name].replicas * plan.places[name].ranks / len(own)
                held = load.setdefault(pool, {})
                held[name] = held.get(name, 0.0) + share
    for pool, held in load.items():
        available = room[pool]
        together = list(held) if pool in hosts else _worst(flow, plan, devices, held)
        total = sum(held[name] for name in together)
        if available is not None and total > available:
            parts = " + ".join(f"{name} {_gib(held[name])}" for name in together)
            fix = "move one to another host, or make it smaller" if pool in hosts else "off-load or move one"
            out.append(f"{pool}: needs {_gib(total)} at once ({parts}), has {_gib(available)}; {fix}")
    return out


def _worst(flow: Flow, plan: Plan, devices: Mapping[str, tuple[str, ...]], held: Mapping[str, float]) -> list[str]:
    """The nodes that hold most memory at one moment."""
    use = turns(flow)
    moving = [name for name in held if plan.places[name].offload]
    stages = sorted({stage for name in moving for stage in use[name]})
    shift_of = {name: i for i, group in enumerate(plan.shifts) for name in group}
    pairs = {frozenset((c.first, c.second)) for c in conflicts(flow, devices)}
    apart = {pair for pair in pairs if len({shift_of.get(name) for name in pair}) == 2}
    best, most = set(moving) if len(stages) > 12 else set[str](), -1.0  # beyond 12 stages assume the worst
    for size in range(len(stages) + 1) if len(stages) <= 12 else ():
        for active in combinations(stages, size):
            if any(frozenset(pair) in apart for pair in combinations(active, 2)):
                continue
            here = {name for name in moving if use[name] & set(active)}
            if sum(held[name] for name in here) > most:
                best, most = here, sum(held[name] for name in here)
    return [name for name in held if name in best or name not in moving]


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
