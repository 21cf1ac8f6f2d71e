"""What the vLLM adapter records is what was drawn, and from which weights."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from m2flow.backends.vllm import VLLMGenerator
from m2flow.models.lm.policy import CausalLMPolicy
from m2flow.protocols import Resident
from m2flow.types import Answer, Request, Weights
from tests.vllm.tiny import VOCABULARY, asked, engine, expected_logprob, finish, logits, prompt, published, tiny


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens.tolist() for answer in answers]


def differences(generator: VLLMGenerator, requests: list[Request], at: float) -> np.ndarray:
    """|engine - transformers|, of every token that is drawn."""
    pairs = zip(finish(generator, requests), requests, strict=True)
    return np.concatenate([np.abs(a.logprob - expected_logprob(generator.policy, r, a.tokens, at)) for a, r in pairs])


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_logprobs_are_those_of_the_tempered_distribution(exact: VLLMGenerator, temperature: float) -> None:
    found = differences(exact, asked(temperature=temperature), temperature)
    assert found.mean() < 1e-5
    assert found.max() < 1e-4


def test_logprobs_of_greedy_answers_are_those_at_temperature_one(exact: VLLMGenerator) -> None:
    assert differences(exact, asked(temperature=0.0), 1.0).max() < 1e-4


def test_greedy_and_drawn_answers_share_a_batch(exact: VLLMGenerator) -> None:
    """vLLM computes log-probs of a mixed batch elsewhere than those of a greedy one."""
    requests = [replace(r, temperature=0.0 if r.id % 2 else 0.7) for r in asked()]
    for answer, request in zip(finish(exact, requests), requests, strict=True):
        right = expected_logprob(exact.policy, request, answer.tokens, request.temperature or 1.0)
        assert np.abs(answer.logprob - right).max() < 1e-4


def test_greedy_tokens_are_the_most_probable(exact: VLLMGenerator) -> None:
    for answer, request in zip(finish(exact, asked(temperature=0.0)), asked(), strict=True):
        assert answer.tokens.tolist() == logits(exact.policy, request, answer.tokens).argmax(-1).tolist()


def test_logprobs_in_bfloat16_are_within_the_stated_bound(rounded: VLLMGenerator) -> None:
    found = differences(rounded, asked(max_tokens=32), 1.0)
    assert 1e-4 < found.mean() < rounded.config.bound  # it is rounded, so that the test sees something


def test_an_answer_depends_on_its_seed_and_not_on_its_company(exact: VLLMGenerator) -> None:
    together = tokens(finish(exact, asked()))
    alone = [tokens(finish(exact, [request]))[0] for request in asked()]
    assert together == alone
    other = [replace(request, seed=request.seed + 1) for request in asked()]
    assert all(a != b for a, b in zip(tokens(finish(exact, other)), together, strict=True))


def test_more_requests_than_the_batch_holds_wait_for_their_turn(exact: VLLMGenerator) -> None:
    many = [Request(i, prompt(i), 4, frozenset(), i) for i in range(3 * exact.config.max_sequences)]
    answers = finish(exact, many)
    assert all(len(answer.tokens) == 4 and answer.finish == "length" for answer in answers)


def test_prompts_of_more_tokens_than_vllm_computes_in_a_step() -> None:
    """vLLM cuts a prompt that does not fit, and on a CPU cannot do so where the request has a seed."""
    made = engine(tiny("qwen2"), dtype="float32", max_context=None, max_sequences=64)
    requests = [Request(i, prompt(i, 150), 4, frozenset(), i) for i in range(64)]  # 9,600 tokens; a step takes 2,048
    for answer, request in zip(finish(made, requests), requests, strict=True):
        assert np.abs(answer.logprob - expected_logprob(made.policy, request, answer.tokens, 1.0)).max() < 1e-4
    made.close()


def test_drawn_tokens_follow_the_distribution(exact: VLLMGenerator) -> None:
    """First tokens of one prompt, 4,000 seeds: chi-square against the probabilities of transformers."""
    begin = prompt(3)
    requests = [Request(i, begin, 1, frozenset(), i, 1.5) for i in range(4000)]
    answers = finish(exact, requests)
    counts = np.bincount([int(answer.tokens[0]) for answer in answers], minlength=VOCABULARY)
    expected = 4000 * (logits(exact.policy, requests[0], answers[0].tokens)[0] / 1.5).softmax(-1).numpy()
    often = expected >= 5
    table = [(counts[often], expected[often]), (counts[~often].sum(), expected[~often].sum())]
    square = sum(float(np.sum((n - e) ** 2 / e)) for n, e in table)
    degrees = int(often.sum())
    assert square < degrees + 4 * (2 * degrees) ** 0.5


def test_a_stop_id_ends_an_answer_and_is_part_of_it(exact: VLLMGenerator) -> None:
    free = finish(exact, asked())
    stop = frozenset({int(free[0].tokens[3]), int(free[1].tokens[5])})
    for answer, before in zip(finish(exact, asked(stop=stop)), free, strict=True):
        places = [i for i, token in enumerate(before.tokens.tolist()) if token in stop]
        size = places[0] + 1 if places else len(before.tokens)
        assert answer.tokens.tolist() == before.tokens[:size].tolist()
        assert answer.finish == ("stop" if places else "length")
        assert len(answer.logprob) == len(answer.version) == size


def test_a_stop_id_in_the_last_place_is_a_stop(exact: VLLMGenerator) -> None:
    [free] = finish(exact, asked(1))
    size = 1 + free.tokens.tolist().index(free.tokens[-1])
    [answer] = finish(exact, asked(1, max_tokens=size, stop=frozenset({int(free.tokens[-1])})))
    assert (answer.finish, len(answer.tokens)) == ("stop", size)


def test_the_models_own_end_id_ends_nothing(exact: VLLMGenerator) -> None:
    end = exact.policy.network.config.eos_token_id
    answers = finish(exact, [Request(i, prompt(i), 100, frozenset(), i, 2.0) for i in range(32)])
    assert sum(answer.tokens[:-1].tolist().count(end) for answer in answers) > 0
    assert {answer.finish for answer in answers} == {"length"}


def test_new_weights_change_answers_and_old_ones_bring_them_back(exact: VLLMGenerator, rounded: VLLMGenerator) -> None:
    for generator in (exact, rounded):
        before = finish(generator, asked(temperature=0.0))
        generator.load(published(tiny(generator.policy.network.config.model_type, seed=1), 7))
        after = finish(generator, asked(temperature=0.0))
        assert all(a != b for a, b in zip(tokens(after), tokens(before), strict=True))
        assert all((answer.version == 7).all() for answer in after)
        generator.load(published(tiny(generator.policy.network.config.model_type), 8))
        assert tokens(finish(generator, asked(temperature=0.0))) == tokens(before)


def test_nothing_computed_with_old_weights_is_used_again(exact: VLLMGenerator) -> None:
    """A prompt longer than a block of the cache, before and after new weights."""
    request = Request(0, prompt(0, 100), 8, frozenset(), temperature=0.0)
    finish(exact, [request])
    exact.load(published(tiny("qwen2", seed=1), 1))
    [answer] = finish(exact, [request])
    right = expected_logprob(tiny("qwen2", seed=1), request, answer.tokens, 1.0)
    assert np.abs(answer.logprob - right).max() < 1e-4


def test_requests_in_flight_go_on_with_new_weights(exact: VLLMGenerator) -> None:
    requests = asked(3)
    exact.submit(requests)
    for _ in range(5):
        assert exact.step() == []
    new = tiny("qwen2", seed=1)
    exact.load(published(new, 1))
    done: dict[int, Answer] = {}
    while len(done) < 3:
        done |= {answer.id: answer for answer in exact.step()}
    for request in requests:
        answer = done[request.id]
        count = int((answer.version == 0).sum())
        assert 0 < count < len(answer.tokens) == 12
        assert answer.version.tolist() == sorted(answer.version.tolist())
        old = expected_logprob(tiny("qwen2"), request, answer.tokens, 1.0)[:count]
        late = expected_logprob(new, request, answer.tokens, 1.0)[count:]
        assert np.abs(answer.logprob - np.concatenate([old, late])).max() < 1e-4


def test_a_stale_output_head_ends_the_run(exact: VLLMGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM on a CPU ties the head once, when it starts: who sends the embedding alone trains against an old head."""

    def without_head(self: CausalLMPolicy) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, x) for name, x in whole(self) if name != "lm_head.weight")

    whole = CausalLMPolicy.hf_weights
    moved = tiny("qwen2")
    with torch.no_grad():
        moved.network.get_input_embeddings().weight.mul_(1.02)
    exact.load(published(moved, 1))  # with the head it is taken
    exact.load(published(tiny("qwen2"), 0))
    monkeypatch.setattr(CausalLMPolicy, "hf_weights", without_head)
    with pytest.raises(RuntimeError, match="the engine has not taken all weights"):
        exact.load(published(moved, 1))


def test_weights_that_are_not_finite_end_the_run() -> None:
    """With an engine of its own: not-a-number stays in its cache of keys and values."""
    made, broken = engine(tiny("qwen2"), dtype="float32"), tiny("qwen2")
    with torch.no_grad():
        next(broken.parameters()).fill_(torch.nan)
    with pytest.raises(RuntimeError, match="differ from the policy's by nan"):
        made.load(published(broken, 1))
    made.close()


def test_weights_of_another_policy_are_refused_and_the_old_ones_stay(exact: VLLMGenerator) -> None:
    before = tokens(finish(exact, asked()))
    good = published(tiny("qwen2", seed=1), 1)
    lacking = dict(list(good.arrays.items())[1:])
    for arrays in (lacking, {**good.arrays, "policy.extra": torch.zeros(1)}):
        with pytest.raises(ValueError, match="weights of version 1: .* do not fit this policy"):
            exact.load(Weights(1, arrays))
    assert exact.version == 0
    assert tokens(finish(exact, asked())) == before


def test_an_aborted_answer_goes_on_where_it_stopped(exact: VLLMGenerator) -> None:
    [request] = asked(1, max_tokens=20, temperature=0.0)
    [whole] = finish(exact, [request])
    exact.submit([request])
    for _ in range(6):
        exact.step()
    [part] = exact.abort()
    assert part.finish == "abort"
    assert 0 < len(part.tokens) < 20
    assert exact.step() == []
    exact.load(published(exact.policy, 1))  # so that versions tell the parts apart
    [again] = finish(exact, [replace(request, begun=part)])
    assert again.tokens.tolist() == whole.tokens.tolist()
    assert np.abs(again.logprob - whole.logprob).max() < 1e-4
    assert again.version.tolist() == [0] * len(part.tokens) + [1] * (20 - len(part.tokens))
    assert again.finish == "length"


def test_an_answer_that_goes_on_does_not_draw_its_first_numbers_again(exact: VLLMGenerator) -> None:
    """With nearly uniform tokens and the same noise, the second half would repeat the first."""
    flat = tiny("qwen2")
    with torch.no_grad():
        for x in flat.parameters():
            x.mul_(0.01)
    exact.load(published(flat, 1))
    [request] = asked(1, max_tokens=8)
    [first] = finish(exact, [request])
    [both] = finish(exact, [replace(request, max_tokens=16, begun=replace(first, finish="abort"))])
    assert both.tokens[:8].tolist() == first.tokens.tolist()
    assert np.mean(both.tokens[8:] == first.tokens) < 0.5


def test_only_the_requests_named_are_aborted(exact: VLLMGenerator) -> None:
    exact.submit(asked(4))
    exact.step()
    assert [answer.id for answer in exact.abort([2, 0, 77])] == [0, 2]
    left: list[Answer] = []
    while len(left) < 2:
        left += exact.step()
    assert sorted(answer.id for answer in left) == [1, 3]


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_temperatures_that_vllm_would_change_are_refused(exact: VLLMGenerator, temperature: float) -> None:
    with pytest.raises(ValueError, match=r"request 0: temperature: .*; vLLM draws at 0\.01 to 2"):
        exact.submit(asked(1, temperature=temperature))


def test_random_state_of_the_process_is_left_alone(exact: VLLMGenerator) -> None:
    before = torch.get_rng_state()
    finish(exact, asked(temperature=0.8))
    exact.load(published(tiny("qwen2", seed=1), 1))
    assert torch.equal(torch.get_rng_state(), before)


def test_starting_an_engine_leaves_the_process_as_it_was() -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    made = engine(tiny("qwen2"), dtype="float32")
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()  # noqa: NPY002
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)  # vLLM takes this away on a CPU
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    made.close()


def test_sleep_is_refused_where_vllm_cannot() -> None:
    with pytest.raises(ValueError, match="sleep: vLLM cannot leave a cpu; set sleep: false"):
        engine(tiny("qwen2"), sleep=True)


def test_without_sleep_the_engine_stays_and_goes_on(exact: VLLMGenerator) -> None:
    assert isinstance(exact, Resident)
    exact.submit(asked(1))
    exact.offload()
    exact.onload()
    done: list[Answer] = []
    while not done:
        done += exact.step()
    assert len(done[0].tokens) == 12
