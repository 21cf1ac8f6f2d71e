from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.algorithms import advantages as adv


def plain_gae(reward, value, bootstrap, terminated, truncated, valid, gamma, lam):
    """The textbook loop, one lane at a time, backwards over its own executed actions."""
    steps, lanes, actions = reward.shape
    out = torch.zeros_like(reward)
    for b in range(lanes):
        carried, follower = 0.0, None  # advantage and value of the next executed action of the same episode
        for t in reversed(range(steps)):
            if not valid[t, b].any():
                carried, follower = 0.0, None
                continue
            if terminated[t, b]:
                carried, follower = 0.0, 0.0
            elif truncated[t, b] or follower is None:
                carried, follower = 0.0, float(bootstrap[t, b])
            for c in reversed(range(actions)):
                if valid[t, b, c]:
                    delta = float(reward[t, b, c]) + gamma * follower - float(value[t, b, c])
                    carried = delta + gamma * lam * carried
                    follower = float(value[t, b, c])
                    out[t, b, c] = carried
    return out


def case(steps, lanes, actions, seed, dtype):
    rng = torch.Generator().manual_seed(seed)
    reward, value = (torch.randn(steps, lanes, actions, generator=rng, dtype=dtype) for _ in range(2))
    bootstrap = torch.randn(steps, lanes, generator=rng, dtype=dtype)
    draw = torch.rand(3, steps, lanes, generator=rng)
    executed = torch.randint(1, actions + 1, (steps, lanes), generator=rng)
    valid = (torch.arange(actions) < executed[..., None]) & (draw[2] > 0.2)[..., None]
    return {
        "reward": reward,
        "value": value,
        "bootstrap": bootstrap,
        "terminated": draw[0] < 0.15,
        "truncated": draw[1] < 0.15,
        "valid": valid,
    }


A13 = {
    "reward": torch.tensor([[0.0], [0.0], [1.0]], dtype=torch.float64),
    "value": torch.tensor([[0.5], [0.6], [0.7]], dtype=torch.float64),
    "bootstrap": torch.tensor([[math.nan], [math.nan], [0.8]], dtype=torch.float64),
    "valid": torch.ones(3, 1, dtype=torch.bool),
    "gamma": 0.9,
    "lam": 0.95,
}
NO, END = torch.zeros(3, 1, dtype=torch.bool), torch.tensor([[False], [False], [True]])


def test_a13_gae_termination_and_time_limit():
    ended, returns = adv.gae(**A13, terminated=END, truncated=NO)
    torch.testing.assert_close(
        ended[:, 0], torch.tensor([0.284958, 0.2865, 0.3], dtype=torch.float64), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(returns, ended + A13["value"])
    limit = torch.tensor([0.811296, 0.9021, 1.02], dtype=torch.float64)
    for truncated in (END, NO):  # a time limit in the last row, and a segment that is merely cut there
        torch.testing.assert_close(
            adv.gae(**A13, terminated=NO, truncated=truncated)[0][:, 0], limit, atol=1e-6, rtol=0
        )
    both = adv.gae(**A13, terminated=END, truncated=END)[0]
    torch.testing.assert_close(both, ended)  # a termination at the time limit does not bootstrap


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**31), st.floats(0, 1), st.floats(0, 1)
)
def test_gae_equals_the_plain_loop_for_any_ends_holes_and_chunks(steps, lanes, actions, seed, gamma, lam):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        args = case(steps, lanes, actions, seed, dtype)
        expected = plain_gae(**args, gamma=gamma, lam=lam)
        found, returns = adv.gae_actions(**args, gamma=gamma, lam=lam)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
        there = args["valid"]
        torch.testing.assert_close(returns[there], (expected + args["value"])[there], atol=tolerance, rtol=tolerance)
        assert (returns[~there] == 0).all()


def test_gae_of_a_long_batch_equals_the_plain_loop():
    args = case(256, 8, 1, 0, torch.float32)
    expected = plain_gae(
        **{k: v.double() if v.is_floating_point() else v for k, v in args.items()}, gamma=0.99, lam=0.95
    )
    flat = {k: v[..., 0] if v.dim() == 3 else v for k, v in args.items()}
    found, _ = adv.gae(**flat, gamma=0.99, lam=0.95)
    torch.testing.assert_close(found.double(), expected[..., 0], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("value", [math.nan, 1e6, math.inf])
@pytest.mark.parametrize("actions", [1, 3])
def test_gae_reads_nothing_under_its_masks(value, actions):
    args = case(12, 5, actions, 3, torch.float64)
    clean = adv.gae_actions(**args, gamma=0.9, lam=0.8)
    there = args["valid"]
    first = there[..., 0]
    last_or_hole = torch.ones_like(first)
    last_or_hole[:-1] = ~first[1:]
    read = (args["truncated"] | last_or_hole) & ~args["terminated"] & first
    dirty = args | {
        "reward": torch.where(there, args["reward"], value),
        "value": torch.where(there, args["value"], value),
        "bootstrap": torch.where(read, args["bootstrap"], value),
        "terminated": args["terminated"] | ~first,
    }
    for a, b in zip(clean, adv.gae_actions(**dirty, gamma=0.9, lam=0.8), strict=True):
        assert torch.equal(a, b)


def test_a_reset_only_step_does_not_connect_two_episodes():
    def rows(*numbers):
        return torch.tensor(numbers, dtype=torch.float64)[:, None]

    flags = torch.zeros(4, 1, dtype=torch.bool)
    truncated, valid = flags.clone(), ~flags
    truncated[1], valid[2] = True, False
    whole = {"reward": rows(1, 2, 99, 4), "value": rows(1, 2, 99, 4), "bootstrap": rows(7, 5, 99, 6)}
    together, _ = adv.gae(**whole, terminated=flags, truncated=truncated, valid=valid, gamma=0.5, lam=0.5)
    # 2 + 0.5 * 5 - 2 = 2.5; 1 + 0.5 * 2 - 1 + 0.25 * 2.5 = 1.625; 4 + 0.5 * 6 - 4 = 3
    torch.testing.assert_close(together, rows(1.625, 2.5, 0, 3))


def test_gae_names_what_has_the_wrong_shape_or_type():
    args = {k: v[..., 0] if v.dim() == 3 else v for k, v in case(4, 2, 1, 0, torch.float32).items()}
    for name in ("value", "bootstrap", "terminated", "truncated", "valid"):
        with pytest.raises(ValueError, match=name):
            adv.gae(**(args | {name: args[name][:3]}), gamma=0.9, lam=0.9)
    with pytest.raises(ValueError, match=r"valid: dtype torch.float32"):
        adv.gae(**(args | {"valid": args["valid"].float()}), gamma=0.9, lam=0.9)
    with pytest.raises(ValueError, match="gamma"):
        adv.gae(**args, gamma=1.5, lam=0.9)
    with pytest.raises(TypeError):
        adv.gae(**args, gamma=0.9, lam=0.9, done=args["terminated"])
    holes = case(4, 2, 3, 0, torch.float32)
    holes["valid"] = torch.tensor([False, True, True]).expand(4, 2, 3)
    with pytest.raises(ValueError, match="come first"):
        adv.gae_actions(**holes, gamma=0.9, lam=0.9)


def test_reward_to_go_by_hand():
    def rows(*numbers):
        return torch.tensor(numbers, dtype=torch.float64).reshape(4, 1, 1)

    no = torch.zeros(4, 1, dtype=torch.bool)
    ended = torch.tensor([[False], [True], [False], [False]])
    args = {"reward": rows(1, 2, 3, 4), "valid": ~no[..., None], "gamma": 0.5}
    for terminated, truncated in ((ended, no), (no, ended)):  # what lies behind a limit counts 0
        found = adv.reward_to_go(**args, terminated=terminated, truncated=truncated)
        torch.testing.assert_close(found, rows(2, 2, 5, 4))


def test_reward_to_go_of_tokens_by_hand():
    reward = torch.tensor([[[-0.1, -0.2, 1.0], [0.5, math.nan, 1e6]]])
    valid = torch.tensor([[[True, True, True], [True, False, False]]])
    end = torch.ones(1, 2, dtype=torch.bool)
    found = adv.reward_to_go(reward=reward, valid=valid, terminated=end, truncated=~end, gamma=1.0)
    torch.testing.assert_close(found, torch.tensor([[[0.7, 0.8, 1.0], [0.5, 0.0, 0.0]]]))


def test_chunk_reward_sums_executed_actions_only():
    reward = torch.tensor([[[1.0, 2.0, math.nan]], [[math.nan] * 3]])
    valid = torch.tensor([[[True, True, False]], [[False] * 3]])
    total, any_valid = adv.chunk_reward(reward=reward, valid=valid)
    assert total.tolist() == [[3.0], [0.0]]
    assert any_valid.tolist() == [[True], [False]]


@pytest.mark.parametrize("hidden", [99.0, math.nan, 1e30])
def test_a07_masked_normalisation_goes_along_the_right_axis(hidden):
    x = torch.tensor([[1.0, 2.0, 3.0, hidden], [10.0, 20.0, hidden, hidden]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]], dtype=torch.bool)
    expected = torch.tensor([[-1.224745, 0.0, 1.224745, 0.0], [-1.0, 1.0, 0.0, 0.0]])
    torch.testing.assert_close(adv.whiten(x, mask=mask, dim=-1), expected, atol=1e-6, rtol=0)


def test_whitening_under_a_mask_is_that_of_what_is_left():
    rng = torch.Generator().manual_seed(0)
    x = 5 + 3 * torch.randn(40, generator=rng, dtype=torch.float64)
    mask = torch.rand(40, generator=rng) > 0.3
    x[~mask] = math.nan
    whole, kept = adv.whiten(x, mask=mask), x[mask]
    torch.testing.assert_close(whole[mask], (kept - kept.mean()) / (kept.std(correction=0) + 1e-8))
    torch.testing.assert_close(adv.whiten(kept, mask=None), whole[mask])
    assert (whole[~mask] == 0).all()


def test_whitening_a_single_value_leaves_it_and_nothing_valid_gives_zeros():
    one = torch.tensor([3.0])
    assert adv.whiten(one, mask=None).tolist() == [3.0]
    x = torch.tensor([3.0, math.nan])
    assert adv.whiten(x, mask=torch.tensor([True, False])).tolist() == [3.0, 0.0]
    assert adv.whiten(x, mask=torch.tensor([False, False])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("n", [2, 7, 8, 16])
@pytest.mark.parametrize("number", [0.1, 0.2, 0.3, 0.35, 0.6, 0.7, 0.9, 0.0, -1.0, 1e-12, 1e12])
def test_a06_equal_rewards_in_float32_are_a_dead_group(n, number):
    score, group = torch.full((n,), number), torch.zeros(n, dtype=torch.int64)
    for std in ("sample", "population", "none"):
        assert adv.group_normalise(score=score, group=group, std=std).tolist() == [0.0] * n
    assert adv.group_filter(score=score, group=group).kept == 0


def test_a06_rounding_of_summed_rewards_is_not_a_spread():
    score = torch.tensor([0.1 + 0.2, 0.3, 0.3 + 1e-7], dtype=torch.float32)
    assert len(set(score.tolist())) > 1
    assert adv.group_normalise(score=score, group=torch.zeros(3, dtype=torch.int64)).tolist() == [0.0] * 3


def test_a06_one_right_of_four_by_both_deviations():
    score, group = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.full((4,), 7)
    sample = adv.group_normalise(score=score, group=group)
    torch.testing.assert_close(sample, torch.tensor([1.5, -0.5, -0.5, -0.5]))
    population = adv.group_normalise(score=score, group=group, std="population")
    torch.testing.assert_close(population, torch.tensor([1.7320508, -0.5773503, -0.5773503, -0.5773503]))
    plain = adv.group_normalise(score=score, group=group, std="none")
    torch.testing.assert_close(plain, torch.tensor([0.75, -0.25, -0.25, -0.25]))


def test_leave_one_out_is_the_score_less_the_mean_of_the_others():
    score, group = torch.tensor([1.0, 0.0, 0.0, 0.5, 3.0, 1.0]), torch.tensor([7, 7, 7, 7, 2, 2])
    found = adv.group_normalise(score=score, group=group, std="none", others=True)
    expected = [1 - 0.5 / 3, -1.5 / 3, -1.5 / 3, 0.5 - 1 / 3, 2.0, -2.0]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    equal = adv.group_normalise(score=torch.full((8,), 0.1), group=torch.zeros(8).long(), std="none", others=True)
    assert equal.tolist() == [0.0] * 8


def test_a07_a_group_of_one_is_an_error_that_names_the_group():
    with pytest.raises(ValueError, match="group 5 has one attempt"):
        adv.group_normalise(score=torch.rand(3), group=torch.tensor([4, 5, 4]))


def test_a05_a_score_that_is_not_a_number_is_an_error_that_names_the_attempt():
    with pytest.raises(ValueError, match=r"attempt 2 \(group 9\)"):
        adv.group_normalise(score=torch.tensor([0.0, 1.0, math.nan, 1.0]), group=torch.tensor([8, 8, 9, 9]))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31))
def test_groups_are_found_by_id_in_any_order(seed):
    rng = torch.Generator().manual_seed(seed)
    group = torch.arange(12) % 4 * 10
    score = torch.rand(12, generator=rng, dtype=torch.float64)
    straight = adv.group_normalise(score=score, group=group)
    for g in (0, 10, 20, 30):
        part = score[group == g]
        torch.testing.assert_close(straight[group == g], (part - part.mean()) / part.std())
    order = torch.randperm(12, generator=rng)
    torch.testing.assert_close(adv.group_normalise(score=score[order], group=group[order]), straight[order])


def test_a30_group_filter_counts_why_groups_were_dropped():
    score = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.1, 0.1])
    group = torch.tensor([3, 3, 1, 1, 2, 2, 0, 0])
    found = adv.group_filter(score=score, group=group)
    assert (found.kept, found.all_right, found.all_wrong, found.all_equal) == (1, 1, 1, 1)
    assert found.keep.tolist() == [False] * 4 + [True, True] + [False] * 2
    scaled = adv.group_filter(score=10 * score - 5, group=group, right=5.0, wrong=-5.0)
    assert (scaled.kept, scaled.all_right, scaled.all_wrong, scaled.all_equal) == (1, 1, 1, 1)
