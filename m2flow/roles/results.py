"""What an evaluation says: the protocol, its numbers with intervals, and every episode. Stored together, as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from m2flow.algorithms.statistics import mean_interval, wilson
from m2flow.types import EpisodeResult


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a number was measured by. Two numbers compare only if their protocols are equal.

    Example: suite "MetaWorld/Reach-v3", seeds 1000000..1000049, horizon 500, success at any step, deterministic policy.
    """

    suite: str
    options: Mapping[str, Any]  # the environment's config
    seeds: tuple[int, ...]
    horizon: int
    success: Literal["once", "end"] = "once"
    deterministic: bool = True
    noise_seed: int = 0  # of a sampling policy; its noise is keyed by (this, seed of the episode, decision)

    @property
    def count(self) -> int:
        """Number of episodes."""
        return len(self.seeds)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "suite": self.suite,
            "options": json.loads(json.dumps(dict(self.options), default=_plain)),
            "seeds": list(self.seeds),
            "count": self.count,
            "horizon": self.horizon,
            "success": self.success,
            "policy": "deterministic" if self.deterministic else "sampled",
            "noise_seed": self.noise_seed,
        }

    @staticmethod
    def from_dict(row: Mapping[str, Any]) -> Evaluation:
        """The inverse of `to_dict`."""
        return Evaluation(
            suite=row["suite"],
            options=row["options"],
            seeds=tuple(row["seeds"]),
            horizon=int(row["horizon"]),
            success=row["success"],
            deterministic=row["policy"] == "deterministic",
            noise_seed=int(row["noise_seed"]),
        )


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The numbers of an evaluation with their 95 % intervals, the protocol, and every episode.

    `metrics` and `intervals` have the keys eval/success, eval/success_once, eval/success_at_end (where the environment
    knows success), eval/return, eval/length; `metrics` also has eval/episodes.
    """

    protocol: Evaluation
    metrics: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    episodes: tuple[EpisodeResult, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "protocol": self.protocol.to_dict(),
            "metrics": dict(self.metrics),
            "intervals": {name: list(pair) for name, pair in self.intervals.items()},
            "episodes": [dataclasses.asdict(episode) for episode in self.episodes],
        }

    def to_json(self) -> str:
        """JSON text; a bound that does not exist (one episode) is null."""

        def plain(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: plain(item) for key, item in value.items()}
            if isinstance(value, list | tuple):
                return [plain(item) for item in value]
            return None if isinstance(value, float) and not math.isfinite(value) else value

        return json.dumps(plain(self.to_dict()), indent=1)

    @staticmethod
    def from_json(text: str) -> EvaluationResult:
        """The inverse of `to_json`."""
        row = json.loads(text)
        known = [math.nan if value is None else value for pair in row["intervals"].values() for value in pair]
        pairs = zip(known[::2], known[1::2], strict=True)
        return EvaluationResult(
            Evaluation.from_dict(row["protocol"]),
            row["metrics"],
            dict(zip(row["intervals"], pairs, strict=True)),
            tuple(EpisodeResult(**episode) for episode in row["episodes"]),
        )


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy as such; anything else that JSON does not know in its own words."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def summarise(protocol: Evaluation, episodes: Iterable[EpisodeResult]) -> EvaluationResult:
    """Means and 95 % intervals (Wilson for rates, Student's t for the others) over the episodes of all workers.

    Raises:
        ValueError: a seed of the protocol is missing, or there twice.
    """
    ordered = tuple(sorted(episodes, key=lambda episode: episode.lane))
    got = [episode.seed for episode in ordered]
    if got != list(protocol.seeds):
        missing = sorted(set(protocol.seeds) - set(got))
        extra = sorted({seed for seed in got if got.count(seed) > 1} | (set(got) - set(protocol.seeds)))
        raise ValueError(f"evaluation of {protocol.suite}: seeds missing {missing[:8]}, twice or foreign {extra[:8]}")
    metrics: dict[str, float] = {}
    intervals: dict[str, tuple[float, float]] = {}
    for name in ("success_once", "success_at_end"):
        values = [getattr(episode, name) for episode in ordered]
        if None not in values:
            metrics[f"eval/{name}"] = sum(values) / len(values)
            intervals[f"eval/{name}"] = wilson(successes=sum(values), trials=len(values))
    headline = "eval/success_once" if protocol.success == "once" else "eval/success_at_end"
    if headline in metrics:
        metrics["eval/success"], intervals["eval/success"] = metrics[headline], intervals[headline]
    for name, attribute in (("eval/return", "ret"), ("eval/length", "length")):
        mean, low, high = mean_interval([float(getattr(episode, attribute)) for episode in ordered])
        metrics[name], intervals[name] = mean, (low, high)
    metrics["eval/episodes"] = float(len(ordered))
    return EvaluationResult(protocol, metrics, intervals, ordered)
