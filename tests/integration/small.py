"""A run small enough for tests, in float64 so that plans can be compared to 1e-9."""

from __future__ import annotations

from typing import Any

import m2flow
from m2flow.api import Run


def recipe(**changes: Any) -> dict[str, Any]:
    """PPO on PointReach: 4 lanes x 16 decisions, 2 epochs of 2 optimiser batches. `changes` replace sections."""
    base: dict[str, Any] = {
        "name": "small",
        "steps": 4,
        "seed": 3,
        "env": {"name": "point_reach", "horizon": 10, "dtype": "float64"},
        "policy": {"name": "mlp", "hidden": [8, 8], "normalize": True},
        "objective": {"name": "ppo", "critic_hidden": [8, 8]},
        "trainer": {"name": "torch", "dtype": "float64"},
        "rollout": {"lanes": 4, "length": 16},
        "learner": {"epochs": 2, "minibatch": 32},
        "checkpoint": {"every": 0},
        "observe": {"recorders": [], "report": False},
    }
    return base | changes


def place(devices: str, replicas: int = 1, *, process: bool = False) -> dict[str, Any]:
    """A place as a recipe's inline plan holds it."""
    return {"devices": devices, "replicas": replicas, "process": process}


def plan(front: dict[str, Any], back: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Rollout and policy in front, learner behind."""
    return {"places": {"rollout": front, "policy": front, "learner": back}, **more}


TURNS = {"shifts": [["rollout", "policy"], ["learner"]]}
PLANS: dict[str, Any] = {
    "collocated": "collocated",
    "disaggregated": "disaggregated",
    "hybrid": "hybrid",
    "two rollouts in threads": plan(place("cpu:0-1", 2), place("cpu:0-1"), **TURNS),
    "two rollouts in processes": plan(place("cpu:0", 2, process=True), place("cpu:1", process=True)),
    "two sub-batches": plan(place("cpu:0-1"), place("cpu:0-1"), sub_batches={"rollout->policy": 2}, **TURNS),
    "policy apart, four sub-batches": {
        "places": {"rollout": place("cpu:0"), "policy": place("cpu:1"), "learner": place("cpu:0")},
        "sub_batches": {"rollout->policy": 4},
        "shifts": [["rollout", "policy"], ["learner"]],
    },
}


def train(tmp_path: Any, name: str, **changes: Any) -> Run:
    """Train the small recipe in its own folder."""
    return m2flow.train(recipe(**changes), run_dir=tmp_path / name, quiet=True)


def numbers(run: Run) -> list[dict[str, float]]:
    """Metric rows without anything that is measured in seconds."""
    noisy = ("time", "throughput/", "time/")
    return [{k: v for k, v in row.items() if not k.startswith(noisy)} for row in run.metrics()]
