"""Decoding: the product's own generator and vLLM, in turn, on the same weights and prompts, in vLLM's environment.

    .venv-vllm/bin/python -m benchmarks.vllm_decoding                       # after `make test-vllm`; prints JSON
    .venv-vllm/bin/python -m benchmarks.vllm_decoding --only qwen2_4m_bfloat16 --rounds 5

Both sides are used through the Generator seam, record log-probabilities, and are forced to full length at temperature
1. Models and prompts are those of benchmarks/decoding.py. A model and dtype has a process of its own; batches of 64 and
256 are measured in it round by round, every other round the other way around.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import decoding, harness

RESULT = Path(__file__).parent / "results" / "vllm_decoding.json"
BATCHES = (64, 256)
ROWS = {f"{m}_{d}": {"model": m, "dtype": d} for m in decoding.MODELS for d in ("bfloat16", "float32")}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_decoding", description=__doc__)
    parser.add_argument("--only", choices=ROWS, action="append", help="rows to measure (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="times both sides are measured (default: 3)")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer (default: 128)")
    parser.add_argument("--threads", type=int, default=2, help="threads of arithmetic (default: 2)")
    parser.add_argument("--result", type=Path, default=RESULT, help="the JSON file")
    parser.add_argument("job", nargs="?", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.job:
        print("RESULT " + json.dumps(measure(**json.loads(options.job))))
        return 0
    rows = (harness.read(options.result) or {}).get("rows", {})
    for name in options.only or ROWS:
        row = ROWS[name] | {"tokens": options.tokens, "threads": options.threads, "rounds": options.rounds}
        load = round(os.getloadavg()[0], 2)
        value = harness.job(sys.executable, "benchmarks.vllm_decoding", row)
        rows[name] = {"work": row, "load": load, "at": harness.now(), "commit": harness.commit(), "batches": value}
        head = {"command": "python -m benchmarks.vllm_decoding", "machine": harness.machine()}
        harness.write(options.result, head | {"rows": rows})
    print(json.dumps(rows, indent=1))
    return 0


# ---- in the measured process


def measure(model: str, dtype: str, tokens: int, threads: int, rounds: int) -> dict[str, Any]:
    """Batch -> tokens per second of both sides, and the ratios of the product to vLLM by wall and by CPU time."""
    os.environ["OMP_NUM_THREADS"] = str(threads)  # read when torch is imported; vLLM's own kernels ask OpenMP
    import numpy as np

    prompts = np.random.default_rng(0).integers(4, decoding.VOCABULARY, (max(BATCHES), decoding.PROMPT))
    sides = {"product": product(model, dtype), "vllm": vllm(model, dtype)}
    for generator in sides.values():
        run(generator, prompts, 0, 2)
    return {str(batch): compared(sides, prompts[:batch], tokens, rounds) for batch in BATCHES}


def compared(sides: dict[str, Any], prompts: Any, tokens: int, rounds: int) -> dict[str, Any]:
    wall: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
            start, used = time.perf_counter(), time.process_time()
            run(sides[name], prompts, number, tokens)
            wall[name].append(len(prompts) * tokens / (time.perf_counter() - start))
            cpu[name].append(len(prompts) * tokens / (time.process_time() - used))
    ratios = {
        key: harness.spread([a / b for a, b in zip(by["product"], by["vllm"], strict=True)])
        for key, by in (("ratio", wall), ("cpu_ratio", cpu))
    }
    return {name: harness.spread(x) | {"rounds": x} for name, x in wall.items()} | ratios


def run(generator: Any, prompts: Any, seed: int, length: int) -> None:
    from m2flow.types import Request

    generator.submit([Request(i, p, length, frozenset(), seed=seed * len(prompts) + i) for i, p in enumerate(prompts)])
    answers: list[Any] = []
    while len(answers) < len(prompts):
        answers += generator.step()
    assert all(len(answer.tokens) == length for answer in answers)


def plain(model: str, dtype: str) -> Any:
    """Just enough of a policy."""
    import torch

    class Plain(torch.nn.Module):
        constant: frozenset[str] = frozenset()
        temperature = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.network = decoding.network(model, dtype)

        def hf_weights(self) -> Any:
            yield from self.network.state_dict().items()

        def save_pretrained(self, folder: Path) -> None:
            self.network.save_pretrained(folder)

    return Plain()


def product(model: str, dtype: str) -> Any:
    from m2flow.backends.generate.config import TorchGeneratorConfig

    return TorchGeneratorConfig().build(plain(model, dtype))


def vllm(model: str, dtype: str) -> Any:
    from m2flow.backends.vllm import VLLMGeneratorConfig

    return VLLMGeneratorConfig(dtype=dtype, max_context=512, check_tokens=0).build(plain(model, dtype))


if __name__ == "__main__":
    raise SystemExit(main())
