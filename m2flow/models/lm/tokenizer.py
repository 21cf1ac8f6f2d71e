"""Tokenizers: one from a folder, or one of single characters made on the spot for small models trained from scratch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")  # classes of tokenizers that belong to no model
ROLES = ("system", "user", "assistant", "tool")
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"


@dataclass(frozen=True, kw_only=True, slots=True)
class CharacterTokenizer:
    """One token per character, after <pad>, <bos> and <eos>."""

    characters: str  # all that can be said, in the order of their ids
    chat: bool = False  # with a chat template: <role> before a message and <eos> behind it; false: plain text

    def __post_init__(self) -> None:
        if not self.characters:
            raise ValueError("characters: is empty; give every character that prompts and answers may hold")
        twice = sorted({c for c in self.characters if self.characters.count(c) > 1})
        if twice:
            raise ValueError(f"characters: {', '.join(map(repr, twice))} is there twice; remove the repetition")

    def build(self) -> Any:
        """A fast tokenizer of transformers; it can be saved, and opened by AutoTokenizer."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        fast: Any = PreTrainedTokenizerFast

        roles = [f"<{role}>" for role in ROLES] if self.chat else []
        special = [PAD, BOS, EOS, *roles]
        vocabulary = {token: i for i, token in enumerate([*special, *self.characters])}
        inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106  not there: unknown is an error
        inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        inner.decoder = decoders.Fuse()
        inner.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocabulary[BOS])]
        )
        made = fast(
            tokenizer_object=inner,
            bos_token=BOS,
            eos_token=EOS,
            pad_token=PAD,
            extra_special_tokens=roles,
            clean_up_tokenization_spaces=False,
        )
        if self.chat:
            made.chat_template = (
                "{{ bos_token }}{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + eos_token }}"
                "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
            )
        return made


def folder(key: str, given: str, needs: str) -> Path:
    """The folder `given`; ValueError naming `key` where it is none or lacks the file `needs`. Nothing is downloaded."""
    place = Path(given).expanduser()
    if not place.is_dir():
        raise ValueError(
            f"{key}: {given!r} is no folder on this machine; models are never downloaded here: give the folder of one "
            "that save_pretrained wrote, or that was downloaded beforehand"
        )
    if not (place / needs).is_file():
        raise ValueError(f"{key}: {given!r} has no {needs}; give a folder that save_pretrained wrote")
    return place


def load(place: Path) -> Any:
    """The tokenizer in a folder; ValueError where transformers finds none.

    One that says it is no model's own is opened as it says: AutoTokenizer opens every tokenizer in the folder of a
    Qwen2 model as Qwen2's, whatever it is.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    settings = place / "tokenizer_config.json"
    named = json.loads(settings.read_text()).get("tokenizer_class") if settings.is_file() else None
    opens: Any = PreTrainedTokenizerFast if named in GENERIC else AutoTokenizer
    try:
        return opens.from_pretrained(place, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"tokenizer: transformers finds none in {str(place)!r}: {error}") from error
