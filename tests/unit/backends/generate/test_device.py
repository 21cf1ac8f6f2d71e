"""Where the decoder is: it moves its policy there before anything is made of it, and every tensor it makes is there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from m2flow import api
from m2flow.backends.generate import engine, sampling
from m2flow.backends.generate.config import TorchGeneratorConfig
from m2flow.backends.generate.family import Network
from m2flow.backends.generate.lean import LeanDecoder
from m2flow.backends.generate.module import ModuleDecoder
from tests.integration.small_text import recipe
from tests.unit.backends.generate.test_generate import SIZES, Plain, network

NO_CUDA = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="this machine has CUDA")


def test_the_policy_is_moved_before_the_decoder_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Plain(network(LlamaConfig(**SIZES)))
    seen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(policy, "to", lambda device: seen.append(device) or policy)
    monkeypatch.setattr(engine, "TorchGenerator", lambda given, **_: seen.append(given))
    TorchGeneratorConfig(device="cuda:1").build(policy)
    assert seen == ["cuda:1", policy]
    with pytest.raises(ValueError, match=r"device: 'cuda:2', but torch finds 2 cuda device\(s\) here"):
        TorchGeneratorConfig(device="cuda:2").build(policy)
    assert len(seen) == 2


@pytest.mark.parametrize("name", ["gpu", "cuda:", "mps"])
def test_a_name_of_no_device_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"device: {name!r}; expected cpu, cuda or cuda:<number>"):
        TorchGeneratorConfig(device=name)


@pytest.mark.parametrize("kind", ["lean", "module"])
def test_every_tensor_is_where_the_weights_are(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, which refuses to compute with tensors of the CPU as a GPU does."""
    monkeypatch.setattr(sampling, "bool", lambda _: True, raising=False)  # there are no numbers to look at
    policy = Plain(network(Qwen3Config(**SIZES))).to("meta")
    whole = Network(policy.network)
    decoder: Any = LeanDecoder(policy, whole, torch.float32, 4, 8) if kind == "lean" else None
    decoder = decoder or ModuleDecoder(whole, torch.float32, 8)
    with torch.no_grad():
        found = [decoder.prefill([np.arange(3), np.arange(5), np.arange(3)], [0, 1, 2])]
        for lengths in ([3, 5, 3], [5, 5, 5], [70, 6, 4]):
            tokens = torch.zeros(3, dtype=torch.int64, device="meta")
            found.append(decoder.decode(tokens, np.array(lengths)))
        decoder.move(2, 0, 4)
        decoder.forget(2)
        found.append(decoder.decode(tokens[:2], np.array([5, 7])))
        found += sampling.draw(found[1], np.full(3, 0.5), np.array([0.0, 1.0, 0.5]))
    assert {x.device.type for x in found} == {"meta"}


@NO_CUDA
def test_a_device_that_is_not_there_is_refused_before_anything_starts(tmp_path: Any) -> None:
    report = api.check(recipe(), "generator.device=cuda")
    assert report.problems == (
        "generator.device: 'cuda', but torch finds 0 cuda device(s) here; use cpu, or fix torch",
    )


def test_sampling_on_the_cpu_beside_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for given in ([], ["generator=null"]):
        (note,) = api.check(recipe(), "trainer.device=cuda", *given).notes
        assert note.startswith("generator.device is cpu and trainer.device cuda")
    assert not api.check(recipe(), "trainer.device=cuda", "generator.device=cuda").notes
    assert not api.check(recipe()).notes
