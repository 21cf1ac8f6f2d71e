"""Who the lanes are, and from which seed each of their episodes starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from m2flow.seeds import HELD_OUT, derive
from m2flow.types import Array

SEED_LIMIT = 2**31  # simulators take a seed as int32


@dataclass(frozen=True, slots=True)
class LaneSeeds:
    """Seeds of B lanes. For training the k-th episode of a lane starts from derive(seed, "env", lane, k), moved up by
    `seeds.HELD_OUT` where it is below: no training episode starts like one of an evaluation.

    For evaluation `fixed` holds one seed per lane: lane i plays a single episode, from fixed[i], and then stands still.
    """

    lanes: tuple[int, ...]
    seed: int = 0
    group: int = 1  # lanes that start alike: the seeds are those of the group's number
    fixed: tuple[int, ...] | None = None

    @property
    def single(self) -> bool:
        """Whether each lane plays one episode only."""
        return self.fixed is not None

    @property
    def ids(self) -> Array:
        """Global lane ids, int64 [B]."""
        return np.array(self.lanes, np.int64)

    def episode(self, row: int, k: int) -> int:
        """Seed of the k-th episode of the lane in row `row`."""
        if self.fixed is not None:
            assert k == 0, "an evaluation lane plays one episode"
            return self.fixed[row]
        return self._derived(self.lanes[row], k)

    def pool(self, epoch: int) -> list[int]:
        """Seeds for an env that draws all later episodes from one seed per lane: derive(seed, "env", lane), and
        derive(seed, "env", lane, "epoch", e) after the e-th fresh start; moved like those of `episode`."""
        if self.fixed is not None:
            return list(self.fixed)
        tail = () if epoch == 0 else ("epoch", epoch)
        return [self._derived(lane, *tail) for lane in self.lanes]

    def _derived(self, lane: int, *path: str | int) -> int:
        found = derive(self.seed, "env", lane // self.group, *path)
        return found if found >= HELD_OUT else found + HELD_OUT

    def take(self, start: int, stop: int) -> LaneSeeds:
        """Lanes of rows start..stop."""
        fixed = None if self.fixed is None else self.fixed[start:stop]
        return LaneSeeds(self.lanes[start:stop], self.seed, self.group, fixed)


def training(lanes: Sequence[int], seed: int, group: int = 1) -> LaneSeeds:
    """Lanes of a training run. With `group` g, lanes 0..g-1 start every episode alike, lanes g..2g-1 too, and so on."""
    ids = tuple(int(lane) for lane in lanes)
    if not ids:
        raise ValueError("lanes: at least one lane is needed")
    if len(set(ids)) != len(ids) or min(ids) < 0:
        raise ValueError(f"lanes: global lane ids must be different and not negative, got {list(ids)}")
    return LaneSeeds(ids, int(seed), group)


def seeded(seeds: Sequence[int]) -> LaneSeeds:
    """Lanes of an evaluation, one explicit seed each."""
    fixed = tuple(int(seed) for seed in seeds)
    if not fixed:
        raise ValueError("seeds: at least one seed is needed")
    wrong = [seed for seed in fixed if not 0 <= seed < SEED_LIMIT]
    if wrong:
        raise ValueError(f"seeds: must be between 0 and 2**31 - 1, got {wrong[0]}")
    return LaneSeeds(tuple(range(len(fixed))), 0, 1, fixed)


def check_action(action: Array, lanes: int, shape: tuple[int, ...]) -> Array:
    """The action as a numpy array [B, *shape]. Raises ValueError where it is not."""
    array = np.asarray(action)
    if array.shape != (lanes, *shape):
        raise ValueError(f"action: got {array.shape}, expected {(lanes, *shape)} (lanes, action shape)")
    return array
