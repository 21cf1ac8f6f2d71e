"""The three functions that place any flow."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.flow.cluster import Cluster, Device
from m2flow.flow.graph import Flow, Node, Stream
from m2flow.flow.plan import Place, PlanError, check, collocated, disaggregated, hybrid, learner_side
from tests.unit.flow.flows import PPO, cores, flows


def test_collocated_puts_all_on_all_devices_in_turns_in_threads():
    plan = collocated(PPO, cores(2))
    assert plan.places == dict.fromkeys(PPO.names, Place(("cpu:0-1",)))
    assert plan.shifts == (("rollout",), ("learner",), ("evaluator",))


def test_disaggregated_splits_the_devices_between_acting_and_learning():
    plan = disaggregated(PPO, cores(5), learner=3, lag=1)
    assert {name for name, p in plan.places.items() if p.devices == ("cpu:2", "cpu:3", "cpu:4")} == {"learner"}
    assert all(p.devices == ("cpu:0", "cpu:1") for name, p in plan.places.items() if name != "learner")
    assert all(p.process for p in plan.places.values())
    assert plan.lag == 1
    assert plan.shifts == (("rollout",), ("evaluator",))
    assert disaggregated(PPO, cores(5)).places["learner"].devices == ("cpu:3", "cpu:4")  # half, rounded down


def test_hybrid_pipelines_callers_with_services_and_lends_all_devices_to_the_learner():
    plan = hybrid(PPO, cores(4))
    assert plan.places["rollout"].devices == plan.places["evaluator"].devices == ("cpu:0", "cpu:1")
    assert plan.places["policy"].devices == ("cpu:2", "cpu:3")
    assert plan.places["learner"].devices == ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
    assert plan.sub_batches == {"rollout->policy": 2, "evaluator->policy": 2}
    assert plan.shifts == (("rollout",), ("learner",), ("evaluator",))


def test_hybrid_without_services_cuts_behind_the_sources():
    flow = Flow("x", (Node("a", trigger="step"), Node("b"), Node("c")), (Stream("a", "b"), Stream("b", "c")))
    plan = hybrid(flow, cores(2))
    assert {name: p.devices for name, p in plan.places.items()} == {
        "a": ("cpu:0",),
        "b": ("cpu:1",),
        "c": ("cpu:0", "cpu:1"),
    }
    assert plan.shifts == (("a", "b"), ("c",))  # a and b are never in each other's way


def test_the_best_kind_of_device_is_used_unless_told_otherwise():
    mixed = Cluster((*cores(2).devices, Device("gpu:0"), Device("gpu:1"), Device("robot:arm")))
    assert collocated(PPO, mixed).places["learner"].devices == ("gpu:0", "gpu:1")
    assert collocated(PPO, mixed, devices=["cpu:0-1"]).places["learner"].devices == ("cpu:0", "cpu:1")


def test_hardware_that_a_node_needs_is_found_by_label():
    flow = Flow("x", (Node("arm", trigger="step", labels=("franka",)), Node("learner")), (Stream("arm", "learner"),))
    lab = Cluster((*cores(2).devices, Device("robot:l", labels=("franka",))))
    plan = collocated(flow, lab)
    assert plan.places["arm"].devices == ("robot:l",)
    assert plan.places["learner"].devices == ("cpu:0", "cpu:1")
    assert plan.shifts == ()
    with pytest.raises(PlanError, match="arm: needs 'franka'"):
        collocated(flow, cores(2))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: disaggregated(PPO, cores(1)), "wants 2 or more devices of one kind .*, available: 1 .cpu:0"),
        (lambda: hybrid(PPO, cores(1)), "wants 2 or more devices"),
        (lambda: collocated(PPO, Cluster(())), "available: 0 .none"),
        (lambda: disaggregated(PPO, cores(2), learner=2), "learner: 2 of 2 devices; take 1 to 1"),
        (lambda: hybrid(PPO, cores(2), services=0), "services: 0 of 2 devices"),
        (lambda: collocated(PPO, cores(2), devices=["cpu:0-3"]), "wants cpu:0-3, available is cpu:0-1"),
        (lambda: disaggregated(Flow("x", (Node("a", trigger="step"),)), cores(2)), "has only one side"),
        (lambda: collocated(PPO, cores(2), lag=-1), "lag must be at least 0"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_numbers(make, words):
    with pytest.raises(PlanError, match=words):
        make()


def test_the_learner_side_is_found_by_edges():
    assert learner_side(PPO) == {"learner"}
    plain = Flow("x", (Node("a", trigger="step"), Node("b")), (Stream("a", "b"),))
    assert learner_side(plain) == {"b"}


@settings(max_examples=150, deadline=None)
@given(flow=flows(), count=st.integers(2, 6), data=st.data())
def test_any_flow_is_placed_validly_or_refused_for_a_stated_reason(flow, count, data):
    cluster = Cluster(tuple(Device(f"fake:{i}", labels=("big",)) for i in range(count)))
    check(flow, collocated(flow, cluster), cluster)
    make = data.draw(st.sampled_from([disaggregated, hybrid]))
    try:
        plan = make(flow, cluster)
    except PlanError as error:
        assert "has only one side" in str(error) or "has no service and no second stage" in str(error)  # noqa: PT017
        return
    check(flow, plan, cluster)
    used = {name: set(place.devices) for name, place in plan.places.items()}
    if make is disaggregated:
        right = learner_side(flow)
        pairs = [(a, b) for a, b in combinations(flow.names, 2) if (a in right) != (b in right)]
        assert all(not used[a] & used[b] for a, b in pairs)
    assert set().union(*used.values()) == set(cluster.ids)
