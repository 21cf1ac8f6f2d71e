"""The policy behind a service handle: batched `act`, versioned `load`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from m2flow.protocols import Policy
from m2flow.types import Action, Array, Observation, Weights


class PolicyService:
    """Acts with the weights it was last given. Callers hand in the noise, so answers do not depend on batching."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.version = 0

    def act(self, obs: Observation, noise: Array | None) -> Action:
        """Decide for the lanes in `obs`; see `Policy.act`."""
        decided = self.policy.act(obs, noise)
        decided.version = self.version
        return decided

    def load(self, weights: Weights) -> None:
        """Take weights named "policy.<parameter>". Every name must be there and fit; caches hold nothing to drop.

        Raises:
            ValueError: they are of another policy; this one acts on with its old weights.
        """
        module: Any = self.policy
        arrays = {name: torch.as_tensor(x) for name, x in strip_prefix(weights.arrays, "policy.").items()}
        own = module.state_dict()
        wrong = sorted(own.keys() ^ arrays.keys()) or [n for n, x in own.items() if x.shape != arrays[n].shape]
        if wrong:
            raise ValueError(f"weights of version {weights.version}: {', '.join(wrong[:5])} do not fit this policy")
        module.load_state_dict(arrays, strict=True)
        self.version = weights.version


def strip_prefix(arrays: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    """The entries whose name starts with `prefix`, without it."""
    return {name[len(prefix) :]: array for name, array in arrays.items() if name.startswith(prefix)}
