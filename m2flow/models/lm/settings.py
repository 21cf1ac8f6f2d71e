"""What the pieces of a language model read of its config. `config.CausalLMConfig` is one; it stands above them all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from m2flow.models.lm.lora import LoRA


class Settings(Protocol):
    """See the fields of `config.CausalLMConfig`."""

    @property
    def path(self) -> str | None: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def lora(self) -> LoRA | None: ...
    @property
    def temperature(self) -> float: ...
    @property
    def activation_checkpointing(self) -> bool: ...
    @property
    def logits_chunk(self) -> int | None: ...
    @property
    def pack(self) -> bool: ...
    @property
    def share_prompts(self) -> bool: ...
    @property
    def dtype(self) -> str | None: ...

    def folder(self) -> Path:
        """The folder of `path`."""

    def load_tokenizer(self) -> Any:
        """The tokenizer of transformers."""
