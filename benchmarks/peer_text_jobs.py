"""What is measured of peers that train language models, as in `peer_jobs`; m2flow is not imported.

TRL's GRPOTrainer: its defaults but for batch sizes, lengths, learning rate, dtype and the switches that make it quick
here (no gradient checkpointing, no KL, no reports). One update per batch, so it never scores its own answers again.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

from benchmarks import small_lm
from benchmarks.clock import Stamps, answer, versions

PACKAGES = ("trl", "transformers", "accelerate", "datasets", "tokenizers", "torch", "numpy")


def grpo(stamps: Stamps, bf16: bool, prompts: int, group: int, tokens: int, steps: int, seed: int) -> None:
    """`steps` steps of `prompts` times `group` answers of `tokens` tokens each: <eos> is never drawn."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found,unused-ignore]

    torch.set_num_threads(1)
    rows = [json.loads(line) for line in small_lm.ROWS.read_text(encoding="utf-8").splitlines()]

    def reward(completions: list[str], answer: list[str], **_rest: Any) -> list[float]:
        return [small_lm.score(text, right) for text, right in zip(completions, answer, strict=True)]

    class Watch(TrainerCallback):
        """A stamp at the end of each step."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:  # noqa: ARG002
            stamps.take(state.global_step * prompts * group)

    with tempfile.TemporaryDirectory(prefix="m2flow-bench-") as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=prompts * group,
            gradient_accumulation_steps=1,
            num_generations=group,
            max_completion_length=tokens,
            max_steps=steps,
            learning_rate=1e-4,
            temperature=1.0,
            beta=0.0,
            gradient_checkpointing=False,
            bf16=bf16,
            use_cpu=True,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=seed,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(small_lm.MODEL, dtype=torch.float32),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(small_lm.MODEL, padding_side="left"),
            callbacks=[Watch()],
        )
        trainer.train()
    found = {row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row}
    if found != {float(tokens)}:
        raise RuntimeError(f"answers of {sorted(found)} tokens on average, all must have {tokens}")


JOBS = {"grpo": grpo}


def main(argument: str) -> None:
    """Run one job and hand its result to the harness."""
    settings = json.loads(argument)
    stamps = Stamps()
    JOBS[settings.pop("job")](stamps, **settings)
    answer(stamps.summary() | {"versions": versions(PACKAGES)})


if __name__ == "__main__":
    main(sys.argv[1])
