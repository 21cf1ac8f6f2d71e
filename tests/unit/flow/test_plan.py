from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.flow.cluster import Cluster, Device
from m2flow.flow.graph import Call, Flow, Node, Stream, Weights
from m2flow.flow.plan import Place, Plan, PlanError, check, diff, explain
from tests.unit.flow.flows import PPO, cores

GIB = 2**30
TWO = cores(2)
SHARED = Plan(
    places=dict.fromkeys(PPO.names, Place(("cpu:0-1",))),
    shifts=(("rollout",), ("learner",), ("evaluator",)),
    name="all",
)
SPLIT = Plan(
    places={name: Place(("cpu:1",) if name == "learner" else ("cpu:0",), process=True) for name in PPO.names},
    shifts=(("rollout",), ("evaluator",)),
    name="split",
)


def problems(plan: Plan, flow: Flow = PPO, cluster: Cluster = TWO, memory: dict[str, int] | None = None) -> list[str]:
    with pytest.raises(PlanError) as caught:
        check(flow, plan, cluster, memory)
    return list(caught.value.problems)


def place(plan: Plan, **places: Place) -> Plan:
    return replace(plan, places={**plan.places, **places})


def test_sound_plans_pass():
    check(PPO, SHARED, TWO)
    check(PPO, SPLIT, TWO)


def test_every_problem_is_listed_at_once():
    plan = Plan(
        places={"rolout": Place(("cpu:0",)), "rollout": Place(("cpu:0-2",)), "policy": Place(("cpu:0-2",), replicas=0)},
        chunks={"rollout->lerner": 3},
        shifts=(("rollout",), ("nobody",)),
        sub_batches={"rollout->policy": 0},
        lag=-1,
    )
    found = problems(plan)
    for words in (
        "learner: is not placed",
        "evaluator: is not placed",
        "no node 'rolout' (did you mean 'rollout'?)",
        "rollout: wants cpu:0-2, available is cpu:0-1 (no cpu:2)",
        "policy: wants cpu:0-2",
        "policy: replicas must be at least 1, got 0",
        "no stream 'rollout->lerner' (did you mean 'rollout->learner'?)",
        "shifts: no node 'nobody'",
        "sub_batches.rollout->policy: must be at least 1, got 0",
        "lag must be at least 0, got -1",
    ):
        assert any(words in problem for problem in found), words


def test_a21_devices_that_are_not_there_are_refused_with_component_wanted_and_available():
    gpu = place(SPLIT, learner=Place(("gpu:0-3",)))
    assert problems(gpu) == ["learner: wants gpu:0-3, there is no gpu (did you mean 'cpu'?)"]
    assert problems(place(SPLIT, learner=Place(("cpu:1-4",)))) == [
        "learner: wants cpu:1-4, available is cpu:0-1 (no cpu:2-4)"
    ]
    assert problems(place(SPLIT, learner=Place())) == ["learner: has neither devices nor a label"]
    assert "cpu:1 more than once" in problems(place(SPLIT, learner=Place(("cpu:1", "cpu:1"))))[0]


def test_a21_workers_that_do_not_divide_devices_are_refused_with_the_numbers_that_do():
    four = cores(4)
    plan = place(SPLIT, learner=Place(("cpu:1-3",), replicas=2))
    assert problems(plan, cluster=four) == [
        "learner: 2 replica(s) of 1 rank(s) are 2 workers on 3 devices; take 1 or 3 workers, so that each gets the "
        "same share"
    ]
    check(PPO, place(SPLIT, learner=Place(("cpu:1-3",), replicas=3)), four)
    check(PPO, place(SPLIT, learner=Place(("cpu:1",), replicas=2)), four)  # two on one core
    ranks = place(SPLIT, learner=Place(("gpu:0",), ranks=2))
    lab = Cluster((*four.devices, Device("gpu:0")))
    assert "ranks need a GPU each" in problems(ranks, cluster=lab)[0]


def test_workers_get_contiguous_even_shares():
    four = cores(4)
    assert Place(("cpu:0-3",), replicas=2).workers(four) == (("cpu:0", "cpu:1"), ("cpu:2", "cpu:3"))
    assert Place(("cpu:0-1",), replicas=2, ranks=2).workers(four) == (("cpu:0",), ("cpu:1",), ("cpu:0",), ("cpu:1",))
    assert Place(label="cpu").workers(four) == (("cpu:0", "cpu:1", "cpu:2", "cpu:3"),)
    assert Place(("cpu:0-2",), replicas=2).workers(four) == ()


def test_a_stream_shares_devices_only_in_shifts():
    flow = Flow("x", (Node("a", trigger="step"), Node("b")), (Stream("a", "b"),))
    both = {"a": Place(("cpu:0",)), "b": Place(("cpu:0-1",))}
    assert problems(Plan(both), flow) == [
        "a and b both use cpu:0 but take no turns there; give them disjoint devices or put them in different shifts, "
        "for instance [[a], [b]]"
    ]
    assert len(problems(Plan(both, shifts=(("a", "b"),)), flow)) == 1  # the same shift is the same time
    check(flow, Plan(both, shifts=(("a",), ("b",))), TWO)


def test_a_weights_edge_shares_devices_only_when_every_caller_takes_turns_with_the_trainer():
    assert problems(replace(SHARED, shifts=(("rollout", "policy"), ("learner",)))) == [
        "rollout and evaluator both use cpu:0-1 but take no turns there; give them disjoint devices or put them in "
        "different shifts, for instance [[rollout], [evaluator]]",
        "evaluator and learner both use cpu:0-1 (evaluator through policy) but take no turns there; give them disjoint "
        "devices or put them in different shifts, for instance [[evaluator], [learner]]",
    ]
    # Evaluator apart, its service with the learner: still it uses the learner's core, through the policy.
    plan = Plan(
        {
            "rollout": Place(("cpu:0",)),
            "policy": Place(("cpu:1",)),
            "learner": Place(("cpu:1",)),
            "evaluator": Place(("cpu:2",)),
        },
        shifts=(("rollout",), ("learner",)),
    )
    assert "evaluator through policy" in problems(plan, cluster=cores(3))[0]
    check(PPO, replace(plan, shifts=(("rollout", "evaluator", "policy"), ("learner",))), cores(3))


def test_a_call_edge_has_the_same_or_disjoint_devices():
    assert problems(place(SPLIT, policy=Place(("cpu:0", "cpu:2"))), cluster=cores(3)) == [
        "rollout calls policy: cpu:0 and cpu:0,cpu:2 overlap in part; co-residents use the same devices, others "
        "disjoint ones",
        "evaluator calls policy: cpu:0 and cpu:0,cpu:2 overlap in part; co-residents use the same devices, others "
        "disjoint ones",
    ]
    check(PPO, place(SPLIT, policy=Place(("cpu:2",))), cores(3))


def test_shifts_name_each_stage_once_services_with_a_caller_and_nobody_idle():
    twice = replace(SHARED, shifts=(("rollout",), ("learner",), ("evaluator", "learner")))
    assert any("stage learner is in more than one shift" in p for p in problems(twice))
    service = replace(SHARED, shifts=(("rollout",), ("learner", "policy"), ("evaluator",)))
    assert problems(service) == [
        "shifts: service policy stands in a shift without a caller (evaluator, rollout); leave it out there"
    ]
    check(PPO, replace(SHARED, shifts=(("rollout", "policy"), ("learner",), ("evaluator", "policy"))), TWO)
    idle = replace(SPLIT, shifts=(("rollout",), ("evaluator",), ("learner",)))
    assert problems(idle) == ["shifts: learner shares no device with another stage; leave it out"]


@pytest.mark.parametrize(
    ("node", "chunk", "allowed"),
    [
        (Node("b", batch=64, scope="batch"), 63, False),
        (Node("b", batch=64, scope="batch"), 64, True),
        (Node("b", batch=64, scope="group", unknown_denominators=1), 8, True),
        (Node("b", batch=64, scope="group", unknown_denominators=2), 8, False),
        (Node("b", batch=64, scope="group", unknown_denominators=2), 64, True),
        (Node("b", scope="batch"), 1, True),
    ],
)
def test_a_chunk_below_the_batch_only_where_whole_batches_are_not_needed(node, chunk, allowed):
    flow = Flow("x", (Node("a", trigger="step"), node), (Stream("a", "b"),))
    plan = Plan({"a": Place(("cpu:0",)), "b": Place(("cpu:1",))}, chunks={"a -> b": chunk})
    if allowed:
        check(flow, plan, TWO)
    else:
        assert f"{chunk} is less than the 64 that b needs" in problems(plan, flow)[0]


def test_a_replay_stream_is_not_cut():
    flow = Flow("x", (Node("a", trigger="step"), Node("b")), (Stream("a", "b", channel="replay"),))
    plan = Plan({"a": Place(("cpu:0",)), "b": Place(("cpu:1",))}, chunks={"a->b": 8})
    assert "a replay stream is not cut" in problems(plan, flow)[0]


def test_labels_are_met_by_every_worker():
    flow = Flow("x", (Node("a", trigger="step", labels=("franka",)),))
    lab = Cluster((*TWO.devices, Device("robot:l", labels=("franka",)), Device("robot:r", labels=("franka",))))
    assert problems(Plan({"a": Place(("cpu:0",))}), flow, lab) == [
        "a: needs 'franka', which cpu:0 lacks; devices that have it: robot:l,robot:r"
    ]
    mixed = Place(("robot:l", "cpu:0", "cpu:1", "robot:r"), replicas=2)
    check(flow, Plan({"a": mixed}), lab)
    check(flow, Plan({"a": Place(label="franka", replicas=2)}), lab)
    assert len(problems(Plan({"a": replace(mixed, replicas=4)}), flow, lab)) == 1
    assert problems(Plan({"a": Place(label="frnka")}), flow, lab) == [
        "a: no device carries the label 'frnka' (did you mean 'franka'?)"
    ]
    assert Plan({"a": Place(label="franka")}).resolve(lab).places["a"].devices == ("robot:l", "robot:r")


def gpus(memory: int) -> Cluster:
    return Cluster((Device("gpu:0", memory=memory), Device("gpu:1", memory=memory)))


def test_memory_of_all_residents_adds_up_even_in_shifts():
    plan = Plan(dict.fromkeys(PPO.names, Place(("gpu:0-1",))), shifts=SHARED.shifts, name="x")
    need = {"policy": 4 * GIB, "learner": 10 * GIB, "rollout": 2 * GIB}  # over two devices: 2 + 5 + 1 each
    check(PPO, plan, gpus(8 * GIB), need)
    found = problems(plan, cluster=gpus(8 * GIB - 1), memory=need)
    assert found == [
        f"gpu:{i}: needs 8.00 GiB at once (rollout 1.00 GiB + policy 2.00 GiB + learner 5.00 GiB), has 8.00 GiB; "
        "off-load or move one"
        for i in range(2)
    ]


MOVING = replace(PPO, nodes=tuple(replace(node, resident=True) for node in PPO.nodes))


def test_only_what_can_leave_its_devices_is_off_loaded():
    away = place(SHARED, policy=Place(("cpu:0-1",), offload=True))
    assert problems(away) == ["policy: cannot leave its devices, so remove offload; nodes of this flow that can: none"]
    check(MOVING, away, TWO)


def test_off_loading_frees_no_memory_of_a_host():
    plan = place(SHARED, learner=Place(("cpu:0-1",), offload=True))
    need = {"rollout": GIB, "learner": GIB}
    check(MOVING, plan, cores(2, memory=GIB), need)
    found = problems(plan, MOVING, cores(2, memory=GIB - 1), need)
    assert "needs 2.00 GiB at once (rollout 1.00 GiB + learner 1.00 GiB)" in found[0]
    assert found[0].endswith("; move one to another host, or make it smaller")


def test_what_is_off_loaded_counts_only_in_its_own_turn():
    plan = Plan(dict.fromkeys(PPO.names, Place(("gpu:0-1",), offload=True)), shifts=SHARED.shifts)
    need = {"policy": 4 * GIB, "learner": 10 * GIB, "rollout": 2 * GIB}
    check(MOVING, plan, gpus(5 * GIB), need)  # the learner's turn: 5; rollout's turn with its policy: 1 + 2
    assert "needs 5.00 GiB at once (learner 5.00 GiB)" in problems(plan, MOVING, gpus(5 * GIB - 1), need)[0]
    stays = place(plan, policy=Place(("gpu:0-1",)))
    check(MOVING, stays, gpus(7 * GIB), need)
    assert len(problems(stays, MOVING, gpus(7 * GIB - 1), need)) == 2


def test_cores_of_a_host_draw_on_one_memory_and_replicas_count():
    need = {"rollout": 3 * GIB, "learner": GIB}
    twice = place(SPLIT, rollout=Place(("cpu:0",), replicas=2))
    check(PPO, twice, cores(2, memory=7 * GIB // 2), need)  # 2 * 3 + 1 = 7 of the host's 7
    found = problems(twice, cluster=cores(2, memory=7 * GIB // 2 - 1), memory=need)
    assert found[0].startswith(
        "the memory of host localhost: needs 7.00 GiB at once (rollout 6.00 GiB + learner 1.00 GiB)"
    )
    check(PPO, twice, cores(2), need)  # unknown memory is not checked
    assert "no node 'lerner'" in problems(SPLIT, memory={"lerner": 1})[0]


def test_diff_says_what_moves():
    old, new = SHARED, replace(SPLIT, lag=1, chunks={"rollout->learner": 64})
    assert [str(change) for change in diff(old, place(new, learner=Place(("cpu:1",), replicas=2)))] == [
        "rollout: devices cpu:0, cpu:1 -> cpu:0",
        "rollout: process False -> True",
        "policy: devices cpu:0, cpu:1 -> cpu:0",
        "policy: process False -> True",
        "learner: devices cpu:0, cpu:1 -> cpu:1",
        "learner: replicas 1 -> 2",
        "evaluator: devices cpu:0, cpu:1 -> cpu:0",
        "evaluator: process False -> True",
        "chunks: rollout->learner added: 64",
        "plan: shifts rollout, learner, evaluator -> rollout, evaluator",
        "plan: lag 0 -> 1",
        "plan: name all -> split",
    ]
    assert diff(old, old) == ()
    fewer = replace(SHARED, places={k: v for k, v in SHARED.places.items() if k != "evaluator"})
    assert [str(change) for change in diff(SHARED, fewer)] == ["evaluator: place removed (was cpu:0-1)"]
    change = diff(SHARED, replace(SHARED, lag=2))[0]
    assert (change.subject, change.what, change.old, change.new) == ("plan", "lag", 0, 2)


def test_explain_shows_who_sits_where_and_when():
    text = explain(PPO, replace(SPLIT, chunks={"rollout->learner": 64}, sub_batches={"rollout->policy": 2}))
    rows = {line.split()[0]: line for line in text.splitlines()}
    assert text.splitlines()[0] == "plan split (lag 0)"
    assert "cpu:1" in rows["learner"]
    assert "per 64 of rollout" in rows["learner"]
    assert "shift 1 of 2" in rows["rollout"]
    assert "with rollout, evaluator" in rows["policy"]
    assert "processes" in rows["policy"]
    assert "sub-batches rollout -> policy: 2" in text
    assert "not placed" in explain(PPO, Plan({}))


def test_a_hand_written_plan_reads_as_meant():
    text = """
    plan: split
    lag: 1
    places:
      rollout: {devices: cpu:0-2, replicas: 3, process: true}
      policy: cpu:0-2
      learner: [cpu:3, cpu:5]
      arm: {label: franka, offload: true}
    chunks: {rollout -> learner: 64}
    shifts: [[rollout, policy], [learner]]
    sub_batches: {rollout->policy: 2}
    """
    plan = Plan.from_yaml(text)
    assert plan == Plan(
        places={
            "rollout": Place(("cpu:0", "cpu:1", "cpu:2"), replicas=3, process=True),
            "policy": Place(("cpu:0", "cpu:1", "cpu:2")),
            "learner": Place(("cpu:3", "cpu:5")),
            "arm": Place(label="franka", offload=True),
        },
        chunks={"rollout->learner": 64},
        shifts=(("rollout", "policy"), ("learner",)),
        sub_batches={"rollout->policy": 2},
        lag=1,
        name="split",
    )
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert Plan.from_dict(plan.to_dict()) == plan


def test_unknown_keys_and_wrong_types_are_all_named():
    text = """
    plan: x
    lga: 0
    places:
      a: {device: cpu:0, replicas: two}
      b: cpu:3-1
      c: 4
    shifts: rollout
    """
    with pytest.raises(PlanError) as caught:
        Plan.from_yaml(text)
    found = "\n".join(caught.value.problems)
    assert "unknown key 'lga' (did you mean 'lag'?)" in found
    assert "places.a: unknown key 'device' (did you mean 'devices'?)" in found
    assert "places.a.replicas: expected a whole number, got 'two'" in found
    assert "places.b.devices: device range 'cpu:3-1' is empty" in found
    assert "places.c: expected a mapping" in found
    assert "plan file.shifts: expected a list" in found
    assert len(caught.value.problems) == 6


places = st.builds(
    Place,
    devices=st.lists(st.sampled_from(["cpu:0", "cpu:1", "cpu:2", "gpu:0", "robot:arm"]), unique=True).map(tuple),
    replicas=st.integers(1, 3),
    ranks=st.integers(1, 3),
    process=st.booleans(),
    label=st.sampled_from(["", "franka"]),
    offload=st.booleans(),
)
plans = st.builds(
    Plan,
    places=st.dictionaries(st.sampled_from(["a", "b", "c"]), places),
    chunks=st.dictionaries(st.sampled_from(["a->b", "b->c"]), st.integers(1, 9)),
    shifts=st.sampled_from([(), (("a",), ("b", "c"))]),
    sub_batches=st.dictionaries(st.just("a->s"), st.integers(1, 4)),
    lag=st.integers(0, 3),
    name=st.sampled_from(["plan", "mine"]),
)


@settings(max_examples=80, deadline=None)
@given(plan=plans)
def test_yaml_round_trip(plan):
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert diff(plan, Plan.from_yaml(plan.to_yaml())) == ()


def test_a_service_of_a_service_is_used_in_the_turns_of_the_first_caller():
    flow = Flow(
        "x",
        (Node("a", trigger="step"), Node("s", kind="service"), Node("t", kind="service"), Node("b")),
        (Stream("a", "b"), Call("a", "s"), Call("s", "t"), Weights("b", "t")),
    )
    plan = Plan({"a": Place(("cpu:0",)), "s": Place(("cpu:0",)), "t": Place(("cpu:1",)), "b": Place(("cpu:1",))})
    assert "a and b both use cpu:1 (a through t)" in problems(plan, flow)[0]
    check(flow, replace(plan, shifts=(("a",), ("b",))), TWO)


def test_the_turns_of_a_chain_of_services_do_not_depend_on_the_order_of_edges():
    nodes = (Node("a", trigger="step"), *(Node(name, kind="service") for name in "stu"), Node("b"))
    edges = (Stream("a", "b"), Call("t", "u"), Call("s", "t"), Call("a", "s"), Weights("b", "u"))
    where = {"a": "cpu:0", "s": "cpu:0", "t": "cpu:0", "u": "cpu:1", "b": "cpu:1"}
    plan = Plan({name: Place((device,)) for name, device in where.items()})
    assert "a and b both use cpu:1 (a through u)" in problems(plan, Flow("x", nodes, edges))[0]


def test_a_trainer_that_also_calls_the_service_it_feeds_takes_turns_with_the_other_callers():
    flow = replace(PPO, edges=(*PPO.edges, Call("learner", "policy")))
    places = {"rollout": "cpu:0", "policy": "cpu:1", "learner": "cpu:1", "evaluator": "cpu:2"}
    plan = Plan({name: Place((device,)) for name, device in places.items()})
    found = problems(plan, flow, cores(3))
    assert [p.split(" both")[0] for p in found] == ["rollout and learner", "evaluator and learner"]
    check(flow, replace(plan, shifts=(("rollout", "evaluator"), ("learner",))), cores(3))
