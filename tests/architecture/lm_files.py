"""What recipes of language models need and no checkout holds: a model folder and files of tasks, made small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from m2flow import config
from m2flow.config import Recipe
from m2flow.sections import SpeaksText, TaskConfig

TINY = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 65536,
}
CHARACTERS = "".join(chr(c) for c in range(32, 127)) + "\n"


def speaks(path: Path) -> bool:
    """Whether a recipe trains a language model."""
    recipe = config.load(path)
    return isinstance(recipe.policy, SpeaksText) and isinstance(recipe.env, TaskConfig)


def stand_ins(recipe: Recipe, folder: Path) -> list[str]:
    """Overrides with which a shipped recipe finds what it names: a tiny random model, and rows of tasks."""
    changes = []
    policy: Any = recipe.policy
    if policy.path is not None and not Path(policy.path).is_dir():
        changes.append(f"policy.path={model(folder / 'model')}")
    files = getattr(recipe.env, "files", ())
    if files and not Path(files[0]).exists():
        changes.append(f"env.files=[{rows(folder / 'train.jsonl', 0)}]")
        if recipe.env.held_out_files:
            changes.append(f"env.held_out_files=[{rows(folder / 'test.jsonl', 1000)}]")
    return changes


def model(folder: Path) -> Path:
    """A random network of two layers with a tokenizer of characters, as `from_pretrained` opens it."""
    from m2flow.models.lm.config import CausalLMConfig
    from m2flow.models.lm.tokenizer import CharacterTokenizer
    from m2flow.types import Field, Spec

    if not folder.exists():
        made = CausalLMConfig(config=TINY, tokenizer=CharacterTokenizer(characters=CHARACTERS, chat=True))
        spec = Spec({"tokens": Field((), "int64")}, Field((), "int64"))
        made.build(spec, 0).save_pretrained(folder)
    return folder


def rows(file: Path, start: int, count: int = 200) -> Path:
    """Tasks with the fields that the recipes read."""
    text = [json.dumps({"prompt": f"What is {n} + 1?", "answer": str(n + 1)}) for n in range(start, start + count)]
    file.write_text("\n".join(text) + "\n", encoding="utf-8")
    return file
