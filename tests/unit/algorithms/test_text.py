"""Reported cases and numbers by hand on answers of a language model, through the objectives that train."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from m2flow.algorithms.imitation import SFT
from m2flow.algorithms.onpolicy import GRPO, PPO
from tests.unit.algorithms.tiny_model import collect, gradient, make
from tests.unit.algorithms.tiny_text import GROUPS, TextModel, lists, moved, poisoned, trajectory

PLAIN = {"level": "action", "baseline": "none", "std": "none"}  # an answer's score is its advantage
MEANS = ("token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum")


def answers(policy, *lengths, scores, truncated=None):
    """Answers of these lengths by the policy itself (every ratio is 1), with these scores."""
    return trajectory(
        policy,
        answers=[(2, n, 0) for n in lengths],
        groups=[1] * len(lengths),
        scores=scores,
        truncated=truncated or [False] * len(lengths),
        gap=0.0,
    )


def flat_gradient(model):
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize(("how", "expected"), list(zip(MEANS, (10 / 6, 2.0, 5.0), strict=True)))
@pytest.mark.parametrize("lengths", [(4, 2), (2, 4)])
def test_a09_means_of_an_answer_do_not_depend_on_the_cut(how, expected, lengths):
    """Losses of 1 at four tokens and of 3 at two."""
    objective = GRPO(**PLAIN, aggregation=how)
    model = TextModel(objective)
    given = poisoned(answers(model.policy, *lengths, scores=[-1.0 if n == 4 else -3.0 for n in lengths]), math.nan)
    batch, _ = objective.targets(model, given)
    whole, loss = gradient(objective, model, batch, [])
    parts, total = gradient(objective, model, batch, [1])
    assert loss == pytest.approx(expected, abs=1e-6)
    assert total == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close(parts, whole, atol=1e-12, rtol=1e-9)
    assert whole.abs().max() > 0


def test_dr_grpo_divides_by_a_constant():
    objective = GRPO(**PLAIN, aggregation="sequence-mean-token-sum", aggregation_constant=8)
    model = TextModel(objective)
    batch, _ = objective.targets(model, answers(model.policy, 4, 2, scores=(-1.0, -3.0)))
    assert gradient(objective, model, batch, [1])[1] == pytest.approx(5.0 / 8)


@pytest.mark.parametrize("how", MEANS)
def test_entropy_and_kl_terms_take_the_same_mean_as_the_policy_term(how):
    objective = GRPO(**PLAIN, aggregation=how, kl="k2", kl_coef=0.3, entropy_coef=0.2)
    model = TextModel(objective)
    now = moved(model, 3)
    batch, _ = objective.targets(model, answers(model.policy, 4, 2, 1, scores=(0.0, 0.0, 0.0)))
    found, loss = gradient(objective, now, batch, [1])
    now.zero_grad()
    x = lists(now, answers(model.policy, 4, 2, 1, scores=(0.0, 0.0, 0.0)))
    terms = [0.15 * (n - r) ** 2 - 0.2 * e for n, r, e in zip(x["new"], x["reference"], x["entropy"], strict=True)]
    expected = {
        "token-mean": torch.cat(terms).mean(),
        "sequence-mean-token-mean": torch.stack([t.mean() for t in terms]).mean(),
        "sequence-mean-token-sum": torch.stack([t.sum() for t in terms]).mean(),
    }[how]
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-9)
    wanted = torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in now.parameters()]
    )
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-9)


def test_gspo_takes_kl_and_entropy_as_means_over_the_tokens_of_each_answer():
    objective = GRPO(level="sequence", baseline="none", std="none", kl="k3", kl_coef=0.3, entropy_coef=0.2)
    model = TextModel(objective)
    now = moved(model, 3)
    given = answers(model.policy, 4, 2, 1, scores=(0.0, 0.0, 0.0))
    batch, _ = objective.targets(model, poisoned(given, math.nan))
    found, loss = gradient(objective, now, batch, [2])
    now.zero_grad()
    x = lists(now, given)
    pairs = zip(x["new"], x["reference"], x["entropy"], strict=True)
    terms = [(0.3 * ((r - n).exp() - (r - n) - 1) - 0.2 * e).mean() for n, r, e in pairs]
    expected = torch.stack(terms).mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-9)
    torch.testing.assert_close(found, flat_gradient(now), atol=1e-12, rtol=1e-9)
    sums = objective.losses(now, objective.prepare(batch, batch.size), "update").metrics
    assert float(sums["entropy"][0]) == pytest.approx(sum(e.mean().item() for e in x["entropy"]))


def test_a10_truncated_answers_leave_numerator_and_denominator():
    """Four tokens that finished, eight that were cut, a loss of 1 each: 4 / 4, and not 4 / 12."""
    objective = GRPO(**PLAIN, mask_truncated=True)
    model = TextModel(objective)
    given = answers(model.policy, 4, 8, scores=(-1.0, -1.0), truncated=(False, True))
    batch, metrics = objective.targets(model, poisoned(given, math.nan))
    assert gradient(objective, model, batch, [1])[1] == pytest.approx(1.0)
    assert float(objective.counts(batch)["units"]) == 4.0
    assert metrics["train/advantage_mean"].weight == 4.0
    for how in MEANS[1:]:
        batch, _ = dataclasses.replace(objective, aggregation=how).targets(model, given)
        counts = dataclasses.replace(objective, aggregation=how).counts(batch)
        assert {name: float(count) for name, count in counts.items()} == {"units": 4.0, "sequences": 1.0}
    batch, _ = GRPO(**PLAIN).targets(model, given)  # off by default
    assert float(GRPO(**PLAIN).counts(batch)["units"]) == 12.0


@pytest.mark.parametrize("how", MEANS)
def test_a10_with_all_answers_truncated_the_loss_is_zero(how):
    objective = PPO(level="action", mask_truncated=True, aggregation=how, entropy_coef=0.1)
    model = TextModel(objective)
    given = answers(model.policy, 4, 8, scores=(-1.0, -1.0), truncated=(True, True))
    with pytest.warns(RuntimeWarning, match="no valid step"):
        batch, metrics = objective.targets(model, given)
    found, loss = gradient(objective, model, batch, [1])
    assert loss == 0.0
    assert (found == 0).all()
    assert all(float(count) == 0 for count in objective.counts(batch).values())
    assert all(math.isnan(metric.value) for metric in metrics.values())


def test_truncated_episodes_of_many_steps_are_left_out_whole():
    objective = PPO(mask_truncated=True)
    model = make(objective, dtype=torch.float64)
    given = collect(model, seed=5, steps=12, lanes=4, holes=False)
    cut = set(given.episode[given.truncated])
    expected = ~np.isin(given.episode, sorted(cut))
    assert cut and 0 < given.truncated.sum() < (~expected).sum()
    batch, _ = objective.targets(model, given)
    assert batch.columns["mask"].tolist() == expected.reshape(-1).tolist()
    assert float(objective.counts(batch)["values"]) == expected.sum()


def test_a_sequence_of_a_robot_is_its_episode():
    objective = GRPO(baseline="none", std="none", aggregation="sequence-mean-token-mean")
    model = make(objective, dtype=torch.float64)
    given = collect(model, seed=2, steps=8, lanes=4)
    batch, _ = objective.targets(model, given)
    _, loss = gradient(objective, model, batch, [3, 11])
    used = given.valid[..., 0]
    scores = [given.reward[..., 0][used & (given.episode == e)].sum() for e in np.unique(given.episode[used])]
    assert float(objective.counts(batch)["sequences"]) == pytest.approx(len(scores))
    assert loss == pytest.approx(-np.mean(scores))  # every ratio is 1, so the mean of an episode is its advantage


def test_a13_gae_over_tokens_by_hand_also_where_the_length_limit_cut():
    objective = PPO(level="action", gamma=0.9, gae_lambda=0.95, whiten="none")
    model = TextModel(objective)
    for truncated in (False, True):  # the limit is part of the task: nothing follows
        given = answers(model.policy, 3, 1, scores=(1.0, 0.25), truncated=(truncated, False))
        value = np.array([[[0.5, 0.6, 0.7], [0.5, math.nan, math.nan]]])
        spoken = dataclasses.replace(given, value=value, bootstrap=np.full((1, 2), math.nan))
        batch, _ = objective.targets(model, spoken)
        found = batch.columns["advantage"]
        assert found[0].tolist() == pytest.approx([0.284958, 0.2865, 0.3], abs=1e-6)
        assert found[1].tolist() == pytest.approx([-0.25, 0.0, 0.0], abs=1e-9)
        returns = batch.columns["return"][0].tolist()
        assert returns == pytest.approx([0.784958, 0.8865, 1.0], abs=1e-6)
    assert objective.counts(batch)["values"] == objective.counts(batch)["units"] == 4


def test_the_critic_of_a_language_model_speaks_before_every_token():
    objective = PPO(level="action", gamma=1.0, gae_lambda=1.0, whiten="none")
    assert objective.heads(TextModel(objective).policy.spec, 1)["value"].outputs == 1
    model = TextModel(objective)
    given = answers(model.policy, 3, 5, scores=(1.0, 2.0))
    batch, _ = objective.targets(model, poisoned(given, math.nan))
    values = lists(model, given)["value"]
    for row, (score, value) in enumerate(zip((1.0, 2.0), values, strict=True)):
        torch.testing.assert_close(batch.columns["advantage"][row, : len(value)], score - value.detach())
        assert batch.columns["return"][row, : len(value)].tolist() == pytest.approx([score] * len(value))


def test_reinforce_pays_the_kl_of_what_follows_and_not_of_what_was():
    objective = GRPO(**PLAIN, credit="to_go", kl="k1", kl_in="reward", kl_coef=0.5)
    model = TextModel(objective)
    given = answers(model.policy, 3, 1, scores=(1.0, 0.0))
    gaps = [b - r for b, r in zip(*(lists(model, given)[k] for k in ("behaviour", "reference")), strict=True)]
    a, b, c = (-0.5 * gaps[0]).tolist()
    batch, metrics = objective.targets(model, given)
    assert batch.columns["advantage"][0].tolist() == pytest.approx([1 + a + b + c, 1 + b + c, 1 + c])
    assert not [name for name in metrics if "group" in name]
    grouped = dataclasses.replace(objective, baseline="group")
    batch, metrics = grouped.targets(model, given)  # the baseline is that of the scores, 0.5, without KL
    assert batch.columns["advantage"][0].tolist() == pytest.approx([0.5 + a + b + c, 0.5 + b + c, 0.5 + c])
    assert metrics["train/groups_kept"].value == 1.0
    shrunk = dataclasses.replace(objective, gamma=0.5)
    found = shrunk.targets(model, given)[0].columns["advantage"][0].tolist()
    assert found == pytest.approx([a + 0.5 * (b + 0.5 * (1 + c)), b + 0.5 * (1 + c), 1 + c])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_kl_in_the_reward_is_estimated_per_token_whatever_the_level(kind):
    objective = GRPO(
        **PLAIN | {"level": "chunk", "std": "none", "baseline": "none"}, kl=kind, kl_in="reward", kl_coef=0.5
    )
    model = TextModel(objective)
    given = answers(model.policy, 3, 1, scores=(1.0, 0.0))
    gaps = [
        (b - r).detach() for b, r in zip(*(lists(model, given)[k] for k in ("behaviour", "reference")), strict=True)
    ]
    by_hand = {"k1": lambda g: g, "k2": lambda g: 0.5 * g * g, "k3": lambda g: torch.exp(-g) + g - 1.0}[kind]
    found = objective.targets(model, given)[0].columns["advantage"].reshape(-1).tolist()
    wanted = [score - 0.5 * float(by_hand(g).sum()) for score, g in zip((1.0, 0.0), gaps, strict=True)]
    assert found == pytest.approx(wanted)


def test_a06_equal_scores_teach_nothing_whatever_the_baseline():
    for options in (
        {},
        {"std": "none"},
        {"std": "none", "baseline": "leave_one_out"},
        {"std": "none", "credit": "to_go"},
    ):
        objective = GRPO(level="action", **options)
        model = TextModel(objective)
        given = trajectory(model.policy, scores=[0.1] * len(GROUPS))
        batch, metrics = objective.targets(model, given)
        assert float(batch.columns["advantage"].abs().max()) == 0.0
        assert metrics["train/dead_groups"].value == 1.0


def test_a07_a_group_of_one_is_an_error_only_where_groups_are_compared():
    for options, refused in (({}, True), ({"baseline": "leave_one_out", "std": "none"}, True), (PLAIN, False)):
        objective = GRPO(**({"level": "action"} | options))
        model = TextModel(objective)
        given = trajectory(model.policy, groups=range(len(GROUPS)))
        assert objective.needs_groups is refused
        if refused:
            with pytest.raises(ValueError, match="group 0 has one attempt"):
                objective.targets(model, given)
        else:
            objective.targets(model, given)


def test_a08_a_group_is_what_was_given_when_sampling_and_not_the_same_text():
    """Two tasks with the same prompt: scores [1, 0] and [1, 1]."""
    objective = GRPO(level="action")
    model = TextModel(objective)
    given = answers(model.policy, 2, 2, 2, 2, scores=(1.0, 0.0, 1.0, 1.0))
    given.obs["tokens"][:] = given.obs["tokens"][0]
    given = dataclasses.replace(given, group=np.array([[5, 5, 6, 6]]))
    signs = objective.targets(model, given)[0].columns["advantage"][:, 0].sign().tolist()
    assert signs == [1.0, -1.0, 0.0, 0.0]


def test_a28_every_first_ratio_is_one_at_any_temperature():
    for level in ("action", "chunk", "sequence"):
        for temperature in (0.5, 1.0, 2.0):
            objective = GRPO(level=level)
            model = TextModel(objective)
            model.policy.temperature = temperature
            batch, _ = objective.targets(model, trajectory(model.policy, gap=0.0))
            sums = objective.losses(model, objective.prepare(batch, batch.size), "update").metrics
            assert float(sums["approx_kl"][0]) == pytest.approx(0.0, abs=1e-12)
            assert float(sums["clip_fraction"][0]) == 0.0


def test_correction_of_sequence_ratios_takes_the_same_mean_as_the_ratio():
    for level, power in (("unit", 1.0), ("sequence", 3.0)):
        objective = GRPO(level="sequence", decoupled=True, behaviour_level=level, baseline="none", std="none")
        model = TextModel(objective)
        given = answers(model.policy, 3, 3, scores=(1.0, 1.0))
        shifted = given.units.logprob - math.log(1.2)
        given = dataclasses.replace(given, units=dataclasses.replace(given.units, logprob=shifted))
        batch, _ = objective.targets(model, given)
        assert batch.columns["weight"].tolist() == pytest.approx([1.2**power] * 2)


def test_sft_is_the_mean_of_minus_log_prob_over_what_should_have_been_said():
    objective = SFT()
    model = TextModel(objective)
    given = trajectory(model.policy)
    zeros = dataclasses.replace(given.units, logprob=np.zeros_like(given.units.logprob))
    batch, metrics = objective.targets(model, dataclasses.replace(given, units=zeros))
    assert metrics == {}
    assert set(batch.columns) == {"mask"}  # nothing to compare recorded log-probs with
    (term,) = objective.losses(model, batch, "update").terms
    assert (term.name, term.per) == ("sft", "units")
    spoken = torch.cat(lists(model, given)["new"])
    assert term.total.item() == pytest.approx(-spoken.sum().item())
    assert float(objective.counts(batch)["units"]) == len(spoken)
    pushed = SFT(entropy_coef=0.5).losses(model, batch, "update").terms[1]
    assert (pushed.name, pushed.coef) == ("entropy", 0.5)
    assert pushed.total.item() == pytest.approx(-torch.cat(lists(model, given)["entropy"]).sum().item())
    with pytest.raises(ValueError, match="entropy_coef"):
        SFT(entropy_coef=-1.0)


def test_the_denominators_are_those_that_are_counted():
    assert PPO().denominators == ("units", "values")
    assert PPO(aggregation="sequence-mean-token-mean").denominators == ("units", "values", "sequences")
    assert GRPO().denominators == ("units",)
    assert GRPO(aggregation="sequence-mean-token-sum").denominators == ("units", "sequences")
    assert GRPO(whiten="batch").scope == "batch"


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (PPO, {"aggregation": "mean"}, "aggregation: 'mean'"),
        (PPO, {"aggregation_constant": 5}, "aggregation_constant: only read with aggregation sequence-mean-token-sum"),
        (PPO, {"aggregation": MEANS[2], "aggregation_constant": 0}, "aggregation_constant: 0"),
        (PPO, {"aggregation": MEANS[1], "level": "sequence"}, "aggregation: .* with level sequence"),
        (PPO, {"level": "sequence", "reward_level": "action"}, "reward_level: 'action'"),
        (PPO, {"surrogate": "reinforce"}, "surrogate: 'reinforce'"),
        (PPO, {"surrogate": "cispo", "dual_clip": 3.0}, "dual_clip: only read with surrogate clip"),
        (PPO, {"surrogate": "cispo", "level": "sequence"}, "surrogate: cispo"),
        (PPO, {"behaviour_rule": "mask"}, "behaviour_rule: only read with decoupled"),
        (PPO, {"behaviour_level": "sequence"}, "behaviour_level: only read with decoupled"),
        (
            PPO,
            {"decoupled": True, "behaviour_rule": "truncate"},
            "behaviour_rule: 'truncate' needs",
        ),
        (PPO, {"decoupled": True, "behaviour_rule": "mask", "behaviour_threshold": 0.5}, "behaviour_threshold: 0.5"),
        (PPO, {"behaviour_rule": "clip"}, "behaviour_rule: 'clip'"),
        (GRPO, {"baseline": "mean"}, "baseline: 'mean'"),
        (GRPO, {"credit": "token"}, "credit: 'token'"),
        (GRPO, {"baseline": "none"}, "std: 'sample' with baseline 'none'.*set std to none"),
        (GRPO, {"baseline": "leave_one_out"}, "std: 'sample' with baseline 'leave_one_out'"),
        (GRPO, {"credit": "to_go"}, "std: 'sample' with credit 'to_go'"),
        (GRPO, {"gamma": 0.9}, "gamma: 0.9, only read with credit to_go"),
    ],
)
def test_a20_fields_that_do_not_fit_are_errors_that_name_the_field(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**options)
