"""The recipe: one frozen tree that says what a run is."""
# ruff: noqa: RUF009  _named and _fixed make dataclass fields

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from m2flow import registry

PLANS = ("collocated", "disaggregated", "hybrid")
MAX_SEED = 2**63 - 1
LONGEST = 1e9  # seconds, 30 years: what a wait can be told


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyStopConfig:
    """End a run before its last step, judged at each evaluation by one metric.

    `threshold` stops as soon as the metric is that good; `patience` stops after that many evaluations in a row without
    a new best. At least one of the two is needed.
    """

    metric: str = field(metadata={"example": "eval/success_once"})  # name of the metric as it is logged
    mode: Literal["max", "min"] = "max"  # whether more or less of it is better
    threshold: float | None = None  # good enough: stop at once; null: never for this reason
    patience: int | None = None  # evaluations without a new best before stopping; null: never for this reason

    def __post_init__(self) -> None:
        if self.threshold is None and self.patience is None:
            raise ValueError("threshold: give threshold or patience (or both); with neither nothing would ever stop")
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"patience: must be at least 1 evaluation or null, got {self.patience}")


def _default(target: str) -> Any:
    return registry.load(target)()


def _named(kind: str, *, optional: bool = False, default: str | None = None) -> Any:
    """A field whose class the recipe chooses by `name`."""
    metadata = {"kind": kind, "optional": optional, "default": default}
    if default is not None:
        return field(default_factory=partial(_default, registry.BUILTIN[kind][default]), metadata=metadata)
    return field(default=None, metadata=metadata) if optional else field(metadata=metadata)


def _fixed(target: str, *, optional: bool = False) -> Any:
    """A field of one class, imported when a recipe is built. Left out: its defaults, or None where it is optional."""
    metadata = {"target": target, "optional": optional}
    if optional:
        return field(default=None, metadata=metadata)
    return field(default_factory=partial(_default, target), metadata=metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All that a run needs to know, typed and immutable. A section is the config of one part, with its own defaults.

    Example: `Recipe(env=PointReachConfig(), policy=MLPConfig(), objective=PPO(), steps=20)`.
    """

    name: str = "run"  # what this run is called; begins the name of its folder
    flow: str = "onpolicy"  # the graph of stages: onpolicy | offpolicy | supervised, or your own
    seed: int | None = 0  # root of all randomness; null: drawn once, shown, and stored with the run
    steps: int = 100  # training steps (one collection of data and the updates on it)
    stall_limit: float = 1800.0  # seconds without a word from any stage before the run is declared stuck
    run_dir: str = "runs"  # folder under which the run's own folder is made
    plan: str | Mapping[str, Any] = (
        "collocated"  # collocated | disaggregated | hybrid | path of a plan | the plan itself
    )
    env: Any = _named("env")  # what is acted in: an environment, or the tasks of a language model
    reward: Any = _named("reward", optional=True)  # scores whole episodes, in place of the env's rewards; null: those
    policy: Any = _named("policy")  # what acts and is trained
    generator: Any = _named("generator", optional=True)  # what samples from a language model; null: torch
    objective: Any = _named("objective")  # the algorithm
    trainer: Any = _named("trainer", default="torch")  # optimiser and where it runs
    rollout: Any = _fixed("m2flow.roles.rollout:RolloutConfig")  # how much is collected per step
    learner: Any = _fixed("m2flow.roles.learner:LearnerConfig")  # how it is cut into optimiser batches
    replay: Any = _fixed("m2flow.comm.replay:ReplayConfig", optional=True)  # buffer of an off-policy flow; null: none
    evaluation: Any = _fixed("m2flow.roles.evaluation:EvaluationConfig", optional=True)  # held-out test; null: none
    checkpoint: Any = _fixed("m2flow.backends.checkpoint:CheckpointConfig")  # what is saved and kept
    observe: Any = _fixed("m2flow.observe.sinks:ObserveConfig")  # where metrics and traces go
    alarms: Any = _fixed("m2flow.observe.alarms:AlarmConfig")  # when a run that learns nothing is stopped
    # when a run that has learnt enough is stopped; null: never
    early_stop: EarlyStopConfig | None = _fixed("m2flow.config.recipe:EarlyStopConfig", optional=True)

    def __post_init__(self) -> None:
        if not self.name or set(self.name) & set("/\\\0\n"):
            raise ValueError(f"name: must be usable as the name of a folder, got {self.name!r}")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed: must be between 0 and 2**63 - 1, or null, got {self.seed}")
        if not 0 < self.stall_limit <= LONGEST:
            raise ValueError(
                f"stall_limit: must be more than 0 and at most {LONGEST:g} seconds, got {self.stall_limit}"
            )
        if self.steps < 1:
            raise ValueError(f"steps: must be at least 1, got {self.steps}")


def with_seed(recipe: Recipe, seed: int | None = None) -> Recipe:
    """The recipe with a definite seed: the given one, else its own, else one drawn now (what `seed: null` means)."""
    chosen = seed if seed is not None else recipe.seed
    return replace(recipe, seed=secrets.randbelow(2**31) if chosen is None else chosen)
