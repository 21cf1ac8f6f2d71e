"""What a run of a language model says where its reward fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import m2flow
from m2flow.observe.jsonl import rows
from m2flow.observe.layout import RunFolder, read_json
from tests.integration import small_text


def fails(_: Any) -> float:
    """A reward that never gives a verdict."""
    raise RuntimeError("no verdict")


FAILING = {"name": "function", "function": f"{__name__}:fails"}


def test_an_evaluation_in_which_every_reward_fails_stops_the_run(tmp_path: Path) -> None:
    run = small_text.train(tmp_path, "run", reward=FAILING, evaluation={"seeds": 4})
    [before] = run.evaluations()[:1]
    assert (before.step, before.metrics["eval/error_share"], before.metrics["eval/success"]) == (0, 1.0, 0.0)
    first = next(iter(rows(run.folder.alarms)))
    assert (first["kind"], first["metric"], first["action"]) == ("reward", "eval/error_share", "stop")
    status = read_json(RunFolder(run.path).status)
    assert "eval/error_share is 1: the reward failed" in str(status)


def test_an_evaluation_of_a_checkpoint_is_refused_where_every_reward_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_text.train(tmp_path, "run", evaluation={"seeds": 4}, steps=1)
    monkeypatch.setattr("tests.integration.small_text.digits", fails)
    with pytest.raises(RuntimeError, match="^evaluation: eval/error_share is 1: the reward failed"):
        m2flow.evaluate(run)
