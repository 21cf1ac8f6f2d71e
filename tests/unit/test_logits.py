"""One function from logits to log-probabilities, at any temperature."""

from __future__ import annotations

import math

import pytest
import torch

from m2flow import logits


def t(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, -0.126928), (0.5, -0.018150), (2.0, -0.313262)])
def test_a28_one_temperature_in_log_prob_and_entropy(temperature, expected):
    given = t(2.0, 0.0)
    found = logits.categorical_logprob(logits=given, action=torch.tensor(0), temperature=temperature)
    assert float(found) == pytest.approx(expected, abs=1e-6)
    p = math.exp(float(found))
    entropy = logits.categorical_entropy(logits=given, temperature=temperature)
    assert float(entropy) == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), abs=1e-12)


def test_categorical_with_impossible_actions_has_finite_values_and_gradients():
    given = torch.tensor([[0.0, -math.inf, 1.0]], dtype=torch.float64, requires_grad=True)
    total = logits.categorical_entropy(logits=given, temperature=1.0).sum()
    total = total + logits.categorical_logprob(logits=given, action=torch.tensor([2]), temperature=1.0).sum()
    (grad,) = torch.autograd.grad(total, given)
    assert total.isfinite()
    assert grad.isfinite().all()
    with pytest.raises(ValueError, match="temperature"):
        logits.categorical_logprob(logits=given, action=torch.tensor([2]), temperature=0.0)
    with pytest.raises(ValueError, match="action"):
        logits.categorical_logprob(logits=given, action=torch.tensor(2), temperature=1.0)


def test_half_precision_is_widened_and_temperature_one_changes_nothing():
    given = torch.tensor([[3.0, 1.0, -2.0]], dtype=torch.bfloat16)
    found = logits.normalised(given, 1.0)
    assert found.dtype == torch.float32
    assert torch.equal(found, given.float().log_softmax(-1))
