"""One seed tree, and noise that depends on what it is for, never on who draws it.

`derive(seed, "env", lane)` names a branch of the tree. `normal` and `uniform` are counter based: the number for
(seed, stream, turn, index) is a pure function of these, so any split of lanes over workers and batches draws the same.
The mixer is SplitMix64 (Steele, Lea, Flood 2014), vectorised in numpy.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

HELD_OUT = 2**21  # seeds of initial states below this are for evaluation only; training starts from those above
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def derive(seed: int, *path: str | int) -> int:
    """A child seed in [0, 2**31), stable over machines and Python versions."""
    text = repr((int(seed), *path)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") & 0x7FFFFFFF


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


def bits(seed: int, streams: NDArray[np.int64], turns: NDArray[np.int64], size: int) -> NDArray[np.uint64]:
    """uint64 [turns, streams, size] hashed from (seed, stream, turn, index)."""
    with np.errstate(over="ignore"):
        root = _mix(np.array([np.uint64(seed) + _GOLDEN], dtype=np.uint64))
        by_stream = _mix(root + np.asarray(streams, np.uint64) * _GOLDEN)
        by_turn = _mix(by_stream[None, :] + (np.asarray(turns, np.uint64)[:, None] + np.uint64(1)) * _MIX1)
        counters = (np.arange(size, dtype=np.uint64) + np.uint64(1)) * _GOLDEN
        return _mix(by_turn[:, :, None] + counters)


def uniform(
    seed: int, streams: NDArray[np.int64], turns: NDArray[np.int64], shape: tuple[int, ...]
) -> NDArray[np.float64]:
    """Uniform in (0, 1): [turns, streams, *shape]."""
    size = int(np.prod(shape, dtype=np.int64))
    raw = bits(seed, streams, turns, size) >> np.uint64(11)
    return ((raw.astype(np.float64) + 0.5) * 2.0**-53).reshape(len(turns), len(streams), *shape)


def normal(
    seed: int, streams: NDArray[np.int64], turns: NDArray[np.int64], shape: tuple[int, ...]
) -> NDArray[np.float64]:
    """Standard normal by Box and Muller, one number from two uniforms: [turns, streams, *shape]."""
    pair = uniform(seed, streams, turns, (2, *shape))
    return np.sqrt(-2.0 * np.log(pair[:, :, 0])) * np.cos(2.0 * np.pi * pair[:, :, 1])


def draw(
    kind: str, seed: int, streams: NDArray[np.int64], turns: NDArray[np.int64], shape: tuple[int, ...]
) -> NDArray[np.float64]:
    """`normal` or `uniform` by name, as `Policy.noise` states it."""
    if kind == "normal":
        return normal(seed, streams, turns, shape)
    if kind == "uniform":
        return uniform(seed, streams, turns, shape)
    raise ValueError(f"noise kind {kind!r}: expected 'normal' or 'uniform'")
