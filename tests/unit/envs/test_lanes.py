"""Which seed each episode of a lane starts from."""

from __future__ import annotations

from m2flow.envs.lanes import seeded, training
from m2flow.seeds import HELD_OUT, derive


def test_no_training_episode_starts_from_a_held_out_seed_and_the_others_are_the_plain_hash() -> None:
    lanes, episodes = training(range(64), seed=0, group=2), range(64)
    plain = {derive(0, "env", lane // 2, k): lanes.episode(lane, k) for lane in range(64) for k in episodes}
    moved = {hashed: seed for hashed, seed in plain.items() if hashed < HELD_OUT}
    assert moved, "none of these hashes is held out, so nothing was tried"
    assert all(HELD_OUT <= seed < 2**31 for seed in plain.values())
    assert all(seed == hashed for hashed, seed in plain.items() if hashed not in moved)


def test_a_pool_of_training_starts_from_no_held_out_seed_either() -> None:
    runs = [training([0, 1, 2, 3], seed=seed) for seed in range(400)]
    hashed = [derive(run.seed, "env", lane) for run in runs for lane in run.lanes]
    assert min(hashed) < HELD_OUT
    given = [seed for run in runs for seed in run.pool(0)]
    assert min(given) >= HELD_OUT
    assert [a for a, b in zip(given, hashed, strict=True) if b >= HELD_OUT] == [b for b in hashed if b >= HELD_OUT]
    assert min(seed for run in runs for epoch in (1, 2) for seed in run.pool(epoch)) >= HELD_OUT


def test_an_evaluation_starts_from_the_seeds_that_it_was_given() -> None:
    lanes = seeded([7, 1_000_000])
    assert [lanes.episode(row, 0) for row in (0, 1)] == lanes.pool(0) == [7, 1_000_000]
