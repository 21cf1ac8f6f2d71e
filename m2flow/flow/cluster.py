"""A Cluster: which devices there are. A value; looking at the real machine is the runtime's business.

Devices are named "kind:name": "cpu:0", "gpu:1", "fake:3", "robot:arm". "cpu:0-3" is short for four of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from m2flow.flow.text import Invalid, dump_yaml, items, load_yaml, mapping, names, nearest, number, read, text

_ID = re.compile(r"([A-Za-z_][A-Za-z0-9_.]*):([A-Za-z0-9_.]+)")
_RANGE = re.compile(r"([A-Za-z_][A-Za-z0-9_.]*):(\d+)-(\d+)")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class ClusterError(Invalid):
    """A cluster that makes no sense, or a device that it lacks; lists every problem."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device. `memory` in bytes (None: unknown, not checked), `speed` relative to 1.0, `settings` how to reach it.

    Example: `Device("robot:arm", labels=("franka",), settings={"ip": "10.0.0.2"})`.
    """

    id: str
    kind: str = ""  # the part of `id` before the colon; may be left out
    memory: int | None = None
    speed: float = 1.0
    labels: tuple[str, ...] = ()
    host: str = "localhost"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        match = _ID.fullmatch(self.id)
        if match is None:
            raise ValueError(f"device id {self.id!r}: expected kind:name, for instance cpu:0 or robot:arm")
        if self.kind not in ("", match[1]):
            raise ValueError(f"device {self.id}: kind {self.kind!r} does not agree with the id; leave it out")
        if self.memory is not None and self.memory < 0:
            raise ValueError(f"device {self.id}: memory must be at least 0 bytes, got {self.memory}")
        if not self.speed > 0:
            raise ValueError(f"device {self.id}: speed must be above 0, got {self.speed}")
        object.__setattr__(self, "kind", match[1])
        object.__setattr__(self, "labels", tuple(self.labels))

    def has(self, label: str) -> bool:
        """Whether it carries a label; its kind and its id count as labels."""
        return label in self.labels or label in (self.kind, self.id)


@dataclass(frozen=True, slots=True)
class Cluster:
    """All devices that plans may name."""

    devices: tuple[Device, ...]
    name: str = "cluster"

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(self.devices))
        ids = self.ids
        twice = sorted({i for i in ids if ids.count(i) > 1})
        if twice:
            raise ClusterError(f"cluster {self.name!r}", [f"device {i} is given twice" for i in twice])

    @property
    def ids(self) -> tuple[str, ...]:
        """Device ids in order."""
        return tuple(device.id for device in self.devices)

    def device(self, name: str) -> Device:
        """The device with the id `name`."""
        for device in self.devices:
            if device.id == name:
                return device
        raise ClusterError(f"cluster {self.name!r}", [self.missing([name])])

    def labelled(self, label: str) -> tuple[str, ...]:
        """Ids of the devices that carry `label` (their kind counts as one)."""
        return tuple(device.id for device in self.devices if device.has(label))

    def missing(self, wanted: Iterable[str]) -> str:
        """What is wanted against what is there, in words; empty if all of it is there."""
        wanted = list(wanted)
        lacking = [i for i in wanted if i not in self.ids]
        if not lacking:
            return ""
        kinds = {i.partition(":")[0] for i in lacking}
        there = [i for i in self.ids if i.partition(":")[0] in kinds]
        if there:
            return f"wants {compress(wanted)}, available is {compress(there)} (no {compress(lacking)})"
        others = {i.partition(":")[0] for i in self.ids}
        hint = nearest(min(kinds), sorted(others))
        return f"wants {compress(wanted)}, there is no {' or '.join(sorted(kinds))}{hint}"

    def to_yaml(self) -> str:
        """YAML that `from_yaml` reads back to an equal cluster; devices that differ only by number share an entry."""
        groups: list[list[Device]] = []
        for device in self.devices:
            last = groups[-1] if groups else []
            alike = bool(last) and replace(device, id=last[0].id, kind="") == last[0]
            if alike and "," not in compress([*(d.id for d in last), device.id]):
                last.append(device)
            else:
                groups.append([device])
        return dump_yaml({"cluster": self.name, "devices": [_entry(group) for group in groups]})

    @staticmethod
    def from_yaml(source: str) -> Cluster:
        """Read a cluster. Unknown keys are refused with the nearest name."""
        return _parse(source)


def expand(devices: Iterable[str]) -> tuple[str, ...]:
    """Ids with ranges written out: ("cpu:0-2", "robot:arm") -> ("cpu:0", "cpu:1", "cpu:2", "robot:arm")."""
    out: list[str] = []
    for item in devices:
        match = _RANGE.fullmatch(item)
        if match is None:
            if not _ID.fullmatch(item):
                raise ValueError(f"device {item!r}: expected kind:name or kind:first-last, such as cpu:0 or cpu:0-3")
            out.append(item)
            continue
        first, last = int(match[2]), int(match[3])
        if last < first:
            raise ValueError(f"device range {item!r} is empty; write {match[1]}:{last}-{first}")
        out += [f"{match[1]}:{i}" for i in range(first, last + 1)]
    return tuple(out)


def compress(devices: Sequence[str]) -> str:
    """The opposite of `expand`, for reading: "cpu:0-2,robot:arm". Runs of numbers are joined in the order given."""
    runs: list[list[str]] = []
    for item in devices:
        kind, _, name = item.partition(":")
        if runs and name.isdigit():
            before, _, number_before = runs[-1][-1].partition(":")
            if before == kind and number_before.isdigit() and int(name) == int(number_before) + 1:
                runs[-1].append(item)
                continue
        runs.append([item])
    return ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1].partition(':')[2]}" for run in runs)


def memory_bytes(value: Any) -> int:
    """Bytes from a whole number or from text such as "80GiB" or "512 MB"."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"([0-9.]+)\s*([A-Za-z]*)", text(value).strip())
    if match is None or match[2] not in _UNITS:
        units = ", ".join(unit for unit in _UNITS if unit)
        raise ValueError(f"expected bytes or a size such as 80GiB (units: {units}), got {value!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def _entry(group: Sequence[Device]) -> dict[str, Any]:
    out: dict[str, Any] = {"id": compress([device.id for device in group])}
    for item in fields(Device):
        value = getattr(group[0], item.name)
        if item.name not in ("id", "kind") and value not in (item.default, {}):
            out[item.name] = list(value) if isinstance(value, tuple) else value
    return out


def _parse(source: str) -> Cluster:
    problems: list[str] = []
    top = read(load_yaml(source), {"cluster": text, "devices": items}, "cluster file", problems)
    if "devices" not in top and not problems:
        problems.append("cluster file: 'devices' is missing")
    readers = {"id": text, "memory": memory_bytes, "speed": number, "labels": names, "host": text, "settings": mapping}
    devices: list[Device] = []
    for entry in top.get("devices", ()):
        where = f"devices.{entry.get('id', '?')}" if isinstance(entry, dict) else "devices"
        values = read(entry, readers, where, problems)
        if "id" not in values:
            problems.append(f"{where}: 'id' is missing")
            continue
        try:
            devices += [Device(**{**values, "id": i}) for i in expand([values["id"]])]
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ClusterError(f"cluster {top.get('cluster', '?')!r}", problems)
    return Cluster(tuple(devices), top.get("cluster", "cluster"))
