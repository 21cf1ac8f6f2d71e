"""A run of a language model small enough for tests, in float64: a random network of 20,000 weights adds digits."""

from __future__ import annotations

from typing import Any

import m2flow
from m2flow.api import Run
from tests.architecture.lm_files import TINY

NETWORK = TINY | {"max_position_embeddings": 128}
CHARACTERS = "0123456789+-*/=()., abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ?{}_<>:\"'\n"


def recipe(**changes: Any) -> dict[str, Any]:
    """GRPO: 3 tasks x 4 answers of at most 6 tokens. `changes` replace sections."""
    base: dict[str, Any] = {
        "name": "small_text",
        "steps": 3,
        "seed": 3,
        "env": {"name": "arithmetic", "digits": 1, "max_tokens": 6, "template": "{question}="},
        "reward": {"name": "function", "function": "tests.integration.small_text:digits"},
        "policy": {"name": "causal_lm", "config": NETWORK, "tokenizer": {"characters": CHARACTERS}},
        "generator": {"name": "torch", "dtype": "float64"},
        "objective": {"name": "grpo", "level": "action"},
        "trainer": {"dtype": "float64", "learning_rate": 3e-3, "optimizer": "adamw"},
        "rollout": {"lanes": 12, "length": 1, "group": 4},
        "learner": {"epochs": 1},
        "checkpoint": {"every": 0},
        "observe": {"recorders": [], "report": False},
    }
    return base | changes


def digits(sample: Any) -> float:
    """Share of digits in an answer: a reward that every network gets some of, and that depends on each token."""
    return sum(c.isdigit() for c in sample.text) / max(1, len(sample.text))


def train(tmp_path: Any, name: str, **changes: Any) -> Run:
    """Train the small recipe in its own folder."""
    return m2flow.train(recipe(**changes), run_dir=tmp_path / name, quiet=True)
