"""What every Objective must do. A new algorithm adds one `Case` to test_objectives.py, and all of this is asked of it.

The data is what a real rollout writes: episodes that end within a segment, chunks cut by an end, steps in which a lane
only reset itself. Gradients are those of the real trainer, in float64.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from m2flow.backends.torch.trainer import TorchTrainerConfig
from m2flow.comm.replay import ReplayConfig
from m2flow.envs.toy import PointReachConfig
from m2flow.protocols import Levelled, NeedsGroups
from m2flow.roles.columns import cut, merge
from m2flow.roles.policy import PolicyService
from m2flow.roles.rollout import Acting, Rollout, RolloutConfig
from m2flow.runtime.worker import LocalHandle
from m2flow.spec import join
from m2flow.types import Batch, Head, Tick, Trajectory

PROTOCOLS = ("Objective", "NeedsGroups", "Levelled")
CAPABILITIES = ("score", "propose", "features")  # of a policy; the last one is every head's, so nobody asks for it
LANES = ((0, 1, 2, 3), (4, 5))  # of two sub-batches, whole groups each
DECISIONS = 9
SGD = TorchTrainerConfig(optimizer="sgd", learning_rate=1.0, max_grad_norm=None, dtype="float64")


@dataclass(frozen=True)
class Case:
    """An objective, and a policy config with which it can be trained.

    `replay`: its batches come from a replay channel. `mask`: some units do not count by themselves.
    """

    name: str
    objective: Any
    policy: Any
    replay: bool = False
    mask: bool = False


# ---- data


@cache
def collected(case: Case) -> tuple[Trajectory, ...]:
    """One step of a rollout by weights that are a little older than those of `trainer`, one part per sub-batch."""
    # A lane resets itself in a step of its own: four decisions, a reset, four decisions.
    env = PointReachConfig(horizon=4 * getattr(case.policy, "chunk", 1), autoreset="next", dtype="float64")
    policy = case.policy.build(env.spec(), 5).to(torch.float64)
    grouped = 2 if isinstance(case.objective, NeedsGroups) and case.objective.needs_groups else 1
    rollout = Rollout(
        envs=[env.build(lanes, 3, group=grouped) for lanes in LANES],
        policy=LocalHandle(PolicyService(policy)),
        join=join(policy.spec, env.spec()),
        acting=Acting(policy.noise, policy.axes, policy.chunk, "float64"),
        config=RolloutConfig(lanes=6, length=DECISIONS, group=grouped),
        seed=3,
    )

    async def work() -> tuple[Trajectory, ...]:
        return tuple([made async for made in rollout.work([Tick(0, 0)]) if isinstance(made, Trajectory)])

    parts = asyncio.run(work())
    assert not all(part.valid.all() for part in parts)
    return tuple(masked(part) for part in parts) if case.mask else parts


def masked(trajectory: Trajectory) -> Trajectory:
    """The same with every third unit or so left out."""
    mask = np.random.default_rng(1).random(trajectory.units.logprob.shape) < 0.7
    return dataclasses.replace(trajectory, units=dataclasses.replace(trajectory.units, mask=mask))


def poisoned(trajectory: Trajectory, value: float) -> Trajectory:
    """The same with `value` wherever a mask says that nothing is to be read."""
    units, valid, decided = trajectory.units, trajectory.valid, trajectory.valid.any(-1)
    gone = ~decided.reshape(-1)
    logprob = np.where(gone.reshape(-1, *[1] * len(units.axes)), value, units.logprob)
    if "chunk" in units.axes:
        np.moveaxis(logprob, units.axes.index("chunk") + 1, 1)[~valid.reshape(len(gone), -1)] = value
    if units.mask is not None:
        logprob = np.where(units.mask, logprob, value)
    record = {name: np.where(gone.reshape(-1, *[1] * (x.ndim - 1)), value, x) for name, x in units.record.items()}
    read = np.concatenate([trajectory.obs_at[decided], trajectory.next_at[decided]])
    obs = {name: x.copy() for name, x in trajectory.obs.items()}
    for x in obs.values():
        x[np.setdiff1d(np.arange(len(x)), read)] = value
    return dataclasses.replace(
        trajectory,
        obs=obs,
        reward=np.where(valid, trajectory.reward, value),
        terminated=trajectory.terminated | ~decided,
        units=dataclasses.replace(units, logprob=logprob, record=record),
    )


def trainer(case: Case, policy: Any = None) -> Any:
    """A new trainer, its policy some updates behind the one that acted: no ratio is 1 by accident."""
    policy = case.policy.build(PointReachConfig().spec(), 5) if policy is None else policy
    made = SGD.build(policy, case.objective, 0)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in made.model.trainable.values():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return made


def rows(case: Case, made: Any, parts: tuple[Trajectory, ...] | None = None) -> tuple[Batch, Mapping[str, Any]]:
    """What the learner gets of a step, before `prepare`, and what `targets` reports."""
    parts = collected(case) if parts is None else parts
    if not case.replay:
        return case.objective.targets(made.model, merge(parts))
    channel = ReplayConfig(batch=20, start=0, update_to_data=0.03).build(0)
    for part in parts:
        channel.put(part)
    return channel.ready()[0].map(torch.as_tensor), {}


def ready(case: Case, made: Any, parts: tuple[Trajectory, ...] | None = None) -> Batch:
    """One optimiser batch."""
    batch, _ = rows(case, made, parts)
    return case.objective.prepare(batch, batch.size)


def noise(case: Case, parts: list[Batch], made: Any) -> list[Any]:
    """What `losses` draws with, part by part; only objectives that ask for proposals get any."""
    if "propose" not in case.objective.requires:
        return [None] * len(parts)
    sizes = [part.size for part in parts]
    shape = (sum(sizes), 2, *made.model.policy.noise[1])
    return list(torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).split(sizes))


def update(case: Case, made: Any, parts: list[Batch]) -> tuple[dict[str, Any], dict[str, float]]:
    """Every phase on one optimiser batch in these parts: the gradient by name (a step of SGD at rate 1), and sums."""
    counts: dict[str, Any] = defaultdict(float)
    for part in parts:
        for name, count in case.objective.counts(part).items():
            counts[name] += float(count)
    before, sums = made.state()["model"], defaultdict(float)
    for phase in case.objective.phases:
        drawn = noise(case, parts, made)
        for part, given in zip(parts, drawn, strict=True):
            for name, (total, per) in made.forward_backward(part, phase, counts, given).items():
                sums[f"{phase.name}/{name} per {per}"] += float(total)
        made.step(phase)
    after = made.state()["model"]
    return {name: after[name] - before[name] for name in made.model.trainable}, dict(sums)


def arrays(batch: Batch) -> dict[str, Any]:
    """Every array of a batch by a name of its own."""
    groups = {"obs": batch.obs, "record": batch.record, "columns": batch.columns, "next": batch.next_obs or {}}
    return {f"{group}/{name}": x for group, named in groups.items() for name, x in named.items()}


def random_states() -> tuple[Any, ...]:
    state = np.random.get_state()  # noqa: NPY002 - the global state is what must not move
    return random.getstate(), state[1].tolist(), state[2], torch.random.get_rng_state().tolist()


# ---- checks


def check_it_declares_what_the_protocol_asks_for(case: Case) -> None:
    objective, made = case.objective, trainer(case)
    assert objective.scope in ("group", "batch")
    assert isinstance(objective.couples_batch, bool)
    assert objective.requires <= set(CAPABILITIES)
    assert len({phase.name for phase in objective.phases}) == len(objective.phases) > 0
    assert all(isinstance(head, Head | float) for head in objective.heads(made.model.policy.spec, 1).values())
    assert (made.model.reference is not None) == objective.needs_reference


def check_targets_give_a_row_per_step_or_per_decision_without_gradients(case: Case) -> None:
    made, trajectory = trainer(case), merge(collected(case))
    batch, _ = case.objective.targets(made.model, trajectory)
    assert batch.size in (trajectory.valid[..., 0].size, int(trajectory.valid.any(-1).sum()))
    assert all(len(x) == batch.size and not x.requires_grad for x in arrays(batch).values())


def check_its_level_is_one_of_four(case: Case) -> None:
    if isinstance(case.objective, Levelled):
        assert case.objective.level in ("token", "action", "chunk", "sequence")


def check_who_needs_groups_refuses_a_group_of_one(case: Case) -> None:
    needs = isinstance(case.objective, NeedsGroups) and case.objective.needs_groups
    if case.replay:
        assert not needs
        return
    alone = tuple(dataclasses.replace(part, group=part.episode) for part in collected(case))
    if needs:
        with pytest.raises(ValueError, match="group"):
            rows(case, trainer(case), alone)
    else:
        rows(case, trainer(case), alone)


def check_counts_add_up_over_any_cut(case: Case) -> None:
    made = trainer(case)
    batch = ready(case, made)
    whole = {name: float(count) for name, count in case.objective.counts(batch).items()}
    assert whole and all(count > 0 for count in whole.values())
    for size in (1, 7, batch.size - 1):
        parts = [case.objective.counts(part) for part in cut(batch, size)]
        assert {name: sum(float(part[name]) for part in parts) for name in whole} == pytest.approx(whole, rel=1e-12)


def check_law_2_any_cut_gives_the_same_gradient(case: Case) -> None:
    if case.objective.couples_batch:
        return
    made = trainer(case)
    batch = ready(case, made)
    whole, sums = update(case, made, [batch])
    assert all(bool(x.isfinite().all()) for x in whole.values())
    assert any(float(x.abs().max()) > 1e-6 for x in whole.values())
    for size in (1, 7, batch.size - 1):
        gradient, parts = update(case, trainer(case), cut(batch, size))
        for name, x in whole.items():
            torch.testing.assert_close(gradient[name], x, atol=1e-12, rtol=1e-9, msg=name)
        assert parts == pytest.approx(sums, rel=1e-9, abs=1e-9)


def check_the_order_of_rows_does_not_matter(case: Case) -> None:
    if "propose" in case.objective.requires:
        return  # noise belongs to the place of a row
    made = trainer(case)
    batch = ready(case, made)
    order = torch.randperm(batch.size, generator=torch.Generator().manual_seed(0))
    whole, _ = update(case, made, [batch])
    shuffled, _ = update(case, trainer(case), [batch.take(order)])
    for name, x in whole.items():
        torch.testing.assert_close(shuffled[name], x, atol=1e-12, rtol=1e-9, msg=name)


def check_what_lies_under_a_mask_changes_nothing(case: Case) -> None:
    clean = trainer(case)
    batch, metrics = rows(case, clean)
    batch = case.objective.prepare(batch, batch.size)
    gradient, sums = update(case, clean, [batch])
    for value in (math.nan, math.inf, -math.inf, 1e6):
        made = trainer(case)
        dirty, said = rows(case, made, tuple(poisoned(part, value) for part in collected(case)))
        found, others = update(case, made, [case.objective.prepare(dirty, dirty.size)])
        assert all(torch.equal(x, found[name]) for name, x in gradient.items())
        assert others == sums
        assert said == metrics


def check_an_epoch_is_prepared_as_its_optimiser_batches_are(case: Case) -> None:
    batch, _ = rows(case, trainer(case))
    for size in (4, 7):  # one that leaves a smaller batch at the end
        epoch = cut(case.objective.prepare(batch, size), size)
        for whole, part in zip(epoch, cut(batch, size), strict=True):
            alone = arrays(case.objective.prepare(part, size))
            assert arrays(whole).keys() == alone.keys()
            for name, x in arrays(whole).items():
                torch.testing.assert_close(x, alone[name], equal_nan=True, msg=name)


def check_losses_name_only_what_is_counted(case: Case) -> None:
    made = trainer(case)
    batch = ready(case, made)
    counted = set(case.objective.counts(batch))
    assert counted <= set(case.objective.denominators)
    for phase in case.objective.phases:
        loss = case.objective.losses(made.model, batch, phase.name, *noise(case, [batch], made))
        named = {term.per for term in loss.terms} | {per for _, per in loss.metrics.values()}
        assert named <= counted, phase.name


def check_metrics_are_finite_numbers(case: Case) -> None:
    made = trainer(case)
    batch, metrics = rows(case, made)
    assert all(name.startswith("train/") for name in metrics)
    assert all(math.isfinite(metric.value) for metric in metrics.values())
    _, sums = update(case, made, [case.objective.prepare(batch, batch.size)])
    assert all(math.isfinite(total) for total in sums.values())
    plain = {name.partition("/")[2].partition(" ")[0]: total for name, total in sums.items()}
    assert case.objective.after_update(plain) in (True, False)


def check_it_is_pure(case: Case) -> None:
    """No global random state moves, and nothing that was handed in is written to."""
    parts = collected(case)
    kept, states, made = copy.deepcopy(parts), random_states(), trainer(case)
    batch, _ = rows(case, made)
    given = copy.deepcopy(batch)
    prepared = case.objective.prepare(batch, batch.size)
    before = copy.deepcopy(prepared)
    update(case, made, cut(prepared, 5))
    assert random_states() == states
    for ours, theirs in ((batch, given), (prepared, before)):
        assert all(torch.equal(x, arrays(theirs)[name]) for name, x in arrays(ours).items())
    for part, copied in zip(parts, kept, strict=True):
        np.testing.assert_array_equal(part.reward, copied.reward)
        np.testing.assert_array_equal(part.units.logprob, copied.units.logprob)


def check_what_it_requires_of_a_policy_is_refused_where_it_lacks(case: Case) -> None:
    for need in sorted(case.objective.requires):
        policy = case.policy.build(PointReachConfig().spec(), 5)
        setattr(policy, need, None)
        with pytest.raises(ValueError, match=need):
            SGD.build(policy, case.objective, 0)


def check_it_uses_nothing_of_a_policy_that_it_does_not_require(case: Case) -> None:
    policy = case.policy.build(PointReachConfig().spec(), 5)
    for capability in set(CAPABILITIES) - {"features"} - case.objective.requires:
        setattr(policy, capability, None)
    made = trainer(case, policy)
    update(case, made, [ready(case, made)])


def check_scope_group_means_that_groups_can_come_one_by_one(case: Case) -> None:
    if case.objective.scope != "group" or case.replay:
        return
    one, other = trainer(case), trainer(case)
    whole, sums = update(case, one, [ready(case, one)])
    gradient, parts = update(case, other, [ready(case, other, (part,)) for part in collected(case)])
    for name, x in whole.items():
        torch.testing.assert_close(gradient[name], x, atol=1e-12, rtol=1e-9, msg=name)
    assert parts == pytest.approx(sums, rel=1e-9, abs=1e-9)


CHECKS: list[Callable[[Case], None]] = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
