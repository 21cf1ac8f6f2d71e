from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from m2flow.comm import tree
from m2flow.comm.weights import WeightsError, checksum, checksums, verify
from m2flow.types import Weights


def signed(version: int, arrays: dict) -> Weights:
    return Weights(version, arrays, checksums(arrays))


def test_a24_strided_weights_arrive_in_their_own_order_and_verify_on_the_other_side():
    for make in (np.arange, torch.arange):
        got = tree.unpack(*tree.pack(signed(1, {"w": make(6).reshape(2, 3).T})))
        verify(got)
        assert got.arrays["w"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_the_first_name_that_differs_is_named():
    weights = signed(7, {"a": np.arange(3.0), "b": np.arange(3.0), "c": np.arange(3.0)})
    weights.arrays["b"][1] = 9.0
    weights.arrays["c"][1] = 9.0
    with pytest.raises(WeightsError, match="version 7: 'b' is not what was sent"):
        verify(weights)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: replace(w, arrays={"a": w.arrays["a"]}), "'b' was announced but did not arrive"),
        (lambda w: replace(w, arrays={**w.arrays, "c": np.ones(1)}), "'c' arrived without a checksum"),
        (lambda w: replace(w, arrays={**w.arrays, "a": w.arrays["b"], "b": w.arrays["a"]}), "'a' is not what was sent"),
        (lambda w: replace(w, arrays={**w.arrays, "a": w.arrays["a"].reshape(2, 1)}), "'a' is not what was sent"),
        (lambda w: replace(w, arrays={**w.arrays, "a": w.arrays["a"].view(np.int64)}), "'a' is not what was sent"),
    ],
)
def test_names_shapes_and_dtypes_are_part_of_the_checksum(change, words):
    weights = signed(1, {"a": np.zeros(2), "b": np.ones(2)})
    with pytest.raises(WeightsError, match=words):
        verify(change(weights))


def test_checksum_is_that_of_the_bytes_in_order_not_of_the_strides():
    square = np.arange(9.0).reshape(3, 3)
    assert checksum("w", square.T) == checksum("w", np.ascontiguousarray(square.T))
    assert checksum("w", square.T) != checksum("w", square)
    assert checksum("w", np.zeros((0, 3))) != checksum("w", np.zeros((3, 0)))
    assert checksum("w", torch.ones(2, dtype=torch.bfloat16)) != checksum("w", torch.ones(2, dtype=torch.int16))
