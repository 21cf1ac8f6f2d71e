"""Flows and clusters that the tests share, and strategies that draw sound flows."""

from __future__ import annotations

from hypothesis import strategies as st

from m2flow.flow.cluster import Cluster, Device
from m2flow.flow.graph import Call, Edge, Flow, Node, Stream, Weights

PPO = Flow(
    "ppo",
    nodes=(
        Node("rollout", trigger="step"),
        Node("policy", kind="service"),
        Node("learner", batch=64),
        Node("evaluator", trigger="evaluate"),
    ),
    edges=(
        Call("rollout", "policy"),
        Stream("rollout", "learner"),
        Weights("learner", "policy"),
        Call("evaluator", "policy"),
    ),
)


def cores(count: int, memory: int | None = None) -> Cluster:
    return Cluster(tuple(Device(f"cpu:{i}", memory=memory) for i in range(count)), "laptop")


@st.composite
def flows(draw: st.DrawFn) -> Flow:
    """Sound flows: streams run from earlier to later stages, services are called, weights go to called services."""
    stages = [f"s{i}" for i in range(draw(st.integers(1, 5)))]
    services = [f"v{i}" for i in range(draw(st.integers(0, 3)))]
    edges: list[Edge] = []
    for i, src in enumerate(stages):
        for dst in stages[i + 1 :]:
            if draw(st.booleans()):
                edges.append(Stream(src, dst, channel=draw(st.sampled_from(["fifo", "replay"]))))
    for i, service in enumerate(services):
        callers = draw(st.lists(st.sampled_from([*stages, *services[:i]]), min_size=1, max_size=3, unique=True))
        edges += [Call(caller, service) for caller in callers]
        if draw(st.booleans()):
            edges.append(Weights(draw(st.sampled_from(stages)), service))
    fed = {edge.dst for edge in edges if isinstance(edge, Stream)}
    nodes = [
        Node(
            name,
            trigger=None if name in fed else draw(st.sampled_from(["step", "evaluate"])),
            batch=draw(st.none() | st.integers(1, 99)),
            scope=draw(st.sampled_from(["group", "batch"])),
            unknown_denominators=draw(st.integers(0, 3)),
            resident=draw(st.booleans()),
            note=draw(st.sampled_from(["", "a note: with a colon", "# hash"])),
        )
        for name in stages
    ]
    nodes += [Node(name, kind="service", labels=draw(st.sampled_from([(), ("big",)]))) for name in services]
    return Flow(draw(st.sampled_from(["a", "flow-1"])), tuple(draw(st.permutations(nodes))), tuple(edges))
