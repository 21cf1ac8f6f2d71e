"""What users read of a run of a language model: answers, tasks and tokens, not environment steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from m2flow import api
from m2flow.cli import main
from m2flow.observe.progress import Progress
from tests.integration import small_text


def test_a_text_run_is_told_of_in_answers_tasks_and_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = api.train(small_text.recipe(steps=2, evaluation={"seeds": 2}), run_dir=tmp_path / "run")
    progress = capsys.readouterr().err
    assert "over 2 answers" in progress
    assert "answers/s" in progress
    page = api.report(run.path, out=tmp_path / "page.html").read_text()
    shown = api.show(run.path)
    with pytest.raises(SystemExit):
        main(["eval", str(run.path)])
    told = capsys.readouterr().out
    assert "2 answers, each held-out task once" in told
    assert "answers: 24" in shown
    lines = {line.split()[0]: line for line in shown.splitlines() if line}
    assert " tokens " in lines["rollout/length"]
    assert " tokens " in lines["eval/length"]
    assert " answers " in lines["rollout/env_steps"]
    for text in (progress, page, shown, told):
        assert "env steps" not in text
        assert "environment steps<" not in text
        assert "environment steps:" not in text


def test_a_run_of_a_robot_still_takes_environment_steps() -> None:
    progress = Progress(2)
    progress.update(1, {"throughput/env_steps_per_s": 5.0})
    assert progress.numbers().startswith("5 env steps/s")
