"""Running code that must leave training as it was: global random states and train/eval modes."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


@contextmanager
def untouched(policy: Any = None) -> Iterator[None]:
    """Put Python's, numpy's and torch's global random states back at the end, also when the block raises.

    A torch module in this process (`policy` itself, or what its service holds) is in eval mode inside the block, and
    each of its parts is in its former mode afterwards. Where the policy lives in another process nothing is done for
    it, and global random states are left alone, because others may use them while the answer is awaited.
    """
    module = _module(policy)
    if policy is not None and module is None:
        yield
        return
    torch = sys.modules.get("torch")
    # The global states are what must not move, so the legacy calls are the right ones here.
    states = random.getstate(), np.random.get_state(), torch.get_rng_state() if torch else None  # noqa: NPY002
    training = [part for part in module.modules() if part.training] if module is not None else []
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        if torch:
            torch.set_rng_state(states[2])


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
