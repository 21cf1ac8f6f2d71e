"""Decoding: the product's own generator and transformers' `generate`, in turn, on the same weights and prompts.

    python -m benchmarks.decoding                        # every row; goes on where an interrupted call was
    python -m benchmarks.decoding --only qwen2_4m_float32_64 --rounds 9
    python -m benchmarks.decoding --show

A row is a model, a dtype and a batch. Every row has a process of its own, in which both sides answer the same prompts
round by round, every other round the other way around. Each answer is forced to its full length at temperature 1. The
product records log-probabilities as well. The dtype is that of the weights of both; a processor without bfloat16
instructions emulates bfloat16 arithmetic, while the product computes in float32 with the rounded weights there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness

RESULT = Path(__file__).parent / "results" / "decoding.json"
BAR = 1.3
PROMPT, VOCABULARY = 12, 512
MODELS: dict[str, dict[str, Any]] = {
    "qwen2_4m": {
        "model_type": "qwen2",
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "qwen3_24m": {
        "model_type": "qwen3",
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}
TOKENS = {"float32": 128, "bfloat16": 16}  # of an answer; emulated bfloat16 takes minutes for more
ROWS = {f"{m}_{d}_{b}": {"model": m, "dtype": d, "batch": b} for m in MODELS for d in TOKENS for b in (64, 256)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: every bar that was measured is met; 1: one is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decoding", description=__doc__)
    parser.add_argument("--only", choices=ROWS, action="append", help="rows to measure (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="times both sides of a row are measured (default: 5)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch's arithmetic (default: 2)")
    parser.add_argument("--tokens", type=int, help=f"of every answer (default: {TOKENS})")
    parser.add_argument("--fresh", action="store_true", help="forget stored rows instead of going on with them")
    parser.add_argument("--show", action="store_true", help="print what has been measured; run nothing")
    parser.add_argument("--result", type=Path, default=RESULT, help="the JSON file")
    parser.add_argument("job", nargs="?", help=argparse.SUPPRESS)  # a row as JSON: this is the measured process
    options = parser.parse_args(arguments)
    if options.job:
        print("RESULT " + json.dumps(measure(**json.loads(options.job))))
        return 0
    found = {} if options.fresh else (harness.read(options.result) or {}).get("rows", {})
    for name in [] if options.show else options.only or ROWS:
        tokens = options.tokens or TOKENS[ROWS[name]["dtype"]]
        row = ROWS[name] | {"threads": options.threads, "rounds": options.rounds, "tokens": tokens}
        if found.get(name, {}).get("work") == row:
            continue
        load = round(os.getloadavg()[0], 2)
        value = harness.job(sys.executable, "benchmarks.decoding", row)
        found[name] = {"work": row, "load": load, "at": harness.now(), "commit": harness.commit()} | value
        command = "python -m benchmarks.decoding " + " ".join(sys.argv[1:] if arguments is None else arguments)
        head = {
            "name": "decoding",
            "title": "decoding to transformers' generate",
            "command": command.strip(),
            "written": harness.now(),
            "machine": harness.machine(),
            "bar": BAR,
        }
        harness.write(options.result, head | {"rows": found})
        print(f"[bench] {name}: {value['ratio']['median']:.2f}x", flush=True)
    print(table(found))
    return int(any(row["ratio"]["median"] < BAR for row in found.values()))


def table(rows: dict[str, Any]) -> str:
    """For people, as Markdown."""
    lines = [
        "| model, dtype, batch | generate, tok/s | m2flow, tok/s | ratio (smallest to largest) | by CPU time | bar |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        ratio, cpu = row["ratio"], row["cpu_ratio"]
        verdict = f"{BAR}x, " + ("met" if ratio["median"] >= BAR else "**missed**")
        spread = f"{ratio['median']:.2f}x ({ratio['min']:.2f} to {ratio['max']:.2f})"
        lines.append(
            f"| {name.replace('_', ' ')} | {row['generate']['median']:,.0f} | {row['product']['median']:,.0f} | "
            f"{spread} | {cpu['median']:.2f}x | {verdict} |"
        )
    return "\n".join(lines) + "\n"


# ---- in the measured process


def measure(model: str, dtype: str, batch: int, tokens: int, threads: int, rounds: int) -> dict[str, Any]:
    """Tokens per second of wall time by side and round, and the ratios by wall and by CPU time."""
    import numpy as np
    import torch

    torch.set_num_threads(threads)
    prompts = np.random.default_rng(0).integers(4, VOCABULARY, (batch, PROMPT))
    sides = {"product": product(network(model, dtype), prompts), "generate": peer(network(model, dtype), prompts)}
    for run in sides.values():
        run(0, 2)
    wall: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
            start, used = time.perf_counter(), time.process_time()
            sides[name](number, tokens)
            wall[name].append(batch * tokens / (time.perf_counter() - start))
            cpu[name].append(batch * tokens / (time.process_time() - used))
    ratios = {
        key: harness.spread([a / b for a, b in zip(by["product"], by["generate"], strict=True)])
        for key, by in (("ratio", wall), ("cpu_ratio", cpu))
    }
    return {name: harness.spread(x) | {"rounds": x} for name, x in wall.items()} | ratios


def network(model: str, dtype: str) -> Any:
    """Random weights, always the same."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    given = dict(MODELS[model])
    config = CONFIG_MAPPING[given.pop("model_type")](
        **given, vocab_size=VOCABULARY, max_position_embeddings=2048, tie_word_embeddings=True, pad_token_id=0
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def product(network: Any, prompts: Any) -> Callable[[int, int], None]:
    """The generator of this package."""
    import torch

    from m2flow.backends.generate.config import TorchGeneratorConfig
    from m2flow.types import Request

    class Plain(torch.nn.Module):
        """Just enough of a policy."""

        constant: frozenset[str] = frozenset()

        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def hf_weights(self) -> Any:
            """The network's own."""
            yield from network.state_dict().items()

    generator = TorchGeneratorConfig().build(Plain())

    def run(seed: int, length: int) -> None:
        generator.submit(
            [Request(i, p, length, frozenset(), seed=seed * len(prompts) + i) for i, p in enumerate(prompts)]
        )
        answers: list[Any] = []
        while len(answers) < len(prompts):
            answers += generator.step()
        assert all(len(answer.tokens) == length for answer in answers)

    return run


def peer(network: Any, prompts: Any) -> Callable[[int, int], None]:
    """`generate` of transformers with its own cache, all prompts of one length, so without padding."""
    import torch

    ids = torch.from_numpy(prompts)
    mask = torch.ones_like(ids)

    def run(seed: int, length: int) -> None:
        torch.manual_seed(seed)
        with torch.inference_mode():
            out = network.generate(
                input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, temperature=1.0, max_new_tokens=length,
                pad_token_id=0, disable_compile=True,
            )  # fmt: skip
        assert out.shape[1] == prompts.shape[1] + length

    return run


if __name__ == "__main__":
    raise SystemExit(main())
