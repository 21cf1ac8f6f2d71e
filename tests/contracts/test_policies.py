"""The Policy contract, asked of every policy, and the part of it that a mere Scorer keeps, of language models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from m2flow.models.flow import FlowConfig
from m2flow.models.lm.lora import LoRA
from m2flow.models.mlp import MLPConfig
from m2flow.protocols import Policy, Scorer
from tests.contracts.policy_suite import CHECKS, DISCRETE, MIXED, SWITCHES, TORQUE, VECTOR, Case
from tests.unit.models.lm.small import conversations, move
from tests.unit.models.lm.small import policy as language_model

SMALL = (16, 12)
CASES = [
    Case("gaussian", MLPConfig(hidden=SMALL), VECTOR),
    Case("gaussian_no_hidden_layer", MLPConfig(hidden=()), VECTOR),
    Case("gaussian_chunk", MLPConfig(hidden=SMALL, chunk=4, activation="silu"), VECTOR),
    Case("gaussian_state_std", MLPConfig(hidden=SMALL, state_dependent_std=True, log_std_init=-0.5), VECTOR),
    Case("gaussian_bounds", MLPConfig(hidden=SMALL, log_std_init=-1.0, log_std_bounds=(-2.5, 0.5)), VECTOR),
    Case("gaussian_scheduled", MLPConfig(hidden=SMALL, std_schedule=((0, 1.0), (3, 0.2))), VECTOR),
    Case("gaussian_shared", MLPConfig(hidden=SMALL, shared_trunk=True, activation="elu"), TORQUE),
    Case("gaussian_normalized", MLPConfig(hidden=SMALL, normalize=True, clip_obs=3.0), MIXED),
    Case("squashed", MLPConfig(hidden=SMALL, dist="squashed", activation="relu"), TORQUE),
    Case("squashed_own_std", MLPConfig(hidden=SMALL, dist="squashed", state_dependent_std=False), TORQUE),
    Case("squashed_normalized", MLPConfig(hidden=SMALL, dist="squashed", normalize=True), MIXED),
    Case("categorical", MLPConfig(hidden=SMALL), DISCRETE),
    Case("categorical_cold", MLPConfig(hidden=SMALL, temperature=0.5), DISCRETE),
    Case("categorical_switches", MLPConfig(hidden=SMALL, chunk=2, normalize=True), SWITCHES),
    Case("flow", FlowConfig(hidden=SMALL), VECTOR),
    Case("flow_one_step", FlowConfig(hidden=SMALL[:1], steps=1, activation="relu"), VECTOR),
    Case("flow_fixed_std", FlowConfig(hidden=SMALL, steps=3, learn_std=False, std=0.1), TORQUE),
    Case("flow_chunk", FlowConfig(hidden=SMALL, chunk=3, normalize=True), MIXED),
]


@pytest.mark.parametrize(
    ("case", "check"), [pytest.param(c, k, id=f"{c.name}-{k.__name__[6:]}") for c in CASES for k in CHECKS]
)
def test_policy_contract(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


LANGUAGE: dict[str, dict[str, Any]] = {
    "causal_lm": {},
    "causal_lm_padded": {"pack": False, "temperature": 0.5},
    "causal_lm_lora": {"lora": LoRA(rank=4), "logits_chunk": 3},
}
language = pytest.mark.parametrize("keys", LANGUAGE.values(), ids=LANGUAGE.keys())


@language
def test_a_language_model_is_a_scorer(keys: dict[str, Any]) -> None:
    made, obs = move(language_model(**keys)), conversations()
    assert isinstance(made, Scorer)
    assert not isinstance(made, Policy)
    found = made.score(obs, {})
    assert found.logprob.shape == found.entropy.shape == obs["at"].shape
    assert made.features(obs).shape == (*obs["at"].shape, made.feature_size)
    assert bool((found.logprob <= 0).all())
    assert bool((found.entropy >= 0).all())


@language
def test_a_language_model_scores_rows_alike_however_they_are_put_together(keys: dict[str, Any]) -> None:
    made, obs = move(language_model(**keys)).double(), conversations()
    whole = made.score(obs, {}).logprob.detach()
    for index in ([0], [6], [2, 4], [5, 3, 1, 6, 0, 2, 4]):
        part = made.score({name: x[index] for name, x in obs.items()}, {}).logprob.detach()
        torch.testing.assert_close(part, whole[index], atol=1e-10, rtol=0)


@language
def test_a_language_model_leaves_no_trace_of_scoring(keys: dict[str, Any]) -> None:
    """Weights, inputs, training flags and the global random states (A16)."""
    made, obs = language_model(**keys), conversations()
    before = copy.deepcopy((made.state_dict(), obs))
    flags = [module.training for module in made.modules()]
    states = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    made.score(obs, {})
    made.features(obs)
    made.observe(obs)
    assert [module.training for module in made.modules()] == flags
    assert torch.equal(states[0], torch.random.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1])  # noqa: NPY002
    assert all(torch.equal(x, made.state_dict()[name]) for name, x in before[0].items())
    assert all(torch.equal(x, obs[name]) for name, x in before[1].items())


@language
def test_a_language_models_gradient_is_that_of_central_differences(keys: dict[str, Any]) -> None:
    made, obs = move(language_model(**keys)).double(), conversations()

    def total(policy: Any) -> torch.Tensor:
        found = policy.score(obs, {})
        return found.logprob.sum() + 0.3 * found.entropy.sum()

    total(made).backward()
    generator = torch.Generator().manual_seed(0)
    ways = {
        n: torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for n, p in made.named_parameters()
        if p.grad is not None
    }
    slope = sum(float((p.grad * ways[n]).sum()) for n, p in made.named_parameters() if n in ways)
    values = []
    for sign in (1.0, -1.0):
        moved = copy.deepcopy(made)
        with torch.no_grad():
            for n, p in moved.named_parameters():
                if n in ways:
                    p += sign * 1e-6 * ways[n]
            values.append(float(total(moved)))
    assert (values[0] - values[1]) / 2e-6 == pytest.approx(slope, rel=1e-5)
