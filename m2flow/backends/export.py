"""What a checkpoint holds beside its arrays: a language model as a folder that other programs open."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FOLDER = "hf"


class Exporter:
    """An `export` of a `CheckpointStore`: writes the policy's own `save_pretrained` into `hf`.

    `make` builds the policy as the run started with it, in the trainer's dtype; it is held only while it is written.
    The module that `save_pretrained` writes is opened again and compared by the policy itself, see
    `models.lm.export.save`.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __call__(self, place: Path, arrays: Mapping[str, Any]) -> None:
        """Write `place`/hf from the arrays of `policy.safetensors`. Raises OSError where it reads back differently."""
        policy = self.make()
        policy.load_state_dict(dict(arrays))
        policy.save_pretrained(place / FOLDER)
