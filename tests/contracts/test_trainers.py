"""The Trainer contract, asked of every trainer. A new backend adds one line to TRAINERS."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.backends.torch.trainer import TorchTrainerConfig
from m2flow.comm.weights import checksums
from m2flow.protocols import Resident, Stateful
from m2flow.types import Phase
from tests.unit.backends.small import Fit, Split, batch, policy, update

PROTOCOLS = ("Trainer",)
TRAINERS = {
    "torch": TorchTrainerConfig(learning_rate=1e-2),
    "torch_adamw": TorchTrainerConfig(learning_rate=1e-2, optimizer="adamw", weight_decay=0.1, max_grad_norm=None),
    "torch_sgd": TorchTrainerConfig(learning_rate=1e-2, optimizer="sgd", momentum=0.9, schedule="linear",
                                    schedule_updates=9),
}  # fmt: skip
trainers = pytest.mark.parametrize("config", TRAINERS.values(), ids=TRAINERS.keys())
objectives = pytest.mark.parametrize("objective", [Fit(), Split()], ids=["one_phase", "three_phases"])


def flat(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in trainer.model.state_dict().items()}


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        return {k: v for name, x in tree.items() for k, v in leaves(x, f"{path}/{name}").items()}
    return {path: tree}


def assert_equal(a: Any, b: Any) -> None:
    a, b = leaves(a), leaves(b)
    assert a.keys() == b.keys()
    for name, x in a.items():
        assert torch.equal(x, b[name]) if isinstance(x, torch.Tensor) else x == b[name], name


@trainers
@objectives
def test_is_a_trainer(config: Any, objective: Any) -> None:
    trainer = config.build(policy(), objective, 0)
    assert isinstance(trainer, Resident)
    assert isinstance(trainer, Stateful)
    assert trainer.version == 0


@trainers
@objectives
def test_updates_reduce_the_loss(config: Any, objective: Any) -> None:
    trainer, rows = config.build(policy(), objective, 0), batch()
    phase, counts = objective.phases[0], objective.counts(rows)

    def losses() -> float:
        sums = trainer.forward_backward(rows, phase, counts)
        trainer.groups[phase.group].flat.grad.zero_()
        return sum(float(total) for name, (total, _) in sums.items() if name.endswith("_loss"))

    before = losses()
    for _ in range(20):
        update(trainer, rows)
    assert losses() < before


@settings(max_examples=15, deadline=None)
@given(cuts=st.sets(st.integers(1, 23), max_size=5))
@pytest.mark.parametrize("name", ["torch"])
def test_law_2_any_cut_gives_the_same_gradient(name: str, cuts: set[int]) -> None:
    results = []
    for edges in ((), tuple(sorted(cuts))):
        trainer = TRAINERS[name].build(policy(), Fit(), 0)
        update(trainer, batch(), edges)
        results.append(flat(trainer))
    for key, x in results[0].items():
        torch.testing.assert_close(x, results[1][key], atol=1e-6, rtol=0)


@trainers
def test_law_2_in_float64_for_several_steps(config: Any) -> None:
    results = []
    for edges in ((), (5,), (1, 2, 3, 20)):
        trainer = config.__class__(**{f: getattr(config, f) for f in config.__slots__} | {"dtype": "float64"}).build(
            policy(), Split(), 0
        )
        for step in range(4):
            update(trainer, batch(seed=step, dtype=torch.float64), edges)
        results.append(flat(trainer))
    for other in results[1:]:
        for key, x in results[0].items():
            torch.testing.assert_close(x, other[key], atol=1e-9, rtol=0)


@trainers
def test_a09_metrics_are_sums_with_their_denominators(config: Any) -> None:
    """Whoever adds them over micro-batches and divides by the count gets the mean over the batch, in any cut."""
    rows, objective = batch(), Fit()
    counts = objective.counts(rows)
    means = []
    for edges in ((0, 24), (0, 1, 9, 24)):
        trainer = config.build(policy(), objective, 0)
        sums: dict[str, float] = {}
        for start, stop in pairwise(edges):
            got = trainer.forward_backward(rows.rows(start, stop), objective.phases[0], counts)
            for name, (total, per) in got.items():
                sums[name] = sums.get(name, 0.0) + float(total) / float(counts[per])
        means.append(sums)
    assert means[0].keys() == {"clone_loss", "value_loss", "alpha_loss", "logprob"}
    assert means[0] == pytest.approx(means[1], rel=1e-5)
    assert means[0]["clone_loss"] == pytest.approx(-means[0]["logprob"])
    assert means[0]["alpha_loss"] == pytest.approx(np.exp(-1.0))


@trainers
def test_a11_a30_a_denominator_of_zero_gives_no_gradient_and_no_nan(config: Any) -> None:
    """All values masked, and the masked targets poisoned: only the other terms move the weights."""
    rows = batch()
    rows.columns["mask"][:] = False
    rows.columns["target"][:] = torch.nan
    trainer = config.build(policy(), Fit(), 0)
    before = flat(trainer)
    update(trainer, rows)
    after = flat(trainer)
    assert all(bool(x.isfinite().all()) for x in after.values())
    if config.weight_decay == 0.0:
        assert all(torch.equal(after[n], before[n]) for n in after if n.startswith("heads.value"))
    assert not torch.equal(after["policy.last.weight"], before["policy.last.weight"])


@trainers
def test_masked_values_leave_no_trace(config: Any) -> None:
    results = []
    for poison in (0.0, 1e6, torch.nan):
        rows = batch()
        rows.columns["target"][~rows.columns["mask"]] = poison
        trainer = config.build(policy(), Fit(), 0)
        update(trainer, rows)
        results.append(flat(trainer))
    for other in results[1:]:
        assert_equal(results[0], other)


@trainers
def test_a_missing_denominator_is_an_error_that_names_it(config: Any) -> None:
    trainer = config.build(policy(), Fit(), 0)
    with pytest.raises(ValueError, match=r"term 'value' is per 'values', which is not counted \(rows\)"):
        trainer.forward_backward(batch(), Fit.phases[0], {"rows": 24.0})
    for bad in (float("nan"), -1.0, float("inf")):
        with pytest.raises(ValueError, match=r"counts\['rows'\] is"):
            trainer.forward_backward(batch(), Fit.phases[0], {"rows": bad, "values": 1.0})


@trainers
def test_a_phase_moves_its_group_and_nothing_else(config: Any) -> None:
    objective, rows = Split(), batch()
    trainer = config.build(policy(), objective, 0)
    owned = {"critic": ("heads.value.", "slow.value."), "actor": ("policy.",), "alpha": ("scalars.log_alpha",)}
    for phase in objective.phases:
        before = flat(trainer)
        trainer.forward_backward(rows, phase, objective.counts(rows))
        trainer.step(phase)
        moved = {n for n, x in flat(trainer).items() if not torch.equal(x, before[n])}
        assert moved
        assert all(name.startswith(owned[phase.name]) for name in moved)
        assert any(name.startswith(owned[phase.name][0]) for name in moved)


@trainers
def test_gradients_of_other_phases_do_not_leak_in(config: Any) -> None:
    """The actor's loss runs through the critic; a critic step after it must not feel that."""
    rows, results = batch(), []
    for order in (("critic",), ("actor", "critic")):
        objective = Split()
        trainer = config.build(policy(), objective, 0)
        phases = {phase.name: phase for phase in objective.phases}
        for name in order:
            trainer.forward_backward(rows, phases[name], objective.counts(rows))
        trainer.step(phases["critic"])
        results.append({n: x for n, x in flat(trainer).items() if n.startswith("heads.")})
    assert_equal(results[0], results[1])


@trainers
def test_slow_copies_follow_by_their_share(config: Any) -> None:
    objective, rows = Split(), batch()
    trainer = config.build(policy(), objective, 0)
    before = flat(trainer)
    for name in (n for n in before if n.startswith("slow.")):
        assert torch.equal(before[name], before[name.replace("slow.", "heads.")])
    update(trainer, rows)
    after = flat(trainer)
    for name in (n for n in before if n.startswith("slow.")):
        want = before[name] + 0.25 * (after[name.replace("slow.", "heads.")] - before[name])
        torch.testing.assert_close(after[name], want)


@trainers
def test_the_reference_never_moves(config: Any) -> None:
    trainer = config.build(policy(), Split(), 0)
    before, obs = flat(trainer), {"state": batch().obs["state"]}
    record = batch().record
    first = trainer.model.reference.score(obs, record).logprob
    for _ in range(3):
        update(trainer, batch())
        trainer.model.policy.observe(obs)
    after = flat(trainer)
    assert any(name.startswith("reference.") for name in after)
    assert all(torch.equal(x, after[n]) for n, x in before.items() if n.startswith("reference."))
    assert torch.equal(first, trainer.model.reference.score(obs, record).logprob)
    assert config.build(policy(), Fit(), 0).model.reference is None


@trainers
def test_weights_are_stamped_copies_by_name(config: Any) -> None:
    trainer = config.build(policy(), Fit(), 0)
    trainer.version = 7
    got = trainer.weights("policy.")
    assert got.version == 7
    names = {f"policy.{name}" for name in policy().state_dict()}
    assert set(got.arrays) == names
    kept = copy.deepcopy(got.arrays)
    update(trainer, batch())
    assert_equal(dict(got.arrays), dict(kept))
    assert set(trainer.weights().arrays) == set(trainer.model.state_dict())
    other = policy(seed=4)
    other.load_state_dict({name.removeprefix("policy."): x for name, x in trainer.weights("policy.").arrays.items()})
    assert_equal(other.state_dict(), dict(trainer.model.policy.state_dict()))
    with pytest.raises(ValueError, match="no name starts with 'polcy'"):
        trainer.weights("polcy")


@trainers
def test_checksums_come_with_the_first_publication_only(config: Any) -> None:
    trainer = config.build(policy(), Fit(), 0)
    first = trainer.weights("policy.")
    assert first.checksums.keys() == first.arrays.keys()
    assert trainer.weights("policy.").checksums == {}
    assert checksums(trainer.weights("policy.").arrays) == first.checksums
    update(trainer, batch())
    after = checksums(trainer.weights("policy.").arrays)
    assert all(after[name] != first.checksums[name] for name in after if name.endswith("weight"))


@trainers
@objectives
def test_law_4_restore_continues_exactly(config: Any, objective: Any) -> None:
    """N updates = k updates, state, a new trainer with other weights, restore, N - k updates; to the last bit."""
    whole = config.build(policy(normalize=True), objective, 0)
    for step in range(6):
        update(whole, batch(seed=step))
        whole.model.policy.observe(batch(seed=step).obs)
        whole.version += 1
        if step == 2:
            state = copy.deepcopy(whole.state())
    other = config.build(policy(seed=9, normalize=True), objective, 5)
    update(other, batch(seed=77))
    other.restore(state)
    assert_equal(other.state(), state)
    assert other.version == 3
    for step in range(3, 6):
        update(other, batch(seed=step))
        other.model.policy.observe(batch(seed=step).obs)
        other.version += 1
    assert_equal(other.state(), whole.state())


@trainers
def test_restore_changes_nothing_and_drops_held_gradients(config: Any) -> None:
    results = []
    for held in (False, True):
        trainer = config.build(policy(), Fit(), 0)
        update(trainer, batch())
        if held:
            trainer.forward_backward(batch(seed=3), Fit.phases[0], {"rows": 1.0, "values": 1.0})
        trainer.restore(trainer.state())
        update(trainer, batch(seed=1))
        results.append(trainer.state())
    assert_equal(*results)


@trainers
def test_state_is_a_copy(config: Any) -> None:
    trainer = config.build(policy(), Split(), 0)
    state = trainer.state()
    kept = copy.deepcopy(state)
    update(trainer, batch())
    assert_equal(state, kept)


@trainers
def test_a19_a_restored_log_alpha_is_the_temperature_at_once(config: Any) -> None:
    trainer = config.build(policy(), Fit(), 0)
    state = trainer.state()
    state["model"]["scalars.log_alpha"] = torch.tensor(-2.302585)
    trainer.restore(state)
    assert trainer.model.scalar("log_alpha").exp().item() == pytest.approx(0.1, rel=1e-6)


@trainers
def test_a_state_that_does_not_fit_is_refused_whole(config: Any) -> None:
    trainer = config.build(policy(), Fit(), 0)
    before = trainer.state()

    def broken(change: Any) -> Any:
        state = copy.deepcopy(before)
        change(state)
        return state

    group = "all"
    faults = [
        (lambda s: s["model"].pop("policy.last.bias"), "lacks"),
        (lambda s: s["model"].update({"policy.last.bias": torch.zeros(3)}), "policy.last.bias is torch.float32"),
        (lambda s: s["model"].update({"policy.last.bias": torch.zeros(2).double()}), "torch.float64"),
        (lambda s: s["optimizer"].pop(group), "optimizer groups"),
        (lambda s: s["optimizer"][group].update(moments={"other": {}}), "optimizer moments"),
    ]
    for change, message in faults:
        with pytest.raises(ValueError, match=message):
            trainer.restore(broken(change))
        assert_equal(trainer.state(), before)


@trainers
@objectives
def test_a16_training_flags_and_random_states_are_left_alone(config: Any, objective: Any) -> None:
    for training in (True, False):
        trainer = config.build(policy().train(training), objective, 0)
        state = torch.random.get_rng_state()
        update(trainer, batch())
        trainer.weights("policy.")
        trainer.restore(trainer.state())
        trainer.offload()
        trainer.onload()
        assert all(module.training == training for module in trainer.model.policy.modules())
        assert torch.equal(state, torch.random.get_rng_state())


@trainers
def test_offload_and_onload_change_nothing(config: Any) -> None:
    results = []
    for moves in (False, True):
        trainer = config.build(policy(), Fit(), 0)
        for step in range(3):
            update(trainer, batch(seed=step))
            if moves:
                trainer.offload()
                trainer.onload()
        results.append(trainer.state())
    assert_equal(*results)


@trainers
def test_a_step_without_gradient_in_any_term_is_an_error(config: Any) -> None:
    class Wrong(Fit):
        phases = (Phase("fit", "log_alpha"),)

        def losses(self, model: Any, batch: Any, phase: str, noise: Any = None) -> Any:
            loss = super().losses(model, batch, phase)
            return type(loss)(loss.terms[:2])

    trainer = config.build(policy(), Wrong(), 0)
    with pytest.raises(RuntimeError, match=r"no term \(clone, value\) depends on the parameters of 'log_alpha'"):
        trainer.forward_backward(batch(), Wrong.phases[0], Fit().counts(batch()))


@trainers
def test_a_capability_that_the_policy_lacks_is_named_at_load(config: Any) -> None:
    class Needy(Fit):
        requires = frozenset({"score", "propose"})

    with pytest.raises(ValueError, match="Needy needs a policy that can propose; MLPPolicy cannot"):
        config.build(policy(), Needy(), 0)
    config.build(policy(dist="squashed"), Needy(), 0)
