"""A small language model and its additions, the same files and the same reward for the product and for its peer.

    .bench/small_lm/model        Qwen2 with 4M random weights, and a tokenizer of single characters
    .bench/small_lm/rows.jsonl   2000 additions of numbers below 50: {"prompt": "12+34=", "answer": "46"}

The tokenizer's <eos> is the first id that the network has no logit for, so that no answer ends before its limit.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

HOME = Path(__file__).parents[1] / ".bench" / "small_lm"
MODEL, ROWS = HOME / "model", HOME / "rows.jsonl"
WORDS = ["<pad>", "<unk>", *"0123456789+-*/=()[]<> .,:;?!abcdefghijklmnopqrstuvwxyzABCDEFGH"]
HIDDEN, LAYERS = 256, 4


def make() -> None:
    """Write both where they are missing. Run it before a measured process starts."""
    if MODEL.exists() and ROWS.exists():
        return
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir(parents=True)
    vocabulary = {word: i for i, word in enumerate([*WORDS, "<eos>"])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast
    tokenizer = fast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    config = Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // 64,
        num_key_value_heads=HIDDEN // 128,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,  # the tokenizer has one
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(MODEL)
    tokenizer.save_pretrained(MODEL)
    numbers = random.Random(0)
    pairs = [(numbers.randrange(50), numbers.randrange(50)) for _ in range(2000)]
    rows = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a, b in pairs]
    ROWS.write_text("\n".join(rows) + "\n", encoding="utf-8")


def score(text: str, answer: str) -> float:
    """1 for an answer that begins with what is right, else up to 0.1 for its share of digits."""
    if text.strip().startswith(answer):
        return 1.0
    return 0.1 * sum(c.isdigit() for c in text) / max(1, len(text))


def reward(sample: Any) -> float:
    """The same for a sample of m2flow."""
    return score(sample.text, sample.task.payload["answer"])
