"""Progress on a terminal and without one; result tables."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from m2flow.observe.progress import Progress, result_table
from m2flow.observe.rundata import load_run
from tests.unit.observe.make_run import make_run


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plain() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=200), text


def test_without_a_terminal_there_is_one_line_every_few_seconds() -> None:
    console, text = plain()
    clock = Clock()
    with Progress(100, title="reach", console=console, every_s=10.0, clock=clock) as progress:
        assert not progress.live
        for step in range(1, 31):
            clock.now += 1.0
            progress.update(step, {"rollout/env_steps": 500.0, "rollout/return": 2.0 * step, "rollout/success": 0.25})
    lines = text.getvalue().splitlines()
    assert lines == [
        "reach: step 10/100  500 env steps/s  return 20  success 25 %  ETA 1 min 30 s",
        "reach: step 20/100  500 env steps/s  return 40  success 25 %  ETA 1 min 20 s",
        "reach: step 30/100  500 env steps/s  return 60  success 25 %  ETA 1 min 10 s",
        "reach: step 30/100  500 env steps/s  return 60  success 25 %  ETA 1 min 10 s",
    ]


def test_what_is_not_shown_prints_nothing_but_notes() -> None:
    console, text = plain()
    clock = Clock()
    progress = Progress(10, console=console, clock=clock)
    clock.now += 60.0
    progress.update(1, {"rollout/return": 7.0})
    progress.close()
    assert text.getvalue() == ""
    progress.note("alarm")
    assert text.getvalue() == "alarm\n"


def test_a_resumed_run_counts_its_speed_from_where_it_resumed() -> None:
    console, text = plain()
    clock = Clock()
    with Progress(100, start=90, console=console, clock=clock) as progress:
        clock.now += 5.0
        progress.update(95, {"throughput/env_steps_per_s": 1234.0})
    assert text.getvalue() == "train: step 95/100  1,234 env steps/s  ETA 5.0 s\n"


def test_metrics_that_a_step_lacks_keep_their_last_value() -> None:
    console, _ = plain()
    progress = Progress(10, console=console, clock=Clock())
    progress.update(1, {"rollout/return": 7.0, "eval/success_once": 0.5})
    progress.update(2, {"train/policy_loss": 3.0})
    assert progress.numbers().split("  ")[:2] == ["return 7", "eval success 50 %"]


def test_on_a_terminal_there_is_a_bar_with_the_same_numbers() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120, color_system=None)
    clock = Clock()
    with Progress(4, title="reach", console=console, clock=clock) as progress:
        assert progress.live
        clock.now = 2.0
        progress.update(4, {"rollout/env_steps": 100.0, "rollout/return": 1.5})
        progress.note("evaluation: [bold]not markup[/bold]")
    shown = text.getvalue()
    assert "reach" in shown
    assert "4/4" in shown
    assert "return 1.5" in shown
    assert "[bold]not markup[/bold]" in shown


def test_a_run_without_a_finished_step_prints_nothing() -> None:
    console, text = plain()
    with Progress(10, console=console):
        pass
    assert text.getvalue() == ""


def test_the_result_table_shows_before_and_after_per_seed_and_their_mean(tmp_path: Path) -> None:
    runs = [
        load_run(make_run(tmp_path / f"s{seed}", seed=seed, successes=(0, after)).path)
        for seed, after in ((0, 9), (1, 10))
    ]
    console, text = plain()
    console.print(result_table(runs))
    rows = text.getvalue()
    assert "seed 0" in rows
    assert "90 %" in rows
    assert "[59.6, 98.2] %" in rows  # Wilson, 9 of 10
    assert "mean of 2" in rows
    assert "95 %" in rows.split("mean of 2")[1]


def test_a_run_without_a_later_evaluation_shows_a_dash(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path / "r", done=3, state="running").path)
    console, text = plain()
    console.print(result_table([run]))
    assert run.after is None
    assert "\u2013" in text.getvalue()
