"""The trained network as an Objective sees it: policy, heads and their slow copies, learnt scalars, a reference."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from m2flow import seeds
from m2flow.backends.torch.heads import HeadNet
from m2flow.capabilities import OffersReference, TellsWidth
from m2flow.types import Array, Head, Observation


class Model(nn.Module):
    """See `protocols.Model`.

    Names begin with `policy.`, `heads.<name>.`, `slow.<name>.`, `scalars.<name>` or `reference.`. The weights depend on
    the policy handed in and on `seed`. Slow copies and the reference are never trained.
    """

    policy: Any
    reference: Any

    def __init__(self, policy: Any, heads: Mapping[str, Head | float], seed: int, *, reference: bool = False) -> None:
        super().__init__()
        first = next((p for p in policy.parameters() if p.requires_grad), next(policy.parameters()))
        self.policy = policy
        self.heads, self.slow, self.scalars = nn.ModuleDict(), nn.ModuleDict(), nn.ParameterDict()
        width = feature_width(policy)
        for name, head in heads.items():
            taken = name in ("all", "policy") or hasattr(self.heads, name) or hasattr(self.scalars, name)
            if taken or "+" in name or "." in name:
                raise ValueError(f"head {name!r}: this name is taken or has a '+' or '.'; choose another")
            if isinstance(head, Head):
                generator = torch.Generator().manual_seed(seeds.derive(seed, "head", name))
                self.heads[name] = HeadNet(head, width, policy.spec.action, policy.chunk, generator).to(first)
                if head.ema > 0:
                    self.slow[name] = _frozen(self.heads[name])
            else:
                self.scalars[name] = nn.Parameter(first.new_tensor(head))
        self.reference = _reference(policy) if reference else None
        self.trainable = {name: p for name, p in self.named_parameters() if p.requires_grad}
        self._nets = {False: dict(self.heads.items()), True: dict(self.slow.items())}

    def value(self, name: str, obs: Observation, action: Array | None = None, *, slow: bool = False) -> Tensor:
        """Head `name` on the policy's features: [S, outputs], or [copies, S, outputs] if it has copies.

        Where every action of a chunk has features of its own, one output gives [S, C].
        """
        net = self._nets[slow].get(name)
        if net is None:
            kind = "slow head" if slow else "head"
            raise ValueError(f"{kind} {name!r} does not exist; there are {sorted(self._nets[slow])}")
        out: Tensor = net.forward(self.policy.features(obs), action)
        return out

    def scalar(self, name: str) -> Tensor:
        """A learnt scalar, 0-d."""
        if name not in self.scalars:
            raise ValueError(f"scalar {name!r} does not exist; there are {sorted(self.scalars)}")
        scalar: Tensor = self.scalars[name]
        return scalar

    def group(self, name: str) -> dict[str, nn.Parameter]:
        """Trainable parameters of a phase's group: `all`, `policy`, a head, a scalar, or several joined by `+`.

        Example: `group("policy+value")`.

        Raises:
            ValueError: no such part, or nothing trainable in it.
        """
        prefixes = {"all": "", "policy": "policy."}
        prefixes |= {head: f"heads.{head}." for head in self.heads} | {s: f"scalars.{s}" for s in self.scalars}
        found: dict[str, nn.Parameter] = {}
        for part in name.split("+"):
            if part not in prefixes:
                raise ValueError(f"group {name!r}: no part {part!r}; there are {', '.join(prefixes)}")
            prefix = prefixes[part]
            exact = prefix.startswith("scalars.")
            mine = {n: p for n, p in self.trainable.items() if (n == prefix if exact else n.startswith(prefix))}
            if not mine:
                raise ValueError(f"group {name!r}: {part!r} has no trainable parameter (all are frozen)")
            found |= mine
        return found


@torch.no_grad()
def feature_width(policy: Any) -> int:
    """Number of features: the policy's `feature_size`, else found by asking it about one row of zeros."""
    if isinstance(policy, TellsWidth):
        return int(policy.feature_size)
    first = next(policy.parameters())
    obs = {
        name: first.new_zeros((1, *field.shape), dtype=torch.long if field.categories else first.dtype)
        for name, field in policy.spec.observation.items()
    }
    return int(policy.features(obs).shape[1])


def _reference(policy: Any) -> Any:
    """The starting policy. One that trains adapters offers itself without them, which costs no second copy."""
    return policy.reference() if isinstance(policy, OffersReference) else _frozen(policy).eval()


def _frozen(module: nn.Module) -> nn.Module:
    """A copy that is never trained."""
    return copy.deepcopy(module).requires_grad_(False)
