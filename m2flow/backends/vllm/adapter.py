"""The LoRA adapters of a policy as a folder that vLLM reads: the format of peft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from m2flow.types import Array

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM lays its buffers out for


def buffer_rank(lora: Any) -> int:
    """The least rank of vLLM's buffers that holds `lora`.

    Raises:
        ValueError: the policy has no adapters, or larger ones than vLLM serves.
    """
    if lora is None:
        raise ValueError("lora: adapter needs a policy with policy.lora; set generator.lora: merged")
    fitting = [rank for rank in RANKS if rank >= lora.rank]
    if not fitting:
        raise ValueError(
            f"lora: vLLM serves adapters up to rank {RANKS[-1]}, this one has {lora.rank}; set lora: merged"
        )
    return fitting[0]


def write(state: Mapping[str, Array], lora: Any, folder: Path) -> None:
    """Write the adapters in `state`, named "network.<layer>.lora_A.<adapter>.weight" and alike, as peft does."""
    from safetensors.torch import save_file

    arrays: dict[str, Tensor] = {}
    for name, x in state.items():
        if ".lora_" not in name:
            continue
        layer, which = name.removeprefix("network.").split(".lora_")
        arrays[f"base_model.model.{layer}.lora_{which[0]}.weight"] = x.detach().cpu().contiguous()
    targets = sorted({name.split(".")[-3] for name in arrays})
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": lora.rank, "lora_alpha": lora.alpha, "bias": "none",
        "target_modules": targets, "inference_mode": True,
    }  # fmt: skip
    folder.mkdir(parents=True)
    save_file(arrays, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
