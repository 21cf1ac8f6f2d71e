from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings

from m2flow.flow.draw import draw
from m2flow.flow.graph import Call, Flow, FlowError, Node, Stream, Weights
from tests.unit.flow.flows import PPO, flows


def problems(flow: Flow) -> list[str]:
    with pytest.raises(FlowError) as caught:
        flow.check()
    return list(caught.value.problems)


def test_a_sound_flow_passes_and_answers_questions():
    PPO.check()
    assert [n.name for n in PPO.sources("step")] == ["rollout"]
    assert [n.name for n in PPO.sources("evaluate")] == ["evaluator"]
    assert [n.name for n in PPO.sources()] == ["rollout", "evaluator"]
    assert [n.name for n in PPO.sinks("step")] == ["learner"]
    assert [n.name for n in PPO.sinks("evaluate")] == ["evaluator"]
    assert [e.src for e in PPO.streams_into("learner")] == ["rollout"]
    assert [e.dst for e in PPO.calls_of("rollout")] == ["policy"]
    assert [e.src for e in PPO.callers_of("policy")] == ["rollout", "evaluator"]
    assert [e.key for e in PPO.weights_into("policy")] == ["learner->policy"]
    assert PPO.order().index("rollout") < PPO.order().index("learner")


def test_every_problem_is_listed_at_once():
    flow = Flow(
        "broken",
        nodes=(Node("rollout", trigger="step"), Node("learner"), Node("learner"), Node("policy", kind="service")),
        edges=(
            Stream("rolout", "learner"),
            Stream("learner", "learner"),
            Stream("rollout", "policy"),
            Call("rollout", "learner"),
            Weights("learner", "rollout"),
        ),
    )
    text = "\n".join(problems(flow))
    assert "node 'learner' is given twice" in text
    assert "no node 'rolout' (did you mean 'rollout'?)" in text
    assert "learner -> learner: a node cannot be joined to itself" in text
    assert "'policy' is a service; streams join stages" in text
    assert "call rollout -> learner: 'learner' is a stage" in text
    assert "weights learner -> rollout: 'rollout' is a stage; weights go to services" in text
    assert len(problems(flow)) == 6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nodes": ()}, "has no nodes"),
        ({"nodes": (Node("a->b", trigger="step"),)}, "a name is letters"),
        ({"nodes": (Node("a", trigger="step", kind="stge"),)}, "kind 'stge' is not one of stage, service"),  # type: ignore[arg-type]
        ({"nodes": (Node("a", trigger="step", batch=0),)}, "batch must be at least 1"),
        ({"nodes": (Node("a"),)}, "nothing wakes it"),
        ({"nodes": (Node("a", trigger="step"), Node("s", kind="service"))}, "nobody calls this service"),
        (
            {"nodes": (Node("a", trigger="step"), Node("b", trigger="step")), "edges": (Stream("a", "b"),)},
            "b: is woken by its incoming stream",
        ),
        (
            {"nodes": (Node("a", trigger="step"), Node("b", atom="group")), "edges": (Stream("a", "b"),)},
            "carries 'trajectory', but b needs whole 'group'",
        ),
        (
            {"nodes": (Node("a", trigger="step"), Node("b")), "edges": (Stream("a", "b", channel="replai"),)},  # type: ignore[arg-type]
            "channel 'replai' (did you mean 'replay'?)",
        ),
        (
            {
                "nodes": (Node("a", trigger="step"), Node("b", trigger="step"), Node("s", kind="service")),
                "edges": (Call("a", "s"), Weights("a", "s"), Weights("b", "s")),
            },
            "gets weights from a and b",
        ),
        (
            {
                "nodes": (Node("a", trigger="step"), Node("s", kind="service"), Node("t", kind="service")),
                "edges": (Call("a", "s"), Call("s", "t"), Call("t", "s")),
            },
            "calls run in a circle",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(change, words):
    assert any(words in problem for problem in problems(Flow("x", **{"nodes": (), "edges": (), **change})))


def test_a_circle_of_streams_is_drawn_in_the_error():
    flow = Flow("x", (Node("a"), Node("b"), Node("c")), (Stream("a", "b"), Stream("b", "c"), Stream("c", "a")))
    [problem] = [p for p in problems(flow) if "circle" in p]
    path = problem.split(": ")[1].split(";")[0].split(" -> ")
    assert path[0] == path[-1]
    assert sorted(path[:-1]) == ["a", "b", "c"]
    assert all(Stream(x, y) in flow.edges for x, y in pairwise(path))


def test_an_error_survives_the_way_to_another_process():
    error = pickle.loads(pickle.dumps(FlowError("flow 'x'", ["one", "two"])))
    assert error.problems == ("one", "two")
    assert "one" in str(error)


def test_diff_says_what_changed():
    other = replace(
        PPO,
        nodes=(PPO.nodes[0], PPO.nodes[1], replace(PPO.nodes[2], batch=32)),
        edges=(PPO.edges[0], Stream("rollout", "learner", channel="replay"), PPO.edges[2]),
    )
    assert [str(c) for c in PPO.diff(other)] == [
        "learner: batch 64 -> 32",
        "flow ppo: node removed (was evaluator)",
        "stream rollout -> learner: channel fifo -> replay",
        "flow ppo: edge removed (was call evaluator -> policy)",
    ]
    assert PPO.diff(PPO) == ()
    assert [str(c) for c in other.diff(PPO)][-1] == "flow ppo: edge added: call evaluator -> policy"


@settings(max_examples=60, deadline=None)
@given(flow=flows())
def test_yaml_round_trip(flow):
    flow.check()
    assert Flow.from_yaml(flow.to_yaml()) == flow
    assert flow.diff(Flow.from_yaml(flow.to_yaml())) == ()


def test_a_hand_written_file_reads_as_meant():
    text = """
    flow: ppo
    nodes:
      rollout: {trigger: step}
      policy: {kind: service}
      learner: {batch: 64}
      evaluator: {trigger: evaluate}
    edges:
    - call: rollout -> policy
    - stream: rollout->learner
    - weights: learner -> policy
    - call: evaluator -> policy
    """
    assert Flow.from_yaml(text) == PPO


def test_unknown_keys_and_wrong_types_are_all_named_with_the_nearest_key():
    text = """
    flow: x
    nodes:
      a: {triger: step, batch: many}
    edges:
    - {stream: a -> b, chanel: fifo}
    - {strem: a -> b}
    - {stream: a, atom: group}
    """
    with pytest.raises(FlowError) as caught:
        Flow.from_yaml(text)
    found = "\n".join(caught.value.problems)
    assert "a: unknown key 'triger' (did you mean 'trigger'?)" in found
    assert "a.batch: expected a whole number, got 'many'" in found
    assert "unknown key 'chanel' (did you mean 'channel'?)" in found
    assert "expected one of stream, call, weights" in found
    assert "expected 'from -> to', got 'a'" in found
    assert len(caught.value.problems) == 5


def test_a_rule_that_no_channel_follows_is_refused():
    flow = Flow.from_yaml(
        "flow: x\nnodes:\n  a: {trigger: step}\n  b: {}\nedges:\n- {stream: a -> b, channel: priority}\n"
    )
    with pytest.raises(FlowError, match=r"channel 'priority' \(there is: fifo, replay\)"):
        flow.check()


def test_every_edge_has_the_key_by_which_plans_name_it():
    assert [edge.key for edge in PPO.edges] == [f"{edge.src}->{edge.dst}" for edge in PPO.edges]
    assert Call("a", "b") != Weights("a", "b")


def test_a_key_given_twice_is_refused():
    with pytest.raises(ValueError, match="line 4: key 'a' is given twice"):
        Flow.from_yaml("flow: x\nnodes:\n  a: {trigger: step}\n  a: {trigger: evaluate}\n")


def test_the_drawing_joins_the_right_rows():
    assert draw(Flow("ppo", PPO.nodes[:3], PPO.edges[:3])).splitlines() == [
        "ppo",
        "  rollout  stage, on step  ---.=====.",
        "  policy   service         <--'...  |",
        "  learner  stage, batch 64 <====='=='",
        "",
        "  -- call    rollout -> policy",
        "  == stream  rollout -> learner (trajectory, fifo)",
        "  .. weights learner -> policy",
    ]


@settings(max_examples=60, deadline=None)
@given(flow=flows())
def test_every_drawing_has_a_row_per_node_and_an_arrow_per_target(flow):
    lines = draw(flow).splitlines()
    rows = {line.split()[0]: line for line in lines[1 : 1 + len(flow.nodes)]}
    assert sorted(rows) == sorted(flow.names)
    for name, line in rows.items():
        assert ("<" in line) == any(edge.dst == name for edge in flow.edges)
    assert len(lines) == 1 + len(flow.nodes) + bool(flow.edges) + len(flow.edges)
