"""How many bytes the nodes of the built-in flows hold, estimated before anything is started.

The network is counted on torch's meta device: its tensors have shapes and no numbers, so any size costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from m2flow.capabilities import constants
from m2flow.config import Recipe
from m2flow.flow.graph import Flow
from m2flow.flow.plan import Plan
from m2flow.sections import OnDevice, SpeaksText
from m2flow.types import Spec

WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}  # bytes of a number


def skeleton(recipe: Recipe, spec: Spec) -> Any:
    """The network that is trained (`backends.torch.model.Model`), with shapes and without numbers.

    Raises:
        ValueError: the policy, or a head that the objective asks for, cannot be built on this environment.
    """
    import torch

    try:
        with torch.device("meta"):
            return _model(recipe, spec)
    except ValueError:
        raise
    except Exception:  # noqa: BLE001  a policy of another package may read its numbers while it is made
        return _model(recipe, spec)


def _model(recipe: Recipe, spec: Spec) -> Any:
    from m2flow.backends.torch.model import Model

    policy = recipe.policy.build(spec, 0)
    heads = recipe.objective.heads(policy.spec, policy.chunk)
    return Model(policy, heads, 0, reference=recipe.objective.needs_reference)


def estimate(recipe: Recipe, flow: Flow, plan: Plan, spec: Spec, model: Any) -> dict[str, int]:
    """Bytes that one replica of each node holds: weights, gradients, optimiser, and the data of a step.

    Replicas share the lanes, and the episodes of an evaluation, so the bytes are those of the largest share.
    """
    float_size = 8 if recipe.trainer.dtype == "float64" else 4
    trained = sum(p.numel() for p in model.trainable.values())
    moved = {id(p) for p in model.trainable.values()}
    frozen = _bytes((p for p in model.parameters() if id(p) not in moved), float_size)  # slow copies, a reference
    weights = _bytes(model.policy.parameters(), float_size)
    row = sum(field.size for field in spec.observation.values()) * float_size
    row += int(model.policy.chunk) * spec.action.size * float_size * 4  # action, log-prob, columns of the same size
    groups = recipe.rollout.lanes // recipe.rollout.group
    lanes = _largest_share(groups, plan, "rollout") * recipe.rollout.group
    data = 3 * recipe.rollout.length * recipe.rollout.lanes * row  # as collected, as columns, shuffled
    kept = 0 if recipe.replay is None else recipe.replay.capacity * 2 * row
    needs = {
        "policy": weights + _decoded(recipe, model.policy, float_size),
        "rollout": recipe.rollout.length * lanes * row,
        "learner": 4 * trained * float_size + frozen + data + kept,  # 4: weight, gradient, two moments
        "evaluator": _together(recipe, plan) * row,
    }
    return {node.name: needs.get(node.name, 0) for node in flow.nodes}


def _decoded(recipe: Recipe, policy: Any, float_size: int) -> int:
    """What a generator holds beside the language model that it is given: a copy of the weights to decode with, adapters
    added in. Its cache of keys and values, which grows with the answers, is not counted."""
    if not isinstance(recipe.policy, SpeaksText):
        return 0
    under = constants(policy)  # what adapters stand on: the copy is as large as that
    held = [p for name, p in policy.named_parameters() if not under or name in under]
    engine = recipe.generator
    size = WIDTHS.get(getattr(engine, "dtype", "auto"), float_size)
    if engine is None or (isinstance(engine, OnDevice) and engine.device == "cpu"):
        size = max(size, 4)  # a processor without instructions for half precision holds rounded float32
    return int(size * sum(p.numel() for p in held))


def _bytes(parameters: Iterable[Any], float_size: int) -> int:
    """Of weights as they are held: in the trainer's dtype, or in half precision where they were made so (the base of
    adapters)."""
    return sum(p.numel() * (p.element_size() if p.element_size() < 4 else float_size) for p in parameters)


def _together(recipe: Recipe, plan: Plan) -> int:
    """Episodes of an evaluation that one evaluator plays at the same time."""
    if recipe.evaluation is None:
        return 0
    lanes: int = recipe.evaluation.lanes
    return min(lanes, _largest_share(len(recipe.evaluation.seed_list) or recipe.evaluation.seeds, plan, "evaluator"))


def _largest_share(count: int, plan: Plan, name: str) -> int:
    """How many of `count` a replica gets at most."""
    return -(-count // plan.places[name].replicas) if name in plan.places else count
