"""The catalogue of metrics is the truth: a few runs write every line of it, and nothing else (an error here)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from m2flow.observe.catalogue import CATALOGUE
from m2flow.observe.metrics import METRICS
from m2flow.types import EpisodeResult
from tests.architecture.lm_files import CHARACTERS
from tests.integration import small, small_text

REACH = {"name": "point_reach", "horizon": 8, "radius": 0.6, "dtype": "float64"}
GROUPS = {"lanes": 4, "length": 8, "group": 2}
RUNS: dict[str, dict[str, Any]] = {
    "ppo": {
        "env": REACH,
        "objective": {"name": "ppo", "entropy_coef": 0.01, "kl": "k3", "kl_coef": 0.1},
        "evaluation": {"seeds": 2},
        "alarms": {"kl_max": 1e-12},
    },
    "grpo": {
        "env": REACH,
        "objective": {"name": "grpo"},
        "rollout": GROUPS,
        "reward": {"name": "function", "function": f"{__name__}:swift"},
    },
    "sac": {
        "env": REACH,
        "flow": "offpolicy",
        "policy": {"name": "mlp", "hidden": [8], "dist": "squashed"},
        "objective": {"name": "sac", "critic_hidden": [8]},
        "learner": {},
        "replay": {"batch": 16, "capacity": 400, "start": 16, "update_to_data": 0.1},
    },
    "text": small_text.recipe(
        env={"name": "arithmetic", "digits": 1, "max_tokens": 4, "max_turns": 2, "tools": ["calculator"]},
        policy={
            "name": "causal_lm",
            "config": {**small_text.NETWORK, "max_position_embeddings": 2048},
            "tokenizer": {"characters": CHARACTERS},
        },
        rollout={"lanes": 4, "length": 1, "group": 2, "resample": 1},
        reward={"name": "math"},
        evaluation={"seeds": 2},
        objective={"name": "grpo", "level": "action", "decoupled": True, "behaviour_threshold": 2.0},
    ),
    "sft": small_text.recipe(flow="supervised", objective={"name": "sft"}, rollout={"lanes": 4, "length": 1}),
}


def swift(episode: EpisodeResult) -> float:
    """Episodes of a seed differ by what their lanes did."""
    return episode.ret


def test_every_line_of_the_catalogue_is_written_by_some_run(tmp_path: Path) -> None:
    declared = {line.partition("|")[0].strip() for line in CATALOGUE.splitlines() if line.strip()}
    written = set()
    for name, changes in RUNS.items():
        changed = {key: x for key, x in changes.items() if key != "name"} | {"steps": 3}
        for row in small.train(tmp_path, name, **changed).metrics():
            found = {metric: METRICS.find(metric) for metric in row if "/" in metric}
            assert None not in found.values(), found
            written |= {info.name for info in found.values() if info is not None}
    assert declared - written == set()
