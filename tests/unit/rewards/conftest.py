"""A math reward whose verifier is started once for a file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from m2flow.rewards.math import MathReward, MathRewardConfig


@pytest.fixture(scope="module")
def reward() -> Iterator[MathReward]:
    made = MathRewardConfig(seconds=20.0, workers=1).build()
    yield made
    made.close()
