"""The section `policy` of a causal language model, from a folder or with random weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from m2flow.models.lm.codec import HFCodec
from m2flow.models.lm.lora import LoRA
from m2flow.models.lm.tokenizer import CharacterTokenizer, folder, load
from m2flow.types import Spec

if TYPE_CHECKING:
    from m2flow.models.lm.policy import CausalLMPolicy


SMALL = {  # a model to begin with, of 800,000 weights
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
COLDEST = 1e-3
PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalLMConfig:
    """A causal language model of transformers: `path`, or `config` with a `tokenizer`. Nothing is ever downloaded."""

    path: str | None = None  # folder that from_pretrained opens: weights, and the tokenizer where `tokenizer` is null
    # or random weights: model_type and keys of its HF config; null takes away that of a `base:`
    config: Mapping[str, Any] | None = field(default_factory=dict, metadata={"example": SMALL})
    # folder of one, or {characters: ...}; null: that of `path`
    tokenizer: CharacterTokenizer | str | None = field(default=None, metadata={"example": {"characters": PRINTABLE}})
    chat: bool = True  # by the chat template, if there is one; false: messages as plain text, one after another
    stop: tuple[str, ...] = ()  # texts of one token each that end an answer too, for instance a line break
    lora: LoRA | None = None  # train adapters and freeze the rest; null: train everything
    temperature: float = 1.0  # divides the logits, when sampling and when scoring
    activation_checkpointing: bool = False  # compute layers again in the backward pass in place of keeping them
    logits_chunk: int | None = None  # sampled tokens per pass through the output layer, computed again; null: all
    pack: bool = True  # compute real tokens only, rows side by side; false: rows padded to the longest
    share_prompts: bool = True  # compute a prompt once for the rows that begin with it; needs pack
    dtype: Literal["float32", "bfloat16", "float16"] | None = None  # of what lora freezes; null: the trainer's

    def __post_init__(self) -> None:
        if self.path is None and not self.config:
            raise ValueError("path: give either the folder of a model, or `config` for random weights; neither is")
        if self.path is not None and self.config:
            raise ValueError(
                "path: given together with `config`, which is for random weights; keep one: `config: null` (also where "
                "it comes from `base:`; then mind `tokenizer`), or `path: null`"
            )
        if self.config and "model_type" not in self.config:
            raise ValueError("config: needs model_type, for instance qwen2 or llama")
        if self.config and self.tokenizer is None:
            raise ValueError("tokenizer: random weights need one: a folder, or {characters: '0123456789+='}")
        if not COLDEST <= self.temperature < math.inf:
            raise ValueError(
                f"temperature: must be at least {COLDEST} (below, nothing is left to explore) and finite, "
                f"got {self.temperature}"
            )
        if self.logits_chunk is not None and self.logits_chunk < 1:
            raise ValueError(f"logits_chunk: must be at least 1, or null for all at once, got {self.logits_chunk}")
        if self.dtype is not None and self.lora is None:
            raise ValueError("dtype: only of weights that lora freezes; trained ones have trainer.dtype; remove it")

    def build(self, spec: Spec, seed: int) -> CausalLMPolicy:
        """A policy whose weights depend on the folder, or on `seed` only. The global random state is not touched.

        On torch's meta device no weight is read.
        """
        from m2flow.models.lm.network import build
        from m2flow.models.lm.policy import CausalLMPolicy

        return CausalLMPolicy(spec, self, build(self, seed))

    def codec(self) -> HFCodec:
        """The tokenizer with its chat template; weights are not read."""
        tokenizer = self.load_tokenizer()
        if not self.chat:
            tokenizer.chat_template = None
        return HFCodec(tokenizer, [*self._stop_ids(), *(_single(tokenizer, text) for text in self.stop)])

    def context(self) -> int | None:
        """`max_position_embeddings` of the model; None where its config has none."""
        known = (self.config or {}) if self.path is None else json.loads((self.folder() / "config.json").read_text())
        found = known.get("max_position_embeddings")
        return None if found is None else int(found)

    def load_tokenizer(self) -> Any:
        """The tokenizer of transformers."""
        if isinstance(self.tokenizer, CharacterTokenizer):
            return self.tokenizer.build()
        if self.tokenizer is not None:
            return load(folder("tokenizer", self.tokenizer, "tokenizer_config.json"))
        return load(self.folder())

    def folder(self) -> Path:
        """The folder of `path`; ValueError where there is no model in it."""
        assert self.path is not None
        return folder("path", self.path, "config.json")

    def _stop_ids(self) -> list[int]:
        """What the model's own generation settings end an answer with: one id or several (A25)."""
        file = None if self.path is None else self.folder() / "generation_config.json"
        if file is None or not file.is_file():
            return []
        given = json.loads(file.read_text()).get("eos_token_id")
        if given is None:
            return []
        return [int(i) for i in given] if isinstance(given, list) else [int(given)]


def _single(tokenizer: Any, text: str) -> int:
    """The id of a text that is one token."""
    unknown = f"stop: the tokenizer has no token for {text!r}; give texts it has, or add it to tokenizer.characters"
    try:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    except Exception as error:  # what the tokenizers library raises is a bare Exception
        raise ValueError(unknown) from error
    if not ids or (tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids):
        raise ValueError(unknown)
    if len(ids) != 1:
        raise ValueError(f"stop: {text!r} is {len(ids)} tokens of this tokenizer; only what is one can end an answer")
    return int(ids[0])
