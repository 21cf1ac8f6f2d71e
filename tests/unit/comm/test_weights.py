from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from m2flow.comm import tree
from m2flow.comm.weights import WeightsError, checksum, load_into, publish, pull, verify


def test_a24_a_lazy_iterator_is_read_when_published():
    base = torch.eye(2)
    delta = torch.zeros(2, 2)
    delta[0, 0] = 1.0

    def merged():
        base.add_(delta)
        yield "w", base
        base.sub_(delta)

    weights = publish(1, merged())
    base.zero_()
    assert pull(weights)["w"][0, 0].item() == 2.0


def test_a24_strided_weights_arrive_in_their_own_order_and_verify_on_the_other_side():
    for make in (np.arange, torch.arange):
        weights = publish(1, {"w": make(6).reshape(2, 3).T})
        header, buffers = tree.pack(weights)
        got = tree.unpack(header, buffers)
        assert pull(got)["w"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a24_dtypes_are_kept_or_converted_by_rule():
    mixed = {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(2), "n": torch.ones(2, dtype=torch.int64)}
    kept = publish(1, mixed).arrays
    assert [kept[k].dtype for k in "abn"] == [torch.bfloat16, torch.float32, torch.int64]
    cast = publish(1, mixed, dtype="bfloat16").arrays
    assert [cast[k].dtype for k in "abn"] == [torch.bfloat16, torch.bfloat16, torch.int64]
    assert publish(1, {"x": np.ones(2), "n": np.ones(2, int)}, dtype="float32").arrays["x"].dtype == np.float32


def test_a22_names_are_in_the_same_order_whatever_order_they_came_in():
    names = {"b", "a", "c"}  # a set: its order depends on the hash seed
    weights = publish(1, {name: np.ones(1) for name in names})
    assert list(weights.arrays) == list(weights.checksums) == ["a", "b", "c"]


def test_a_snapshot_does_not_follow_later_training():
    for live in (torch.ones(3), np.ones(3)):
        weights = publish(4, {"w": live})
        live += 1
        assert weights.arrays["w"].tolist() == [1.0, 1.0, 1.0]
        assert weights.version == 4
        verify(weights)


def test_the_first_name_that_differs_is_named():
    weights = publish(7, {"a": np.arange(3.0), "b": np.arange(3.0), "c": np.arange(3.0)})
    weights.arrays["b"][1] = 9.0
    weights.arrays["c"][1] = 9.0
    with pytest.raises(WeightsError, match="version 7: 'b' is not what was sent"):
        verify(weights)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: replace(w, arrays={"a": w.arrays["a"]}), "'b' was announced but did not arrive"),
        (lambda w: replace(w, arrays={**w.arrays, "c": np.ones(1)}), "'c' has no checksum"),
        (lambda w: replace(w, arrays={**w.arrays, "a": w.arrays["b"], "b": w.arrays["a"]}), "'a' is not what was sent"),
        (lambda w: replace(w, arrays={**w.arrays, "a": w.arrays["a"].reshape(2, 1)}), "'a' is not what was sent"),
        (lambda w: replace(w, arrays={**w.arrays, "a": w.arrays["a"].view(np.int64)}), "'a' is not what was sent"),
    ],
)
def test_names_shapes_and_dtypes_are_part_of_the_checksum(change, words):
    weights = publish(1, {"a": np.zeros(2), "b": np.ones(2)})
    with pytest.raises(WeightsError, match=words):
        verify(change(weights))


def test_checksum_is_that_of_the_bytes_in_order_not_of_the_strides():
    square = np.arange(9.0).reshape(3, 3)
    assert checksum("w", square.T) == checksum("w", np.ascontiguousarray(square.T))
    assert checksum("w", square.T) != checksum("w", square)
    assert checksum("w", np.zeros((0, 3))) != checksum("w", np.zeros((3, 0)))
    assert checksum("w", torch.ones(2, dtype=torch.bfloat16)) != checksum("w", torch.ones(2, dtype=torch.int16))


def test_an_old_version_is_refused():
    weights = publish(3, {"w": np.ones(1)})
    pull(weights, at_least=3)
    with pytest.raises(WeightsError, match="version 3 arrived, at least 4"):
        pull(weights, at_least=4)


def test_a_name_published_twice_is_refused():
    with pytest.raises(WeightsError, match="'w' is published twice"):
        publish(1, [("w", np.ones(1)), ("w", np.ones(1))])


def module() -> torch.nn.Module:
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    for i, p in enumerate(net.parameters()):
        torch.nn.init.constant_(p, float(i))
    return net


def test_loading_by_prefix_moves_parameters_and_buffers_and_leaves_the_rest():
    source, target = module(), module()
    torch.nn.init.normal_(source[0].weight)
    source[1].num_batches_tracked += 5
    arrays = {f"policy.{k}": v for k, v in source.state_dict().items()} | {"critic.w": torch.ones(1)}
    load_into(target.state_dict(), publish(1, arrays), prefix="policy.")
    assert torch.equal(target[0].weight, source[0].weight)
    assert target[1].num_batches_tracked == 5
    assert all(parameter.requires_grad for parameter in target.parameters())


def test_names_must_match_and_nothing_is_loaded_when_they_do_not():
    state = {"a": np.zeros(2), "b": np.zeros(2)}
    with pytest.raises(WeightsError, match=r"missing \['b'\], unexpected \['c'\]"):
        load_into(state, publish(1, {"a": np.ones(2), "c": np.ones(2)}))
    with pytest.raises(WeightsError, match=r"'b' has shape \(3,\), here it is \(2,\)"):
        load_into(state, publish(1, {"a": np.ones(2), "b": np.ones(3)}))
    with pytest.raises(WeightsError, match="'b' is int64, here it is float64"):
        load_into(state, publish(1, {"a": np.ones(2), "b": np.ones(2, np.int64)}))
    assert state["a"].tolist() == [0.0, 0.0]


def test_tied_names_may_come_once_and_must_agree_when_they_come_twice():
    shared = torch.zeros(2)
    state = {"embed": shared, "head": shared.detach()}
    load_into(state, publish(1, {"embed": torch.ones(2)}))
    assert shared.tolist() == [1.0, 1.0]
    load_into(state, publish(1, {"embed": torch.full((2,), 2.0), "head": torch.full((2,), 2.0)}))
    assert shared.tolist() == [2.0, 2.0]
    with pytest.raises(WeightsError, match="'embed' and 'head' share memory here but arrived with different values"):
        load_into(state, publish(1, {"embed": torch.ones(2), "head": torch.zeros(2)}))
    assert shared.tolist() == [2.0, 2.0]
    with pytest.raises(WeightsError, match=r"missing \['head'\]"):
        load_into({"embed": torch.zeros(2), "head": torch.zeros(2)}, publish(1, {"embed": torch.ones(2)}))


@pytest.mark.parametrize("target", [np.zeros(3), torch.zeros(3, dtype=torch.float64)])
@pytest.mark.parametrize(
    "given",
    [
        np.array([0.1, 1e-300, 3.0]),
        torch.tensor([0.1, 1e-300, 3.0], dtype=torch.float64),
        torch.tensor([0.5, 2.0, 3.0], dtype=torch.bfloat16),
        np.arange(6.0)[::2],
    ],
)
def test_numpy_and_torch_load_into_one_another_exactly(target, given):
    load_into({"w": target}, publish(1, {"w": given}))
    assert list(map(float, target)) == list(map(float, given))
