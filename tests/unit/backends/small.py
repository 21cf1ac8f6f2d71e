"""A regression objective with one head, small enough to check by hand, and a policy for it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from m2flow.models.mlp import MLPConfig, MLPPolicy
from m2flow.types import Batch, Field, Head, Loss, Phase, Spec, Term

SPEC = Spec({"state": Field((3,))}, Field((2,), low=-1.0, high=1.0))
PHASE = Phase("fit", "all")


class Fit:
    """Behaviour cloning on log-prob (per row) and value regression (per value that counts)."""

    phases: tuple[Phase, ...] = (PHASE,)
    requires = frozenset({"score"})
    needs_reference = False

    def __init__(self, head: Head | None = None, coef: float = 0.5) -> None:
        self.head, self.coef = head or Head(hidden=(8,)), coef

    def heads(self, spec: Spec, chunk: int = 1) -> Mapping[str, Head | float]:
        return {"value": self.head, "log_alpha": -1.0}

    def losses(self, model: Any, batch: Batch, phase: str, noise: Any = None) -> Loss:
        logprob = model.policy.score(batch.obs, batch.record).logprob.sum((1, 2))
        mask = batch.columns["mask"]
        # Masked before the square: the gradient of a masked NaN would be 0 * NaN.
        target = torch.where(mask, batch.columns["target"], 0.0)
        error = torch.where(mask, model.value("value", batch.obs).squeeze(-1) - target, 0.0).square()
        terms = (
            Term("clone", -logprob.sum(), "rows"),
            Term("value", error.sum(), "values", self.coef),
            Term("alpha", model.scalar("log_alpha").exp() * len(logprob), "rows"),
        )
        return Loss(terms, {"logprob": (logprob.detach().sum(), "rows")})

    def counts(self, batch: Batch) -> dict[str, Any]:
        return {"rows": float(batch.size), "values": batch.columns["mask"].sum()}


class Split(Fit):
    """The same in three phases, with a slow copy of the head and a reference policy."""

    phases = (Phase("critic", "value"), Phase("actor", "policy"), Phase("alpha", "log_alpha"))
    needs_reference = True

    def __init__(self) -> None:
        super().__init__(Head(hidden=(8,), copies=2, ema=0.25, takes_action=True))

    def losses(self, model: Any, batch: Batch, phase: str, noise: Any = None) -> Loss:
        action = batch.record["action"]
        if phase == "critic":
            q = model.value("value", batch.obs, action).squeeze(-1)
            return Loss((Term("critic", (q - batch.columns["target"]).square().sum(), "rows"),))
        if phase == "actor":
            q = model.value("value", batch.obs, action).squeeze(-1).mean(0)
            logprob = model.policy.score(batch.obs, batch.record).logprob.sum((1, 2))
            alpha = model.scalar("log_alpha").exp()
            return Loss((Term("actor", (q * logprob + alpha * logprob).sum(), "rows"),))
        return Loss((Term("alpha", model.scalar("log_alpha").exp() * batch.size, "rows"),))


def policy(seed: int = 0, **changes: Any) -> MLPPolicy:
    return MLPConfig(**({"hidden": (8, 8)} | changes)).build(SPEC, seed)


def batch(rows: int = 24, seed: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.tensor(rng.normal(size=shape), dtype=dtype)

    columns = {"target": draw(rows), "mask": torch.tensor(rng.random(rows) < 0.7)}
    return Batch({"state": draw(rows, 3)}, {"action": draw(rows, 1, 2)}, columns)


def update(trainer: Any, rows: Batch, cuts: tuple[int, ...] = ()) -> dict[str, Any]:
    """All phases on one optimiser batch, cut into micro-batches at `cuts`. Metrics of the last phase."""
    out: dict[str, Any] = {}
    counts = trainer.objective.counts(rows)
    edges = (0, *cuts, rows.size)
    for phase in trainer.objective.phases:
        for start, stop in pairwise(edges):
            trainer.forward_backward(rows.rows(start, stop), phase, counts)
        out |= trainer.step(phase)
    return out
