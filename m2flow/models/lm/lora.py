"""LoRA (2106.09685) by peft: small trained matrices beside frozen ones, W + scale * B A."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ADAPTER = "default"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoRA:
    """Which layers get an adapter, and of what size. The scale of an adapter is alpha / rank."""

    rank: int = 16  # inner width of an adapter
    alpha: float = 32.0  # numerator of the scale
    targets: tuple[str, ...] = ()  # ends of layer names, for instance q_proj; empty: every linear layer but the last

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank: must be at least 1, got {self.rank}")
        if not 0.0 < self.alpha < math.inf:
            raise ValueError(f"alpha: must be more than 0 and finite, got {self.alpha}")

    def settings(self) -> Any:
        """The same in peft's words."""
        from peft import LoraConfig

        alpha: Any = int(self.alpha) if float(self.alpha).is_integer() else self.alpha
        targets = list(self.targets) if self.targets else "all-linear"
        return LoraConfig(
            r=self.rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM"
        )


def inject(network: Any, lora: LoRA) -> None:
    """Add adapters to `network` in place and freeze the rest. Uses the global random state.

    Raises:
        ValueError: no layer has one of these names, one is the output layer and tied to the embedding, or narrower than
            the rank.
    """
    from peft import inject_adapter_in_model

    names = {name.rpartition(".")[2] for name, x in network.named_modules() if isinstance(x, nn.Linear)}
    unknown = sorted(set(lora.targets) - names - {name for name, _ in network.named_modules()})
    if unknown:
        raise ValueError(f"lora.targets: no layer is called {unknown[0]!r}; there are {', '.join(sorted(names))}")
    head = next((name for name, x in network.named_modules() if x is network.get_output_embeddings()), "")
    if head.rpartition(".")[2] in lora.targets and network.config.tie_word_embeddings:
        raise ValueError(
            f"lora.targets: {head!r} shares its weight with the embedding of this model, and an adapter on it alone "
            "would make two different weights of one; leave it out"
        )
    network.requires_grad_(False)
    inject_adapter_in_model(lora.settings(), network, adapter_name=ADAPTER)
    sides = {name: min(x.base_layer.weight.shape) for name, x in adapted(network).items()}
    narrow = min(sides, key=sides.__getitem__, default=None)
    if narrow is not None and lora.rank > sides[narrow]:
        raise ValueError(
            f"lora.rank: {lora.rank} is more than the width {sides[narrow]} of {narrow!r}, so an adapter would be "
            f"larger than what it adapts; use at most {sides[narrow]}, or leave that layer out of lora.targets"
        )


def adapted(network: nn.Module) -> dict[str, Any]:
    """Every layer with an adapter, by name."""
    return {name: x for name, x in network.named_modules() if hasattr(x, "lora_A") and hasattr(x, "base_layer")}


@contextmanager
def disabled(network: nn.Module) -> Iterator[None]:
    """The network without its adapters; peft's own switch would freeze them as well."""
    layers = list(adapted(network).values())
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@torch.no_grad()
def merged(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the network's state without adapters: they are added to the weights, in a copy. Lazy: what is
    read is what the network holds then.

    A sum has the wider dtype of the two: rounded to a base in half precision, small updates would vanish. Whoever wants
    a narrower dtype rounds what he gets, once.
    """
    layers = adapted(network)
    for name, x in network.state_dict().items():
        owner, _, leaf = name.rpartition(".base_layer.")
        if not owner:
            if ".lora_" not in name:
                yield name, x
            continue
        if leaf == "weight":
            layer = layers[owner]
            delta = layer.lora_B[ADAPTER].weight @ layer.lora_A[ADAPTER].weight
            x = x.to(torch.promote_types(x.dtype, delta.dtype)) + layer.scaling[ADAPTER] * delta  # noqa: PLW2901
        yield f"{owner}.{leaf}", x


def dtypes(network: nn.Module) -> dict[str, torch.dtype]:
    """What the weights under the adapters are held in, by the names of `merged`."""
    state = network.state_dict().items()
    return {name.replace(".base_layer.", "."): x.dtype for name, x in state if ".lora_" not in name}


def save_adapter(network: nn.Module, lora: LoRA, folder: Path) -> None:
    """The adapters alone, as peft's own `save_pretrained` writes them."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    settings = lora.settings()
    layer: Any
    if not lora.targets:  # what "all-linear" meant here
        settings.target_modules = sorted({name.rpartition(".")[2] for name in adapted(network)})
    settings.inference_mode = True
    settings.base_model_name_or_path = getattr(network, "name_or_path", "") or None
    settings.save_pretrained(folder)
    arrays = {}
    for name, layer in adapted(network).items():
        for which in ("lora_A", "lora_B"):
            x = getattr(layer, which)[ADAPTER].weight
            arrays[f"base_model.model.{name}.{which}.weight"] = x.detach().cpu().contiguous().clone()
    save_file(arrays, folder / "adapter_model.safetensors", metadata={"format": "pt"})
