from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from m2flow import intervals as stats


def test_wilson_at_the_ends_and_in_the_middle():
    z2 = 1.959963984540054**2
    assert stats.wilson(successes=50, trials=50) == pytest.approx((50 / (50 + z2), 1.0), abs=1e-12)
    assert stats.wilson(successes=0, trials=50) == pytest.approx((0.0, z2 / (50 + z2)), abs=1e-12)
    # the two roots of (p - 0.9)^2 = z^2 p (1 - p) / 50
    roots = np.roots([1 + z2 / 50, -(1.8 + z2 / 50), 0.81])
    assert stats.wilson(successes=45, trials=50) == pytest.approx(tuple(sorted(roots)), abs=1e-12)
    wide, narrow = (stats.wilson(successes=45, trials=50, confidence=c) for c in (0.99, 0.8))
    assert wide[0] < narrow[0] < 0.9 < narrow[1] < wide[1]
    assert all(math.isnan(x) for x in stats.wilson(successes=0, trials=0))
    with pytest.raises(ValueError, match="successes"):
        stats.wilson(successes=3, trials=2)
    with pytest.raises(ValueError, match="confidence"):
        stats.wilson(successes=1, trials=2, confidence=95)


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [
        (0.975, 1, 12.7062047364),  # printed tables of Student's t
        (0.975, 2, 4.30265272991),
        (0.995, 5, 4.03214298356),
        (0.975, 10, 2.22813885196),
        (0.975, 49, 2.00957523713),
        (0.025, 10, -2.22813885196),
        (0.75, 1, 1.0),
    ],
)
def test_t_quantile_equals_the_tables(probability, freedom, expected):
    assert stats.t_quantile(probability, freedom=freedom) == pytest.approx(expected, abs=1e-8)


def test_mean_interval_of_three_seeds_by_hand():
    mean, low, high = stats.mean_interval([1.0, 2.0, 3.0])
    half = 4.30265272991 / math.sqrt(3)
    assert (mean, low, high) == pytest.approx((2.0, 2.0 - half, 2.0 + half), abs=1e-8)
    assert stats.mean_interval([5.0])[0] == 5.0
    assert all(math.isnan(x) for x in stats.mean_interval([5.0])[1:])
    assert all(math.isnan(x) for x in stats.mean_interval([]))
    with pytest.raises(ValueError, match="values"):
        stats.mean_interval([[1.0]])


def test_t_interval_covers_the_mean_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(600):
        _, low, high = stats.mean_interval(rng.normal(size=4), confidence=0.9)
        hits += low <= 0.0 <= high
    assert 0.87 < hits / 600 < 0.93


def test_statistics_load_no_torch():
    code = "import sys, m2flow.intervals; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
