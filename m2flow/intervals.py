"""Confidence intervals for what an evaluation measured. numpy only."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)


def wilson(*, successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Interval for a success rate (Wilson 1927): sane at 0 and at all successes. No trials: (nan, nan)."""
    _check_confidence(confidence)
    if not 0 <= successes <= trials:
        raise ValueError(f"successes: {successes} of {trials} trials")
    if trials == 0:
        return math.nan, math.nan
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate, shrink = successes / trials, 1 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / shrink
    half = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials)) / shrink
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return low, high


def mean_interval(values: Any, *, confidence: float = 0.95) -> tuple[float, float, float]:
    """Mean, and Student's t interval around it: (mean, low, high) of `values` [n].

    Right also for the three seeds of a training run. One value: the bounds are nan; none: all nan.
    """
    _check_confidence(confidence)
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1:
        raise ValueError(f"values: shape {x.shape}, expected [n]")
    if len(x) == 0:
        return math.nan, math.nan, math.nan
    mean = float(x.mean())
    if len(x) == 1:
        return mean, math.nan, math.nan
    half = t_quantile(0.5 + confidence / 2, freedom=len(x) - 1) * float(x.std(ddof=1)) / math.sqrt(len(x))
    return mean, mean - half, mean + half


def t_quantile(probability: float, *, freedom: int) -> float:
    """The x with P(t <= x) = `probability`, for Student's t with `freedom` degrees."""
    if not 0.0 < probability < 1.0 or freedom < 1:
        raise ValueError(f"t_quantile: probability {probability} and freedom {freedom}, expected (0, 1) and at least 1")
    if probability < 0.5:
        return -t_quantile(1.0 - probability, freedom=freedom)
    low, high = 0.0, math.pi / 2  # x = sqrt(freedom) tan(angle): the density becomes cos(angle) ** (freedom - 1)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_mass(middle, freedom) < probability - 0.5 else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _t_mass(angle: float, freedom: int) -> float:
    """P(0 <= t <= sqrt(freedom) tan(angle)), by Gauss-Legendre quadrature."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    nodes: NDArray[np.float64] = angle / 2 * (_NODES + 1)
    return float(scale * angle / 2 * np.dot(_WEIGHTS, np.cos(nodes) ** (freedom - 1)))


def _check_confidence(confidence: float) -> None:
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence: {confidence}, expected between 0 and 1")
