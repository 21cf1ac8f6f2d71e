"""A service loads weights only if they are what was sent: the worker checks their checksums, where there are any."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from m2flow.backends.torch.trainer import TorchTrainerConfig
from m2flow.comm.transport import Reference, SharedMemory
from m2flow.comm.weights import WeightsError, checksums, verify
from m2flow.flow.graph import Call, Flow, Node
from m2flow.flow.graph import Weights as WeightsEdge
from m2flow.flow.plan import Place, Plan
from m2flow.roles.policy import PolicyService
from m2flow.runtime.wiring import DRIVER, Wiring, WorkerSpec
from m2flow.runtime.worker import Program, Worker
from m2flow.types import Weights
from tests.unit.backends.small import Fit, policy

WAIT = 20.0
FLOW = Flow(
    "receipt",
    nodes=(Node("rollout", trigger="step"), Node("policy", kind="service"), Node("learner")),
    edges=(Call("rollout", "policy"), WeightsEdge("learner", "policy")),
)


class Service:
    """A worker that hosts the policy service, and the driver's end of its link."""

    def __init__(self, link: type[Reference | SharedMemory]) -> None:
        self.here, there = link.pair(ends=(DRIVER, "policy/0"))
        self.service = PolicyService(policy(seed=1))
        spec = WorkerSpec("policy/0", ("policy",), 0, 1, ("cpu:0",), process=False)
        plan = Plan({name: Place(("cpu:0",)) for name in ("rollout", "policy", "learner")})
        wiring = Wiring((spec,), {("policy", 0): spec.id}, frozenset())
        program = Program(FLOW, plan, wiring, {"policy": lambda _: self.service}, wait_limit=WAIT)
        self.thread = threading.Thread(target=Worker(spec, program, {DRIVER: there}).run, daemon=True)
        self.thread.start()
        assert self.here.recv(WAIT)[0] == "ready"

    def give(self, weights: Weights) -> tuple[Any, ...]:
        """Send weights along the weights edge; what the worker tells the driver."""
        self.here.send(("weights", "policy", weights), WAIT)
        return self.here.recv(WAIT)

    def stop(self) -> None:
        self.here.send(("stop",), WAIT)
        self.thread.join(WAIT)
        assert not self.thread.is_alive()
        self.here.close()


@pytest.fixture(params=[Reference, SharedMemory])
def service(request) -> Iterator[Service]:
    made = Service(request.param)
    yield made
    made.stop()


def published(version: int = 0) -> Weights:
    """What the real trainer publishes first: with checksums."""
    trainer = TorchTrainerConfig().build(policy(seed=2), Fit(), 0)
    trainer.version = version
    weights = trainer.weights("policy.")
    assert weights.checksums.keys() == weights.arrays.keys()
    return weights


def flipped(weights: Weights, name: str, byte: int) -> Weights:
    """The same with one bit of one byte of one parameter changed on the way."""
    array = weights.arrays[name].clone()
    array.view(-1).view(torch.uint8)[byte] ^= 1  # the lowest bit: a change that no norm would show
    return dataclasses.replace(weights, arrays={**weights.arrays, name: array})


def values(service: Service) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in service.service.policy.state_dict().items()}


def test_a24_intact_weights_are_loaded(service):
    weights = published(3)
    assert service.give(weights) == ("loaded", "policy", 0, 3)
    assert all(torch.equal(x, weights.arrays[f"policy.{name}"]) for name, x in values(service).items())


@pytest.mark.parametrize("which", [0, -1])
def test_a24_a_flipped_bit_is_refused_by_name_and_nothing_is_loaded(service, which):
    weights, before = published(3), values(service)
    name = list(weights.arrays)[which]
    last = weights.arrays[name].numel() * weights.arrays[name].element_size() - 1
    for byte in (0, last):
        kind, stage, rank, _, error, text = service.give(flipped(weights, name, byte))
        assert (kind, stage, rank) == ("failed", "policy", 0)
        assert error == f"WeightsError: weights of version 3: {name!r} is not what was sent (checksum differs)"
        assert "_on_weights" in text
    assert service.service.version == 0
    assert all(torch.equal(x, before[name]) for name, x in values(service).items())
    assert service.give(weights)[0] == "loaded"  # the same ones, intact


def test_a24_a_parameter_that_did_not_arrive_is_named(service):
    weights = published()
    name = next(iter(weights.arrays))
    short = dataclasses.replace(weights, arrays={n: x for n, x in weights.arrays.items() if n != name})
    assert f"{name!r} was announced but did not arrive" in service.give(short)[4]


def test_later_publications_carry_no_checksums_and_are_loaded_as_they_are(service):
    weights = published()
    plain = dataclasses.replace(flipped(weights, next(iter(weights.arrays)), 0), version=4, checksums={})
    assert service.give(plain) == ("loaded", "policy", 0, 4)


def test_strided_weights_of_every_dtype_pass_when_intact(service):
    weights = published()
    turned = {n: x.t().contiguous().t() if x.ndim == 2 else x for n, x in weights.arrays.items()}
    assert any(not x.is_contiguous() for x in turned.values())
    assert service.give(dataclasses.replace(weights, arrays=turned))[0] == "loaded"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_every_dtype_is_verified(dtype):
    arrays = {"w": torch.arange(12).reshape(3, 4).to(dtype), "none": torch.zeros((0, 2), dtype=dtype)}
    weights = Weights(1, arrays, checksums(arrays))
    verify(weights)
    weights.arrays["w"].view(-1)[5] = 0
    with pytest.raises(WeightsError, match="'w' is not what was sent"):
        verify(weights)


def test_numpy_weights_verify_too():
    arrays = {"w": np.arange(4.0)}
    weights = Weights(1, arrays, checksums(arrays))
    verify(weights)
    weights.arrays["w"][0] = 1.0
    with pytest.raises(WeightsError, match="'w'"):
        verify(weights)
