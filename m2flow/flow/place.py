"""A Plan: where a flow runs, in what slices, in whose turn. One value; hand-writable, printable, comparable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from m2flow.flow.cluster import Cluster, compress, expand
from m2flow.flow.plan_yaml import parse
from m2flow.flow.text import Invalid, dump_yaml, load_yaml, names


class PlanError(Invalid):
    """A plan that does not fit its flow or cluster; lists every problem."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one node sits: `replicas` independent copies of `ranks` workers that act as one.

    Devices are ids or ranges ("cpu:0-3"), written out here; or none, and a `label`: then all devices that carry it (a
    kind, "cpu", counts as a label). `process`: spawned and pinned to the devices, else threads of the driver's process.
    `offload`: leaves the devices when its turn ends. Example: `Place(("cpu:0-3",), replicas=2, process=True)`.
    """

    devices: tuple[str, ...] = ()
    replicas: int = 1
    ranks: int = 1
    process: bool = False
    label: str = ""
    offload: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", expand(names(self.devices)))

    def on(self, cluster: Cluster) -> tuple[str, ...]:
        """The devices, those of `label` where none are named."""
        return self.devices if self.devices or not self.label else cluster.labelled(self.label)

    def workers(self, cluster: Cluster) -> tuple[tuple[str, ...], ...]:
        """Devices of every worker, replica by replica and rank by rank. Empty if they cannot be shared out evenly."""
        devices, size = self.on(cluster), self.replicas * self.ranks
        if not devices or size < 1 or (size % len(devices) and len(devices) % size):
            return ()
        if size >= len(devices):
            return tuple((devices[i % len(devices)],) for i in range(size))
        each = len(devices) // size
        return tuple(devices[i * each : (i + 1) * each] for i in range(size))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, defaults left out."""
        out: dict[str, Any] = {"devices": compress(self.devices).split(",")} if self.devices else {}
        if len(out.get("devices", ())) == 1:
            out["devices"] = out["devices"][0]
        for part in fields(self):
            value = getattr(self, part.name)
            if part.name != "devices" and value != part.default:
                out[part.name] = value
        return out


@dataclass(frozen=True, slots=True)
class Plan:
    """Places by node; chunks by stream "src->dst" (weight that travels together; none: as it comes); shifts: stages of
    different shifts take turns on devices that they share (a service works in the shifts of its callers, and may be
    named there); sub-batches by call "caller->service"; lag (0: on-policy).

    Example: `shifts=(("rollout", "policy"), ("learner",))`.
    """

    places: Mapping[str, Place]
    chunks: Mapping[str, int] = field(default_factory=dict)
    shifts: tuple[tuple[str, ...], ...] = ()
    sub_batches: Mapping[str, int] = field(default_factory=dict)
    lag: int = 0
    name: str = "plan"

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", dict(self.places))
        object.__setattr__(self, "shifts", tuple(tuple(group) for group in self.shifts))
        for key in ("chunks", "sub_batches"):
            tidy = {"->".join(_ends(edge)): value for edge, value in getattr(self, key).items()}
            object.__setattr__(self, key, tidy)

    def resolve(self, cluster: Cluster) -> Plan:
        """The same plan with labels turned into device ids."""
        return replace(self, places={name: replace(p, devices=p.on(cluster)) for name, p in self.places.items()})

    def to_yaml(self) -> str:
        """YAML that `from_yaml` reads back to an equal plan. Defaults are left out."""
        return dump_yaml(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, as YAML holds it."""
        out: dict[str, Any] = {"plan": self.name, "lag": self.lag}
        out["places"] = {name: place.to_dict() for name, place in self.places.items()}
        if self.chunks:
            out["chunks"] = {spaced(key): value for key, value in self.chunks.items()}
        if self.shifts:
            out["shifts"] = [list(group) for group in self.shifts]
        if self.sub_batches:
            out["sub_batches"] = {spaced(key): value for key, value in self.sub_batches.items()}
        return out

    @staticmethod
    def from_yaml(source: str) -> Plan:
        """Read a plan; see plan_yaml.py for the form. Unknown keys are refused with the nearest name."""
        return Plan.from_dict(load_yaml(source))

    @staticmethod
    def from_dict(data: Any) -> Plan:
        """Read a plan from plain values, such as a recipe's `plan` section."""
        problems: list[str] = []
        values = parse(data, problems)
        if problems:
            raise PlanError(f"plan {values.get('name', '?')!r}", problems)
        places = {name: Place(**place) for name, place in values.pop("places").items()}
        return Plan(places, **values)


def spaced(key: str) -> str:
    """ "src->dst" as people write it: "src -> dst"."""
    return " -> ".join(_ends(key))


def _ends(key: str) -> list[str]:
    return [part.strip() for part in key.split("->")]
