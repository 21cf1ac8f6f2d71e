"""From (flow, plan) to workers and the connections between them. Pure: nothing is started here.

A worker hosts one replica of a node. Nodes joined by a call edge and placed alike live in one worker, so that a call
is a
function call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from m2flow.flow.cluster import Cluster
from m2flow.flow.graph import Call, Flow, Stream, Weights
from m2flow.flow.plan import Plan, PlanError

DRIVER = "driver"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One thread or process: which nodes it hosts, as which replica, on which devices.

    Example: `WorkerSpec("rollout+policy/0", ("rollout", "policy"), rank=0, size=2, devices=("cpu:0",), process=True)`.
    """

    id: str
    nodes: tuple[str, ...]
    rank: int
    size: int
    devices: tuple[str, ...]
    process: bool


@dataclass(frozen=True, slots=True)
class Wiring:
    """All workers, who talks to whom, and for every node where its outputs go."""

    workers: tuple[WorkerSpec, ...]
    home: Mapping[tuple[str, int], str]  # (node, replica) -> worker id
    links: frozenset[tuple[str, str]]  # worker id pairs, sorted
    leases: Mapping[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)  # devices a replica takes turns on

    def worker(self, node: str, rank: int) -> str:
        """Id of the worker that hosts this replica."""
        return self.home[node, rank]


def check_runnable(flow: Flow, plan: Plan, cluster: Cluster) -> None:
    """Raise PlanError for what a sound plan may say and this runtime does not do yet; it would train wrongly in
    silence."""
    problems = []
    senders = {edge.src for edge in flow.weights}
    for name, place in plan.places.items():
        if place.ranks > 1:
            problems.append(f"{name}: asks for {place.ranks} ranks; the local runtime runs one rank per replica")
        if name in senders and place.replicas > 1:
            problems.append(f"{name}: sends weights, so it runs as one replica, not {place.replicas}")
        if name in {edge.dst for edge in flow.streams} and not _fed(flow, plan, name):
            problems.append(f"{name}: {place.replicas} replicas, and fewer that send to it; some would wait for ever")
        imaginary = [d for d in place.on(cluster) if cluster.device(d).kind not in ("cpu", "gpu")]
        if imaginary:
            problems.append(
                f"{name}: {', '.join(imaginary)} can be planned with, but nothing runs on it; use cpu or gpu"
            )
    if problems:
        raise PlanError(f"plan {plan.name!r} on the local runtime", problems)


def wire(flow: Flow, plan: Plan, cluster: Cluster) -> Wiring:
    """Group nodes into workers and list the links that the edges need. The plan has been checked and resolved."""
    workers: list[WorkerSpec] = []
    home: dict[tuple[str, int], str] = {}
    for nodes in _together(flow, plan):
        place = plan.places[nodes[0]]
        devices = place.workers(cluster)
        for rank in range(place.replicas):
            spec = WorkerSpec(f"{'+'.join(nodes)}/{rank}", nodes, rank, place.replicas, devices[rank], place.process)
            workers.append(spec)
            home.update({(node, rank): spec.id for node in nodes})
    links = set()
    for edge in flow.edges:
        for rank in range(plan.places[edge.src].replicas):
            for target in targets(edge, rank, plan):
                ends = sorted((home[edge.src, rank], home[edge.dst, target]))
                if ends[0] != ends[1]:
                    links.add((ends[0], ends[1]))
    return Wiring(tuple(workers), home, frozenset(links), _leases(flow, plan, cluster))


def targets(edge: Stream | Call | Weights, rank: int, plan: Plan) -> list[int]:
    """Replicas of `edge.dst` that replica `rank` of `edge.src` talks to: all for weights, else one."""
    size = plan.places[edge.dst].replicas
    return list(range(size)) if isinstance(edge, Weights) else [rank % size]


def producers(flow: Flow, plan: Plan, node: str, rank: int) -> frozenset[tuple[str, int]]:
    """(node, replica) pairs whose streams end at this replica."""
    return frozenset(
        (edge.src, source)
        for edge in flow.edges
        if isinstance(edge, Stream) and edge.dst == node
        for source in range(plan.places[edge.src].replicas)
        if rank in targets(edge, source, plan)
    )


def _fed(flow: Flow, plan: Plan, node: str) -> bool:
    """Whether every replica of a stage gets items."""
    return all(producers(flow, plan, node, rank) for rank in range(plan.places[node].replicas))


def _together(flow: Flow, plan: Plan) -> list[tuple[str, ...]]:
    """Nodes by worker: a service and all its callers that are placed alike share one."""
    group = {node.name: {node.name} for node in flow.nodes}
    for edge in flow.edges:
        if isinstance(edge, Call) and plan.places[edge.src] == plan.places[edge.dst]:
            joined = group[edge.src] | group[edge.dst]
            group.update(dict.fromkeys(joined, joined))
    seen: list[set[str]] = []
    for members in group.values():
        if members not in seen:
            seen.append(members)
    return [tuple(node.name for node in flow.nodes if node.name in members) for members in seen]


def _used(flow: Flow, plan: Plan, node: str, rank: int) -> set[tuple[str, int]]:
    """A replica of a node and the replicas of the services that it reaches by calls."""
    calls = [(edge.dst, target) for edge in flow.calls_of(node) for target in targets(edge, rank, plan)]
    return {(node, rank)}.union(*(_used(flow, plan, name, target) for name, target in calls))


def _leases(flow: Flow, plan: Plan, cluster: Cluster) -> dict[tuple[str, int], tuple[str, ...]]:
    """Devices on which a replica of a stage must take turns: those it (or a service it calls) shares with a stage that
    is not its own."""
    devices: dict[tuple[str, int], set[str]] = {}
    for stage in flow.stages:
        for rank in range(plan.places[stage.name].replicas):
            used = _used(flow, plan, stage.name, rank)
            devices[stage.name, rank] = {d for name, at in used for d in plan.places[name].workers(cluster)[at]}
    leases = {}
    for (stage_name, rank), own in devices.items():
        others = {d for (other, _), theirs in devices.items() if other != stage_name for d in theirs}
        if own & others:
            leases[stage_name, rank] = tuple(sorted(own & others))
    return leases
