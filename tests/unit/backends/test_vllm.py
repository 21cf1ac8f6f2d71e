"""What of the vLLM adapter needs no vLLM: its settings, and the adapters that it writes. The rest is in tests/vllm."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from m2flow.backends.vllm import VLLMGeneratorConfig, adapter
from m2flow.models.lm.config import CausalLMConfig
from m2flow.models.lm.lora import LoRA
from m2flow.models.lm.policy import CausalLMPolicy
from m2flow.models.lm.tokenizer import CharacterTokenizer
from m2flow.types import Field, Spec


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
