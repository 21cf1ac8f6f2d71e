from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.flow.cluster import Cluster, ClusterError, Device, compress, expand, memory_bytes


def test_ranges_are_written_out_and_back():
    assert expand(["cpu:0-2", "robot:arm"]) == ("cpu:0", "cpu:1", "cpu:2", "robot:arm")
    assert compress(("cpu:0", "cpu:1", "cpu:2", "robot:arm", "gpu:3")) == "cpu:0-2,robot:arm,gpu:3"


@given(st.lists(st.sampled_from([f"{k}:{n}" for k in ("cpu", "gpu") for n in (*range(12), "arm")]), max_size=12))
def test_compress_loses_nothing(devices):
    assert expand(filter(None, compress(devices).split(","))) == tuple(devices)


@pytest.mark.parametrize("text", ["cpu", "cpu:", ":0", "cpu 0", "cpu:0-", "0:cpu"])
def test_what_is_no_device_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="for instance cpu:0|such as cpu:0"):
        expand([text])


def test_a21_an_empty_range_is_refused_with_the_range_that_was_meant():
    with pytest.raises(ValueError, match="'cpu:3-1' is empty; write cpu:1-3"):
        expand(["cpu:3-1"])


def test_kind_comes_from_the_id_and_must_agree():
    assert Device("gpu:1").kind == "gpu"
    with pytest.raises(ValueError, match="kind 'cpu' does not agree"):
        Device("gpu:1", kind="cpu")


@pytest.mark.parametrize("wrong", [{"memory": -1}, {"speed": 0.0}, {"speed": float("nan")}])
def test_impossible_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Device("fake:0", **wrong)


def test_a_device_given_twice_is_refused():
    with pytest.raises(ClusterError, match="cpu:0 is given twice"):
        Cluster((Device("cpu:0"), Device("cpu:0")))


def test_a21_what_is_wanted_stands_beside_what_is_there():
    cluster = Cluster((Device("cpu:0"), Device("cpu:1")))
    assert cluster.missing(["cpu:0", "cpu:1"]) == ""
    assert cluster.missing(expand(["cpu:0-3"])) == "wants cpu:0-3, available is cpu:0-1 (no cpu:2-3)"
    assert cluster.missing(expand(["gpu:0-3"])) == "wants gpu:0-3, there is no gpu (did you mean 'cpu'?)"


def test_labels_kinds_and_ids_find_devices():
    cluster = Cluster((Device("cpu:0"), Device("robot:arm", labels=("franka",))))
    assert cluster.labelled("franka") == cluster.labelled("robot") == cluster.labelled("robot:arm") == ("robot:arm",)
    assert cluster.device("robot:arm").has("franka")
    assert not cluster.device("cpu:0").has("franka")
    with pytest.raises(ClusterError, match="no gpu"):
        cluster.device("gpu:0")


@pytest.mark.parametrize(
    ("text", "size"), [(7, 7), ("7", 7), ("80GiB", 80 * 2**30), ("512 MB", 512_000_000), ("1.5KiB", 1536)]
)
def test_sizes_are_read(text, size):
    assert memory_bytes(text) == size


def test_a_hand_written_cluster_with_fake_devices_and_a_robot():
    text = """
    cluster: lab
    devices:
    - {id: fake:0-3, memory: 80GiB, speed: 2.0}
    - id: robot:arm
      labels: [franka]
      host: bench-3
      settings: {ip: 10.0.0.2, cameras: [wrist, front]}
    """
    cluster = Cluster.from_yaml(text)
    assert cluster.ids == ("fake:0", "fake:1", "fake:2", "fake:3", "robot:arm")
    assert cluster.device("fake:2") == Device("fake:2", memory=80 * 2**30, speed=2.0)
    assert cluster.device("robot:arm").settings == {"ip": "10.0.0.2", "cameras": ["wrist", "front"]}
    assert Cluster.from_yaml(cluster.to_yaml()) == cluster
    assert cluster.to_yaml().count("id:") == 2


def test_everything_wrong_with_a_file_is_named_at_once():
    text = """
    cluster: lab
    devices:
    - {id: fake:0, memroy: 80GiB}
    - {id: fake:1, memory: 80XB}
    - {labels: [franka]}
    - {id: fake:2, speed: -1}
    """
    with pytest.raises(ClusterError) as caught:
        Cluster.from_yaml(text)
    found = "\n".join(caught.value.problems)
    assert "unknown key 'memroy' (did you mean 'memory'?)" in found
    assert "devices.fake:1.memory: expected bytes or a size such as 80GiB" in found
    assert "'id' is missing" in found
    assert "speed must be above 0, got -1" in found


devices = st.builds(
    Device,
    id=st.sampled_from([f"{kind}:{i}" for kind in ("cpu", "gpu", "robot") for i in range(6)]),
    memory=st.none() | st.integers(0, 3),
    speed=st.sampled_from([1.0, 0.5]),
    labels=st.sampled_from([(), ("a",), ("a", "b")]),
    host=st.sampled_from(["localhost", "n1"]),
    settings=st.sampled_from([{}, {"ip": "10.0.0.1"}]),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(devices, unique_by=lambda d: d.id, max_size=8))
def test_yaml_round_trip(found):
    cluster = Cluster(tuple(found), "c")
    assert Cluster.from_yaml(cluster.to_yaml()) == cluster
