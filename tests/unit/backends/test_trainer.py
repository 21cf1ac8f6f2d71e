"""The torch trainer against torch.optim, by hand, and what its config refuses. The contract is in tests/contracts."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from m2flow.backends.torch.trainer import TorchTrainerConfig
from m2flow.types import Head, Phase
from tests.unit.backends.small import PHASE, Fit, Split, batch, policy, update

F64 = torch.float64


def plain(trainer: Any) -> Any:
    """A copy of the model that knows nothing of flat tensors."""
    model = copy.deepcopy(trainer.model)
    for parameter in model.parameters():
        parameter.grad = None
    return model


def total(model: Any, rows: Any) -> torch.Tensor:
    """The loss of `Fit` with its means written out."""
    loss = Fit().losses(model, rows, "fit")
    counts = {name: float(x) for name, x in Fit().counts(rows).items()}
    return sum(term.coef * term.total / counts[term.per] for term in loss.terms)


@pytest.mark.parametrize(
    ("changes", "make"),
    [
        ({"betas": (0.8, 0.99), "eps": 1e-5}, lambda p: torch.optim.Adam(p, 1e-2, betas=(0.8, 0.99), eps=1e-5)),
        ({"weight_decay": 0.1}, lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.1)),
        ({"optimizer": "adamw", "weight_decay": 0.1}, lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1)),
        ({"optimizer": "sgd"}, lambda p: torch.optim.SGD(p, 1e-2)),
        (
            {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1},
            lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, weight_decay=0.1),
        ),
    ],
    ids=["adam", "adam_decay", "adamw", "sgd", "sgd_momentum"],
)
@pytest.mark.parametrize("limit", [None, 0.3])
def test_updates_are_those_of_torch_optim(changes: dict, make: Any, limit: float | None) -> None:
    """Ten updates with clipping, in float64: the same weights as torch's optimiser and clip_grad_norm_."""
    config = TorchTrainerConfig(learning_rate=1e-2, max_grad_norm=limit, dtype="float64", **changes)
    trainer = config.build(policy(), Fit(), 0)
    model = plain(trainer)
    optimizer = make(list(model.parameters()))
    for step in range(10):
        rows = batch(seed=step, dtype=F64)
        metrics = update(trainer, rows)
        optimizer.zero_grad()
        total(model, rows).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit or math.inf)
        optimizer.step()
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-12)
    for name, x in model.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[name], x, rtol=1e-10, atol=1e-12)


def test_a_large_gradient_is_clipped_and_a_small_one_is_not() -> None:
    for limit, moved in ((1e-3, 1e-3), (1e9, None)):
        config = TorchTrainerConfig(learning_rate=1.0, optimizer="sgd", max_grad_norm=limit, dtype="float64")
        trainer = config.build(policy(), Fit(), 0)
        before = trainer.groups["all"].flat.data.clone()
        norm = update(trainer, batch(dtype=F64))["grad_norm"]
        step = (trainer.groups["all"].flat.data - before).norm().item()
        assert norm > 1e-2
        assert step == pytest.approx(moved or norm, rel=1e-2 if moved else 1e-9)


def test_linear_schedule_by_training_steps_and_by_updates() -> None:
    steps = TorchTrainerConfig(learning_rate=1.0, schedule="linear", schedule_steps=4, final_fraction=0.2)
    trainer = steps.build(policy(), Fit(), 0)
    seen = []
    for version in (0, 0, 1, 2, 4, 9):
        trainer.version = version
        seen.append(update(trainer, batch())["lr"])
    assert seen == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.2, 0.2])
    updates = TorchTrainerConfig(learning_rate=1.0, schedule="linear", schedule_updates=4)
    trainer = updates.build(policy(), Fit(), 0)
    assert [update(trainer, batch())["lr"] for _ in range(6)] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0, 0.0])


def test_groups_have_their_own_rates_and_metric_names() -> None:
    config = TorchTrainerConfig(learning_rate=1e-3, group_learning_rates={"value": 1e-2, "log_alpha": 0.0})
    trainer = config.build(policy(), Split(), 0)
    got = update(trainer, batch())
    assert {k: v for k, v in got.items() if k.startswith("lr")} == {
        "lr/critic": 1e-2,
        "lr/actor": 1e-3,
        "lr/alpha": 0.0,
    }
    assert {"grad_norm/critic", "grad_norm/actor", "grad_norm/alpha"} <= got.keys()
    assert trainer.model.scalar("log_alpha").item() == -1.0
    with pytest.raises(ValueError, match="group_learning_rates: no group 'q'; there are value, policy, log_alpha"):
        TorchTrainerConfig(group_learning_rates={"q": 1.0}).build(policy(), Split(), 0)


def test_groups_by_name() -> None:
    model = TorchTrainerConfig().build(policy(), Fit(), 0).model
    names = {g: set(model.group(g)) for g in ("all", "policy", "value", "log_alpha", "policy+value")}
    assert names["log_alpha"] == {"scalars.log_alpha"}
    assert names["policy+value"] == names["policy"] | names["value"]
    assert names["all"] == names["policy+value"] | names["log_alpha"]
    with pytest.raises(ValueError, match="no part 'critic'; there are all, policy, value, log_alpha"):
        model.group("critic")


def test_frozen_parameters_stay_and_an_all_frozen_group_is_refused() -> None:
    half = policy()
    half.trunk.requires_grad_(False)
    trainer = TorchTrainerConfig(learning_rate=0.1).build(half, Fit(), 0)
    before = {name: x.clone() for name, x in half.trunk.state_dict().items()}
    update(trainer, batch())
    assert all(torch.equal(x, before[name]) for name, x in half.trunk.state_dict().items())
    assert not any("trunk" in name for name in trainer.state()["optimizer"]["all"]["moments"]["exp_avg"])
    with pytest.raises(ValueError, match="'policy' has no trainable parameter"):
        TorchTrainerConfig().build(policy().requires_grad_(False), Split(), 0)


def test_groups_that_share_a_parameter_are_refused() -> None:
    class Both(Fit):
        phases = (Phase("one", "all"), Phase("two", "policy"))

    with pytest.raises(ValueError, match=r"'all' and 'policy' both move policy\."):
        TorchTrainerConfig().build(policy(), Both(), 0)


def test_a_gradient_that_is_not_finite_stops_before_it_reaches_the_weights() -> None:
    trainer = TorchTrainerConfig().build(policy(), Fit(), 0)
    rows = batch()
    rows.columns["target"][rows.columns["mask"]] = torch.inf
    before = trainer.state()["model"]
    with pytest.raises(FloatingPointError, match=r"phase 'fit', update 1: the gradient of heads\.value\.weights\.0"):
        update(trainer, rows)
    assert all(torch.equal(x, before[name]) for name, x in trainer.model.state_dict().items())


@pytest.mark.parametrize(
    ("meddle", "what"),
    [
        (lambda p: p.zero_grad(set_to_none=True), "the gradient of policy"),
        (lambda p: p.to(torch.float64), "the data of policy"),
        (lambda p: p.load_state_dict(policy(seed=3).state_dict(), assign=True), "policy"),
    ],
)
def test_parameters_replaced_behind_its_back_are_noticed(meddle: Any, what: str) -> None:
    trainer = TorchTrainerConfig().build(policy(), Fit(), 0)
    meddle(trainer.model.policy)
    with pytest.raises(RuntimeError, match=rf"^{what}\..* was replaced"):
        trainer.weights("policy.")


def test_moments_are_kept_by_parameter_name() -> None:
    """So a checkpoint does not depend on how parameters lie in memory. The value is Adam's first step by hand."""
    trainer = TorchTrainerConfig(max_grad_norm=None, dtype="float64").build(policy(), Fit(), 0)
    rows = batch(dtype=F64)
    model = plain(trainer)
    total(model, rows).backward()
    update(trainer, rows)
    moments = trainer.state()["optimizer"]["all"]["moments"]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(moments["exp_avg"][name], 0.1 * parameter.grad)
        torch.testing.assert_close(moments["exp_avg_sq"][name], 0.001 * parameter.grad**2)


def test_a_move_to_other_memory_changes_nothing() -> None:
    """What `offload` and `onload` do where there is a device: weights move, flat tensors are gathered anew."""
    results = []
    for moves in (False, True):
        trainer = TorchTrainerConfig().build(policy(), Split(), 0)
        for step in range(3):
            update(trainer, batch(seed=step))
            if moves:
                old = {name: group.flat.data.data_ptr() for name, group in trainer.groups.items()}
                for parameter in trainer.model.parameters():
                    parameter.data = parameter.data.clone()
                for name, group in trainer.groups.items():
                    group.gather(torch.device("cpu"))
                    assert group.flat.data.data_ptr() != old[name]
        results.append(trainer.state())
    for name, x in results[0]["model"].items():
        assert torch.equal(x, results[1]["model"][name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("objective", [Fit(), Split()], ids=["one_phase", "three_phases"])
def test_a_gpu_trains_like_the_cpu_and_gives_its_memory_back(objective: Any) -> None:
    states = []
    for device in ("cpu", "cuda"):
        trainer = TorchTrainerConfig(device=device, dtype="float64").build(policy(), objective, 0)
        for step in range(3):
            update(trainer, batch(seed=step, dtype=F64).map(lambda x, device=device: x.to(device)))
            trainer.offload()
            assert all(not p.is_cuda for p in trainer.model.parameters())
            trainer.onload()
        states.append(trainer.state()["model"])
    for name, x in states[0].items():
        torch.testing.assert_close(states[1][name].cpu(), x, rtol=1e-9, atol=1e-9)


def test_heads_in_copies_are_independent_networks() -> None:
    """One batched product gives what each copy gives alone, and no two start equal."""
    from m2flow.backends.torch.heads import HeadNet
    from tests.unit.backends.small import SPEC

    head = Head(outputs=2, hidden=(8, 6), activation="relu", copies=3, takes_action=True, gain=0.5)
    net = HeadNet(head, 4, SPEC.action, 1, torch.Generator().manual_seed(0))
    x, action = torch.randn(5, 4), torch.rand(5, 1, 2)
    out = net(x, action)
    assert out.shape == (3, 5, 2)
    for copy_ in range(3):
        h = torch.cat([x, action.flatten(1)], 1)
        for i, (w, b) in enumerate(net.pairs):
            h = h @ w[copy_] + b[copy_, 0]
            h = h.relu() if i < 2 else h
        torch.testing.assert_close(out[copy_], h)
    assert not torch.equal(net.pairs[0][0][0], net.pairs[0][0][1])
    inner, last = net.pairs[1][0][0].T, net.pairs[2][0][0].T
    torch.testing.assert_close(inner @ inner.T, 2.0 * torch.eye(6), atol=1e-5, rtol=0)
    torch.testing.assert_close(last @ last.T, 0.25 * torch.eye(2), atol=1e-5, rtol=0)


def test_a_head_sees_bounded_actions_on_minus_one_to_one() -> None:
    from m2flow.backends.torch.heads import HeadNet
    from m2flow.types import Field

    head = Head(hidden=(), takes_action=True, gain=1.0)
    net = HeadNet(head, 0, Field((2,), low=(-2.0, 0.0), high=(2.0, 10.0)), 1, torch.Generator().manual_seed(0))
    weight = net.pairs[0][0]
    got = net(torch.zeros(2, 0), torch.tensor([[2.0, 0.0], [0.0, 5.0]]))
    torch.testing.assert_close(got, torch.stack([weight @ torch.tensor([1.0, -1.0]), torch.zeros(1)]))
    with pytest.raises(ValueError, match="takes_action=True got action=NoneType"):
        net(torch.zeros(2, 0), None)


def test_head_weights_depend_on_the_seed_and_name_only() -> None:
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    one = TorchTrainerConfig().build(policy(), Fit(), 3).model.heads["value"].state_dict()
    assert torch.equal(state, torch.random.get_rng_state())
    two = TorchTrainerConfig().build(policy(seed=8), Fit(), 3).model.heads["value"].state_dict()
    three = TorchTrainerConfig().build(policy(), Fit(), 4).model.heads["value"].state_dict()
    assert all(torch.equal(x, two[name]) for name, x in one.items())
    assert any(not torch.equal(x, three[name]) for name, x in one.items())


def test_value_and_scalar_names_are_checked() -> None:
    model = TorchTrainerConfig().build(policy(), Fit(), 0).model
    with pytest.raises(ValueError, match=r"slow head 'value' does not exist; there are \[\]"):
        model.value("value", batch().obs, slow=True)
    with pytest.raises(ValueError, match="scalar 'alpha' does not exist"):
        model.scalar("alpha")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate: must be more than 0"),
        ({"learning_rate": math.nan}, "learning_rate: must be more than 0"),
        ({"betas": (1.0, 0.9)}, "betas: each must be in"),
        ({"max_grad_norm": 0.0}, "max_grad_norm: must be more than 0, or null"),
        ({"weight_decay": -1.0}, "weight_decay: must be 0 or more"),
        ({"schedule": "linear"}, "schedule: linear needs schedule_steps or schedule_updates"),
        ({"schedule_steps": 5}, "schedule_steps: only read with schedule: linear"),
        ({"schedule": "linear", "schedule_steps": 0}, "schedule_steps: must be at least 1"),
        ({"threads": 0}, "threads: must be at least 1"),
        ({"group_learning_rates": {"q": -1.0}}, "group_learning_rates: q must be 0 or more"),
        ({"final_fraction": 2.0}, "final_fraction: must be in"),
        ({"momentum": 1.0}, "momentum: must be in"),
    ],
)
def test_config_says_what_is_wrong(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TorchTrainerConfig(**change)


def test_a_term_with_coefficient_zero_is_reported_but_gives_no_gradient() -> None:
    trainer = TorchTrainerConfig().build(policy(), Fit(coef=0.0), 0)
    got = trainer.forward_backward(batch(), PHASE, Fit().counts(batch()))
    assert got["value_loss"][0] > 0
    head = trainer.groups["all"].flat.split(trainer.groups["all"].flat.grad)["heads.value.weights.0"]
    assert not head.any()


@pytest.mark.parametrize(
    "changes", [{"optimizer": "adamw", "weight_decay": 0.1}, {"optimizer": "sgd", "momentum": 0.9}]
)
def test_an_optimiser_batch_in_which_nothing_counted_moves_nothing(changes: dict[str, Any]) -> None:
    """Momentum and weight decay would, and a step of groups that were all dropped is no step."""
    trainer = TorchTrainerConfig(**changes).build(policy(), Fit(), 0)
    counts = Fit().counts(batch())
    trainer.forward_backward(batch(), PHASE, counts)
    trainer.step(PHASE)
    before, updates = trainer.groups["all"].flat.data.clone(), trainer.groups["all"].optimizer.updates
    trainer.forward_backward(batch(), PHASE, dict.fromkeys(counts, 0.0))
    assert trainer.step(PHASE)["grad_norm"] == 0.0
    assert torch.equal(trainer.groups["all"].flat.data, before)
    assert trainer.groups["all"].optimizer.updates == updates
    trainer.forward_backward(batch(), PHASE, counts)
    trainer.step(PHASE)
    assert not torch.equal(trainer.groups["all"].flat.data, before)
