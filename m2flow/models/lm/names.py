"""Names of a policy's weights: a tied weight has one, and loading does without what a config builds again."""

from __future__ import annotations

from typing import Any

from torch import nn


class Aliases:
    """Second names of tied weights: left out of `state_dict`, put back where weights are loaded."""

    def __init__(self, policy: Any) -> None:
        first: dict[int, str] = {}
        self.of: dict[str, str] = {}  # second name -> first
        for name, x in policy.named_parameters(remove_duplicate=False):
            if first.setdefault(id(x), name) != name:
                self.of[name] = first[id(x)]
        policy.register_state_dict_post_hook(_leave_out)
        policy.register_load_state_dict_pre_hook(_put_back)


def _leave_out(policy: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    aliases: Any = policy.aliases
    for name in aliases.of:
        state.pop(prefix + name, None)


def _put_back(policy: Any, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
    """What is missing on purpose is filled with the policy's own tensors; copying one onto itself costs nothing."""
    own: dict[str, Any] = dict(policy.named_parameters(remove_duplicate=False)) | dict(policy.named_buffers())
    for name in policy.constant:
        state.setdefault(prefix + name, own[name])
    for name, first in policy.aliases.of.items():
        if prefix + first in state:
            state.setdefault(prefix + name, own[name])
