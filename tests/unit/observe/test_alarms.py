"""Alarms (pains 1, 7; case A10, A30): each fires on its condition, and on nothing that is well."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from m2flow.observe.alarms import ACTIONS, AlarmConfig, Alarms, as_metrics, automatic_floor
from m2flow.observe.jsonl import rows

HEALTHY = {
    "train/policy_loss": -0.01,
    "train/value_loss": 0.3,
    "train/grad_norm": 0.8,
    "train/approx_kl": 0.01,
    "train/entropy": 1.2,
    "train/advantage_std": 1.0,
    "train/logprob_gap": 1e-6,
    "train/samples": 4096.0,
    "rollout/success": 0.1,
    "rollout/return": 3.0,
}


def fired(alarms: Alarms, rows_: list[dict[str, float]], start: int = 0) -> list[tuple[int, str, str]]:
    """(step, kind, action) of all alarms over these rows, each laid over healthy numbers."""
    return [
        (alarm.step, alarm.kind, alarm.action)
        for step, row in enumerate(rows_, start)
        for alarm in alarms.check(step, HEALTHY | row)
    ]


def test_a_healthy_run_raises_nothing() -> None:
    assert fired(AlarmConfig().build(floor=automatic_floor(1, 4)), [{}] * 500) == []


def test_a_row_without_metrics_raises_nothing() -> None:
    assert fired(Alarms(), [{}]) == []
    assert Alarms().check(0, {}) == []


def test_a_logprob_gap_stops_at_the_first_step_and_warns_later() -> None:
    assert fired(Alarms(), [{"train/logprob_gap": 0.2}]) == [(0, "logprob_gap", "stop")]
    assert fired(Alarms(), [{}, {"train/logprob_gap": 0.2}]) == [(1, "logprob_gap", "warn")]


def test_a_logprob_gap_that_is_no_number_is_a_gap() -> None:
    assert fired(Alarms(), [{"train/logprob_gap": math.nan}]) == [(0, "logprob_gap", "stop")]


def test_with_stale_data_only_the_first_step_is_held_to_the_logprob_bound() -> None:
    alarms = AlarmConfig().build(lag=2)
    assert fired(alarms, [{}, {"train/logprob_gap": 0.2}]) == []
    assert fired(AlarmConfig().build(lag=2), [{"train/logprob_gap": 0.2}]) == [(0, "logprob_gap", "stop")]


def test_the_first_step_after_a_resume_is_a_first_step() -> None:
    before = Alarms()
    before.check(0, HEALTHY)
    after = Alarms()
    after.restore(before.state())
    assert fired(after, [{"train/logprob_gap": 0.2}], start=1) == [(1, "logprob_gap", "stop")]


@pytest.mark.parametrize("name", ["train/policy_loss", "train/value_loss", "train/grad_norm", "train/grad_norm/critic"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_loss_or_gradient_stops(name: str, value: float) -> None:
    assert fired(Alarms(), [{name: value}]) == [(0, "non_finite", "stop")]


@pytest.mark.parametrize(
    "row",
    [
        {"train/samples": 0.0, "train/policy_loss": math.nan, "train/value_loss": math.nan},
        {"train/advantage_std": math.nan, "train/policy_loss": math.nan},
    ],
)
def test_a30_all_samples_masked_warns_and_does_not_stop(row: dict[str, float]) -> None:
    assert fired(Alarms(), [row]) == [(0, "nothing", "warn")]


def test_a10_all_cut_raises_an_alarm_but_not_a_zero_gradient_stop_at_once() -> None:
    row = {"train/samples": 0.0, "train/grad_norm": 0.0, "train/policy_loss": 0.0}
    assert [kind for _, kind, _ in fired(Alarms(), [row] * 9)] == ["nothing"] * 4  # at 1, 2, 4, 8 steps


@pytest.mark.parametrize(
    ("row", "action"),
    [
        ({"train/advantage_std": 0.0}, "stop"),
        ({"train/advantage_std": 8e-9}, "stop"),  # A06: float32 deviation of eight equal rewards
        ({"train/dead_groups": 1.0}, "stop"),
    ],
)
def test_no_signal_fires_after_k_steps_in_a_row(row: dict[str, float], action: str) -> None:
    alarms = AlarmConfig(no_signal_steps=3).build()
    assert fired(alarms, [row, row, {"train/advantage_std": 1.0, "train/dead_groups": 0.5}, row, row]) == []
    assert fired(alarms, [row], start=5) == [(5, "no_signal", action)]


@pytest.mark.parametrize("name", ["train/grad_norm", "train/grad_norm/actor"])
def test_a_zero_gradient_fires_after_k_steps_in_a_row(name: str) -> None:
    alarms = AlarmConfig(zero_gradient_steps=4).build()
    row = {name: 0.0}
    assert fired(alarms, [row, row, row, {name: 1e-12}, row, row, row]) == []
    assert fired(alarms, [row], start=7) == [(7, "zero_gradient", "stop")]


def test_a_missing_reading_neither_counts_nor_resets() -> None:
    alarms = AlarmConfig(stuck_evaluations=3).build()
    for step in range(2):
        assert alarms.check(step, {"eval/success_once": 0.0}) == []
    assert alarms.check(2, {"train/grad_norm": 1.0}) == []
    assert alarms.check(2, {"eval/success_once": math.nan}) == [], "no episode of this step knows its success"
    assert [a.kind for a in alarms.check(3, {"eval/success_once": 0.0})] == ["stuck"]


def test_a_lasting_condition_fires_at_k_2k_4k() -> None:
    alarms = AlarmConfig(stuck_steps=5).build()
    assert [step for step, _, _ in fired(alarms, [{"rollout/success": 0.0}] * 45, start=1)] == [5, 10, 20, 40]


def test_entropy_collapse_of_discrete_actions_is_measured_against_uniform() -> None:
    floor = 0.01 * math.log(4)
    alarms = AlarmConfig().build(floor=automatic_floor(1, 4))
    assert fired(alarms, [{"train/entropy": floor * 1.01}]) == []
    assert fired(alarms, [{"train/entropy": floor * 0.99}]) == [(0, "entropy", "warn")]


@pytest.mark.parametrize("entries", [1, 6])
def test_entropy_collapse_of_continuous_actions_is_a_standard_deviation_of_a_thousandth(entries: int) -> None:
    def entropy(std: float) -> float:
        normal = torch.distributions.Normal(torch.zeros(entries), torch.full((entries,), std))
        return float(normal.entropy().sum())

    config = AlarmConfig()
    assert fired(config.build(floor=automatic_floor(entries, None)), [{"train/entropy": entropy(1.1e-3)}]) == []
    collapsed = fired(config.build(floor=automatic_floor(entries, None)), [{"train/entropy": entropy(0.9e-3)}])
    assert collapsed == [(0, "entropy", "warn")]


def test_a_floor_of_the_recipe_replaces_the_automatic_one() -> None:
    own = AlarmConfig(entropy_floor=-2.0).build(floor=automatic_floor(1, None))
    assert fired(own, [{"train/entropy": -1.9}, {"train/entropy": -3.0}]) == [(1, "entropy", "warn")]


def test_the_text_of_a_non_finite_loss_says_what_is_saved() -> None:
    stopped = AlarmConfig().build().check(0, {"train/policy_loss": math.nan})[0].text
    assert "ends without saving" in stopped
    assert "lost" not in stopped
    assert "saving" not in AlarmConfig(non_finite="warn").build().check(0, {"train/policy_loss": math.nan})[0].text


def test_actions_are_configurable_and_off_is_silent() -> None:
    quiet = AlarmConfig(
        logprob_gap_first="off",
        logprob_gap_later="off",
        non_finite="off",
        nothing="off",
        no_signal="off",
        zero_gradient="off",
        entropy="off",
        kl="off",
        stuck="off",
    )
    bad = dict.fromkeys(HEALTHY, 0.0) | {
        "train/logprob_gap": 9.0,
        "train/policy_loss": math.nan,
        "train/approx_kl": 9.0,
    }
    assert fired(quiet.build(), [bad] * 300) == []
    assert fired(AlarmConfig(kl="stop").build(), [{"train/approx_kl": 2.0}]) == [(0, "kl", "stop")]


@pytest.mark.parametrize(
    ("field", "value"),
    [("kl", "panic"), ("kl_max", 0.0), ("no_signal_steps", 0), ("logprob_gap_max", -1.0), ("spread_floor", math.nan)],
)
def test_a_wrong_setting_is_an_error_that_names_it(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        AlarmConfig(**{field: value})  # type: ignore[arg-type]


def test_every_alarm_says_what_was_seen_and_what_to_look_at() -> None:
    config = AlarmConfig(no_signal_steps=1, zero_gradient_steps=1, stuck_steps=1, stuck_evaluations=1)
    bad = {
        "train/logprob_gap": 0.5, "train/policy_loss": math.nan, "train/samples": 0.0, "train/dead_groups": 1.0,
        "reward/error_share": 0.5, "train/grad_norm": 0.0, "train/entropy": 0.0,
        "train/approx_kl": 5.0, "rollout/success": 0.0, "eval/success_once": 0.0,
    }  # fmt: skip
    alarms = config.build(floor=automatic_floor(1, 3))
    found = alarms.check(0, {"train/advantage_std": 0.0}) + alarms.check(1, bad)
    found += config.build().check(0, {"train/policy_loss": math.inf})
    assert {a.kind for a in found} == {
        "logprob_gap", "non_finite", "nothing", "reward", "no_signal", "zero_gradient", "entropy", "kl", "stuck",
    }  # fmt: skip
    for alarm in found:
        assert alarm.action in ACTIONS
        assert alarm.text.startswith(alarm.metric)
        assert "look at" in alarm.text.lower() or "Fine if" in alarm.text
        assert "{" not in alarm.text


def test_counters_survive_a_checkpoint() -> None:
    first = AlarmConfig(zero_gradient_steps=4).build()
    assert fired(first, [{"train/grad_norm": 0.0}] * 3) == []
    second = AlarmConfig(zero_gradient_steps=4).build()
    second.restore(first.state())
    assert fired(second, [{"train/grad_norm": 0.0}], start=3) == [(3, "zero_gradient", "stop")]


def test_alarms_are_on_disk_when_check_returns_and_dropped_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "alarms.jsonl"
    alarms = AlarmConfig().build(path)
    for step in (1, 5):
        alarms.check(step, {"train/policy_loss": math.nan})
        alarms.check(step, {"train/policy_loss": 0.0})
    assert [(row["step"], row["value"]) for row in rows(path)] == [(1, None), (5, None)]
    AlarmConfig().build(path, resume_step=4)
    assert [row["step"] for row in rows(path)] == [1]


def test_alarms_become_metrics() -> None:
    found = Alarms().check(0, {"train/policy_loss": math.nan, "train/grad_norm": math.nan, "train/approx_kl": 3.0})
    assert as_metrics(found) == {"alarm/non_finite": 2.0, "alarm/kl": 1.0}


@pytest.mark.parametrize("name", [f"{who}/{what}_share" for who in ("reward", "eval") for what in ("error", "timeout")])
def test_a_reward_that_fails_on_half_of_the_samples_stops_a_step_and_an_evaluation(name: str) -> None:
    assert fired(AlarmConfig().build(), [{name: 0.49}]) == []
    assert fired(AlarmConfig().build(), [{name: 0.5}]) == [(0, "reward", "stop")]
