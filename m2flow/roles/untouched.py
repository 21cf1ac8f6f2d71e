"""Running code that must leave training as it was: global random states and train/eval modes."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


class Untouched:
    """Blocks of code with global random states (Python's, numpy's, torch's) of their own, begun from `seed`.

    Between the blocks, and after one that raised, the outer states are as if nothing had happened. Code that draws from
    them goes on drawing where its last block stopped.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._inside: tuple[Any, Any, Any] | None = None

    @contextmanager
    def block(self, policy: Any = None) -> Iterator[None]:
        """Run the block. A torch module in this process (`policy` itself, or what its service holds) is in eval mode
        inside it, and each of its parts is in its former mode afterwards.

        Where the policy lives in another process nothing is done: that is its service's business, and others may use
        this process while the answer is awaited.
        """
        module = _module(policy)
        if policy is not None and module is None:
            yield
            return
        outside = _states()
        _seed(self.seed) if self._inside is None else _set(self._inside)
        training = [part for part in module.modules() if part.training] if module is not None else []
        for part in training:
            part.training = False
        try:
            yield
        finally:
            for part in training:
                part.training = True
            self._inside = _states()
            _set(outside)


def _states() -> tuple[Any, Any, Any]:
    torch = sys.modules.get("torch")
    # The global states are what must not move, so the legacy calls are the right ones here.
    return random.getstate(), np.random.get_state(), torch.get_rng_state() if torch else None  # noqa: NPY002


def _set(states: tuple[Any, Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    if states[2] is not None:
        sys.modules["torch"].set_rng_state(states[2])


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch = sys.modules.get("torch")
    if torch:
        torch.default_generator.manual_seed(seed)  # not `torch.manual_seed`, which would also move the GPUs' states


def _module(policy: Any) -> Any:
    """The torch module behind a policy, a service or a local handle; None where there is none in this process.

    Only types and instance dictionaries are read: a handle turns every attribute it does not have into a remote call.
    """
    found = policy
    for _ in range(4):
        if found is None or callable(getattr(type(found), "modules", None)):
            return found
        own = getattr(found, "__dict__", {})
        found = next((own[name] for name in ("_service", "policy", "module") if name in own), None)
    return None
