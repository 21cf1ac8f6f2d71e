"""A Flow: what happens, as a small typed graph of stages and services. A value: nothing runs here.

    flow = Flow(
        "ppo",
        nodes=(
            Node("rollout", trigger="step"),
            Node("policy", kind="service"),
            Node("learner", batch=64),
        ),
        edges=(Stream("rollout", "learner"), Call("rollout", "policy"), Weights("learner", "policy")),
    )

Three kinds of edge: a stream carries items in order and may be cut in time or space, though never through its atom; a
call is question and answer inside an episode; weights go with a version from a trainer to a service.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal, TypeAlias

from m2flow.flow.flow_yaml import parse
from m2flow.flow.text import Change, Invalid, changes, dump_yaml, load_yaml, nearest

KINDS = ("stage", "service")
TRIGGERS = ("step", "evaluate")
SCOPES = ("group", "batch")
CHANNELS = ("fifo", "replay")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")


class FlowError(Invalid):
    """A flow that makes no sense; lists every problem."""


@dataclass(frozen=True, slots=True)
class Node:
    """A stage (turns items into items) or a service (answers calls).

    `trigger` says which driver tick wakes a stage that has no incoming stream. `batch` is the weight of items that one
    optimiser batch of this node needs (lanes, groups, ...); `scope` and `unknown_denominators` say whether less can be
    worked on: "batch" needs whole-batch statistics first, and only one denominator may be unknown in advance.
    `atom` is what the node needs whole. `labels` name the hardware it cannot do without. `resident`: it can leave its
    devices and come back (see `protocols.Resident`), so that a plan may off-load it.
    """

    name: str
    kind: Literal["stage", "service"] = "stage"
    trigger: Literal["step", "evaluate"] | None = None
    atom: str = "trajectory"
    scope: Literal["group", "batch"] = "batch"
    batch: int | None = None
    unknown_denominators: int = 1
    resident: bool = False
    labels: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", tuple(self.labels))


@dataclass(frozen=True, slots=True)
class _Joined:
    src: str
    dst: str

    @property
    def key(self) -> str:
        """ "src->dst", as plans name it."""
        return f"{self.src}->{self.dst}"


@dataclass(frozen=True, slots=True)
class Stream(_Joined):
    """Ordered items from stage to stage. `atom` is never cut; `channel` is the rule by which items are handed out: as
    they came, or drawn by a sampling rule."""

    atom: str = "trajectory"
    channel: Literal["fifo", "replay"] = "fifo"


@dataclass(frozen=True, slots=True)
class Call(_Joined):
    """Question and answer inside an episode: `src` awaits a handle of the service `dst`."""


@dataclass(frozen=True, slots=True)
class Weights(_Joined):
    """Versioned weights from the training stage `src` to the service `dst`."""


Edge: TypeAlias = Stream | Call | Weights


@dataclass(frozen=True, slots=True)
class Flow:
    """Nodes and edges. `check` before use: helpers assume a sound flow."""

    name: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(self.nodes))
        object.__setattr__(self, "edges", tuple(self.edges))

    # ---- reading

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all nodes."""
        return tuple(node.name for node in self.nodes)

    @property
    def stages(self) -> tuple[Node, ...]:
        """Nodes that turn items into items."""
        return tuple(node for node in self.nodes if node.kind == "stage")

    @property
    def services(self) -> tuple[Node, ...]:
        """Nodes that answer calls."""
        return tuple(node for node in self.nodes if node.kind == "service")

    @property
    def streams(self) -> tuple[Stream, ...]:
        """All stream edges."""
        return tuple(edge for edge in self.edges if isinstance(edge, Stream))

    @property
    def calls(self) -> tuple[Call, ...]:
        """All call edges."""
        return tuple(edge for edge in self.edges if isinstance(edge, Call))

    @property
    def weights(self) -> tuple[Weights, ...]:
        """All weights edges."""
        return tuple(edge for edge in self.edges if isinstance(edge, Weights))

    def node(self, name: str) -> Node:
        """The node called `name`."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise FlowError(f"flow {self.name!r}", [f"no node {name!r}{nearest(name, self.names)}"])

    def sources(self, trigger: str | None = None) -> tuple[Node, ...]:
        """Stages without an incoming stream; only those woken by `trigger`, if given."""
        fed = {edge.dst for edge in self.streams}
        return tuple(n for n in self.stages if n.name not in fed and (trigger is None or n.trigger == trigger))

    def sinks(self, trigger: str | None = None) -> tuple[Node, ...]:
        """Stages without an outgoing stream; only those that a `trigger` reaches, if given."""
        feeding = {edge.src for edge in self.streams}
        reached = self.downstream(n.name for n in self.sources(trigger))
        return tuple(n for n in self.stages if n.name not in feeding and n.name in reached)

    def downstream(self, starts: Iterable[str]) -> frozenset[str]:
        """`starts` and every stage that streams lead to from them."""
        seen = set(starts)
        todo = list(seen)
        while todo:
            here = todo.pop()
            new = [edge.dst for edge in self.streams if edge.src == here and edge.dst not in seen]
            seen.update(new)
            todo += new
        return frozenset(seen)

    def streams_into(self, name: str) -> tuple[Stream, ...]:
        """Streams that end at this stage."""
        return tuple(edge for edge in self.streams if edge.dst == name)

    def calls_of(self, name: str) -> tuple[Call, ...]:
        """Calls that this node makes."""
        return tuple(edge for edge in self.calls if edge.src == name)

    def callers_of(self, name: str) -> tuple[Call, ...]:
        """Calls that this service answers."""
        return tuple(edge for edge in self.calls if edge.dst == name)

    def weights_into(self, name: str) -> tuple[Weights, ...]:
        """Weights edges that end at this service."""
        return tuple(edge for edge in self.weights if edge.dst == name)

    def order(self) -> tuple[str, ...]:
        """Stages, producers before consumers, ties in the order of `nodes`. Stages on a circle are left out."""
        waiting = {n.name: {e.src for e in self.streams_into(n.name)} for n in self.stages}
        out: list[str] = []
        while True:
            free = next((name for name, needs in waiting.items() if needs <= set(out)), None)
            if free is None:
                return tuple(out)
            out.append(free)
            del waiting[free]

    # ---- checking and comparing

    def check(self) -> None:
        """Raise FlowError with every problem, or return."""
        problems = [*_node_problems(self), *_edge_problems(self)]
        if not problems:  # the shape of a graph means something only when its edges do
            problems = _shape_problems(self)
        if problems:
            raise FlowError(f"flow {self.name!r}", problems)

    def diff(self, other: Flow) -> tuple[Change, ...]:
        """What changes from this flow to `other`."""
        out: list[Change] = []
        mine, theirs = {n.name: n for n in self.nodes}, {n.name: n for n in other.nodes}
        for name in [*mine, *(n for n in theirs if n not in mine)]:
            if name in mine and name in theirs:
                out += changes(name, _values(mine[name]), _values(theirs[name]))
            else:
                out.append(_came_or_went(self, "node", name, came=name in theirs))
        ours, others = {_edge_name(e): e for e in self.edges}, {_edge_name(e): e for e in other.edges}
        for name in [*ours, *(e for e in others if e not in ours)]:
            if name in ours and name in others:
                out += changes(name, _values(ours[name]), _values(others[name]))
            else:
                out.append(_came_or_went(self, "edge", name, came=name in others))
        return tuple(out)

    # ---- as text

    def to_yaml(self) -> str:
        """YAML that `from_yaml` reads back to an equal flow. Defaults are left out."""
        nodes = {node.name: _given(node, skip=("name",)) for node in self.nodes}
        edges = [
            {type(edge).__name__.lower(): f"{edge.src} -> {edge.dst}", **_given(edge, skip=("src", "dst"))}
            for edge in self.edges
        ]
        return dump_yaml({"flow": self.name, "nodes": nodes, **({"edges": edges} if edges else {})})

    @staticmethod
    def from_yaml(source: str) -> Flow:
        """Read a flow; see flow_yaml.py for the form. Unknown keys are refused with the nearest name."""
        problems: list[str] = []
        values = parse(load_yaml(source), problems)
        if problems:
            raise FlowError(f"flow {values['name']!r}", problems)
        kinds = {"stream": Stream, "call": Call, "weights": Weights}
        edges = tuple(kinds[kind](**edge) for kind, edge in values["edges"])
        return Flow(values["name"], tuple(Node(**node) for node in values["nodes"]), edges)


def _given(item: Node | Edge, skip: tuple[str, ...]) -> dict[str, Any]:
    """Fields that are not at their default, as plain values."""
    out = {}
    for part in fields(item):
        value = getattr(item, part.name)
        if part.name not in skip and (part.default is MISSING or value != part.default):
            out[part.name] = list(value) if isinstance(value, tuple) else value
    return out


def _came_or_went(flow: Flow, what: str, name: str, *, came: bool) -> Change:
    return Change(f"flow {flow.name}", what, None if came else name, name if came else None)


def _values(item: Node | Edge) -> dict[str, Any]:
    return {f.name: getattr(item, f.name) for f in fields(item)}


def _edge_name(edge: Edge) -> str:
    return f"{type(edge).__name__.lower()} {edge.src} -> {edge.dst}"


def _node_problems(flow: Flow) -> list[str]:
    out = [] if flow.nodes else ["has no nodes"]
    seen: set[str] = set()
    for node in flow.nodes:
        if node.name in seen:
            out.append(f"node {node.name!r} is given twice")
        seen.add(node.name)
        if not isinstance(node.name, str) or not _NAME.fullmatch(node.name):
            out.append(f"node {node.name!r}: a name is letters, digits, '_' and '.', and starts with a letter or '_'")
        for key, value, allowed in (
            ("kind", node.kind, KINDS),
            ("scope", node.scope, SCOPES),
            ("trigger", node.trigger, (*TRIGGERS, None)),
        ):
            if value not in allowed:
                out.append(f"{node.name}: {key} {value!r} is not one of {', '.join(map(str, allowed))}")
        if node.batch is not None and node.batch < 1:
            out.append(f"{node.name}: batch must be at least 1, got {node.batch}")
        if node.unknown_denominators < 0:
            out.append(f"{node.name}: unknown_denominators must be at least 0, got {node.unknown_denominators}")
        if node.kind == "service" and node.trigger is not None:
            out.append(f"{node.name}: a service answers calls and has no trigger; remove trigger {node.trigger!r}")
    return out


def _edge_problems(flow: Flow) -> list[str]:
    out: list[str] = []
    kinds = {node.name: node.kind for node in flow.nodes}
    seen: set[str] = set()
    for edge in flow.edges:
        name = _edge_name(edge)
        if name in seen:
            out.append(f"{name} is given twice")
        seen.add(name)
        unknown = [end for end in dict.fromkeys((edge.src, edge.dst)) if end not in kinds]
        out += [f"{name}: no node {end!r}{nearest(end, kinds)}" for end in unknown]
        if edge.src == edge.dst:
            out.append(f"{name}: a node cannot be joined to itself")
        if unknown or edge.src == edge.dst:
            continue
        src, dst = kinds[edge.src], kinds[edge.dst]
        if isinstance(edge, Stream):
            ends = [end for end in (edge.src, edge.dst) if kinds[end] == "service"]
            out += [f"{name}: {end!r} is a service; streams join stages" for end in ends]
            if edge.channel not in CHANNELS:
                out.append(f"{name}: channel {edge.channel!r}{nearest(str(edge.channel), CHANNELS)}")
            needs = flow.node(edge.dst).atom
            if dst == "stage" and edge.atom != needs:
                out.append(f"{name}: carries {edge.atom!r}, but {edge.dst} needs whole {needs!r}; make the two agree")
        elif isinstance(edge, Call) and dst != "service":
            out.append(f"{name}: {edge.dst!r} is a stage; only services answer calls")
        elif isinstance(edge, Weights):
            if dst != "service":
                out.append(f"{name}: {edge.dst!r} is a stage; weights go to services")
            if src != "stage":
                out.append(f"{name}: {edge.src!r} is a service; weights come from the stage that trains them")
    return out


def _shape_problems(flow: Flow) -> list[str]:
    out: list[str] = []
    fed = {edge.dst for edge in flow.streams}
    for node in flow.stages:
        if node.name in fed and node.trigger is not None:
            out.append(f"{node.name}: is woken by its incoming stream; remove trigger {node.trigger!r}")
        if node.name not in fed and node.trigger is None:
            out.append(f"{node.name}: nothing wakes it; give it a trigger ({' or '.join(TRIGGERS)}) or a stream")
    for node in flow.services:
        if not flow.callers_of(node.name):
            out.append(f"{node.name}: nobody calls this service; add a call to it or remove it")
        senders = [edge.src for edge in flow.weights_into(node.name)]
        if len(senders) > 1:
            out.append(f"{node.name}: gets weights from {' and '.join(senders)}; one service has one trainer")
    for what, edges in (("streams", flow.streams), ("calls", flow.calls)):
        cycle = _cycle(edges)
        if cycle:
            out.append(f"{what} run in a circle: {' -> '.join(cycle)}; every one of them would wait for the others")
    return out


def _cycle(edges: Iterable[Edge]) -> list[str]:
    """Names along one circle, the first repeated at the end; empty if there is none."""
    before: dict[str, set[str]] = {}
    for edge in edges:
        before.setdefault(edge.dst, set()).add(edge.src)
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        return [str(name) for name in error.args[1]]
    return []
