"""Metric registry and combination (pain 25, cases A30)."""

from __future__ import annotations

import math
import random
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2flow.observe.catalogue import CATALOGUE
from m2flow.observe.metrics import (
    METRICS,
    REDUCTIONS,
    MetricError,
    MetricInfo,
    Reduce,
    Registry,
    combine,
    reduce,
)
from m2flow.types import Metric

values = st.floats(-1e6, 1e6)
weights = st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.0])
parts = st.lists(st.tuples(values, weights), min_size=1, max_size=12)
how = st.sampled_from(REDUCTIONS)


def declared() -> list[str]:
    """A name for every line of the catalogue."""
    return [line.partition("|")[0].strip().replace("*", "x") for line in CATALOGUE.splitlines() if line.strip()]


def by_hand(pairs: list[tuple[float, float]], reduction: Reduce) -> float:
    """An independent, naive implementation over the parts that weigh something."""
    live = [(v, w) for v, w in pairs if w > 0]
    if reduction == "sum":
        return sum(v for v, _ in live)
    if not live:
        return math.nan
    if reduction == "mean":
        return sum(v * w for v, w in live) / sum(w for _, w in live)
    if reduction == "last":
        return live[-1][0]
    return (min if reduction == "min" else max)(v for v, _ in live)


@given(parts, how)
def test_combination_equals_the_naive_formula(pairs: list[tuple[float, float]], reduction: Reduce) -> None:
    got = combine([Metric(v, reduction, w) for v, w in pairs])
    assert got.value == pytest.approx(by_hand(pairs, reduction), rel=1e-9, abs=1e-6, nan_ok=True)
    assert got.weight == pytest.approx(sum(w for _, w in pairs))


@given(parts, how, st.integers(0, 12))
def test_any_cut_into_parts_gives_the_same_number(pairs: list[tuple[float, float]], reduction: Reduce, at: int) -> None:
    metrics = [Metric(v, reduction, w) for v, w in pairs]
    whole = combine(metrics)
    halves = [part for part in (metrics[:at], metrics[at:]) if part]
    again = combine([combine(part) for part in halves])
    assert again.value == pytest.approx(whole.value, rel=1e-9, abs=1e-6, nan_ok=True)
    assert again.weight == pytest.approx(whole.weight)


@given(parts, st.sampled_from(["mean", "sum", "min", "max"]), st.randoms())
def test_order_does_not_matter_except_for_last(
    pairs: list[tuple[float, float]], reduction: Reduce, rng: random.Random
) -> None:
    metrics = [Metric(v, reduction, w) for v, w in pairs]
    shuffled = rng.sample(metrics, len(metrics))
    assert combine(shuffled).value == pytest.approx(combine(metrics).value, rel=1e-12, abs=1e-9, nan_ok=True)


@given(parts, how, st.sampled_from([math.nan, math.inf, 1e6]))
def test_a_value_without_weight_is_never_read(
    pairs: list[tuple[float, float]], reduction: Reduce, poison: float
) -> None:
    clean = combine([Metric(v, reduction, w) for v, w in pairs])
    poisoned = combine([Metric(v if w else poison, reduction, w) for v, w in pairs])
    assert poisoned.value == clean.value or (math.isnan(poisoned.value) and math.isnan(clean.value))


def test_the_worked_example_of_types() -> None:
    got = combine([Metric(3.0, "mean", 2), Metric(6.0, "mean", 1)])
    assert (got.value, got.weight, got.reduce) == (4.0, 3.0, "mean")


@pytest.mark.parametrize("reduction", ["mean", "min", "max", "last"])
def test_a30_over_nothing_is_nan_and_never_infinite(reduction: Reduce) -> None:
    got = combine([Metric(5.0, reduction, 0.0), Metric(math.inf, reduction, 0.0)])
    assert math.isnan(got.value)
    assert got.weight == 0.0
    assert math.isnan(combine([]).value)


def test_a_sum_over_nothing_is_zero() -> None:
    assert combine([Metric(5.0, "sum", 0.0)]) == Metric(0.0, "sum", 0.0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "min", "max"])
@pytest.mark.parametrize("order", [(math.nan, 1.0), (1.0, math.nan)])
def test_a_nan_that_counts_is_not_hidden(reduction: Reduce, order: tuple[float, float]) -> None:
    assert math.isnan(combine([Metric(v, reduction) for v in order]).value)


def test_opposite_infinities_are_nan_and_not_an_exception() -> None:
    assert math.isnan(combine([Metric(math.inf, "sum"), Metric(-math.inf, "sum")]).value)
    assert combine([Metric(math.inf, "sum"), Metric(1.0, "sum")]).value == math.inf


def test_mixed_reductions_and_wrong_weights_are_errors() -> None:
    with pytest.raises(ValueError, match=r"'mean'.*'sum'"):
        combine([Metric(1.0, "mean"), Metric(1.0, "sum")])
    for weight in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="weight"):
            combine([Metric(1.0, "mean", weight)])


def test_only_declared_sums_grow_with_replicas() -> None:
    row = {
        "train/policy_loss": Metric(0.5, "mean", 64),
        "rollout/env_steps": Metric(1024.0, "sum"),
        "time/rollout_s": Metric(2.0, "sum"),
        "train/logprob_gap": Metric(1e-6, "max"),
        "train/advantage_min": Metric(-2.0, "min", 64),
        "train/epochs": Metric(4.0, "last"),
    }
    one = reduce([("a", row)])
    four = reduce(enumerate([row] * 4))
    assert one == {name: metric.value for name, metric in row.items()}
    assert four == one | {"rollout/env_steps": 4096.0}


def test_every_declared_mean_min_max_is_blind_to_the_number_of_replicas() -> None:
    for name in declared():
        found = METRICS.find(name)
        assert found is not None
        got = reduce(enumerate([{name: Metric(3.0, found.reduce)}] * 5))[name]
        assert got == (15.0 if (found.across or found.reduce) == "sum" else 3.0), name


def test_reports_of_one_replica_add_up_before_replicas_are_compared() -> None:
    rows = [{"time/learn_s": Metric(s, "sum")} for s in (1.0, 2.0, 2.5)]
    assert reduce(zip("aab", rows, strict=True)) == {"time/learn_s": 3.0}


def test_a_mean_over_replicas_is_weighted() -> None:
    rows = [{"rollout/return": Metric(10.0, "mean", 1)}, {"rollout/return": Metric(40.0, "mean", 3)}]
    assert reduce(enumerate(rows)) == {"rollout/return": 32.5}


def test_a_replica_that_saw_no_episode_changes_nothing() -> None:
    rows = [{"rollout/return": Metric(10.0, "mean", 2)}, {}, {"rollout/return": Metric(math.nan, "mean", 0)}]
    assert reduce(enumerate(rows)) == {"rollout/return": 10.0}


def test_an_unknown_name_is_an_error_in_tests_and_one_warning_in_production() -> None:
    rows = [{"train/surprise": Metric(1.0, "sum")}]
    with pytest.raises(MetricError, match=r"'train/surprise' is not declared.*declare"):
        reduce(enumerate(rows), registry=Registry(strict=True))
    lax = Registry(strict=False)
    with pytest.warns(UserWarning, match="train/surprise"):
        assert reduce(enumerate(rows * 2), registry=lax) == {"train/surprise": 2.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reduce(enumerate(rows), registry=lax)


def test_the_environment_variable_decides_where_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Registry().strict
    monkeypatch.setenv("M2FLOW_STRICT_METRICS", "0")
    assert not Registry().strict


def test_a_metric_that_contradicts_its_declaration_is_reported_and_the_declaration_used() -> None:
    wrong = [{"train/policy_loss": Metric(2.0, "sum")}] * 3
    with pytest.raises(MetricError, match="declared is 'mean'"):
        reduce(enumerate(wrong))
    lax = Registry([MetricInfo(name="train/policy_loss", unit="", reduce="mean", about="x")], strict=False)
    with pytest.warns(UserWarning, match="declared is 'mean'"):
        assert reduce(enumerate(wrong), registry=lax) == {"train/policy_loss": 2.0}


def test_an_exact_name_wins_over_patterns_and_longer_patterns_win() -> None:
    registry = Registry(
        [
            MetricInfo(name="a/*", unit="any", reduce="sum", about=""),
            MetricInfo(name="a/b*", unit="longer", reduce="sum", about=""),
            MetricInfo(name="a/bc", unit="exact", reduce="sum", about=""),
        ]
    )
    found = [registry.find(name) for name in ("a/x", "a/bx", "a/bc", "c/x")]
    assert [info.unit if info else None for info in found] == ["any", "longer", "exact", None]


def test_declaring_twice_differently_is_an_error_and_the_same_is_not() -> None:
    info = MetricInfo(name="mine/x", unit="s", reduce="mean", about="")
    registry = Registry([info, info])
    with pytest.raises(MetricError, match="already declared"):
        registry.declare(MetricInfo(name="mine/x", unit="m", reduce="mean", about=""))
    with pytest.raises(ValueError, match="no namespace"):
        MetricInfo(name="loss", unit="", reduce="mean", about="")
    with pytest.raises(ValueError, match="reduce: 'avg'"):
        MetricInfo(name="a/b", unit="", reduce="avg", about="")  # type: ignore[arg-type]


def test_every_line_of_the_catalogue_is_declared_with_a_description() -> None:
    assert len(declared()) > 40
    for name in declared():
        info = METRICS.find(name)
        assert info is not None
        assert info.about
