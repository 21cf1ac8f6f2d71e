"""Confidence intervals of evaluation numbers, without scipy."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Two-sided 95 % quantiles of Student's t for 1..30 degrees of freedom; beyond, an expansion around the normal one.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
        2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip
_Z95 = 1.959964


def wilson(successes: int, n: int, z: float = _Z95) -> tuple[float, float]:
    """95 % interval of a success rate (Wilson 1927); (NaN, NaN) for n = 0. `wilson(50, 50)` is (0.929, 1)."""
    if n < 1:
        return math.nan, math.nan
    if not 0 <= successes <= n:
        raise ValueError(f"successes: {successes} of {n}")
    p, zz = successes / n, z * z / n
    middle, half = p + zz / 2, z * math.sqrt(p * (1 - p) / n + zz / (4 * n))
    return max(0.0, (middle - half) / (1 + zz)), min(1.0, (middle + half) / (1 + zz))


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a mean by Student's t; (NaN, NaN) for fewer than two values."""
    n = len(values)
    if n < 2:
        return math.nan, math.nan
    mean = math.fsum(values) / n
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    df = n - 1
    t = _T95[df - 1] if df <= len(_T95) else _Z95 + (_Z95**3 + _Z95) / (4 * df)
    half = t * spread / math.sqrt(n)
    return mean - half, mean + half
