"""What `check` accepts, `train` begins; what would stop a run is told by both, all at once, before a folder is made."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from m2flow import api, config, memory, registry
from m2flow.backends.torch.model import Model
from m2flow.flow.plan import PlanError
from m2flow.prepare import Refused, prepare

START: dict[str, Any] = {"env": "point_reach", "policy": "mlp", "objective": "ppo"}
SAC: dict[str, Any] = {**START, "objective": "sac", "flow": "offpolicy", "replay": {}}
PLANS = sorted(config.shipped("plans").items())


def told(source: Any, *overrides: str, tmp_path: Path, **options: Any) -> tuple[str, ...]:
    """The problems that `check` lists, after seeing that `train` refuses with the same words and makes no folder."""
    report = api.check(source, *overrides, **options)
    assert not report.ok
    with pytest.raises(ValueError) as caught:
        api.train(source, *overrides, run_dir=tmp_path / "run", quiet=True)
    for problem in report.problems:
        assert problem in str(caught.value)
    assert not (tmp_path / "run").exists()
    return report.problems


@pytest.mark.parametrize("dist", ["auto", "gaussian"])
def test_sac_needs_a_policy_that_proposes(dist: str, tmp_path: Path) -> None:
    (problem,) = told({**SAC, "policy": {"name": "mlp", "dist": dist}}, tmp_path=tmp_path)
    assert problem.startswith("policy: SAC needs a policy that can propose, and MLPPolicy with dist ")
    assert "dist: squashed" in problem
    assert api.check({**SAC, "policy": {"name": "mlp", "dist": "squashed"}}).ok


def test_a_policy_that_cannot_act_here_is_told_under_its_key(tmp_path: Path) -> None:
    (problem,) = told({**START, "env": "bandit", "policy": {"name": "mlp", "dist": "gaussian"}}, tmp_path=tmp_path)
    assert problem.startswith("policy.dist: gaussian cannot emit one of 4 categories")


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="this machine has CUDA")
def test_a_device_that_torch_does_not_find_here_is_refused_but_not_for_another_cluster(tmp_path: Path) -> None:
    (problem,) = told(START, "trainer.device=cuda", tmp_path=tmp_path)
    assert problem.startswith("trainer.device: 'cuda', but torch finds 0 cuda device(s) here; use cpu")
    there = tmp_path / "cluster.yaml"
    there.write_text("cluster: other\ndevices: [{id: 'gpu:0'}, {id: 'cpu:0'}]\n")
    assert api.check(START, "trainer.device=cuda", cluster=there).ok


def test_an_environment_without_a_time_limit_needs_a_horizon_for_evaluation(tmp_path: Path) -> None:
    endless = {**START, "env": {"name": "gymnasium", "id": f"{__name__}:Endless-v0"}, "evaluation": {}}
    (problem,) = told(endless, tmp_path=tmp_path)
    assert problem.startswith("evaluation.horizon: the environment has no time limit of its own")
    assert api.check(endless, "evaluation.horizon=9").ok


def test_actions_that_no_policy_emits_are_refused(tmp_path: Path) -> None:
    (problem,) = told({**START, "env": {"name": "gymnasium", "id": f"{__name__}:Unequal-v0"}}, tmp_path=tmp_path)
    assert problem.startswith("env: action space MultiDiscrete([3 4]): no policy emits whole numbers, or categories of")


def test_an_environment_that_raises_is_told_and_not_thrown() -> None:
    report = api.check({**START, "env": {"name": "gymnasium", "id": "Pendulum-v1", "kwargs": {"wind": 1}}})
    assert len(report.problems) == 1
    assert "env: TypeError:" in report.problems[0]
    assert "wind" in report.problems[0]


def test_a_missing_tracker_is_told_before_the_run_folder_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(registry.PACKAGES, ("recorder", "wandb"), "a_package_that_is_not_there")
    (problem,) = told(START, "observe.recorders=[wandb]", tmp_path=tmp_path)
    assert problem.startswith("observe.recorders: recorder 'wandb' needs the package 'a_package_that_is_not_there'")
    assert "pip install" in problem


def test_every_tracker_names_the_package_that_it_imports() -> None:
    named = {name for kind, name in registry.PACKAGES if kind == "recorder"}
    assert named == set(registry.BUILTIN["recorder"]) - {"jsonl"}
    assert {name for brought in registry.EXTRAS.values() for name in brought} >= named - {"tensorboard"}
    assert importlib.util.find_spec("tensorboard"), "a dependency of m2flow itself"


def test_all_faults_are_told_at_once() -> None:
    recipe = config.load(SAC, "plan={places: {rolout: 'cpu:0'}, plan: p}", "trainer.device=cuda:99")
    with pytest.raises(Refused) as caught:
        prepare(recipe)
    text = str(caught.value)
    assert "policy: SAC needs" in text
    assert "no node 'rolout'" in text
    assert "trainer.device: 'cuda:99'" in text
    assert text.startswith(f"{len(caught.value.problems)} problems:")


def test_a_plan_alone_is_refused_in_its_own_words() -> None:
    with pytest.raises(PlanError, match="plan 'p' for flow"):
        prepare(config.load(START, "plan={places: {rollout: 'cpu:0'}, plan: p}"))


@pytest.mark.parametrize(("length", "ok"), [(40, True), (80, True), (60, False), (20, False)])
def test_a_step_of_groups_holds_whole_episodes(length: int, ok: bool) -> None:
    report = api.check({**START, "objective": "grpo", "rollout": {"lanes": 4, "group": 2, "length": length}})
    assert report.ok == ok
    if not ok:
        assert report.problems[0].startswith(f"rollout.length: {length} decisions cut episodes of 40")


@pytest.mark.parametrize(("chunk", "length", "ok"), [(2, 5, True), (5, 4, True), (3, 4, False), (4, 3, False)])
def test_a_chunk_of_groups_divides_the_episode(chunk: int, length: int, ok: bool) -> None:
    """Else what is left of an episode's last chunk is played in the next one, which is then shorter."""
    source = {
        **START,
        "env": {"name": "point_reach", "horizon": 10},
        "policy": {"name": "mlp", "chunk": chunk},
        "objective": "grpo",
        "rollout": {"lanes": 4, "group": 2, "length": length},
    }
    report = api.check(source)
    assert report.ok == ok
    if not ok:
        expected = f"policy.chunk: {chunk} actions per decision do not divide the time limit of env, 10 steps"
        assert report.problems[0].startswith(expected)
        assert report.problems[0].endswith("use 2 or 5")


def test_groups_need_an_environment_that_resets_within_a_step(tmp_path: Path) -> None:
    source = {**START, "env": "count", "objective": "grpo", "rollout": {"lanes": 4, "group": 2, "length": 4}}
    (problem,) = told(source, tmp_path=tmp_path)
    assert problem.startswith("rollout.group: Count takes a step to reset a lane")


# ---- plans


@pytest.mark.parametrize("path", [path for _, path in PLANS], ids=[name for name, _ in PLANS])
def test_a_shipped_plan_serves_recipes_with_and_without_evaluation(path: Path) -> None:
    machine = api_cluster()
    for evaluation, count in (({}, 0), (None, 1)):
        recipe = config.load({**START, "plan": str(path), "evaluation": evaluation})
        ready = prepare(recipe, machine)
        assert ("evaluator" in ready.plan.places) == (evaluation is not None)
        assert len(ready.notes) == count
    assert "has a place for the evaluator, which is not used: evaluation is null" in ready.notes[0]


def test_a_misspelt_place_is_refused_whether_evaluation_is_on_or_off() -> None:
    plan = {
        "places": dict.fromkeys(("rollout", "policy", "learner", "evaluater"), "cpu:0"),
        "shifts": [["rollout", "policy"], ["evaluater", "policy"], ["learner"]],
    }
    with pytest.raises(PlanError, match="no node 'evaluater'"):
        prepare(config.load({**START, "plan": plan}), api_cluster())


def api_cluster() -> Any:
    from m2flow.flow.cluster import Cluster, Device

    return Cluster(devices=tuple(Device(id=f"cpu:{i}", kind="cpu", memory=2**32) for i in range(2)))


# ---- memory


@pytest.mark.parametrize(
    ("policy", "objective"),
    [
        ({"name": "mlp"}, "ppo"),
        ({"name": "mlp", "shared_trunk": True, "normalize": True}, {"name": "ppo", "kl": "k3", "kl_coef": 0.1}),
        ({"name": "mlp", "dist": "squashed", "chunk": 2}, "sac"),
        ({"name": "flow", "normalize": True}, "ppo"),
        ({"name": "flow", "learn_std": False, "chunk": 3}, {"name": "ppo", "level": "action"}),
    ],
)
def test_the_network_is_counted_without_being_made(policy: dict[str, Any], objective: Any) -> None:
    extra = {"flow": "offpolicy", "replay": {}} if objective == "sac" else {}
    recipe = config.load({**START, **extra, "policy": policy, "objective": objective})
    spec = recipe.env.spec()
    found = memory.skeleton(recipe, spec)
    built = recipe.policy.build(spec, 0)
    heads = recipe.objective.heads(built.spec, built.chunk)
    real = Model(built, heads, 0, reference=recipe.objective.needs_reference)
    assert {name: x.shape for name, x in found.state_dict().items()} == {
        name: x.shape for name, x in real.state_dict().items()
    }
    assert set(found.trainable) == set(real.trainable)
    assert all(x.is_meta for x in found.parameters())
    trained = sum(x.numel() for x in real.parameters() if x.requires_grad)
    still = sum(x.numel() for x in real.parameters() if not x.requires_grad)
    ready = prepare(recipe)
    more = memory.estimate(recipe, ready.flow, ready.plan, spec, found)["learner"]
    data = memory.estimate(recipe, ready.flow, ready.plan, spec, _Empty(built))["learner"]
    assert more - data == 4 * (4 * trained + still)


class _Empty:
    """A network of no weights."""

    def __init__(self, policy: Any) -> None:
        self.policy = torch.nn.Module()
        self.policy.chunk = policy.chunk
        self.trainable: dict[str, Any] = {}

    def parameters(self) -> list[Any]:
        return []


def test_replicas_share_the_lanes_and_the_episodes_of_an_evaluation() -> None:
    def needs(lanes: int, plan: Any, **evaluation: Any) -> Any:
        recipe = config.load({**START, "rollout": {"lanes": lanes, "length": 10}, "evaluation": evaluation})
        return prepare(config.load(recipe, f"plan={plan}"), api_cluster()).memory

    one, two = needs(8, "collocated"), needs(8, dict(PLANS)["two_rollouts"])
    assert one["rollout"] == 2 * two["rollout"]
    assert one["evaluator"] == 2 * two["evaluator"]
    assert needs(9, dict(PLANS)["two_rollouts"])["rollout"] * 8 == one["rollout"] * 5  # the larger share
    assert needs(8, "collocated", seeds=5)["evaluator"] * 10 == one["evaluator"]  # no more episodes than there are
    assert needs(8, "collocated", seed_list=[3, 4])["evaluator"] * 25 == one["evaluator"]


def test_a_network_that_would_not_fit_is_refused_without_being_made() -> None:
    report = api.check({**START, "policy": {"name": "mlp", "hidden": [200_000, 200_000]}})
    assert any("at once" in problem and "has" in problem for problem in report.problems)


# ---- stored runs and seeds


@pytest.mark.parametrize("content", ["null", "[1]", '"text"', "{", "7"])
def test_a_run_folder_without_a_recipe_is_named_in_one_message(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json") as caught:
        _ = api.Run(tmp_path).recipe
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"config\.json"):
        api.resume(tmp_path)


def test_a_stored_recipe_is_read_back(tmp_path: Path) -> None:
    recipe = config.load(START, "alarms.kl_max=.inf")
    (tmp_path / "config.json").write_text(json.dumps(json.loads(config.dump_json(recipe))))
    assert api.Run(tmp_path).recipe == recipe
    assert api.Run(tmp_path).recipe.alarms.kl_max == math.inf


def test_the_same_seed_twice_is_refused() -> None:
    api.distinct([0, 1, 2])
    api.distinct([])
    with pytest.raises(ValueError, match="--seed: 0 given more than once"):
        api.distinct([0, 3, 0])


# ---- environments for these tests


def _register() -> None:
    import gymnasium
    import numpy as np
    from gymnasium import spaces

    class Small(gymnasium.Env[Any, Any]):
        observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        action_space: Any = spaces.Box(-1.0, 1.0, (1,), np.float32)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed, options=options)
            return np.zeros(2, np.float32), {}

        def step(self, action: Any) -> Any:
            return np.zeros(2, np.float32), 0.0, False, False, {}

    class Unequal(Small):
        action_space = spaces.MultiDiscrete([3, 4])

    gymnasium.register("Endless-v0", entry_point=Small)
    gymnasium.register("Unequal-v0", entry_point=Unequal, max_episode_steps=5)


_register()
