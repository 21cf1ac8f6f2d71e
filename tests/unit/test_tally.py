"""Metrics of one training step, joined by their reduction."""

import math

from m2flow.roles.learner import _Tally
from m2flow.types import Metric


def test_parts_of_a_step_are_joined_by_their_reduction():
    tally = _Tally()
    tally.add({"train/samples": Metric(3.0, "sum"), "train/staleness": Metric(1.0, "mean", 3.0)})
    tally.add({"train/samples": Metric(1.0, "sum"), "train/staleness": Metric(5.0, "mean", 1.0)})
    tally.add({"train/staleness": Metric(math.nan, "mean", 0.0), "train/epochs": Metric(4.0, "last")})
    tally.sums([{"policy_loss": (2.0, "units")}, {"policy_loss": (4.0, "units")}], {"units": 12.0})
    tally.sums([{"policy_loss": (math.nan, "units")}], {"units": 0.0})  # nothing counted: left out
    out = tally.close()
    assert out["train/samples"].value == 4.0
    assert out["train/staleness"].value == 2.0
    assert out["train/epochs"].value == 4.0
    assert out["train/policy_loss"].value == 0.5
    assert tally.close() == {}
