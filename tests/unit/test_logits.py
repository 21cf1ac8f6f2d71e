"""One function from logits to log-probabilities, against torch's own distribution and against finite differences."""

from __future__ import annotations

import pytest
import torch

from m2flow.logits import categorical_entropy, categorical_logprob, categorical_score

LOGITS = torch.tensor([[2.0, 0.0], [-1.0, 3.0]], dtype=torch.float64)


def test_a28_by_hand() -> None:
    for temperature, want in ((1.0, -0.126928), (0.5, -0.018150), (2.0, -0.313262)):
        action = torch.tensor([0])
        both, _ = categorical_score(logits=LOGITS[:1], action=action, temperature=temperature)
        alone = categorical_logprob(logits=LOGITS[:1], action=action, temperature=temperature)
        assert both.item() == pytest.approx(want, abs=1e-6) == alone.item()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("coefs", [(1.0, 0.0), (0.0, 1.0), (0.7, -0.4)])
def test_values_and_gradients_are_those_of_torch(temperature: float, coefs: tuple[float, float]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, 7, generator=generator, dtype=torch.float64).requires_grad_()
    action = torch.randint(7, (5, 3), generator=generator)
    weight = torch.randn(5, 3, generator=generator, dtype=torch.float64)

    def slope(logprob: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        parts = [c * (weight * x).sum() for c, x in zip(coefs, (logprob, entropy), strict=True) if c]
        return torch.autograd.grad(sum(parts), logits)[0]

    plain = torch.distributions.Categorical(logits=logits / temperature)
    want = plain.log_prob(action), plain.entropy()
    got = categorical_score(logits=logits, action=action, temperature=temperature)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)
    torch.testing.assert_close(slope(*got), slope(*want))
    torch.testing.assert_close(got[1], categorical_entropy(logits=logits, temperature=temperature))


def test_impossible_categories_count_nothing() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], dtype=torch.float64, requires_grad=True)
    logprob, entropy = categorical_score(logits=logits, action=torch.tensor([0]), temperature=1.0)
    assert (logprob.item(), entropy.item()) == pytest.approx((-0.693147, 0.693147), abs=1e-6)
    (logprob + entropy).sum().backward()
    assert logits.grad.tolist()[0] == pytest.approx([0.5, -0.5, 0.0])


def test_half_precision_is_scored_in_float32() -> None:
    logits = LOGITS.bfloat16().requires_grad_()
    logprob, entropy = categorical_score(logits=logits, action=torch.tensor([0, 1]), temperature=1.0)
    assert logprob.dtype == entropy.dtype == torch.float32
    (logprob.sum() + entropy.sum()).backward()
    assert logits.grad.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="action: shape"):
        categorical_score(logits=logits, action=torch.tensor([0]), temperature=1.0)
    with pytest.raises(ValueError, match="temperature: 0"):
        categorical_score(logits=logits, action=torch.tensor([0, 1]), temperature=0.0)
