"""What the builders of robots' and of language models' flows share: seeds, policies, lanes, threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from m2flow.config import Recipe
from m2flow.types import Spec


def run_seed(recipe: Recipe) -> int:
    """The root of the seed tree. A recipe that runs always has one: `seed: null` is drawn before the run starts."""
    if recipe.seed is None:
        raise ValueError("seed: null was not drawn before the run was built")
    return recipe.seed


def build_policy(recipe: Recipe, spec: Spec) -> Any:
    """The policy with its initial weights, which depend on the recipe's seed only."""
    import torch

    from m2flow import seeds

    policy = recipe.policy.build(spec, seeds.derive(run_seed(recipe), "policy"))
    return policy.to(getattr(torch, recipe.trainer.dtype))


def share(items: Sequence[int], parts_count: int, index: int) -> list[int]:
    """Part `index` of `items` cut into `parts_count` runs whose sizes differ by one at most."""
    small, extra = divmod(len(items), parts_count)
    start = index * small + min(index, extra)
    return list(items[start : start + small + (index < extra)])


def share_lanes(recipe: Recipe, size: int, rank: int, cuts: int) -> list[list[int]]:
    """Lanes of each sub-batch of a replica. Groups stay whole."""
    group = recipe.rollout.group
    mine = share(range(recipe.rollout.lanes // group), size, rank)
    return [[g * group + i for g in share(mine, cuts, cut) for i in range(group)] for cut in range(cuts)]


def use_threads(recipe: Recipe) -> None:
    """Threads of torch's maths in this process, as the trainer's config says."""
    import torch

    torch.set_num_threads(recipe.trainer.threads)
