from __future__ import annotations

import math

import pytest
import torch

from m2flow.algorithms import losses

CLIP = {"clip_low": 0.2, "clip_high": 0.2}


def t(*numbers, grad=False):
    return torch.tensor(numbers, dtype=torch.float64, requires_grad=grad)


def test_a12_kl_estimators_and_the_swapped_call():
    pair = {"policy_logprob": t(-1.0), "reference_logprob": t(-1.5)}
    for name, expected in (("k1", 0.5), ("k2", 0.125), ("k3", 0.106531)):
        assert float(losses.kl(**pair, estimator=name)) == pytest.approx(expected, abs=1e-6)
    swapped = losses.kl(policy_logprob=t(-1.5), reference_logprob=t(-1.0), estimator="k3")
    assert float(swapped) == pytest.approx(0.148721, abs=1e-6)


def test_a12_arguments_go_by_name_and_unknown_names_are_errors():
    with pytest.raises(TypeError):
        losses.kl(t(-1.0), t(-1.5), "k1")
    with pytest.raises(TypeError, match="clip_ratio_c"):
        losses.log_ratio_bounds(advantage=t(-1.0), dual_clip=None, limit=20.0, clip_ratio_c=3.0, **CLIP)
    with pytest.raises(ValueError, match="estimator: 'k4'"):
        losses.kl(policy_logprob=t(0.0), reference_logprob=t(0.0), estimator="k4")


def test_bounds_keep_the_precision_of_the_advantage():
    lower, upper = losses.log_ratio_bounds(advantage=t(1.0, -1.0), dual_clip=3.0, limit=20.0, **CLIP)
    assert lower.tolist() == [-20.0, math.log1p(-0.2)]
    assert upper.tolist() == [math.log1p(0.2), math.log(3.0)]


def test_approximate_kl_is_the_k3_estimate_without_gradient():
    log_ratio = t(0.3, -0.4, grad=True)
    found = losses.approx_kl_sum(log_ratio=log_ratio)
    assert float(found) == pytest.approx(math.exp(0.3) - 1.3 + math.exp(-0.4) - 0.6, abs=1e-12)
    assert not found.requires_grad


def test_gradients_of_the_kl_estimators_on_policy_samples():
    """Exact expectations over a categorical policy: k2 has the KL's gradient, k1 none, k3 that of the other KL."""
    logits, reference = t(0.5, -0.2, 1.0, grad=True), t(0.1, 0.4, -0.3).log_softmax(0)
    policy = logits.log_softmax(0)
    weight = policy.exp().detach()
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    (other,) = torch.autograd.grad(-(reference.exp() * policy).sum(), logits, retain_graph=True)
    for name, expected in (("k1", torch.zeros(3).double()), ("k2", exact), ("k3", other)):
        estimate = losses.kl(policy_logprob=policy, reference_logprob=reference, estimator=name)
        (found,) = torch.autograd.grad((weight * estimate).sum(), logits, retain_graph=True)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    unbiased = losses.kl(policy_logprob=policy, reference_logprob=reference, estimator="k3")
    torch.testing.assert_close((weight * unbiased).sum(), (weight * (policy - reference)).sum())


def test_value_loss_by_hand():
    value, target = t(1.0, 5.0), t(2.0, 1.0)
    assert float(losses.value_loss_sum(value=value, target=target)) == 0.5 + 8.0
    assert float(losses.value_loss_sum(value=value, target=target, huber=2.0)) == 0.5 + 2.0 * (4.0 - 1.0)
    # values may move 0.5 from 0 and 4: 0.5 is farther from 2 (1.125 > 0.5), 4.5 nearer to 1 than 5 (8 > 6.125)
    clipped = {"old_value": t(0.0, 4.0), "clip": 0.5}
    assert float(losses.value_loss_sum(value=value, target=target, **clipped)) == 1.125 + 8.0
    with pytest.raises(ValueError, match="old_value"):
        losses.value_loss_sum(value=value, target=target, clip=0.5)
    with pytest.raises(ValueError, match="target"):  # [S] against [S, 1] would broadcast in silence
        losses.value_loss_sum(value=value[:, None], target=target)


@pytest.mark.parametrize("options", [{}, {"huber": 1.0}, {"clip": 0.3}, {"clip": 0.3, "huber": 1.0}])
def test_value_loss_reads_nothing_under_the_mask(options):
    rng = torch.Generator().manual_seed(0)
    value, target, old = (torch.randn(8, generator=rng, dtype=torch.float64) for _ in range(3))
    mask = torch.tensor([True, False] * 4)

    def run(hidden):
        x = torch.where(mask, value, hidden).requires_grad_()
        args = {"target": torch.where(mask, target, hidden), "old_value": torch.where(mask, old, hidden)}
        loss = losses.value_loss_sum(value=x, mask=mask, **args, **options)
        return loss.detach(), *torch.autograd.grad(loss, x)

    kept = losses.value_loss_sum(value=value[mask], target=target[mask], old_value=old[mask], **options)
    for hidden in (0.0, 1e6, math.nan):
        loss, grad = run(hidden)
        torch.testing.assert_close(loss, kept)
        torch.testing.assert_close(grad, run(0.0)[1])


def test_behaviour_weight_drops_what_is_too_far_off():
    whole = losses.behaviour_weight(proximal_logprob=t(0.0, 1.0, -1.0), behaviour_logprob=t(0.0, 0.0, 0.0))
    weight, keep = losses.bound_weight(whole, threshold=2.0)
    assert weight.tolist() == pytest.approx([1.0, 0.0, math.exp(-1)])
    assert keep.tolist() == [True, False, True]
    weight, keep = losses.bound_weight(whole, threshold=None)
    assert weight.tolist() == pytest.approx([1.0, math.e, math.exp(-1)])
    assert keep.all()


def test_behaviour_weight_truncates_or_masks_both_sides():
    pair = {"proximal_logprob": t(0.0, 1.0, -1.0, 0.5), "behaviour_logprob": t(0.0, 0.0, 0.0, 0.0)}
    whole = losses.behaviour_weight(**pair)
    weight, keep = losses.bound_weight(whole, threshold=2.0, rule="truncate")
    assert weight.tolist() == pytest.approx([1.0, 2.0, math.exp(-1), math.exp(0.5)])
    assert keep.all()
    weight, keep = losses.bound_weight(whole, threshold=2.0, rule="mask")
    assert weight.tolist() == pytest.approx([1.0, 0.0, 0.0, math.exp(0.5)])
    assert keep.tolist() == [True, False, False, True]


def test_the_joint_behaviour_weight_is_the_product_of_a_row():
    pair = {"proximal_logprob": t([0.5, 0.4], [0.1, -0.2]), "behaviour_logprob": torch.zeros(2, 2).double()}
    weight, keep = losses.bound_weight(losses.behaviour_weight(**pair, joint=True), threshold=2.0, rule="mask")
    assert weight.tolist() == [[0.0, 0.0], [pytest.approx(math.exp(-0.1))] * 2]
    assert keep.tolist() == [[False, False], [True, True]]
    flat = {name: x[:, 0] for name, x in pair.items()}
    assert losses.behaviour_weight(**flat, joint=True).tolist() == pytest.approx([math.exp(0.5), math.exp(0.1)])


def test_importance_bounds_do_not_look_at_the_sign():
    lower, upper = losses.importance_bounds(advantage=t(1.0, -1.0), limit=20.0, **CLIP)
    assert lower.tolist() == [math.log1p(-0.2)] * 2
    assert upper.tolist() == [math.log1p(0.2)] * 2
    lower, upper = losses.importance_bounds(advantage=t(1.0), limit=20.0, clip_low=1.0, clip_high=4.0)
    assert (lower.item(), upper.item()) == (-20.0, pytest.approx(math.log(5.0)))


def test_sac_target_by_hand():
    args = {
        "reward": t(1.0, 1.0),
        "terminated": torch.tensor([False, True]),
        "next_q": torch.stack([t(3.0, math.nan), t(2.0, math.nan)]),
        "next_logprob": t(-1.0, math.nan),
        "gamma": 0.5,
    }
    assert losses.sac_target(**args, temperature=0.2).tolist() == [1.0 + 0.5 * (2.0 + 0.2), 1.0]
    assert losses.sac_target(**args, temperature=0.0).tolist() == [2.0, 1.0]
    with pytest.raises(ValueError, match="terminated"):
        losses.sac_target(**(args | {"terminated": args["terminated"][:, None]}), temperature=0.2)


def test_sac_losses_by_hand():
    q = torch.stack([t(1.0, 2.0), t(3.0, 0.0)])
    assert float(losses.sac_critic_sum(q=q, target=t(1.0, 1.0))) == 0.0 + 1.0 + 4.0 + 1.0
    assert float(losses.sac_actor_sum(q=q, logprob=t(-1.0, 2.0), temperature=0.5)) == (-0.5 - 1.0) + (1.0 - 0.0)
    log_alpha, logprob = t(math.log(2.0), grad=True), t(-3.0, grad=True)
    loss = losses.sac_temperature_sum(log_temperature=log_alpha[0], logprob=logprob, target_entropy=1.0)
    assert loss.item() == pytest.approx(-2.0 * (-3.0 + 1.0))
    loss.backward()
    assert log_alpha.grad.tolist() == pytest.approx([4.0])  # entropy 3 above its target 1: descent lowers alpha
    assert logprob.grad is None
    with pytest.raises(ValueError, match="q"):
        losses.sac_critic_sum(q=q[..., None], target=t(1.0, 1.0))
