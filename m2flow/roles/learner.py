"""Learner: turns trajectories (or sampled batches) into optimiser steps and publishes weights.

It knows neither the algorithm (that is the Objective) nor the network (that is the Trainer's). Trajectories of a step
are kept until the step closes, put in lane order, and trained on as one batch; ready batches from a replay channel are
trained on as they come. A new version is published when the step closes.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from m2flow import seeds
from m2flow.capabilities import Sized
from m2flow.protocols import Objective, Trainer
from m2flow.roles.columns import cut, merge, side_by_side
from m2flow.types import Array, Batch, Metric, Observation, Report, Trajectory, Tree, Weights

PARITY_ROWS = 256
PARITY_TOKENS = 512  # of a language model, whose rows cost far more


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    """How a step's rows are cut into optimiser batches."""

    epochs: int = 10  # passes over the rows of a step
    minibatch: int | None = None  # rows per optimiser step; null: all rows at once
    microbatch: int | None = None  # rows per forward-backward; null: the whole optimiser batch
    microbatch_tokens: int | None = None  # of a language model: tokens per forward-backward, in place of rows

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"epochs: must be at least 1, got {self.epochs}")
        for name in ("minibatch", "microbatch", "microbatch_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: must be at least 1 or null, got {value}")
        if self.minibatch is not None and self.microbatch is not None and self.microbatch > self.minibatch:
            raise ValueError(f"microbatch: {self.microbatch} exceeds minibatch {self.minibatch}; lower microbatch")
        if self.microbatch is not None and self.microbatch_tokens is not None:
            raise ValueError("microbatch_tokens: counts tokens where microbatch counts rows; give one of the two")


class Learner:
    """Stage: items are Trajectory or Batch; yields `Weights` and a final `Report` when the step closes."""

    def __init__(
        self,
        *,
        trainer: Trainer,
        objective: Objective,
        config: LearnerConfig,
        seed: int,
        noise: tuple[str, tuple[int, ...]],
    ) -> None:
        self.trainer, self.objective, self.config, self.noise = trainer, objective, config, noise
        self.seed = seeds.derive(seed, "learn")
        self.pending: list[Trajectory] = []
        self.seen: list[Observation] = []  # for the policy's running statistics
        self.updates = 0
        self.tally = _Tally()
        self.clock = 0.0

    def start(self) -> Iterator[Weights]:
        """Publish the weights that the first rollouts act with."""
        yield self._weights()

    def work(self, items: Sequence[Trajectory | Batch]) -> Iterator[Report]:
        """Keep trajectories until the step closes; train on ready batches at once."""
        started = time.perf_counter()
        for item in items:
            if isinstance(item, Trajectory):
                self.pending.append(item)
            else:
                batch = item.map(partial(torch.as_tensor, device=self._weight.device))
                self.tally.add({"train/samples": Metric(float(batch.size), "sum")})
                self._update(self.objective.prepare(batch, batch.size))
        self.clock += time.perf_counter() - started
        yield from ()

    def inserted(self, items: Sequence[Trajectory]) -> None:
        """Trajectories of this step that went into a replay channel: each observation counts once for the
        statistics."""
        self.seen += [item.obs for item in items]
        for item in items:
            age = self.trainer.version - item.version[item.valid.any(-1)]
            if age.size:
                self.tally.add({"train/staleness": Metric(float(age.mean()), "mean", float(age.size))})

    def close_step(self, step: int) -> Iterator[Weights | Report]:
        """Train on what was kept, take in statistics, publish."""
        started = time.perf_counter()
        if self.pending:
            self._train(merge(self.pending), step)
            self.pending = []
        if self.seen:
            self.trainer.model.policy.observe(side_by_side(self.seen))
            self.seen = []
        self.trainer.version = step + 1
        metrics = self.tally.close()
        metrics["time/learn_s"] = Metric(self.clock + time.perf_counter() - started, "sum")
        self.clock = 0.0
        yield self._weights()
        yield Report(step, metrics)

    def _weights(self) -> Weights:
        return self.trainer.weights("policy.")

    def _train(self, trajectory: Trajectory, step: int) -> None:
        """Epochs over the rows of one step, shuffled by a key of (seed, step, epoch)."""
        batch, metrics = self.objective.targets(self.trainer.model, trajectory)
        self.tally.add(metrics)
        self.tally.add({"train/samples": Metric(float(trajectory.valid.any(-1).sum()), "sum")})
        self.inserted([trajectory])
        batch = self._parity(batch)
        rows = min(self.config.minibatch or batch.size, batch.size)
        ready = self.objective.prepare(batch, rows) if rows == batch.size else None
        for epoch in range(self.config.epochs):
            for part in [ready] if ready is not None else self._shuffled(batch, rows, step, epoch):
                if self._update(part):
                    self.tally.add({"train/epochs": Metric(float(epoch + 1), "last")})
                    return
        self.tally.add({"train/epochs": Metric(float(self.config.epochs), "last")})

    def _shuffled(self, batch: Batch, rows: int, step: int, epoch: int) -> list[Batch]:
        """The optimiser batches of one epoch."""
        generator = np.random.Generator(np.random.Philox(seeds.derive(self.seed, step, epoch)))
        order = torch.from_numpy(generator.permutation(batch.size))
        if self.config.microbatch_tokens is not None:  # answers to one prompt side by side, which share its tokens
            order = torch.cat([part.sort().values for part in torch.split(order, rows)])
        return cut(self.objective.prepare(batch.take(order), rows), rows)

    def _update(self, batch: Batch) -> bool:
        """One optimiser batch through every phase that is due; True when the objective asks to stop."""
        objective, trainer = self.objective, self.trainer
        counts = objective.counts(batch)
        noise = self._noise(batch.size) if "propose" in objective.requires else None
        parts = [(batch, noise)]
        if self.config.microbatch_tokens is not None:
            parts = [(batch.rows(*run), None) for run in self._runs(batch)]
        elif self.config.microbatch is not None and self.config.microbatch < batch.size:
            micro = self.config.microbatch
            noises = itertools.repeat(None) if noise is None else noise.split(micro)
            parts = list(zip(cut(batch, micro), noises, strict=False))
        for phase in objective.phases:
            if self.updates % phase.every == 0:
                sums = [trainer.forward_backward(part, phase, counts, drawn) for part, drawn in parts]
                self.tally.sums(sums, counts)
                self.tally.values(trainer.step(phase))
        self.updates += 1
        return objective.after_update(self.tally.latest)

    def _runs(self, batch: Batch) -> list[tuple[int, int]]:
        """Runs of rows of at most `microbatch_tokens` tokens each; a row that has more is a run of its own."""
        assert self.config.microbatch_tokens is not None
        sizes = self.trainer.model.policy.sizes(batch.obs).tolist()
        runs, start, held = [], 0, 0
        for row, size in enumerate(sizes):
            if row > start and held + size > self.config.microbatch_tokens:
                runs.append((start, row))
                start, held = row, 0
            held += size
        return [*runs, (start, len(sizes))]

    @property
    def _weight(self) -> Any:
        """Any parameter: its dtype and device are those of the training data."""
        return next(self.trainer.model.parameters())

    def _noise(self, rows: int) -> Array:
        """[rows, 2, *noise shape], keyed by (seed, update, row)."""
        kind, shape = self.noise
        drawn = seeds.draw(kind, self.seed, np.arange(rows), np.array([self.updates]), (2, *shape))[0]
        return torch.from_numpy(drawn).to(self._weight)

    @torch.no_grad()
    def _parity(self, batch: Batch) -> Batch:
        """Largest gap between recorded and recomputed log-prob on the first rows, under the current weights.

        At lag 0 this is round-off; with stale data it is the policy's movement. Returns the batch without the column
        that only this check reads.
        """
        if "behaviour_logprob" not in batch.columns:
            return batch
        rows = min(PARITY_ROWS, batch.size)
        policy = self.trainer.model.policy
        if isinstance(policy, Sized):
            tokens = policy.sizes(batch.rows(0, rows).obs).cumsum(0)
            rows = max(1, int((tokens <= PARITY_TOKENS).sum()))
        part = batch.rows(0, rows)
        again = policy.score(part.obs, part.record).logprob
        gap = (again - part.columns["behaviour_logprob"]).abs()
        counted = part.columns.get("unit_mask")
        if counted is not None:
            gap = gap[counted]
        if gap.numel():
            count = float(gap.numel())
            self.tally.add(
                {
                    "train/logprob_gap": Metric(float(gap.max()), "max"),
                    "train/logprob_gap_mean": Metric(float(gap.mean()), "mean", count),
                    "train/ratio_outside": Metric(float((gap > math.log(2.0)).float().mean()), "mean", count),
                }
            )
        return replace(batch, columns={k: v for k, v in batch.columns.items() if k != "behaviour_logprob"})

    def onload(self) -> None:
        """Back to the trainer's device."""
        self.trainer.onload()

    def offload(self) -> None:
        """Leave the trainer's device."""
        self.trainer.offload()

    def state(self) -> Tree:
        """Trainer state and the update counter that keys randomness."""
        return {"trainer": self.trainer.state(), "updates": self.updates}

    def restore(self, state: Tree) -> None:
        """Continue exactly."""
        self.trainer.restore(state["trainer"])
        self.updates = int(state["updates"])


class _Tally:
    """Metric sums of a step with their counts. Numbers that live on a device stay there until the step closes."""

    def __init__(self) -> None:
        self.metrics: dict[str, list[Metric]] = {}
        self.parts: dict[str, list[tuple[Any, Any]]] = {}  # name -> (sum, count) of each optimiser batch
        self.latest = _Latest(self.parts)

    def add(self, metrics: Mapping[str, Metric]) -> None:
        """Finished metrics: sums add up, means are weighted; of the rest the last stays."""
        for name, metric in metrics.items():
            self.metrics.setdefault(name, []).append(metric)

    def sums(self, cuts: Sequence[Mapping[str, tuple[Array, str]]], counts: Mapping[str, Array | float]) -> None:
        """Sums of the micro-batches of one optimiser batch, each with the denominator that it is counted per."""
        for name, (total, per) in cuts[0].items():
            whole = total if len(cuts) == 1 else sum(cut[name][0] for cut in cuts)
            self.parts.setdefault(name, []).append((whole, counts[per]))

    def values(self, values: Mapping[str, Array]) -> None:
        """Numbers of one optimiser step."""
        for name, value in values.items():
            self.parts.setdefault(name, []).append((value, 1.0))

    def close(self) -> dict[str, Metric]:
        """Means over the optimiser batches of the step; a batch in which nothing counted is left out."""
        out = {name: _joined(metrics) for name, metrics in self.metrics.items()}
        for name, parts in self.parts.items():
            ratios = [float(total) / float(count) for total, count in parts if float(count) > 0]
            if ratios:
                out[f"train/{name}"] = Metric(sum(ratios) / len(ratios), "mean", float(len(ratios)))
        self.metrics, self.parts = {}, {}
        self.latest = _Latest(self.parts)
        return out


def _joined(metrics: Sequence[Metric]) -> Metric:
    """One metric of the parts that a step reported under one name."""
    how, weight = metrics[-1].reduce, sum(metric.weight for metric in metrics)
    if how == "sum":
        return Metric(sum(metric.value for metric in metrics), how, weight)
    if how == "mean" and weight > 0:
        counted = [metric for metric in metrics if metric.weight > 0]
        return Metric(sum(metric.value * metric.weight for metric in counted) / weight, how, weight)
    return metrics[-1]


class _Latest(Mapping[str, float]):
    """The last value of each metric, turned into a number only when it is asked for."""

    def __init__(self, parts: dict[str, list[tuple[Any, Any]]]) -> None:
        self.parts = parts

    def __getitem__(self, name: str) -> float:
        total, count = self.parts[name][-1]
        return float(total) / float(count) if float(count) > 0 else 0.0

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)
