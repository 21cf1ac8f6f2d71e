"""Imitation: raise the log-prob of what somebody else did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from m2flow.algorithms.targets import like, step_rows, to_tensors
from m2flow.protocols import Model
from m2flow.types import Array, Batch, Head, Loss, Metric, Phase, Spec, Term, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class SFT:
    """Supervised fine-tuning: minus the log-prob of the recorded actions, a mean over all units that count.

    A language model imitates the tokens that its demonstrations say it should have said, a robot policy the recorded
    actions (behaviour cloning). Rewards and the recorded log-prob are not read. Its batches have one column, `mask`
    [S, *axes]. The metric `sft_loss` is in nats per unit: its exponential is the perplexity.
    """

    entropy_coef: float = 0.0  # of the entropy, which is pushed up

    scope: ClassVar[Literal["group", "batch"]] = "group"
    denominators: ClassVar[tuple[str, ...]] = ("units",)
    couples_batch: ClassVar[bool] = False
    phases: ClassVar[tuple[Phase, ...]] = (Phase("update", "all"),)
    requires: ClassVar[frozenset[str]] = frozenset({"score"})
    needs_reference: ClassVar[bool] = False
    level: ClassVar[Literal["token"]] = "token"
    imitates: ClassVar[bool] = True  # what it learns from are demonstrations: `flow: supervised`

    def __post_init__(self) -> None:
        if not self.entropy_coef >= 0.0:
            raise ValueError(f"entropy_coef: {self.entropy_coef!r}, expected 0 or more")

    def heads(self, spec: Spec, chunk: int = 1) -> Mapping[str, Head | float]:  # noqa: ARG002
        """None."""
        return {}

    @torch.no_grad()
    def targets(self, model: Model, trajectory: Trajectory) -> tuple[Batch, Mapping[str, Metric]]:
        """The rows of a Trajectory, and which of their units count."""
        device, dtype = like(model)
        rows = step_rows(to_tensors(trajectory, device=device, dtype=dtype))
        mask = torch.ones_like(rows.logprob, dtype=torch.bool) if rows.mask is None else rows.mask
        return Batch(rows.obs, rows.record, {"mask": mask}), {}

    def prepare(self, batch: Batch, rows: int) -> Batch:  # noqa: ARG002 - no row looks at another
        """Nothing is left to do."""
        return batch

    def counts(self, batch: Batch) -> Mapping[str, Array | float]:
        """Units that count in these rows."""
        return {"units": batch.columns["mask"].sum()}

    def losses(self, model: Model, batch: Batch, phase: str, noise: Array | None = None) -> Loss:  # noqa: ARG002
        """Minus log-prob, and minus entropy where it has a coefficient. `noise` is not read."""
        mask = batch.columns["mask"]
        score = model.policy.score(batch.obs, batch.record)

        def total(x: Tensor) -> Tensor:
            return torch.where(mask, x, 0.0).sum()

        terms = [Term("sft", -total(score.logprob), "units")]
        if self.entropy_coef:
            terms.append(Term("entropy", -total(score.entropy), "units", self.entropy_coef))
        return Loss(tuple(terms), {"entropy": (total(score.entropy.detach()), "units")})

    def after_update(self, metrics: Mapping[str, float]) -> bool:  # noqa: ARG002
        """Never stops early."""
        return False
