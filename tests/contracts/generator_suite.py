"""What every Generator must do, as checks that take a case. Their yardstick is a plain forward pass of transformers
over whole sequences, with a copy of the policy that the generator does not own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from m2flow import seeds
from m2flow.types import Answer, Request, Weights

PROTOCOLS = ("Generator",)

NEVER: frozenset[int] = frozenset()  # no stop id: answers end at their limit
LENGTHS = (5, 3, 9, 1, 6, 3, 17)  # of prompts, more than a case has slots
LIMIT = 9


@dataclass(frozen=True)
class Case:
    """A generator with fewer slots than LENGTHS has prompts, if it has slots.

    `build()` gives it, and a policy of the same weights that it does not share: a torch module with `network` (a
    causal LM of transformers) and `state_dict`, in the dtype that the answers are checked in.
    """

    name: str
    build: Callable[[], tuple[Any, Any]]
    bound: float  # how far a log-probability may be from the plain forward pass
    exact: bool = True  # token i is drawn with seeds.uniform(seed, [0], [i], ()), and float64 tells tokens apart


# ---- pieces


def vocabulary(policy: Any) -> int:
    return int(policy.network.config.vocab_size)


def prompts(policy: Any, lengths: Sequence[int] = LENGTHS) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, vocabulary(policy), length) for length in lengths]


def asked(policy: Any, lengths: Sequence[int] = LENGTHS, **given: Any) -> list[Request]:
    """A request per prompt; seeds are unlike the ids."""
    given = {"max_tokens": LIMIT, "stop": NEVER} | given
    return [Request(10 + i, prompt, seed=100 + i, **given) for i, prompt in enumerate(prompts(policy, lengths))]


def run(generator: Any, requests: Sequence[Request]) -> dict[int, Answer]:
    generator.submit(requests)
    return finish(generator, len(requests))


def finish(generator: Any, count: int) -> dict[int, Answer]:
    answers: list[Answer] = []
    for _ in range(1000):
        answers += generator.step()
        if len(answers) >= count:
            break
    assert len({a.id for a in answers}) == len(answers) == count
    assert generator.step() == []
    return {a.id: a for a in answers}


@torch.no_grad()
def plain(policy: Any, prompt: np.ndarray, tokens: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probabilities of all tokens of the vocabulary where each of `tokens` was drawn, [n, V], without a cache."""
    ids = torch.from_numpy(np.concatenate([prompt, tokens]))[None]
    logits = policy.network(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
    return torch.log_softmax(logits / (temperature or 1.0), -1).numpy()


def assert_right(case: Case, policy: Any, request: Request, answer: Answer, start: int = 0) -> None:
    """Shapes, and log-probabilities from token `start` on."""
    tokens = np.asarray(answer.tokens)
    assert tokens.dtype == np.int64
    assert tokens.shape == np.shape(answer.logprob) == np.shape(answer.version)
    known = plain(policy, np.asarray(request.prompt), tokens, request.temperature)
    wanted = np.take_along_axis(known, tokens[:, None], 1)[:, 0]
    np.testing.assert_allclose(np.asarray(answer.logprob)[start:], wanted[start:], rtol=0, atol=case.bound)
    if request.temperature == 0.0:
        assert (wanted[start:] >= known.max(1)[start:] - 2.0 * case.bound).all()


def changed(policy: Any, version: int) -> Weights:
    """Other weights, put into `policy` too. Named as a trainer publishes them: without what is constant."""
    torch.manual_seed(version)
    with torch.no_grad():
        for name, x in policy.state_dict().items():
            if name not in policy.constant:
                x.add_(0.1 * torch.randn_like(x) * x.abs().mean().clamp(min=0.2))
    arrays = {f"policy.{n}": x.detach().clone() for n, x in policy.state_dict().items() if n not in policy.constant}
    return Weights(version, arrays | {"critic.weight": torch.full((3,), torch.nan)})


def temperatures(case: Case) -> tuple[float, ...]:
    """Under which two runs of the same requests must agree."""
    return (0.0, 0.8) if case.exact else (0.0,)


def assert_same(case: Case, a: Mapping[int, Answer], b: Mapping[int, Answer]) -> None:
    assert a.keys() == b.keys()
    for i in a:
        assert np.array_equal(a[i].tokens, b[i].tokens), i
        assert a[i].finish == b[i].finish
        np.testing.assert_allclose(a[i].logprob, b[i].logprob, rtol=0, atol=2.0 * case.bound)


# ---- checks


def check_logprobs_are_those_of_a_plain_forward_pass(case: Case) -> None:
    """More requests than slots, prompts of all lengths, several temperatures in one batch (law 3, A28)."""
    generator, policy = case.build()
    requests = [replace(r, temperature=(1.0, 0.6, 1.7)[i % 3]) for i, r in enumerate(asked(policy))]
    answers = run(generator, requests)
    for request in requests:
        answer = answers[request.id]
        assert (answer.finish, len(answer.tokens)) == ("length", LIMIT)
        assert np.array_equal(answer.version, [0] * LIMIT)
        assert_right(case, policy, request, answer)


def check_greedy_is_the_most_probable_token(case: Case) -> None:
    """And its log-probability is that at temperature 1; where tokens are told apart, `generate` answers the same."""
    generator, policy = case.build()
    requests = asked(policy, temperature=0.0)
    answers = run(generator, requests)
    for request in requests:
        assert_right(case, policy, request, answers[request.id])
        if case.exact:
            ids = torch.from_numpy(np.asarray(request.prompt))[None]
            with torch.no_grad():
                out = policy.network.generate(
                    input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
                    max_new_tokens=LIMIT, eos_token_id=-1, pad_token_id=0,
                )  # fmt: skip
            assert np.array_equal(out[0, ids.shape[1] :].numpy(), answers[request.id].tokens)


def check_tokens_are_drawn_by_the_seed_of_their_request(case: Case) -> None:
    """By inverse CDF, computed here from the plain forward pass."""
    if not case.exact:
        return
    generator, policy = case.build()
    requests = asked(policy, temperature=0.8)
    answers = run(generator, requests)
    for request in requests:
        tokens = answers[request.id].tokens
        known = np.exp(plain(policy, request.prompt, tokens, 0.8)).cumsum(1)
        drawn = seeds.uniform(request.seed, np.zeros(1, np.int64), np.arange(LIMIT), ())[:, 0]
        wanted = [int(np.searchsorted(row, u * row[-1], side="right")) for row, u in zip(known, drawn, strict=True)]
        assert tokens.tolist() == wanted


def check_answers_do_not_depend_on_the_batch(case: Case) -> None:
    """One by one, all at once, and backwards."""
    for temperature in temperatures(case):
        generator, policy = case.build()
        requests = asked(policy, temperature=temperature)
        whole = run(generator, requests)
        assert_same(case, whole, run(generator, requests[::-1]))
        assert_same(case, whole, {r.id: run(generator, [r])[r.id] for r in requests})


def check_equal_prompts(case: Case) -> None:
    """Attempts at one task: seeds tell them apart, and nothing else."""
    generator, policy = case.build()
    first, other = asked(policy, (11, 4))
    group = [replace(first, id=i, seed=i // 2) for i in range(8)]
    answers = run(generator, [*group[:5], replace(other, id=99), *group[5:]])
    for request in group:
        assert_right(case, policy, request, answers[request.id])
    if case.exact:
        assert all(np.array_equal(answers[i].tokens, answers[i + 1].tokens) for i in (0, 2, 4, 6))
    assert len({tuple(answers[i].tokens) for i in (0, 2, 4, 6)}) > 1


def check_a25_stop_ids(case: Case) -> None:
    """Any of a request's own stop ids ends its answer, is part of it, and counts also as the last token allowed."""
    generator, policy = case.build()
    requests = asked(policy, temperature=0.0)
    whole = run(generator, requests)
    absent = next(i for i in range(vocabulary(policy)) if all(i not in a.tokens for a in whole.values()))
    stops = []
    for i, request in enumerate(requests):
        tokens = whole[request.id].tokens.tolist()
        ids = ({tokens[3], tokens[6]}, {absent}, {tokens[-1]}, {tokens[0], absent}, set())[i % 5]
        stops.append(replace(request, stop=frozenset(ids)))
    answers = run(generator, stops)
    ended = []
    for request in stops:
        tokens = whole[request.id].tokens.tolist()
        end = next((j + 1 for j, token in enumerate(tokens) if token in request.stop), None)
        assert answers[request.id].tokens.tolist() == tokens[:end]
        assert answers[request.id].finish == ("length" if end is None else "stop")
        ended.append(end)
    assert len(set(ended)) > 2


def check_every_request_has_its_own_limit(case: Case) -> None:
    generator, policy = case.build()
    requests = [replace(r, max_tokens=1 + 5 * (i % 3)) for i, r in enumerate(asked(policy, temperature=0.0))]
    answers = run(generator, requests)
    for request in requests:
        assert (len(answers[request.id].tokens), answers[request.id].finish) == (request.max_tokens, "length")
        assert_right(case, policy, request, answers[request.id])


def check_an_aborted_request_goes_on_where_it_was(case: Case) -> None:
    """Running ones and waiting ones; the answer is the one that it would have got, and holds what had begun."""
    for temperature in temperatures(case):
        generator, policy = case.build()
        requests = asked(policy, temperature=temperature, max_tokens=40)
        whole = run(generator, requests)
        generator.submit(requests)
        answers = {a.id: a for a in generator.step()}
        partial = {a.id: a for a in generator.abort()}
        assert partial.keys() | answers.keys() == whole.keys()
        assert generator.step() == []
        assert any(0 < len(a.tokens) < 40 for a in partial.values())
        for i, a in partial.items():
            assert a.finish == "abort"
            assert np.array_equal(a.tokens, whole[i].tokens[: len(a.tokens)])
        again = [replace(r, begun=partial[r.id]) for r in requests if r.id in partial]
        assert_same(case, whole, answers | run(generator, again))


def check_some_can_be_aborted(case: Case) -> None:
    """The others go on as if nothing had been; ids that are not in flight are passed over."""
    generator, policy = case.build()
    requests = asked(policy, temperature=0.0, max_tokens=40)
    whole = run(generator, requests)
    generator.submit(requests)
    answers = {a.id: a for a in generator.step()}
    out = generator.abort([10, 12, 12345])
    assert {a.id for a in out} == {10, 12} - answers.keys()
    rest = whole.keys() - {10, 12} - answers.keys()
    assert_same(case, whole, answers | {a.id: whole[a.id] for a in out} | finish(generator, len(rest)))


def check_what_had_ended_is_not_gone_on_with(case: Case) -> None:
    generator, policy = case.build()
    (request,) = asked(policy, (4,), temperature=0.0)
    whole = run(generator, [request])[request.id]
    for stop, reason in ((frozenset({int(whole.tokens[-1])}), "stop"), (NEVER, "length")):
        begun = Answer(77, whole.tokens, whole.logprob, np.full(LIMIT, 3), "abort")
        got = run(generator, [replace(request, stop=stop, begun=begun)])[request.id]
        assert (got.id, got.finish) == (request.id, reason)
        assert np.array_equal(got.tokens, whole.tokens)
        assert np.array_equal(got.version, begun.version)


def check_new_weights_answer(case: Case) -> None:
    """As a generator with those weights from the start would; every token carries their version."""
    generator, policy = case.build()
    requests = asked(policy, temperature=0.0)
    old = run(generator, requests)
    for version in (5, 6):
        generator.load(changed(policy, version))
        new = run(generator, requests)
        assert any(not np.array_equal(old[i].tokens, new[i].tokens) for i in old)
        for request in requests:
            assert np.array_equal(new[request.id].version, [version] * LIMIT)
            assert_right(case, policy, request, new[request.id])
        old = new


def check_requests_in_flight_go_on_with_new_weights(case: Case) -> None:
    """From the next token on, and with nothing that the old ones computed."""
    generator, policy = case.build()
    requests = asked(policy, max_tokens=40)
    generator.submit(requests)
    early = {a.id: a for a in generator.step()}
    generator.load(changed(policy, 9))
    answers = early | finish(generator, len(requests) - len(early))
    both = 0
    for request in requests:
        answer = answers[request.id]
        start = int((np.asarray(answer.version) == 0).sum())
        assert np.array_equal(answer.version, [0] * start + [9] * (40 - start))
        assert_right(case, policy, request, answer, start)
        both += 0 < start < 40
    assert both


def check_weights_of_another_policy_are_refused(case: Case) -> None:
    """And change nothing, in part or whole."""
    generator, policy = case.build()
    requests = asked(policy, temperature=0.0)
    old = run(generator, requests)
    good = changed(policy, 3).arrays
    first, *_, last = [name for name in good if name.startswith("policy.")]
    for arrays in (
        {k: v for k, v in good.items() if k != last},
        {**good, "policy.unknown": torch.zeros(2)},
        {**good, last: good[last][..., :-1]},
    ):
        with pytest.raises(ValueError, match="version 8"):
            generator.load(Weights(8, arrays))
    assert first != last
    new = run(generator, requests)
    assert_same(case, old, new)
    assert np.array_equal(new[10].version, [0] * LIMIT)


def check_requests_that_are_none_are_refused(case: Case) -> None:
    """With their id and the reason, and none of those submitted with them is taken."""
    generator, policy = case.build()
    good, other = asked(policy, (4, 5))
    begun = Answer(11, np.zeros(LIMIT + 1, np.int64), np.zeros(LIMIT + 1), np.zeros(LIMIT + 1, np.int64), "abort")
    for bad, reason in (
        (replace(other, id=good.id), "in flight"),
        (replace(other, prompt=np.zeros(0, np.int64)), "prompt"),
        (replace(other, prompt=np.array([0, vocabulary(policy)])), "prompt"),
        (replace(other, max_tokens=0), "max_tokens"),
        (replace(other, max_tokens=10**6), "max_tokens"),
        (replace(other, temperature=-0.1), "temperature"),
        (replace(other, begun=begun), "begun"),
    ):
        with pytest.raises(ValueError, match=rf"request {bad.id}: .*{reason}"):
            generator.submit([good, bad])
        assert generator.step() == []
    assert len(run(generator, [good, other])) == 2


def check_nothing_that_is_handed_in_changes(case: Case) -> None:
    generator, policy = case.build()
    requests = asked(policy)
    for request in requests:
        request.prompt.flags.writeable = False
    before = [request.prompt.copy() for request in requests]
    state = torch.random.get_rng_state()
    run(generator, requests)
    assert torch.equal(state, torch.random.get_rng_state()) or not case.exact
    assert all(np.array_equal(x, request.prompt) for x, request in zip(before, requests, strict=True))


def check_closing_frees_it(case: Case) -> None:
    generator, policy = case.build()
    generator.submit(asked(policy))
    generator.step()
    generator.close()


CHECKS = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
