"""The one registry of metrics: what a name means, its unit, and how parts of it are combined.

Two rules keep numbers honest. Parts of one replica (several reports in a step) combine by `reduce`; replicas combine by
`across`, which is the same unless stated. So a sum grows with replicas only where the registry says that it counts
something that replicas add up (episodes, environment steps), while seconds of replicas that run side by side do not.

    combine([Metric(3.0, weight=2), Metric(6.0, weight=1)])        -> Metric(4.0, "mean", weight=3)
    reduce(enumerate([{"rollout/env_steps": Metric(64, "sum")}] * 2)) -> {"rollout/env_steps": 128.0}
    reduce(enumerate([{"time/rollout_s": Metric(2.0, "sum")}] * 2))   -> {"time/rollout_s": 2.0}
"""

from __future__ import annotations

import fnmatch
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from m2flow.observe.catalogue import CATALOGUE
from m2flow.types import Metric

Reduce: TypeAlias = Literal["mean", "sum", "min", "max", "last"]
REDUCTIONS: tuple[Reduce, ...] = ("mean", "sum", "min", "max", "last")
STRICT_VARIABLE = "M2FLOW_STRICT_METRICS"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricInfo:
    """What is known about a metric name. `*` in a name stands for any text, also with slashes in it."""

    name: str
    unit: str
    reduce: Reduce
    about: str
    across: Reduce | None = None  # how replicas combine; None: like `reduce`

    def __post_init__(self) -> None:
        if "/" not in self.name:
            raise ValueError(f"name: {self.name!r} has no namespace; write for instance 'train/{self.name}'")
        _reduction(self.reduce)
        _reduction(self.across or self.reduce)


class MetricError(ValueError):
    """A metric name nobody declared, or one that is combined in another way than declared."""


class Registry:
    """Metric names and their meaning. An exact name wins over a pattern, a longer pattern over a shorter one.

    `strict` makes a wrong metric an error (tests); else it is one warning per name (production: a number with a new
    name is no reason to lose a run). None: strict if the environment variable M2FLOW_STRICT_METRICS is set to 1.
    """

    def __init__(self, infos: Iterable[MetricInfo] = (), strict: bool | None = None) -> None:
        self._exact: dict[str, MetricInfo] = {}
        self._patterns: list[MetricInfo] = []
        self._found: dict[str, MetricInfo] = {}
        self._warned: set[str] = set()
        self._strict = strict
        for info in infos:
            self.declare(info)

    @property
    def strict(self) -> bool:
        """Whether a wrong metric is an error."""
        return os.environ.get(STRICT_VARIABLE) == "1" if self._strict is None else self._strict

    def declare(self, info: MetricInfo) -> MetricInfo:
        """Add a metric. Declaring a name again in another way is an error."""
        known = next((p for p in self._patterns if p.name == info.name), self._exact.get(info.name))
        if known is not None and known != info:
            raise MetricError(f"metric {info.name!r} is already declared as {known}")
        if known is None and "*" in info.name:
            self._patterns.append(info)
            self._patterns.sort(key=lambda p: -len(p.name))
        elif known is None:
            self._exact[info.name] = info
        self._found.clear()
        return info

    def find(self, name: str) -> MetricInfo | None:
        """What is declared for a name, or None."""
        info = self._exact.get(name) or self._found.get(name)
        if info is None:
            info = next((p for p in self._patterns if fnmatch.fnmatchcase(name, p.name)), None)
            if info is not None:
                self._found[name] = info
        return info

    def check(self, name: str, metric: Metric | None = None) -> MetricInfo:
        """The declaration of a name; for an unknown name an error (strict) or a warning and a plain declaration."""
        info = self.find(name)
        if info is None:
            self._complain(
                name,
                f"metric {name!r} is not declared; add it to m2flow/observe/catalogue.py, or declare it with"
                " METRICS.declare(MetricInfo(...))",
            )
            given: Reduce = metric.reduce if metric else "last"
            info = MetricInfo(
                name=name if "/" in name else f"other/{name}", unit="", reduce=given, about="not declared"
            )
        elif metric is not None and metric.reduce != info.reduce:
            self._complain(
                name,
                f"metric {name!r} came with reduce={metric.reduce!r}, declared is {info.reduce!r};"
                " the declaration is used",
            )
        return info

    def _complain(self, name: str, text: str) -> None:
        if self.strict:
            raise MetricError(text)
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(text, stacklevel=4)


def _total(values: Sequence[float]) -> float:
    """A sum that does not depend on order for finite values; infinities and NaN as IEEE adds them."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def combine(metrics: Sequence[Metric]) -> Metric:
    """One metric from its parts, all with the same reduction. Associative up to rounding.

    A part of weight 0 stands for nothing and its value is never read. Mean, min, max and last over nothing are NaN with
    weight 0; a sum over nothing is 0. A NaN with weight counts, and makes the result NaN. Raises ValueError for parts
    with different reductions or a negative or non-finite weight.
    """
    if not metrics:
        return Metric(math.nan, "mean", 0.0)
    how = metrics[0].reduce
    for metric in metrics:
        if metric.reduce != how:
            raise ValueError(f"cannot combine a metric with reduce={how!r} and one with reduce={metric.reduce!r}")
        if not (metric.weight >= 0 and math.isfinite(metric.weight)):
            raise ValueError(f"weight: {metric.weight} of a metric; expected a finite number >= 0")
    parts = [m for m in metrics if m.weight > 0]
    weight = _total([m.weight for m in parts])
    values = [float(m.value) for m in parts]
    if not parts:
        return Metric(0.0 if how == "sum" else math.nan, how, 0.0)
    if len(parts) == 1:
        return Metric(values[0], how, weight)
    if how == "mean":
        return Metric(_total([v * m.weight for v, m in zip(values, parts, strict=True)]) / weight, how, weight)
    if how == "sum":
        return Metric(_total(values), how, weight)
    if how == "last":
        return Metric(values[-1], how, weight)
    if any(map(math.isnan, values)):
        return Metric(math.nan, how, weight)
    return Metric(min(values) if how == "min" else max(values), how, weight)


def reduce(
    reports: Iterable[tuple[object, Mapping[str, Metric]]], registry: Registry | None = None
) -> dict[str, float]:
    """One number per metric name from the reports of a step, each with its sender, in order of first appearance.

    What one sender (a replica) said combines by the declared `reduce`, senders by the declared `across`. The
    declaration decides also where a Metric says otherwise.
    """
    parts: dict[str, dict[object, list[Metric]]] = {}
    for sender, row in reports:
        for name, metric in row.items():
            parts.setdefault(name, {}).setdefault(sender, []).append(metric)
    return {name: _reduced(name, list(by.values()), registry or METRICS) for name, by in parts.items()}


def _reduced(name: str, by_replica: Sequence[Sequence[Metric]], registry: Registry) -> float:
    infos = [registry.check(name, metric) for metrics in by_replica for metric in metrics]
    own, across = infos[0].reduce, infos[0].across or infos[0].reduce
    each = [combine([Metric(m.value, own, m.weight) for m in metrics]) for metrics in by_replica]
    return combine([Metric(m.value, across, m.weight) for m in each]).value


def _catalogue() -> list[MetricInfo]:
    infos = []
    for line in filter(None, map(str.strip, CATALOGUE.splitlines())):
        name, unit, how, about = (part.strip() for part in line.split("|"))
        own, _, across = how.partition("/")
        infos.append(
            MetricInfo(name=name, unit=unit, reduce=_reduction(own), across=_reduction(across or own), about=about)
        )
    return infos


def _reduction(word: str) -> Reduce:
    for known in REDUCTIONS:
        if known == word:
            return known
    raise ValueError(f"reduce: {word!r}; allowed: {', '.join(REDUCTIONS)}")


METRICS = Registry(_catalogue())
