"""A language model as a folder that transformers, peft and inference engines open."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m2flow.models.lm import lora, tokenizer
from m2flow.models.lm.network import quiet

_LOG = logging.getLogger("m2flow.lm")
_told: set[str] = set()  # kinds of tokenizers that users have been told of
COMPARE_UP_TO = 300_000_000  # parameters; of larger models only the bytes that were written are compared
PROMPT = 16  # tokens of the fixed prompt: ids 0, 1, 2, ...
# Largest gap of a logit, relative to the largest logit where that is more than 1. Of half precision it is the rounding
# of a few dozen layers; of float64 it is that of norms, which transformers by itself computes in float32.
BOUND = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}


def save(policy: Any, folder: Path) -> None:
    """Write the model of a `CausalLMPolicy` with its adapters added in, its tokenizer and generation settings; under
    LoRA the adapters alone as well, in `folder`/adapter as peft writes them.

    Then open it again and compare: every array, and for models up to `COMPARE_UP_TO` parameters the logits of a fixed
    prompt, within `BOUND`.

    Raises:
        OSError: what was read back differs.
    """
    network, config = policy.network, policy.config
    folder.mkdir(parents=True, exist_ok=True)
    kinds = lora.dtypes(network)  # a folder has the dtype that the model came in; the only place where sums are rounded
    arrays = {name: x.detach().to("cpu", kinds[name]).contiguous() for name, x in policy.hf_weights()}
    plain = _plain(network, arrays)
    with quiet():
        plain.save_pretrained(folder)
        config.load_tokenizer().save_pretrained(folder)
        if config.lora is not None:
            lora.save_adapter(network, config.lora, folder / "adapter")
        _compare(network, plain, folder)


def _plain(network: Any, arrays: dict[str, Tensor]) -> Any:
    """The network without adapters, holding `arrays`; nothing is copied."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    settings = copy.deepcopy(network.config)
    settings._attn_implementation_internal = None
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        plain = auto.from_config(settings, dtype=next(iter(arrays.values())).dtype)
    plain.load_state_dict(arrays, strict=True, assign=True)
    plain.tie_weights()
    plain.generation_config = GenerationConfig.from_dict(network.generation_config.to_dict())
    return plain.eval()


@torch.no_grad()
def _compare(network: Any, plain: Any, folder: Path) -> None:
    """Raise OSError unless the folder opens, and opens as what was written."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    auto: Any = AutoModelForCausalLM
    want = plain.state_dict()
    again = auto.from_pretrained(folder, dtype=plain.dtype, local_files_only=True).eval()
    found = again.state_dict()
    for name, x in want.items():
        if name not in found or not torch.equal(found[name], x):
            raise OSError(f"checkpoint: {folder.name} read back differs in {name}; is the disk sound?")
    _tell_foreign(AutoTokenizer.from_pretrained(folder, local_files_only=True), folder)
    if sum(x.numel() for x in want.values()) > COMPARE_UP_TO:
        return
    ids = torch.arange(PROMPT)[None] % again.config.vocab_size
    first = next(network.parameters())
    here = network(input_ids=ids.to(first.device), use_cache=False).logits.cpu()
    there = again(input_ids=ids, use_cache=False).logits
    gap = float((here.to(torch.float64) - there.to(torch.float64)).abs().max())
    bound = BOUND[min(here.dtype, there.dtype, key=lambda d: torch.finfo(d).bits)] * max(1.0, float(here.abs().max()))
    if not gap <= bound:
        raise OSError(
            f"checkpoint: logits of {folder.name} differ from the trained model's by {gap}, more than {bound}"
        )


def _tell_foreign(opened: Any, folder: Path) -> None:
    """Say so where AutoTokenizer opens the tokenizer as another one: each tokenizer beside a Qwen2 model as Qwen2's.

    Once for each kind, and without the folder: each checkpoint of a run is alike, and this one is still moved.
    """
    own, kind = tokenizer.load(folder), type(opened).__name__
    text = own.decode(range(min(1000, len(own))), skip_special_tokens=True)
    if kind not in _told and opened(text)["input_ids"] != own(text)["input_ids"]:
        _told.add(kind)
        _LOG.warning(
            "checkpoint: AutoTokenizer of this transformers opens its tokenizer as %s, which it is not; open it with "
            "PreTrainedTokenizerFast.from_pretrained, as policy.path does, or use another model_type (llama, qwen3)",
            kind,
        )
