"""What an evaluation is measured by, and how its episodes become numbers with intervals."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from m2flow.intervals import mean_interval, wilson
from m2flow.types import Array, EpisodeResult, Evaluation, Metric


@dataclass(frozen=True, slots=True)
class EvalProtocol:
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


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy as such; anything else that JSON does not know in its own words."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def summarise(step: int, protocol: EvalProtocol, episodes: Iterable[EpisodeResult]) -> Evaluation:
    """Means and 95 % intervals (Wilson for rates, Student's t for the others) over the episodes of all workers.

    The numbers are eval/success, eval/success_once, eval/success_at_end (where the environment knows success),
    eval/return, eval/length and, without an interval, eval/episodes and, where the reward says so, eval/error_share and
    eval/timeout_share. Episodes are in the order of the protocol's seeds.

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
    for name in ("error", "timeout"):
        failed = [episode.info[name] > 0 for episode in ordered if name in episode.info]
        if failed:
            metrics[f"eval/{name}_share"] = sum(failed) / len(failed)
    metrics["eval/episodes"] = float(len(ordered))
    rows = [dataclasses.asdict(episode) for episode in ordered]
    return Evaluation(step, metrics, protocol.to_dict(), intervals, rows)


def components(scored: Sequence[Mapping[str, Array]]) -> dict[str, Metric]:
    """`reward/<name>` of what a reward gave; NaN stands for no score. `error` and `timeout` are counted."""
    metrics = {}
    for name in dict.fromkeys(name for scores in scored for name in scores):
        values = np.concatenate([scores[name] for scores in scored if name in scores]).astype(np.float64)
        known = values[~np.isnan(values)]
        if name in ("error", "timeout"):
            metrics[f"reward/{name}"] = Metric(float(known.sum()), "sum")
            metrics[f"reward/{name}_share"] = Metric(float(known.mean()), "mean", float(len(known)))
        elif len(known):
            metrics[f"reward/{name}"] = Metric(float(known.mean()), "mean", float(len(known)))
    return metrics


def succeeded(scores: Mapping[str, Array]) -> Array:
    """bool [attempts]: by a part's "<part>/correct", else by "correct", else a reward of 1. No score is no success."""
    name = next((n for n in scores if n.endswith("/correct")), "correct" if "correct" in scores else "reward")
    bar = 1.0 if name == "reward" else 0.5
    return np.nan_to_num(np.asarray(scores[name], np.float64), nan=0.0) >= bar - 1e-6
