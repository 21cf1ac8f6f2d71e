"""The reward of reasoning-gym's tasks: the dataset's own scorer, in a process that can be ended (`gym_worker`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from m2flow.rewards.answers import last_tag, said
from m2flow.rewards.math_pool import Pool
from m2flow.types import Sample

SECONDS, MEMORY = 10.0, 4096  # of one answer; MiB of the process


def score(sample: Sample) -> float:
    """What the dataset's scorer gives the answer, from 0 to 1: for what stands in the last <answer>...</answer>, else
    for the whole text, of what follows the last </think>; 0 where a thought does not end.

    Raises:
        TimeoutError: the scorer took longer than `SECONDS`. The reward function counts it as an error, with 0.
        RuntimeError: the scorer failed. Counted likewise.
    """
    payload = sample.task.payload
    text = said(sample.text)
    if text is None:
        return 0.0
    tagged = last_tag(text)
    answer = text if tagged is None else tagged
    asked = {name: payload[name] for name in ("dataset", "options", "seed", "index", "question")}
    [outcome] = _pool()([{**asked, "entry": _as_json(payload["entry"]), "answer": answer.strip()}])
    if outcome.verdict == "timeout":
        raise TimeoutError(f"{payload['dataset']}: its scorer took {outcome.why}")
    if outcome.verdict != "scored":
        raise RuntimeError(f"{payload['dataset']}: its scorer gave no verdict ({outcome.why})")
    return outcome.score


def _as_json(entry: Mapping[str, Any]) -> Any:
    """The entry where JSON keeps all of it (tuples and numbers as keys it does not); else None: it is made again."""
    try:
        return entry if json.loads(json.dumps(entry)) == entry else None
    except (TypeError, ValueError):
        return None


@lru_cache(maxsize=1)
def _pool() -> Pool:
    return Pool(1, SECONDS, MEMORY, worker="m2flow.rewards.gym_worker")
