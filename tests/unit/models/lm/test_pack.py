"""Packed rows with shared prompts mean what single rows mean, in values and gradients, for every architecture."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from m2flow.models.lm import network, pack
from m2flow.models.lm.lora import LoRA
from tests.unit.models.lm.small import POISON, conversations, gradients, move, one_by_one, policy

WAYS: dict[str, dict[str, Any]] = {
    "shared": {},
    "packed": {"share_prompts": False},
    "padded": {"pack": False},
    "chunked": {"logits_chunk": 4},
    "checkpointed": {"activation_checkpointing": True},
}
OTHERS = ("gemma2",)  # computed as padded rows, because of what they do beside attention


def scored(made: Any, obs: Any) -> list[torch.Tensor]:
    """Log-prob, entropy, features."""
    found = made.score(obs)
    return [found.logprob, found.entropy, made.features(obs)]


def differ(a: Any, b: Any) -> float:
    return max(float((x - y).detach().abs().max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", [*sorted(network.PACKED), *OTHERS])
def test_law_2_packed_and_shared_rows_are_rows_one_at_a_time(kind: str) -> None:
    obs = conversations()
    plain = policy(kind, temperature=0.7).double()
    assert network.packable(plain.network) == (kind not in OTHERS)
    want = one_by_one(plain.network, obs, 0.7)
    weights = torch.rand(3, *obs["at"].shape, dtype=torch.float64)
    loss = [(x * w).sum() if x.dim() == 2 else (x.sum(-1) * w).sum() for x, w in zip(want, weights, strict=True)]
    sum(loss).backward()
    slopes = gradients(plain)
    ways = {name: way for name, way in WAYS.items() if kind not in OTHERS or name in ("shared", "padded")}
    for name, way in ways.items():
        made = policy(kind, temperature=0.7, **way).double()
        got = scored(made, obs)
        assert differ(got, want) < 1e-9, name
        assert not got[0][obs["at"] == 0].any()
        loss = [(x * w).sum() if x.dim() == 2 else (x.sum(-1) * w).sum() for x, w in zip(got, weights, strict=True)]
        sum(loss).backward()
        mine = gradients(made)
        assert mine.keys() == slopes.keys()
        assert differ(mine.values(), slopes.values()) < 1e-8, name


def test_prompts_are_computed_once_and_nothing_behind_the_last_sampled_token() -> None:
    """By hand: prompts of 4, 6 and 1 tokens, and behind them 0..8 tokens of each row."""
    obs = conversations()
    layout = pack.pack(obs["tokens"], obs["at"], share=True)
    # rows 0, 2, 5 behind a prompt of 4: 2, 8, 0 more; rows 1, 3 behind 6: 0, 3 more; row 4: 2 in all
    assert len(layout.ids) == 4 + 2 + 8 + 0 + 6 + 0 + 3 + 2
    assert len(pack.pack(obs["tokens"], obs["at"], share=False).ids) == 6 + 6 + 12 + 9 + 2 + 4
    assert POISON not in layout.ids
    assert sorted(layout.back.tolist()) != []
    assert layout.cell.tolist() == obs["at"].reshape(-1).nonzero().squeeze(1).tolist()
    assert pack.pack(obs["tokens"][6:], obs["at"][6:], share=True) is None


def test_tokens_behind_the_last_sampled_one_and_their_order_leave_no_trace() -> None:
    obs, made = conversations(), policy().double()
    want = scored(made, obs)
    other = {name: x.clone() for name, x in obs.items()}
    for row, end in enumerate(obs["at"].amax(1).tolist()):
        other["tokens"][row, end + 1 :] = -(10**9)
    other["length"][:] = 0  # how long a row is does not decide; what was sampled does
    assert differ(scored(made, other), want) == 0.0
    order = torch.tensor([5, 3, 6, 0, 4, 1, 2])
    shuffled = scored(made, {name: x[order] for name, x in obs.items()})
    assert differ(shuffled, [x[order] for x in want]) < 1e-12


def test_rows_of_very_different_length_fall_into_blocks() -> None:
    """Long rows and short ones are not padded to each other, and blocks stay below their limit."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 20, (40, 300), generator=generator)
    ends = torch.randint(2, 299, (40,), generator=generator)
    at = torch.stack([ends, torch.zeros_like(ends)], 1)
    layout = pack.pack(tokens, at, share=True)
    assert len(layout.blocks) > 1
    computed = sum(block.query.numel() for block in layout.blocks)
    assert computed < 2 * len(layout.ids)
    made, plain = policy().double(), policy(pack=False).double()
    with torch.no_grad():
        obs = {"tokens": tokens, "at": at}
        assert differ(scored(made, obs), scored(plain, obs)) < 1e-9


def test_a_block_stays_below_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "AREA", 60)
    monkeypatch.setattr(pack, "SHARED_LENGTH", 11)
    obs = conversations()
    layout = pack.pack(obs["tokens"], obs["at"], share=True)
    for block in layout.blocks:
        assert len(block.query) == 1 or block.query.numel() * block.key.shape[1] <= 60
    assert len(layout.ids) == 4 + 2 + 0 + 12 + 6 + 0 + 3 + 2  # the row of 12 tokens shares with nobody
    made = policy().double()
    got = scored(made, obs)
    monkeypatch.undo()
    assert differ(got, scored(made, obs)) < 1e-12


@pytest.mark.parametrize(("window", "packs"), [(20, True), (5, False)])
def test_a_sliding_window_shorter_than_a_row_is_computed_as_padded_rows(window: int, packs: bool) -> None:
    obs = conversations()
    made = policy("mistral", sizes={"sliding_window": window}).double()
    assert (network.window(made.network) >= int(obs["at"].max())) == packs
    want = one_by_one(made.network, obs, 1.0)
    assert differ(scored(made, obs), want) < 1e-9
    if not packs:
        without = policy("mistral", sizes={"sliding_window": None}).double()
        assert differ(scored(without, obs), want) > 1e-6


def test_what_attention_does_not_know_is_an_error() -> None:
    from m2flow.models.lm.attention import PACK, attention

    layout = pack.pack(conversations()["tokens"], conversations()["at"], share=True)
    x = torch.zeros(1, 2, len(layout.ids), 4)
    for odd in ({"softcap": 30.0}, {"s_aux": x}, {"dropout": 0.1}, {"sliding_window": 3}):
        with pytest.raises(ValueError, match="set pack: false"):
            attention(torch.nn.Identity(), x, x, x, None, scaling=1.0, **{PACK: layout}, **odd)


def test_chunks_of_the_output_layer_are_refused_where_logits_are_changed_behind_it() -> None:
    with pytest.raises(ValueError, match="logits_chunk: gemma2 changes"):
        policy("gemma2", logits_chunk=2).score(conversations())


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_adapters_are_scored_like_merged_weights(way: dict[str, Any]) -> None:
    obs = conversations()
    made = move(policy("llama", lora=LoRA(rank=4), **way)).double()
    got = made.score(obs)
    got.logprob.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in made.parameters() if p.requires_grad)
    plain = policy("llama").double()
    plain.network.load_state_dict(dict(made.hf_weights()))
    want = one_by_one(plain.network, obs, 1.0)
    assert differ([got.logprob], want[:1]) < 1e-9


def test_features_and_scores_share_one_pass_within_sharing_only() -> None:
    obs, made, passes = conversations(), policy().double(), []
    made.network.get_decoder().register_forward_hook(lambda *_: passes.append(1))
    with made.sharing():
        one = made.score(obs).logprob.sum() + made.features(obs).sum()
        assert len(passes) == 1
        with torch.no_grad():
            made.features(obs)  # another gradient mode: another pass
        assert len(passes) == 2
    one.backward()
    together = gradients(made)
    (made.score(obs).logprob.sum() + made.features(obs).sum()).backward()
    assert len(passes) == 4
    assert differ(together.values(), gradients(made).values()) < 1e-9
    with made.sharing():
        made.score(obs)
        made.score({name: x.clone() for name, x in obs.items()})
        assert len(passes) == 6
