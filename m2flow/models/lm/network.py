"""The module of transformers behind a policy: read from a folder, or made with random weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from m2flow.models.lm import attention, exact, fused, lora

# Architectures whose tokens meet in attention only, and whose logits are the output layer's, unchanged: packed rows are
# exact for them (tests/unit/models/lm/test_pack.py asks each). All others are computed as padded rows.
PACKED = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "olmo2", "gemma"})

SIZES = ("hidden_size", "num_attention_heads", "head_dim", "num_key_value_heads")

# transformers draws from the global random state, which threads of one process share.
_ALONE = threading.Lock()


def build(config: Any, seed: int) -> Any:
    """The network of a `config.CausalLMConfig`, with its adapters. Global random states stay as they were."""
    attention.register()
    with _ALONE, torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        network = _pretrained(config) if config.path is not None else _random(config)
        if config.lora is not None:
            torch.manual_seed(seed)
            lora.inject(network, config.lora)
    if network.config.model_type in PACKED:
        network.set_attn_implementation(attention.NAME)
        fused.install(network)
    exact.install(network.get_decoder())
    network.train(config.activation_checkpointing)  # nothing else reads the flag: there is no dropout
    if config.activation_checkpointing:
        again = partial(exact.contexts, network.get_decoder())
        enable = getattr(network, "activation_checkpointing_enable", network.gradient_checkpointing_enable)
        enable({"use_reentrant": False, "context_fn": again})
    return network


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars of transformers: a run has its own."""
    from transformers.utils import logging as theirs

    logging: Any = theirs

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def packable(network: Any) -> bool:
    """Whether packed rows are exact. A sliding window is looked at row by row, see `attention`."""
    kinds = set(getattr(network.config, "layer_types", None) or ())
    return network.config.model_type in PACKED and kinds <= {"full_attention", "sliding_attention"}


def window(network: Any) -> int | None:
    """The sliding window beyond which tokens do not see each other; None: there is none."""
    config = network.config
    kinds = getattr(config, "layer_types", None)
    if not getattr(config, "use_sliding_window", True) or (kinds and "sliding_attention" not in kinds):
        return None
    width: int | None = getattr(config, "sliding_window", None)
    return width


def on_meta() -> bool:
    """Whether tensors are being made without numbers."""
    return torch.get_default_device().type == "meta"


def _pretrained(config: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM

    place = config.folder()
    settings = _without_dropout(AutoConfig.from_pretrained(place, local_files_only=True))
    dtype = getattr(torch, config.dtype or "float32")
    if on_meta():
        return auto.from_config(settings, dtype=dtype)
    try:
        return auto.from_pretrained(place, config=settings, dtype=dtype, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"path: transformers cannot open the model in {config.path!r}: {error}") from error


def _random(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM

    network = auto.from_config(_without_dropout(_settings(config)), dtype=getattr(torch, config.dtype or "float32"))
    network.generation_config.eos_token_id = network.config.eos_token_id
    network.generation_config.pad_token_id = network.config.pad_token_id
    return network


def _settings(config: Any) -> Any:
    """The HF config of a model with random weights; vocabulary and special tokens are the tokenizer's."""
    from transformers import CONFIG_MAPPING

    given = dict(config.config or {})
    kind = given.pop("model_type")
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"config: model_type {kind!r} is unknown to transformers; for instance qwen2, qwen3, llama")
    tokenizer = config.load_tokenizer()
    words = max(tokenizer.get_vocab().values()) + 1
    if given.setdefault("vocab_size", words) < words:
        raise ValueError(f"config: vocab_size {given['vocab_size']} is less than the tokenizer's {words}; leave it out")
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    known = {"tie_word_embeddings", "head_dim", "layer_types", *CONFIG_MAPPING[kind].attribute_map}
    known |= CONFIG_MAPPING[kind]().to_dict().keys()
    unknown = sorted(set(given) - known)
    if unknown:
        raise ValueError(f"config: {kind} has no key {unknown[0]!r}; it has {', '.join(sorted(known))}")
    _check_heads(given)
    try:
        made = CONFIG_MAPPING[kind](**(special | _lists(given)))
    except Exception as error:  # transformers validates with errors of its own kinds
        raise ValueError(f"config: transformers refuses it for {kind}: {error}") from error
    _check_heads({name: getattr(made, name, None) for name in SIZES})
    return made


def _check_heads(sizes: Mapping[str, Any]) -> None:
    """Heads divide the width of the model (or have a width of their own), heads of keys the heads."""
    for name in SIZES:
        value = sizes.get(name)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"config: {name} must be a whole number from 1 on, got {value!r}")
    width, heads, inner, shared = (sizes.get(name) for name in SIZES)
    if width and heads and not inner and width % heads:
        raise ValueError(f"config: num_attention_heads {heads} must divide hidden_size {width}, or give head_dim")
    if heads and shared and heads % shared:
        raise ValueError(f"config: num_key_value_heads {shared} must divide num_attention_heads {heads}")


def _lists(given: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe holds tuples and read-only mappings; transformers wants lists and dicts."""
    return {k: list(v) if isinstance(v, tuple) else dict(v) if isinstance(v, Mapping) else v for k, v in given.items()}


def _without_dropout(settings: Any) -> Any:
    """What was sampled must be scored by the same function, so there is none."""
    for name, value in settings.to_dict().items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(settings, name, 0.0)
    return settings
