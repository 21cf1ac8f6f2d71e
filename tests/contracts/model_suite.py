"""What every Model must do for an Objective. A new one adds one `Case` to test_models.py, and is asked all of this."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from m2flow.types import Head, Phase, Spec

PROTOCOLS = ("Model",)
ROWS = 9


@dataclass(frozen=True)
class Asks:
    """Of an objective only what a model is made of."""

    networks: Mapping[str, Head | float]
    needs_reference: bool = False
    phases: tuple[Phase, ...] = (Phase("update", "all"),)
    requires: frozenset[str] = frozenset()

    def heads(self, spec: Spec, chunk: int = 1) -> Mapping[str, Head | float]:
        return self.networks


HEADS = {
    "value": Head(hidden=(4,)),
    "per_action": Head(outputs=3, hidden=(4,)),
    "q": Head(hidden=(4,), copies=2, takes_action=True, ema=0.1),
    "log_alpha": -0.5,
}


@dataclass(frozen=True)
class Case:
    """`build(objective)` makes a model with the heads it asks for, in float64."""

    name: str
    build: Callable[[Any], Any]

    def make(self, *, reference: bool = False) -> Any:
        return self.build(Asks(HEADS, reference))


def inputs(model: Any, rows: int = ROWS) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Observations and actions [S, C, *shape]."""
    rng, spec = np.random.default_rng(0), model.policy.spec
    obs = {name: torch.from_numpy(rng.normal(size=(rows, *f.shape))) for name, f in spec.observation.items()}
    return obs, torch.from_numpy(rng.uniform(-1, 1, (rows, model.policy.chunk, *spec.action.shape)))


def moved(model: Any) -> list[str]:
    """Names of the parameters that hold a gradient other than 0."""
    return [n for n, p in model.named_parameters() if p.grad is not None and bool(p.grad.abs().sum() > 0)]


# ---- checks


def check_a_value_is_one_row_of_outputs_per_row(case: Case) -> None:
    model = case.make()
    obs, action = inputs(model)
    assert model.value("value", obs).shape == (ROWS, 1)
    assert model.value("per_action", obs).shape == (ROWS, 3)
    assert model.value("q", obs, action).shape == (2, ROWS, 1)


def check_a_row_has_the_same_value_in_any_batch(case: Case) -> None:
    model = case.make()
    obs, action = inputs(model)
    whole, q = model.value("per_action", obs), model.value("q", obs, action)
    for rows in (slice(0, 1), slice(3, 8)):
        part = {name: x[rows] for name, x in obs.items()}
        torch.testing.assert_close(model.value("per_action", part), whole[rows])
        torch.testing.assert_close(model.value("q", part, action[rows]), q[:, rows])


def check_copies_are_networks_of_their_own_that_see_the_action(case: Case) -> None:
    model = case.make()
    obs, action = inputs(model)
    q = model.value("q", obs, action)
    assert not torch.equal(q[0], q[1])
    assert bool((model.value("q", obs, -action) != q).all())


def check_values_have_gradients_to_weights_and_to_the_action(case: Case) -> None:
    model = case.make()
    obs, action = inputs(model)
    model.value("value", obs).sum().backward()
    assert moved(model)
    action.requires_grad_()
    model.value("q", obs, action).sum().backward()
    assert action.grad is not None and bool((action.grad != 0).any())


def check_the_slow_copy_is_no_part_of_what_is_trained(case: Case) -> None:
    """A gradient goes through it to the action, and to no weight of the head."""
    model = case.make()
    obs, action = inputs(model)
    action.requires_grad_()
    slow = model.value("q", obs, action, slow=True)
    assert slow.shape == (2, ROWS, 1)
    slow.sum().backward()
    assert not [name for name in moved(model) if not name.startswith("policy.")]


def check_scalars_start_where_they_were_asked_to_and_are_learnt(case: Case) -> None:
    scalar = case.make().scalar("log_alpha")
    assert scalar.shape == ()
    assert scalar.item() == -0.5
    (2.0 * scalar).backward()
    assert scalar.grad.item() == 2.0


def check_a_reference_is_there_where_it_is_asked_for_and_stands_still(case: Case) -> None:
    assert case.make().reference is None
    model = case.make(reference=True)
    assert not any(p.requires_grad for p in model.reference.parameters())
    before = copy.deepcopy(model.reference.state_dict())
    with torch.no_grad():
        for parameter in model.policy.parameters():
            parameter += 1.0
    assert all(torch.equal(x, before[name]) for name, x in model.reference.state_dict().items())


def check_what_is_not_there_is_refused(case: Case) -> None:
    model = case.make()
    obs, _ = inputs(model)
    with pytest.raises((ValueError, KeyError, AttributeError), match="nobody"):
        model.value("nobody", obs)
    with pytest.raises((ValueError, KeyError, AttributeError), match="nobody"):
        model.scalar("nobody")


def check_looking_changes_nothing(case: Case) -> None:
    model = case.make(reference=True)
    before, state = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    obs, action = inputs(model)
    kept = copy.deepcopy((obs, action))
    model.value("value", obs)
    model.value("q", obs, action, slow=True)
    model.scalar("log_alpha")
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in before.items())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(kept[1], action) and all(torch.equal(x, obs[name]) for name, x in kept[0].items())


CHECKS: list[Callable[[Case], None]] = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
