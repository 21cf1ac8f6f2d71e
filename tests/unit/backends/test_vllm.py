"""What of the vLLM adapter needs no vLLM: its settings, the adapters that it writes, and how it books requests.

The rest is in tests/vllm.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from m2flow.backends.vllm import VLLMGenerator, VLLMGeneratorConfig, adapter
from m2flow.models.lm.config import CausalLMConfig
from m2flow.models.lm.lora import LoRA
from m2flow.models.lm.policy import CausalLMPolicy
from m2flow.models.lm.tokenizer import CharacterTokenizer
from m2flow.types import Answer, Field, Request, Spec, Weights


def policy(lora: LoRA | None) -> CausalLMPolicy:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {"model_type": "qwen2", "num_key_value_heads": 1, "vocab_size": 24, **sizes}
    made = CausalLMConfig(config=config, tokenizer=CharacterTokenizer(characters="0123456789+="), lora=lora)
    return made.build(Spec({}, Field((), "int64")), 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_context", 15), ("max_sequences", 0), ("gpu_memory_utilisation", 0.0), ("kv_cache_gb", -1.0),
     ("tensor_parallel", 0), ("check_tokens", -1), ("check_bound", 0.0)],
)  # fmt: skip
def test_settings_name_their_key(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        VLLMGeneratorConfig(**{field: value})


def test_without_vllm_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(
        ValueError, match=r"generator: vLLM is not installed in this environment: pip install 'm2flow\[vllm\]'"
    ):
        VLLMGeneratorConfig().build(policy(None))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers so
@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj")])
def test_adapters_are_written_as_peft_reads_them(tmp_path: Path, targets: tuple[str, ...]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    made = policy(LoRA(rank=3, alpha=7.5, targets=targets))
    with torch.no_grad():
        for name, x in made.named_parameters():
            if "lora_B" in name:
                x.normal_(generator=torch.Generator().manual_seed(1))
    adapter.write(made.state_dict(), made.config.lora, tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_config(made.network.config, dtype=torch.float32, attn_implementation="eager")
    plain.load_state_dict(dict(policy(None).hf_weights()))
    with torch.no_grad():
        ids = torch.arange(12)[None]
        again = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()(input_ids=ids).logits
        assert torch.allclose(again, made.network(input_ids=ids).logits, atol=1e-5)


@pytest.mark.parametrize(("rank", "buffer"), [(1, 1), (3, 8), (16, 16), (17, 32), (512, 512)])
def test_buffers_hold_the_adapter(rank: int, buffer: int) -> None:
    assert adapter.buffer_rank(LoRA(rank=rank)) == buffer


def test_adapters_are_asked_for_only_where_vllm_can_serve_them() -> None:
    with pytest.raises(
        ValueError, match=r"lora: adapter needs a policy with policy\.lora; set generator\.lora: merged"
    ):
        adapter.buffer_rank(None)
    with pytest.raises(ValueError, match="lora: vLLM serves adapters up to rank 512, this one has 600"):
        adapter.buffer_rank(LoRA(rank=600))


class Parrot:
    """An engine with the methods of vLLM's that the adapter calls: each request gets token 5 at every step."""

    def __init__(self) -> None:
        model = SimpleNamespace(get_vocab_size=lambda: 24, max_model_len=64)
        self.vllm_config = SimpleNamespace(model_config=model)
        self.left: dict[str, int] = {}

    def add_request(self, name: str, prompt: Any, params: Any, lora_request: Any) -> None:
        self.left[name] = params.max_tokens

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.left[name]

    def collective_rpc(self, method: str, kwargs: Any) -> None:
        pass

    def reset_prefix_cache(self) -> bool:
        return True

    def step(self) -> list[Any]:
        said = []
        for name in list(self.left):
            self.left[name] -= 1
            ended = not self.left[name]
            part = SimpleNamespace(
                token_ids=[5], logprobs=[{5: SimpleNamespace(logprob=-3.0)}], finish_reason="length" if ended else None
            )
            said.append(SimpleNamespace(request_id=name, outputs=[part], finished=ended))
            if ended:
                del self.left[name]
        return said


@pytest.fixture
def parrot(monkeypatch: pytest.MonkeyPatch) -> Iterator[VLLMGenerator]:
    package, parts = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    package.SamplingParams, parts.RequestOutputKind = SimpleNamespace, SimpleNamespace(DELTA="delta")
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", parts)
    made = VLLMGenerator(Parrot(), policy(None), VLLMGeneratorConfig(check_tokens=4, check_bound=100.0))
    yield made
    made.close()


def test_new_weights_are_checked_with_answers_of_the_check_alone(parrot: VLLMGenerator) -> None:
    """An answer that had ended before it was submitted waits for the next step, whatever is asked of the engine
    meanwhile; what goes on does so behind its own tokens."""
    own = np.full(4, 7)
    begun = Answer(1, own, np.full(4, -1.0), np.zeros(4, np.int64), "abort")
    alone = parrot.difference
    parrot.submit(
        [
            Request(1, np.array([3, 4]), 4, frozenset(), begun=begun),
            Request(2, np.array([3, 4]), 3, frozenset()),
        ]
    )
    parrot.load(Weights(1, {f"policy.{name}": x for name, x in parrot.policy.state_dict().items()}))
    assert parrot.difference == alone, "the same weights and probes, with other requests in flight"
    (first,) = parrot.step()
    assert (first.id, first.finish, first.tokens.tolist()) == (1, "length", own.tolist())
    assert parrot.step() == []
    (second,) = parrot.step()
    assert (second.id, second.tokens.tolist(), second.version.tolist()) == (2, [5, 5, 5], [1, 1, 1])
    assert parrot.step() == []
