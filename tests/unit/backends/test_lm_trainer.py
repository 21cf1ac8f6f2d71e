"""Training a language model: constants, heads per token, autocast, schedules, law 2 over conversations, checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from m2flow.backends.checkpoint import CheckpointConfig, read_policy
from m2flow.backends.export import Exporter
from m2flow.backends.torch.heads import HeadNet
from m2flow.backends.torch.trainer import TorchTrainerConfig
from m2flow.models.lm.config import CausalLMConfig
from m2flow.models.lm.lora import LoRA
from m2flow.models.lm.policy import computes_bfloat16
from m2flow.types import Batch, Head, Loss, Phase, Term
from tests.unit.backends.small import Fit, batch, update
from tests.unit.backends.small import policy as mlp
from tests.unit.models.lm.small import SPEC, conversations, policy

ADAPTED: dict[str, Any] = {"lora": LoRA(rank=4)}


class Talk:
    """Likelihood of what was said, values of tokens towards 1, and closeness to the start, per token."""

    phases = (Phase("talk", "all"),)
    requires = frozenset({"score"})

    def __init__(self, *, needs_reference: bool = False) -> None:
        self.needs_reference = needs_reference

    def heads(self, spec: Any, chunk: int = 1) -> dict[str, Any]:
        return {"value": Head(outputs=chunk, hidden=(8,))}

    def losses(self, model: Any, rows: Batch, phase: str, noise: Any = None) -> Loss:
        there = rows.columns["there"]
        score = model.policy.score(rows.obs, rows.record)
        value = model.value("value", rows.obs)
        assert value.shape == there.shape
        terms = [
            Term("said", -score.logprob[there].sum(), "tokens"),
            Term("value", (value[there] - 1.0).square().sum(), "tokens", 0.5),
        ]
        if self.needs_reference:
            gap = score.logprob - model.reference.score(rows.obs, rows.record).logprob
            terms.append(Term("close", gap[there].square().sum(), "tokens", 0.1))
        return Loss(tuple(terms), {"entropy": (score.entropy.detach()[there].sum(), "tokens")})

    def counts(self, rows: Batch) -> dict[str, Any]:
        return {"tokens": rows.columns["there"].sum()}


def talk() -> Batch:
    obs = conversations()
    return Batch(obs, {}, {"there": obs["at"] > 0})


def trained(keys: dict[str, Any], cuts: tuple[int, ...] = (), steps: int = 3, **settings: Any) -> Any:
    config = TorchTrainerConfig(**({"learning_rate": 1e-2, "dtype": "float64"} | settings))
    trainer = config.build(policy(**keys), Talk(needs_reference=True), 0)
    for _ in range(steps):
        update(trainer, talk(), cuts)
    return trainer


@pytest.mark.parametrize("keys", [{}, ADAPTED, {"sizes": {"tie_word_embeddings": True}}], ids=["full", "lora", "tied"])
def test_law_2_any_cut_of_conversations_gives_the_same_weights(keys: dict[str, Any]) -> None:
    """Also where a cut separates rows that would share a prompt, and where a part has nothing sampled (row 6)."""
    whole = trained(keys).state()["model"]
    for other in (trained(keys, (1, 3, 6)), trained(keys | {"pack": False}), trained(keys | {"logits_chunk": 3}, (4,))):
        for name, x in other.state()["model"].items():
            torch.testing.assert_close(x, whole[name], atol=1e-9, rtol=0)


def test_a28_the_first_update_has_a_gap_to_the_reference_of_zero() -> None:
    for keys in ({}, ADAPTED):
        trainer = TorchTrainerConfig().build(policy(**keys), Talk(needs_reference=True), 0)
        sums = trainer.forward_backward(talk(), Talk.phases[0], Talk().counts(talk()))
        assert abs(sums["close_loss"][0]) < 1e-9


def test_constants_are_neither_published_nor_saved_but_known_again() -> None:
    trainer = trained(ADAPTED)
    state, sent = trainer.state(), trainer.weights("policy.")
    assert sent.arrays
    assert all("lora_" in name for name in sent.arrays)
    assert sent.checksums.keys() == sent.arrays.keys()
    assert all("lora_" in name or name.startswith("heads.") for name in state["model"])
    other = TorchTrainerConfig(learning_rate=1e-2, dtype="float64").build(
        policy(**ADAPTED), Talk(needs_reference=True), 7
    )
    other.restore(state)
    for one in (trainer, other):
        update(one, talk())
    for name, x in trainer.state()["model"].items():
        assert torch.equal(x, other.state()["model"][name])
    foreign = TorchTrainerConfig(dtype="float64").build(policy(seed=4, **ADAPTED), Talk(needs_reference=True), 0)
    with pytest.raises(ValueError, match="on top of other weights"):
        foreign.restore(state)


def test_one_forward_pass_serves_policy_and_value(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = TorchTrainerConfig().build(policy(), Talk(), 0)
    passes: list[int] = []
    trainer.model.policy.network.get_decoder().register_forward_hook(lambda *_: passes.append(1))
    for step in range(2):
        update(trainer, talk())
        assert len(passes) == step + 1


def test_a_frozen_base_in_half_precision_trains_in_float32() -> None:
    trainer = trained(ADAPTED | {"dtype": "bfloat16"}, dtype="float32")
    assert trainer.groups["all"].flat.data.dtype == torch.float32
    held = dict(trainer.model.policy.named_parameters())
    assert {held[name].dtype for name in trainer.model.policy.constant} == {torch.bfloat16}


def test_autocast_without_instructions_for_it_computes_in_float32(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Emulated bfloat16 takes minutes a step: scores and updates are those of autocast: none, and the log says so."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    computes_bfloat16.cache_clear()
    try:
        full, half = (TorchTrainerConfig(autocast=kind).build(policy(), Talk(), 0) for kind in ("none", "bfloat16"))
        for trainer in (full, half):
            trainer.model.policy.score(talk().obs)
            trainer.forward_backward(talk(), Talk.phases[0], Talk().counts(talk()))
        assert torch.equal(full.groups["all"].flat.grad, half.groups["all"].flat.grad)
        assert sum("no instructions for bfloat16" in record.message for record in caplog.records) == 1
    finally:
        computes_bfloat16.cache_clear()


def test_autocast_computes_in_half_precision_and_keeps_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs in float32, the same inside and outside of an update; near those of full precision, and learning."""
    monkeypatch.setattr("m2flow.models.lm.policy.computes_bfloat16", lambda _: True)  # emulated if need be
    full = TorchTrainerConfig().build(policy(), Talk(), 0)
    half = TorchTrainerConfig(autocast="bfloat16", learning_rate=1e-2).build(policy(), Talk(), 0)
    want, got = (t.model.policy.score(talk().obs).logprob.detach() for t in (full, half))
    assert got.dtype == torch.float32
    assert 1e-6 < float((got - want).abs().max()) < 0.1
    sums = half.forward_backward(talk(), Talk.phases[0], Talk().counts(talk()))
    assert sums["said_loss"][0] == pytest.approx(-float(got.sum()), rel=1e-5)
    half.step(Talk.phases[0])
    losses = []
    for _ in range(10):
        losses.append(half.forward_backward(talk(), Talk.phases[0], Talk().counts(talk()))["said_loss"][0])
        half.step(Talk.phases[0])
    assert losses[-1] < 0.8 * losses[0]
    assert half.groups["all"].flat.data.dtype == torch.float32
    fit = TorchTrainerConfig(autocast="bfloat16").build(mlp(), Fit(), 0)
    update(fit, batch())
    with pytest.raises(ValueError, match="autocast: bfloat16 needs dtype: float32"):
        TorchTrainerConfig(autocast="bfloat16", dtype="float64")


@pytest.mark.parametrize("copies", [1, 2])
def test_a_head_gives_a_value_for_every_token(copies: int) -> None:
    generator = torch.Generator().manual_seed(0)
    head = HeadNet(Head(hidden=(6,), copies=copies), 4, SPEC.action, 1, generator)
    x = torch.randn(3, 5, 4, generator=generator)
    got = head(x, None)
    assert got.shape == ((3, 5) if copies == 1 else (2, 3, 5))
    for row in range(3):
        torch.testing.assert_close(got[..., row, :], head(x[row], None).squeeze(-1))
    several = HeadNet(Head(outputs=2, hidden=()), 4, SPEC.action, 1, generator)
    assert several(x, None).shape == (3, 5, 2)
    with pytest.raises(ValueError, match="features"):
        HeadNet(Head(takes_action=True), 4, SPEC.action, 1, generator)(x, torch.zeros(3, 1))


def rates(**settings: Any) -> list[float]:
    trainer = TorchTrainerConfig(learning_rate=1.0, **settings).build(mlp(), Fit(), 0)
    out = []
    for version in range(6):
        trainer.version = version
        out.append(trainer._rate(trainer.groups["all"]))
    return out


def test_rates_by_hand() -> None:
    assert rates() == [1.0] * 6
    assert rates(warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])
    cosine = [0.5 * (1 + math.cos(math.pi * i / 4)) for i in (0, 1, 2, 3, 4, 4)]
    assert rates(schedule="cosine", schedule_steps=4) == pytest.approx(cosine)
    assert rates(schedule="cosine", schedule_steps=4, final_fraction=0.5)[4] == pytest.approx(0.5)
    both = rates(schedule="linear", schedule_steps=4, warmup_steps=2)
    assert both == pytest.approx([0.5, 0.75, 0.5, 0.25, 0.0, 0.0])
    with pytest.raises(ValueError, match="schedule: cosine needs schedule_steps"):
        TorchTrainerConfig(schedule="cosine")
    with pytest.raises(ValueError, match="warmup_steps: must be 0 or more"):
        TorchTrainerConfig(warmup_steps=-1)


@pytest.mark.parametrize("keys", [{}, ADAPTED], ids=["full", "lora"])
def test_a_checkpoint_holds_a_folder_that_from_pretrained_opens(keys: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = trained(keys, dtype="float32")
    store = CheckpointConfig().build(tmp_path, Exporter(lambda: policy(**keys)))
    store.save(3, {"learner": {"trainer": trainer.state()}}, {})
    place = store.path(3)
    model = AutoModelForCausalLM.from_pretrained(place / "hf")
    AutoTokenizer.from_pretrained(place / "hf")
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        want = trainer.model.policy.network(input_ids=ids).logits
        torch.testing.assert_close(model(input_ids=ids).logits, want, atol=1e-4, rtol=1e-4)
    assert (place / "hf/adapter/adapter_config.json").is_file() == bool(keys)
    again = policy(**keys)
    again.load_state_dict(read_policy(place), strict=True)
    own = trainer.model.policy.score(talk().obs).logprob
    torch.testing.assert_close(again.score(talk().obs).logprob, own)
    opened = CausalLMConfig(path=str(place / "hf")).build(SPEC, 0)
    torch.testing.assert_close(opened.score(talk().obs).logprob, own, atol=1e-4, rtol=1e-4)
    _, state, _ = store.load(3)
    trainer.restore(state["learner"]["trainer"])
    (place / "hf/model.safetensors").write_bytes(b"x" * (place / "hf/model.safetensors").stat().st_size)
    with pytest.raises(ValueError, match=r"hf/model.safetensors is damaged"):
        store.load(3)


def test_a19_an_export_that_fails_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    trainer, calls = trained({}, steps=1), []

    def export(place: Path, arrays: Any) -> None:
        (place / "hf").mkdir()
        (place / "hf/half").write_text("x")
        calls.append(sorted(arrays))
        if len(calls) == 2:
            raise OSError("disk full")

    store = CheckpointConfig(keep=1).build(tmp_path, export)
    store.save(1, {"trainer": trainer.state()}, {})
    with pytest.raises(OSError, match="disk full"):
        store.save(2, {"trainer": trainer.state()}, {})
    assert list(store.steps()) == [1]
    assert calls[0] == sorted(trainer.model.policy.state_dict())
    store.load()
