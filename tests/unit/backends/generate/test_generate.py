"""What the contract does not ask: which forward pass is taken and when, its memory, and its config."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from m2flow.backends.generate import lean as lean_module
from m2flow.backends.generate.cache import Cache
from m2flow.backends.generate.config import TorchGeneratorConfig
from m2flow.backends.generate.lean import packs
from m2flow.backends.generate.module import ModuleDecoder
from m2flow.types import Request, Weights

SIZES: Any = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


class Plain(nn.Module):
    """Just enough of a policy."""

    constant: frozenset[str] = frozenset()

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.network.state_dict().items()


def network(config: Any) -> Any:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for x in made.parameters():
            x.copy_(0.25 * torch.randn_like(x) if x.dim() > 1 else 1.0 + 0.2 * torch.randn_like(x))
    return made.eval()


def generator(config: Any, **given: Any) -> Any:
    return TorchGeneratorConfig(**given).build(Plain(network(config)))


def request(i: int, prompt: list[int], n: int = 6, **given: Any) -> Request:
    return Request(i, np.array(prompt), n, frozenset(), seed=i, **given)


def run(engine: Any, requests: list[Request]) -> dict[int, Any]:
    engine.submit(requests)
    out: dict[int, Any] = {}
    while len(out) < len(requests):
        out |= {a.id: a for a in engine.step()}
    return out


def gap(answers: dict[int, Any], requests: list[Request], plain: Any) -> float:
    """The largest distance of a log-probability from a forward pass of `plain` over the whole sequence."""
    worst = 0.0
    for one in requests:
        ids = torch.from_numpy(np.concatenate([one.prompt, answers[one.id].tokens]))[None]
        with torch.no_grad():
            known = plain(ids).logits[0, len(one.prompt) - 1 : -1].double().log_softmax(-1)
        wanted = known.gather(-1, ids[0, len(one.prompt) :, None])[:, 0].numpy()
        worst = max(worst, float(np.abs(wanted - answers[one.id].logprob).max()))
    return worst


# ---- which forward pass


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=0), "last 4 tokens"),
        (LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "dynamic"),
        (LlamaConfig(**SIZES, hidden_act="gelu"), "gelu"),
        (LlamaConfig(**SIZES, mlp_bias=True), "mlp.down_proj.bias"),
        (LlamaConfig(**SIZES, attention_bias=True), "o_proj.bias"),
    ],
)
def test_what_the_lean_forward_does_not_know_is_left_to_the_network(
    config: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "m2flow"):
        engine = generator(config, slots=2)
    assert isinstance(engine.decoder, ModuleDecoder)
    assert reason in caplog.text
    requests = [request(i, [1 + i] * (3 + i)) for i in range(3)]
    assert gap(run(engine, requests), requests, network(config)) < 1e-4


def test_a_network_that_computes_something_else_is_found_out(caplog: pytest.LogCaptureFixture) -> None:
    """A qwen2 by its config, whose layers were tampered with: nothing but its logits can say so."""
    policy = Plain(network(Qwen2Config(**SIZES)))
    policy.network.model.layers[1].mlp.register_forward_hook(lambda _module, _given, out: 1.05 * out)
    with caplog.at_level(logging.INFO, "m2flow"):
        engine = TorchGeneratorConfig().build(policy)
    assert isinstance(engine.decoder, ModuleDecoder)
    assert "differs" in caplog.text


@pytest.mark.parametrize("native", [False, True])
def test_bfloat16_with_and_without_instructions_for_it(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float32 arithmetic with the rounded weights: exact without; rounded everywhere with."""
    monkeypatch.setattr(lean_module, "computes_bfloat16", lambda _device: native)
    plain = network(Qwen3Config(**SIZES))
    for x in plain.parameters():
        x.data = x.data.bfloat16().float()
    engine = generator(Qwen3Config(**SIZES), dtype="bfloat16", slots=3)
    assert engine.decoder.cache.dtype == (torch.bfloat16 if native else torch.float32)
    requests = [request(i, [1 + i] * (3 + i)) for i in range(4)]
    found = gap(run(engine, requests), requests, plain)
    assert found < (0.5 if native else 1e-4)
    assert native == (found > 1e-3)


def test_the_network_decodes_in_another_dtype_by_a_copy() -> None:
    """The policy's own weights keep theirs, so that weights arrive unrounded; the copy follows them."""
    config = LlamaConfig(**SIZES, attention_bias=True)
    engine = generator(config, dtype="bfloat16", slots=2)
    plain = network(config)
    assert engine.policy.network.lm_head.weight.dtype == torch.float32
    requests = [request(i, [5 + i] * 4) for i in range(2)]
    assert 1e-4 < gap(run(engine, requests), requests, plain) < 0.5
    with torch.no_grad():
        plain.lm_head.weight.mul_(-1.0)
    engine.load(Weights(1, {f"policy.network.{n}": x for n, x in plain.state_dict().items()}))
    assert gap(run(engine, requests), requests, plain) < 0.5


# ---- how much is computed, and what is kept


def test_equal_prompts_are_computed_once() -> None:
    engine = generator(Qwen2Config(**SIZES), slots=16)
    sizes: list[int] = []
    real = engine.decoder._run
    engine.decoder._run = lambda tokens, *rest: sizes.append(len(tokens)) or real(tokens, *rest)
    run(engine, [request(i, [7, 8, 9, 10, 11], 3) for i in range(16)])
    assert sizes == [5, 16, 16]


def test_taking_a_request_in_looks_at_no_other() -> None:
    """One by one, thousands of them; an id is free again when its answer is out, or it is stopped."""

    class Unread(deque[Request]):
        def __iter__(self) -> Iterator[Request]:
            if reading:
                return super().__iter__()
            raise AssertionError("all that waits was read")

    reading = False
    engine = generator(Qwen2Config(**SIZES), slots=1)
    engine.waiting = Unread()
    for i in range(3):
        engine.submit([request(i, [1, 2])])
    for some, said in (([2], 2), ([7, 7], 7), ([8, 0], 0)):
        with pytest.raises(ValueError, match=f"request {said}: this id is in flight"):
            engine.submit([request(i, [1, 2]) for i in some])
    answers: list[int] = []
    while len(answers) < 3:
        answers += [answer.id for answer in engine.step()]
    reading = True  # what stops requests may look for them
    engine.submit([request(i, [1, 2]) for i in (0, 7, 8)])  # none of those that were refused has stayed
    assert {answer.id for answer in engine.abort([7])} == {7}
    engine.submit([request(7, [1, 2])])
    assert {answer.id for answer in engine.abort()} == {0, 7, 8}
    run(engine, [request(i, [1, 2]) for i in (0, 7, 8)])


def test_free_slots_are_filled_in_small_groups() -> None:
    """Of 32 slots one in sixteen: two by two, not one by one."""
    engine = generator(Qwen2Config(**SIZES), slots=32, block=1)
    sizes: list[int] = []
    real = engine.decoder.prefill
    engine.decoder.prefill = lambda rows, slots: sizes.append(len(rows)) or real(rows, slots)
    run(engine, [request(i, [1 + i, 2], 3 + i % 32) for i in range(40)])
    assert sizes[0] == 32
    assert sum(sizes) == 40
    assert min(sizes[1:-1]) == 2


def test_packs_are_bounded_and_little_is_padding() -> None:
    assert list(packs([9, 8, 7, 3, 3, 1], 18)) == [slice(0, 2), slice(2, 3), slice(3, 5), slice(5, 6)]
    assert list(packs([50, 2], 18)) == [slice(0, 1), slice(1, 2)]
    assert list(packs([2, 2, 2], 1)) == [slice(0, 1), slice(1, 2), slice(2, 3)]


def test_memory_grows_with_what_is_asked_and_keeps_contexts() -> None:
    cache = Cache(1, 2, 4, torch.float32, torch.device("cpu"), most=3)
    cache.reserve(1, 5)
    assert cache.keys[0].shape == (1, 2, 64, 4)
    cache.fill(0, torch.tensor([0]), torch.ones(1, 2, 5, 4), torch.full((1, 2, 5, 4), 2.0))
    cache.reserve(3, 65)
    assert cache.values[0].shape == (3, 2, 128, 4)
    assert cache.keys[0][0, :, :5].eq(1.0).all()
    assert cache.values[0].sum() == 2.0 * 40
    cache.move(0, 2, 5)
    places = cache.places(torch.tensor([5, 0, 5]))
    keys, values = cache.append(0, places, torch.full((3, 2, 4), 3.0), torch.full((3, 2, 4), 4.0), 6)
    assert keys.view(3, 2, 6, 4)[:, 0, :, 0].tolist() == [[1, 1, 1, 1, 1, 3], [3, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 3]]
    assert values.view(3, 2, 6, 4)[2, 1, :, 3].tolist() == [2, 2, 2, 2, 2, 4]


def test_long_answers_beside_short_ones() -> None:
    """The memory grows twice under running answers, and gaps are filled from behind."""
    engine = generator(Qwen2Config(**SIZES), slots=5)
    requests = [request(i, [1 + i] * (1 + 3 * i), 3 + 29 * (i % 6)) for i in range(12)]
    answers = run(engine, requests)
    assert [len(answers[r.id].tokens) for r in requests] == [r.max_tokens for r in requests]
    assert gap(answers, requests, network(Qwen2Config(**SIZES))) < 1e-4
    assert engine.decoder.cache.rows == 5


def test_poison_behind_the_end_of_a_context_changes_nothing() -> None:
    """The memory of other requests is overwritten with large numbers; masks keep them out."""
    requests = [request(0, [1, 2, 3], 20), request(1, [4], 20)]
    engine = generator(Qwen2Config(**SIZES), slots=2)
    clean = run(engine, requests)
    with torch.inference_mode():
        for x in (*engine.decoder.cache.keys, *engine.decoder.cache.values):
            x.fill_(1e4)
    again = run(engine, requests)
    for i in (0, 1):
        assert np.array_equal(clean[i].tokens, again[i].tokens)
        np.testing.assert_allclose(clean[i].logprob, again[i].logprob, atol=1e-5)


def test_weights_that_are_not_finite_are_an_error() -> None:
    engine = generator(Qwen2Config(**SIZES), slots=2)
    state = {f"policy.{n}": torch.full_like(x, torch.nan) for n, x in engine.policy.state_dict().items()}
    engine.load(Weights(4, state))
    engine.submit([request(0, [1, 2])])
    with pytest.raises(ValueError, match="version 4.*not finite"):
        engine.step()


# ---- config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"slots": 0}, "slots: must be at least 1, got 0"),
        ({"block": 0}, "block: must be at least 1, got 0"),
        ({"prefill_tokens": 0}, "prefill_tokens: must be at least 1, got 0"),
        ({"max_context": 1}, "max_context: must be at least 2"),
    ],
)
def test_config_says_which_key_is_wrong(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TorchGeneratorConfig(**given)


def test_a_context_is_as_long_as_the_model_or_the_config_says() -> None:
    for engine, most in ((generator(Qwen2Config(**SIZES)), 256), (generator(Qwen2Config(**SIZES), max_context=20), 20)):
        engine.submit([request(0, [1, 2], most - 2)])
        with pytest.raises(ValueError, match=f"more than the {most} of a context"):
            engine.submit([request(1, [1, 2], most - 1)])
