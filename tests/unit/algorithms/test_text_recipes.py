"""Every row of docs/algorithms.md, on ragged answers: loss and gradient are those of the formula, answer by answer."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from m2flow import registry
from tests.unit.algorithms.tiny_model import gradient
from tests.unit.algorithms.tiny_text import GROUPS, SCORES, TRUNCATED, TextModel, lists, moved, poisoned, trajectory

PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"
ROWS = {
    row[1]: yaml.safe_load(row[2])
    for row in re.finditer(r"^\| ([^|]+?) \|[^|]*\| `(\{.*\})` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
}
each_row = pytest.mark.parametrize("name", ROWS)


def built(name):
    values = dict(ROWS[name])
    return registry.resolve("objective", values.pop("name"))(**values)


def case(name):
    """The objective of a row, the model at the start of a step, the same some updates later, and what was sampled."""
    objective = built(name)
    start = TextModel(objective)
    return objective, start, moved(start, 1, by=0.5), trajectory(start.policy, gap=1.5)


# ---- the formulas, from the papers, on lists of 1-d tensors


def group(statistic):
    """Of each answer: a statistic of the scores of its group."""
    return [statistic([s for s, g in zip(SCORES, GROUPS, strict=True) if g == mine]) for mine in GROUPS]


def mean():
    return group(np.mean)


def clip(new, old, advantage, low=0.2, high=0.2):
    ratio = (new - old).exp()
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def k3(new, reference):
    return (reference - new).exp() - (reference - new) - 1


def whitened(parts):
    flat = torch.cat(parts)
    return [(x - flat.mean()) / flat.std(correction=0) for x in parts]


def constant(x, advantages):
    return [torch.full_like(part, a).detach() for part, a in zip(x["new"], advantages, strict=True)]


def relative():
    return [s - m for s, m in zip(SCORES, mean(), strict=True)]


def normalised():
    return [a / s for a, s in zip(relative(), group(lambda x: np.std(x, ddof=1)), strict=True)]


def per_token(x, start, advantage, **options):
    return [clip(n, b, a, **options) for n, b, a in zip(x["new"], x["behaviour"], advantage, strict=True)]


def grpo(x, start):
    parts = per_token(x, start, constant(x, normalised()))
    answers = [(p - 0.04 * k3(n, r)).mean() for p, n, r in zip(parts, x["new"], x["reference"], strict=True)]
    return -torch.stack(answers).mean()


def dr_grpo(x, start):
    answers = [p.sum() / 3000 for p in per_token(x, start, constant(x, relative()))]
    return -torch.stack(answers).mean()


def dapo(x, start):
    return -torch.cat(per_token(x, start, constant(x, normalised()), high=0.28)).mean()


def dapo_filtered(x, start):
    parts = per_token(x, start, constant(x, normalised()), high=0.28)
    return -torch.cat([p for p, cut in zip(parts, TRUNCATED, strict=True) if not cut]).mean()


def reinforce(x, start):
    returns = []
    for s, b, r in zip(SCORES, x["behaviour"], x["reference"], strict=True):
        reward = [-0.01 * float(d) for d in b - r]
        reward[-1] += s
        returns.append(torch.tensor([sum(reward[i:]) for i in range(len(reward))], dtype=torch.float64))
    return -torch.cat(per_token(x, start, whitened(returns))).mean()


def reinforce_baseline(x, start):
    parts = per_token(x, start, whitened(constant(x, relative())))
    k2 = [(n - r).square() / 2 for n, r in zip(x["new"], x["reference"], strict=True)]
    return -torch.cat(parts).mean() + 0.001 * torch.cat(k2).mean()


def rloo(x, start):
    paid = [s - 0.05 * float((b - r).sum()) for s, b, r in zip(SCORES, x["behaviour"], x["reference"], strict=True)]
    answers = []
    for i, mine in enumerate(GROUPS):
        others = [paid[j] for j, g in enumerate(GROUPS) if g == mine and j != i]
        answers.append(clip(x["new"][i].sum(), x["behaviour"][i].sum(), paid[i] - sum(others) / len(others)))
    return -torch.stack(answers).mean()


def gspo(x, start):
    new, old = ([p.mean() for p in x[key]] for key in ("new", "behaviour"))
    answers = [clip(n, b, a, 0.0003, 0.0004) for n, b, a in zip(new, old, normalised(), strict=True)]
    return -torch.stack(answers).mean()


def cispo(x, start):
    weight = [(n - b).exp().clamp(0, 5).detach() for n, b in zip(x["new"], x["behaviour"], strict=True)]
    parts = [w * a * n for w, a, n in zip(weight, normalised(), x["new"], strict=True)]
    return -torch.cat(parts).mean()


def critic(x, start, *, kl=0.05, value_clip=0.2, lam=0.95, weigh=None, gamma=1.0):
    """PPO over tokens: an answer is an episode of as many steps, and the critic speaks before each of them."""
    advantage, value_loss = [], []
    for i, (old, now) in enumerate(zip(start["value"], x["value"], strict=True)):
        n, found, carried = len(old), torch.zeros(len(old), dtype=torch.float64), 0.0
        for t in reversed(range(n)):
            reward = SCORES[i] * (t == n - 1)
            if kl:
                reward -= kl * float(x["behaviour"][i][t] - x["reference"][i][t])
            after = 0.0 if t == n - 1 else float(old[t + 1])
            carried = reward + gamma * after - float(old[t]) + gamma * lam * carried
            found[t] = carried
        advantage.append(found)
        target, near = found + old.detach(), now
        if value_clip:
            near = old.detach() + (now - old.detach()).clamp(-value_clip, value_clip)
        value_loss.append(torch.maximum((now - target) ** 2, (near - target) ** 2) / 2)
    value_loss = torch.cat(value_loss).mean()
    if weigh is not None:
        return weigh(x, start, advantage) + value_loss
    return -torch.cat(per_token(x, start, whitened(advantage))).mean() + value_loss


def decoupled(x, start):
    """Units that weigh more than 5 are out: of the mean, and of what whitens the advantages."""

    def weigh(x, start, advantage):
        weight = [(o - b).exp() for o, b in zip(start["new"], x["behaviour"], strict=True)]
        keep = torch.cat(weight) <= 5.0
        kept = torch.cat(advantage)[keep]
        kept = (kept - kept.mean()) / kept.std(correction=0)
        parts = torch.cat(weight)[keep] * clip(torch.cat(x["new"])[keep], torch.cat(start["new"])[keep], kept)
        return -parts.mean()

    return critic(x, start, kl=0.0, value_clip=None, weigh=weigh)


def corrected(rule, whole):
    def loss(x, start):
        total, count = 0.0, 0
        for i, a in enumerate(normalised()):
            weight = (start["new"][i] - x["behaviour"][i]).detach()
            weight = (weight.sum().expand_as(weight) if whole else weight).exp()
            terms = clip(x["new"][i], start["new"][i].detach(), a)
            for w, term in zip(weight.tolist(), terms, strict=True):
                if rule == "truncate":
                    total, count = total - min(w, 2.0) * term, count + 1
                elif 0.5 <= w <= 2.0:
                    total, count = total - w * term, count + 1
        return total / count

    return loss


def sft(x, start):
    return -torch.cat(x["new"]).mean()


FORMULAS = {
    "GRPO": grpo,
    "Dr.GRPO": dr_grpo,
    "DAPO": dapo,
    "DAPO, overlong filtering": dapo_filtered,
    "Reinforce++": reinforce,
    "Reinforce++ baseline": reinforce_baseline,
    "RLOO": rloo,
    "GSPO": gspo,
    "CISPO": cispo,
    "PPO with a critic over tokens": critic,
    "decoupled PPO (stale data)": decoupled,
    "TIS per token": corrected("truncate", False),
    "TIS per sequence": corrected("truncate", True),
    "MIS per token": corrected("mask", False),
    "MIS per sequence": corrected("mask", True),
    "SFT, behaviour cloning": sft,
}


def test_every_row_of_the_page_has_a_formula_here():
    assert list(ROWS) == list(FORMULAS)


@each_row
def test_loss_and_gradient_equal_the_formula_of_the_paper(name):
    objective, start, now, given = case(name)
    batch, _ = objective.targets(start, given)
    found, loss = gradient(objective, now, batch, [])
    now.zero_grad()
    with torch.no_grad():
        before = lists(start, given)
    expected = FORMULAS[name](lists(now, given), before)
    expected.backward()
    wanted = torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in now.parameters()]
    )
    assert wanted.abs().max() > 1e-5
    assert loss == pytest.approx(expected.item(), rel=1e-6, abs=1e-9)
    torch.testing.assert_close(found, wanted, atol=1e-8 * float(wanted.abs().max()), rtol=1e-6)


@each_row
def test_law_2_any_cut_of_answers_gives_the_same_gradient(name):
    objective, start, now, given = case(name)
    batch, _ = objective.targets(start, given)
    whole, loss = gradient(objective, now, batch, [])
    order = torch.tensor([3, 0, 7, 1, 6, 2, 5, 4])
    for cuts in ([4], [1, 2, 5], [1, 2, 3, 4, 5, 6, 7]):
        for rows in (batch, batch.take(order)):
            parts, total = gradient(objective, now, rows, cuts)
            torch.testing.assert_close(parts, whole, atol=1e-12, rtol=1e-9)
            assert total == pytest.approx(loss, rel=1e-9, abs=1e-12)


@each_row
@pytest.mark.parametrize("hidden", [math.nan, 1e6, -math.inf])
def test_nothing_in_the_padding_changes_anything(name, hidden):
    results = []
    for dirty in (False, True):
        objective, start, now, given = case(name)
        if dirty:
            given = poisoned(given, hidden)
            for model in (start, now):
                model.policy.hidden = hidden
                if model.reference is not None:
                    model.reference.hidden = hidden
        batch, metrics = objective.targets(start, given)
        found, loss = gradient(objective, now, batch, [3])
        ready = objective.prepare(batch, batch.size)
        sums = {key: float(total) for key, (total, _) in objective.losses(now, ready, "update").metrics.items()}
        counts = {key: float(count) for key, count in objective.counts(ready).items()}
        results.append((found, loss, sums, counts, {key: (m.value, m.weight) for key, m in metrics.items()}))
    (clean, *rest), (soiled, *others) = results
    assert torch.equal(clean, soiled)
    assert rest == others


@each_row
def test_counts_are_declared_and_only_sampled_tokens_count(name):
    objective, start, now, given = case(name)
    batch, _ = objective.targets(start, given)
    counts = {key: float(count) for key, count in objective.counts(batch).items()}
    assert set(counts) == set(objective.denominators)
    if ROWS[name].get("level") == "action" and not {"decoupled", "mask_truncated"} & set(ROWS[name]):
        assert counts["units"] == given.valid.sum()  # tokens of prompts and tools are not there at all
    if "sequences" in counts:
        assert counts["sequences"] == len(GROUPS)
    loss = objective.losses(now, objective.prepare(batch, batch.size), "update")
    assert {term.per for term in loss.terms} | {per for _, per in loss.metrics.values()} <= set(counts)


@pytest.mark.parametrize("name", [name for name in ROWS if "clip_high" in ROWS[name] or "decoupled" in ROWS[name]])
def test_the_data_reaches_the_bounds_that_a_row_sets(name):
    """Else a row would be compared with its formula where the two cannot differ."""
    objective, start, now, given = case(name)
    batch, _ = objective.targets(start, given)
    batch = objective.prepare(batch, batch.size)
    clipped = float(objective.losses(now, batch, "update").metrics["clip_fraction"][0])
    assert 0 < clipped < float(objective.counts(batch)["units"])
    if "decoupled" in ROWS[name]:
        weight = batch.columns["weight"][torch.from_numpy(given.valid[0])]
        bounded = weight == 2.0 if ROWS[name].get("behaviour_rule") == "truncate" else weight == 0.0
        assert 0 < int(bounded.sum()) < len(bounded)
