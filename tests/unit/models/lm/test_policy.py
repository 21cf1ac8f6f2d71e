"""The policy around a model: names, seeds, adapters, reference, what it hands to engines and to disk."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from m2flow.models.lm import export
from m2flow.models.lm.config import CausalLMConfig
from m2flow.models.lm.lora import LoRA
from tests.unit.models.lm.small import LETTERS, SPEC, config, conversations, move, one_by_one, policy

TIED = {"tie_word_embeddings": True}
ADAPTED: dict[str, Any] = {"lora": LoRA(rank=4, alpha=8)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small tied model."""
    folder = tmp_path_factory.mktemp("model") / "hf"
    policy("llama", sizes=TIED).save_pretrained(folder)
    return folder


def test_weights_depend_on_the_seed_only_and_leave_no_trace() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    made = [policy(seed=seed, **ADAPTED).state_dict() for seed in (3, 3, 4)]
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(x, made[1][name]) for name, x in made[0].items())
    assert any(not torch.equal(x, made[2][name]) for name, x in made[0].items() if "lora_A" in name)


def test_it_is_a_scorer_with_its_vocabulary() -> None:
    made = policy()
    words = 3 + len(LETTERS.characters)
    assert (made.axes, made.chunk, made.temperature) == (("chunk",), 1, 1.0)
    assert made.spec.action.categories == words == made.vocabulary
    assert made.feature_size == 32
    assert made.network.generation_config.eos_token_id == 2
    obs = conversations()
    assert made.sizes(obs).tolist() == [6, 6, 12, 9, 2, 4, 1]
    assert not made.score({name: x[6:] for name, x in obs.items()}).logprob.any()
    made.score({name: x[6:] for name, x in obs.items()}).logprob.sum().backward()  # no mistake: a gradient of 0


def test_a24_names_are_unique_and_engines_get_every_tied_one() -> None:
    """vLLM keeps a stale output layer without a word where only `embed_tokens` arrives."""
    made = policy("llama", sizes=TIED)
    addresses = [x.data_ptr() for x in made.state_dict().values()]
    assert len(addresses) == len(set(addresses))
    assert not any("lm_head" in name for name in made.state_dict())
    names = dict(made.hf_weights())
    assert names["lm_head.weight"].data_ptr() == names["model.embed_tokens.weight"].data_ptr()
    other = policy("llama", seed=9, sizes=TIED)
    other.load_state_dict(made.state_dict(), strict=True)
    assert torch.equal(other.network.lm_head.weight, made.network.model.embed_tokens.weight)
    assert other.network.lm_head.weight is other.network.model.embed_tokens.weight
    for same in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(same.score(conversations()).logprob, made.score(conversations()).logprob)
        assert same.state_dict().keys() == made.state_dict().keys()


def test_constants_are_what_adapters_stand_on_and_loading_does_without() -> None:
    made, other = move(policy(**ADAPTED)), policy(**ADAPTED)
    state = made.state_dict()
    assert made.constant == {name for name in state if "lora_" not in name}
    other.load_state_dict({name: x for name, x in state.items() if name not in made.constant}, strict=True)
    assert torch.equal(other.score(conversations()).logprob, made.score(conversations()).logprob)
    with pytest.raises(RuntimeError, match="lora_A"):
        other.load_state_dict({name: x for name, x in state.items() if "lora_A" not in name}, strict=True)
    assert policy().constant == frozenset()


def test_a24a_merged_weights_are_what_the_adapter_adds_whenever_they_are_read() -> None:
    """W = I and a delta of 1 at [0, 0]: the receiver holds 2 there, and the module is as it was."""
    made = policy(lora=LoRA(rank=1, alpha=1, targets=("q_proj",)))
    layer = made.network.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.base_layer.weight.copy_(torch.eye(32))
        layer.lora_A.default.weight.zero_()[0, 0] = 1.0
        layer.lora_B.default.weight.zero_()[0, 0] = 1.0
    lazy: Iterator[tuple[str, torch.Tensor]] = made.hf_weights()
    got = dict(lazy)["model.layers.0.self_attn.q_proj.weight"]
    want = torch.eye(32)
    want[0, 0] = 2.0
    assert torch.equal(got, want)
    assert torch.equal(layer.base_layer.weight, torch.eye(32))
    assert not any("lora" in name or "base_layer" in name for name, _ in made.hf_weights())


def small_update() -> tuple[Any, str, torch.Tensor]:
    """Adapters of 2**-12 on a base of ones in bfloat16, which knows nothing between 1 and 1 + 2**-7."""
    made = policy(lora=LoRA(rank=1, alpha=1, targets=("q_proj",)), dtype="bfloat16").to(torch.float32)
    layer = made.network.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.base_layer.weight.fill_(1.0)
        layer.lora_A.default.weight.fill_(1.0)
        layer.lora_B.default.weight.fill_(2.0**-12)
    return made, "model.layers.0.self_attn.q_proj.weight", torch.full((32, 32), 1.0 + 2.0**-12)


def test_a_small_update_of_adapters_is_not_rounded_away() -> None:
    from m2flow.backends.generate.config import TorchGeneratorConfig

    made, name, want = small_update()
    found = dict(made.hf_weights())
    assert torch.equal(found[name], want)
    assert {x.dtype for n, x in found.items() if "q_proj.weight" not in n} == {torch.bfloat16}
    for dtype, held in (("auto", want), ("float32", want), ("bfloat16", torch.ones(32, 32))):
        decoder: Any = TorchGeneratorConfig(dtype=dtype).build(made).decoder  # type: ignore[arg-type]
        assert torch.equal(decoder.weights.layers[0].qkv[:32].float(), held)


def test_a_folder_has_the_dtype_of_the_base_and_the_adapter_its_own(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    made, name, _ = small_update()
    made.save_pretrained(tmp_path / "hf")
    held = load_file(tmp_path / "hf/model.safetensors")
    assert {x.dtype for x in held.values()} == {torch.bfloat16}
    assert held[name].eq(1.0).all()
    assert json.loads((tmp_path / "hf/config.json").read_text())["dtype"] == "bfloat16"
    adapter = load_file(tmp_path / "hf/adapter/adapter_model.safetensors")
    assert {x.dtype for x in adapter.values()} == {torch.float32}


def test_a_reference_is_the_start_without_a_second_copy_under_lora() -> None:
    obs = conversations()
    for keys, names in ((ADAPTED, 0), ({}, 1)):
        made = policy(**keys).double()
        start = made.score(obs).logprob.detach()
        reference = made.reference()
        move(made)
        with made.sharing():
            here = made.score(obs).logprob
            assert torch.allclose(reference.score(obs).logprob, start, atol=1e-12)
            assert not torch.allclose(here, start, atol=1e-3)
            assert torch.equal(made.score(obs).logprob, here)
        assert not reference.score(obs).logprob.requires_grad
        assert isinstance(reference, torch.nn.Module) == bool(names)
        assert any(p.requires_grad for p in made.parameters())


def test_a_frozen_base_keeps_its_dtype_and_what_is_trained_does_not() -> None:
    made = policy(**ADAPTED, dtype="bfloat16").to(torch.float32)
    kinds = {name: p.dtype for name, p in made.named_parameters()}
    assert {kinds[name] for name in made.constant} == {torch.bfloat16}
    assert {kind for name, kind in kinds.items() if name not in made.constant} == {torch.float32}
    found = made.score(conversations())
    assert found.logprob.dtype == torch.float32
    assert made.features(conversations()).dtype == torch.float32
    found.logprob.sum().backward()


def test_on_the_meta_device_nothing_is_read(saved: Path) -> None:
    folder = saved.with_name("no_weights")
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((saved / name).read_bytes())
    for keys in ({}, ADAPTED):
        with torch.device("meta"):
            made = CausalLMConfig(path=str(folder), **keys).build(SPEC, 0)
        assert all(p.is_meta for p in made.parameters())
        real = CausalLMConfig(path=str(saved), **keys).build(SPEC, 0)
        assert {n: p.shape for n, p in made.named_parameters()} == {n: p.shape for n, p in real.named_parameters()}
        assert made.constant == real.constant


def test_a28_the_temperature_divides_once_for_everyone() -> None:
    obs = conversations()
    for temperature in (0.5, 2.0):
        made = policy(temperature=temperature, **ADAPTED).double()
        want = one_by_one(made.network, obs, temperature)[0]
        for scorer in (made, made.reference()):
            assert torch.allclose(scorer.score(obs).logprob, want, atol=1e-9)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_saved_model_opens_and_says_the_same(kind: str, tmp_path: Path) -> None:
    """By transformers' own classes, in another process it would be no different."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = move(policy(kind))
    made.save_pretrained(tmp_path / "hf")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    ids = torch.arange(3, 15)[None]
    torch.testing.assert_close(again(input_ids=ids).logits, made.network(input_ids=ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").decode([4, 5]) == "12" if kind == "llama" else True
    mine = CausalLMConfig(path=str(tmp_path / "hf")).build(SPEC, 0)
    torch.testing.assert_close(mine.score(conversations()).logprob, made.score(conversations()).logprob)
    assert CausalLMConfig(path=str(tmp_path / "hf")).codec().stop == {2}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_a24c_an_exported_adapter_has_its_alpha_and_equals_the_merged_model(tmp_path: Path) -> None:
    """r 32 and alpha 16; peft itself opens it on the model that training started from."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    wide = {"hidden_size": 64}  # no layer is narrower than the rank
    made = move(policy("llama", sizes=wide, lora=LoRA(rank=32, alpha=16)))
    made.save_pretrained(tmp_path / "hf")
    settings = json.loads((tmp_path / "hf/adapter/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["lora_dropout"]) == (32, 16, 0.0)
    adapted = PeftModel.from_pretrained(policy("llama", sizes=wide).network, tmp_path / "hf/adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        want = made.network(input_ids=ids).logits
        torch.testing.assert_close(adapted(input_ids=ids).logits, want)
        torch.testing.assert_close(merged(input_ids=ids).logits, want, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(want, policy("llama").network(input_ids=ids).logits, atol=1e-2)


def test_what_reads_back_differently_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge that goes wrong on the way to disk shows in the logits."""
    from m2flow.models.lm import lora

    made = move(policy(**ADAPTED))
    monkeypatch.setattr(lora, "merged", lambda network: iter([
        (n.replace(".base_layer", ""), x) for n, x in network.state_dict().items() if "lora_" not in n
    ]))  # fmt: skip
    with pytest.raises(OSError, match=r"logits of hf differ from the trained model's by"):
        made.save_pretrained(tmp_path / "hf")
    monkeypatch.setattr(export, "COMPARE_UP_TO", 0)
    made.save_pretrained(tmp_path / "large")  # of large models only the bytes are compared


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"path": "/nowhere/at/all", "config": {}, "tokenizer": None},
            "path: '/nowhere/at/all' is no folder on this machine",
        ),
        ({"path": "x"}, "path: given together with `config`.*`config: null`"),
        ({"config": {}}, "path: give either.*; neither is"),
        ({"config": None}, "path: give either"),
        (
            {"sizes": {"num_attention_heads": 3}},
            "num_key_value_heads 2 must divide num_attention_heads 3|hidden_size 32",
        ),
        ({"sizes": {"num_attention_heads": 6}}, "config: num_attention_heads 6 must divide hidden_size 32"),
        ({"sizes": {"num_attention_heads": 1}}, "config: num_key_value_heads 2 must divide num_attention_heads 1"),
        ({"sizes": {"num_attention_heads": 0}}, "config: num_attention_heads must be a whole number from 1 on, got 0"),
        ({"sizes": {"hidden_size": "x"}}, "config: hidden_size must be a whole number"),
        ({"lora": LoRA(rank=17)}, "lora.rank: 17 is more than the width 16 of .*k_proj"),
        ({"temperature": 1e-4}, "temperature: must be at least 0.001"),
        ({"config": {"hidden_size": 8}}, "config: needs model_type"),
        ({"tokenizer": None}, "tokenizer: random weights need one"),
        ({"config": {"model_type": "qwen9"}}, "config: model_type 'qwen9' is unknown"),
        ({"config": {"model_type": "qwen2", "hidden": 8}}, "config: qwen2 has no key 'hidden'"),
        ({"config": {"model_type": "qwen2", "vocab_size": 8}}, "config: vocab_size 8 is less than the tokenizer's 20"),
        ({"temperature": 0.0}, "temperature: must be at least 0.001"),
        ({"logits_chunk": 0}, "logits_chunk: must be at least 1"),
        ({"dtype": "bfloat16"}, "dtype: only of weights that lora freezes"),
        ({"lora": LoRA(targets=("q_prj",))}, "lora.targets: no layer is called 'q_prj'; there are .*q_proj"),
    ],
)
def test_config_says_what_is_wrong(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**keys).build(SPEC, 0)
    for wrong, said in (({"rank": 0}, "rank"), ({"alpha": 0.0}, "alpha")):
        with pytest.raises(ValueError, match=f"{said}: must be"):
            LoRA(**wrong)


def test_without_gradients_many_rows_are_computed_in_parts_and_give_the_same(monkeypatch) -> None:
    made, obs = policy().double(), conversations()
    with torch.no_grad():
        whole, wide = made.score(obs), made.features(obs)
        monkeypatch.setattr("m2flow.models.lm.policy.AT_ONCE", 12)
        parts, apart = made.score(obs), made.features(obs)
    torch.testing.assert_close(parts.logprob, whole.logprob, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(parts.entropy, whole.entropy, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(apart, wide, rtol=1e-9, atol=1e-9)
