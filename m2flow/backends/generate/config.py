"""The section `generator: {name: torch}`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from m2flow.backends import devices

if TYPE_CHECKING:
    from m2flow.backends.generate.engine import TorchGenerator


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchGeneratorConfig:
    """Our own batched decoder: a running batch with a cache of keys and values, refilled as answers end."""

    slots: int = 256  # answers that are decoded together; more wait in order
    # of weights, cache and arithmetic; auto: that of the policy, of lora's adapters where it has them. Small updates of
    # adapters vanish in bfloat16. On a processor without instructions for it, bfloat16 rounds the weights and computes
    # in float32, which is quicker there and more exact
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    block: int = 8  # tokens of every running answer between two looks at what is finished or shall be stopped
    max_context: int | None = None  # tokens of prompt and answer together; null: what the model was made for
    prefill_tokens: int = 8192  # of prompts that are computed at once, which bounds the memory that this takes
    device: str = "cpu"  # as torch names it: cpu, cuda or cuda:<number>; it does not follow trainer.device

    def __post_init__(self) -> None:
        for name in ("slots", "block", "prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}")
        if self.max_context is not None and self.max_context < 2:
            raise ValueError(
                f"max_context: must be at least 2 (a prompt and an answer), or null, got {self.max_context}"
            )
        devices.check_name(self.device, mps=False)  # tokens are drawn in float64, which mps does not have

    def build(self, policy: Any) -> TorchGenerator:
        """A decoder that samples from `policy`, see `decoder.LanguageModel` for what it must offer; it is on `device`
        from now on.

        Raises:
            ValueError: torch does not find the device on this machine.
        """
        from m2flow.backends.generate.engine import TorchGenerator

        devices.check_there(self.device)
        return TorchGenerator(
            policy.to(self.device),
            slots=self.slots,
            dtype=self.dtype,
            block=self.block,
            max_context=self.max_context,
            prefill_tokens=self.prefill_tokens,
        )
