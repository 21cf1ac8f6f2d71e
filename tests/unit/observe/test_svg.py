"""Charts: ticks, thinning, smoothing, and that points land where they should."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2flow.observe.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Series,
    line_chart,
    nice_ticks,
    smooth,
    spark,
    thin,
    tick_texts,
)


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_few_and_inside(low: float, width: float) -> None:
    width = max(width, 1e-6 * abs(low))
    high = low + width
    ticks = nice_ticks(low, high)
    assert 2 <= len(ticks) <= 7
    slack = 1e-6 * width
    assert all(low - slack <= t <= high + slack for t in ticks)


@pytest.mark.parametrize(
    ("ticks", "percent", "texts"),
    [
        ([0.0, 0.25, 0.5], True, ["0 %", "25 %", "50 %"]),
        ([0.0125, 0.015], False, ["0.0125", "0.0150"]),
        ([-2e-6, -1e-6, 0.0], False, ["\u22122e-6", "\u22121e-6", "0"]),
        ([0.0, 200_000.0, 400_000.0], False, ["0", "200k", "400k"]),
        ([2_500_000.0, 5_000_000.0], False, ["2.5M", "5.0M"]),
        ([0.0, 1000.0, 2000.0], False, ["0", "1000", "2000"]),
        ([], False, []),
    ],
)
def test_tick_labels(ticks: list[float], percent: bool, texts: list[str]) -> None:
    assert tick_texts(ticks, percent) == texts


def test_thinning_keeps_every_peak_and_the_order() -> None:
    y = [0.0] * 10_000
    y[1234], y[7777] = 5.0, -3.0
    x = [float(i) for i in range(10_000)]
    thin_x, thin_y = thin(x, y, 300)
    assert len(thin_x) <= 300
    assert thin_x == sorted(thin_x)
    assert (max(thin_y), min(thin_y)) == (5.0, -3.0)
    assert dict(zip(thin_x, thin_y, strict=True))[1234.0] == 5.0


def test_smoothing_is_centred_and_leaves_gaps() -> None:
    assert smooth([0.0, 0.0, 3.0, 0.0, 0.0], 1) == [0.0, 1.0, 1.0, 1.0, 0.0]
    line = [2.0 * i for i in range(50)]
    assert smooth(line, 5)[5:-5] == pytest.approx(line[5:-5])
    with_gap = smooth([1.0, math.nan, 3.0], 1)
    assert math.isnan(with_gap[1])
    assert (with_gap[0], with_gap[2]) == (1.0, 3.0)


def test_points_land_at_the_corners_of_the_axes() -> None:
    chart = line_chart([Series(label="a", x=[0.0, 10.0], y=[0.0, 1.0])], key="k", x_label="x", y_label="y", whole=True)
    [path] = re.findall(r'<path class="line c0" d="([^"]+)"', chart.svg)
    (x0, y0), (x1, y1) = [tuple(map(float, p.split())) for p in re.findall(r"[ML]([\d.]+ [\d.]+)", path)]
    assert (x0, x1) == (LEFT, WIDTH - RIGHT)
    assert y0 == HEIGHT - BOTTOM
    assert y1 == pytest.approx(TOP + (HEIGHT - TOP - BOTTOM) * 0.04 / 1.04, abs=0.06)


def test_a_line_is_interrupted_where_there_is_no_number() -> None:
    series = Series(label="a", x=[0.0, 1.0, 2.0, 3.0], y=[1.0, math.nan, 2.0, math.inf])
    chart = line_chart([series], key="k", x_label="", y_label="")
    [path] = re.findall(r'<path class="line c0" d="([^"]+)"', chart.svg)
    assert re.sub(r"[\d. ]+", "", path) == "MM"
    assert chart.data["series"][0]["y"] == [1.0, None, 2.0, None]
    assert "nan" not in chart.svg
    assert "inf" not in chart.svg


@pytest.mark.parametrize("y", [[], [math.nan], [5.0], [0.0, 0.0], [1e300, -1e300], [3.0] * 100])
def test_degenerate_curves_draw_without_nan(y: list[float]) -> None:
    series = Series(label="a", x=[float(i) for i in range(len(y))], y=y)
    svg = line_chart([series], key="k", x_label="step", y_label="").svg
    assert not re.search(r"nan|inf(?!o)", svg)


def test_labels_are_escaped() -> None:
    svg = line_chart([], key='a"b', x_label="<x>", y_label="&y").svg
    assert "<x>" not in svg
    assert 'data-key="a&quot;b"' in svg


def test_error_bars_span_the_interval() -> None:
    series = Series(label="a", x=[0.0, 1.0], y=[0.5, 0.5], low=[0.25, math.nan], high=[0.75, math.nan])
    svg = line_chart([series], key="k", x_label="", y_label="", percent=True, whole=True, markers=True).svg
    [(high, low)] = re.findall(r'<line class="bar c0"[^>]*y1="([\d.]+)" y2="([\d.]+)"', svg)[:1]
    height = (HEIGHT - TOP - BOTTOM) / 1.04
    assert abs(float(high) - float(low)) == pytest.approx(0.5 * height, abs=0.2)
    assert svg.count('class="bar') == 1
    assert svg.count("<circle") == 2


def test_sparklines_of_nothing_are_nothing() -> None:
    assert spark([]) == ""
    assert spark([math.nan]) == ""
    assert "M1.0" in spark([1.0, 2.0])
