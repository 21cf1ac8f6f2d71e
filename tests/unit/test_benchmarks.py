"""The benchmarks: the hand-written PPO is the product's maths, the harness counts rightly, stored results are whole."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import m2flow
from benchmarks import harness, learning, run, suite
from benchmarks.clock import Stamps, cpu_seconds
from benchmarks.handwritten_ppo import train
from m2flow.backends.checkpoint import read_policy
from m2flow.config import load

REPO = Path(__file__).parents[2]
RESULTS = sorted((REPO / "benchmarks" / "results").glob("*.json"))


@pytest.mark.parametrize("minibatch", [None, 64])
def test_the_handwritten_ppo_ends_with_the_weights_of_the_product(tmp_path, minibatch) -> None:
    recipe = REPO / "benchmarks" / "recipes" / "halfcheetah_mb512.yaml"
    small = ["steps=2", "rollout.length=24", f"learner.minibatch={minibatch or 'null'}", "learner.epochs=3"]
    small += ["observe.report=false", "observe.recorders=[]"]
    ran = m2flow.train(recipe, *small, run_dir=tmp_path / "run", seed=3, quiet=True)
    product = read_policy(load(recipe, *small).checkpoint.build(ran.folder.checkpoints).path(None))
    seen = []
    flat = train(
        load(recipe).env.build(range(8), 3),
        steps=2, seed=3, length=24, minibatch=minibatch or 192, epochs=3,
        on_step=lambda step, metrics: seen.append(metrics),
    )  # fmt: skip
    # the policy's arrays come first in the flat vector, in this order
    names = [f"trunk.layers.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")]
    names += ["distribution.log_std", "last.weight", "last.bias"]
    theirs = np.concatenate([np.asarray(product[name]).reshape(-1) for name in names])
    size = len(theirs)
    assert size == 17 * 64 + 64 + 64 * 64 + 64 + 6 + 64 * 6 + 6
    np.testing.assert_allclose(flat[:size].numpy(), theirs, rtol=0, atol=2e-6)
    for mine, row in zip(seen, ran.metrics(), strict=True):
        assert mine["grad_norm"] == pytest.approx(row["train/grad_norm"], rel=1e-3)
        assert mine["value_loss"] / (minibatch or 192) == pytest.approx(row["train/value_loss"], rel=1e-3)


def test_the_handwritten_ppo_moves_its_weights() -> None:
    recipe = load(REPO / "benchmarks" / "recipes" / "halfcheetah_mb512.yaml")
    runs = [
        train(recipe.env.build(range(8), 0), steps=steps, seed=0, length=16, minibatch=64, epochs=1) for steps in (1, 2)
    ]
    assert torch.isfinite(runs[1]).all()
    assert not torch.equal(*runs)


def test_stamps_leave_out_the_first_iteration_and_divide_by_cpu_seconds() -> None:
    stamps = Stamps()
    stamps.taken = [(100.0, 5.0, 50.0), (200.0, 6.0, 60.0), (400.0, 8.0, 61.0)]
    found = stamps.summary()
    assert found["value"] == pytest.approx(300 / 3)
    assert found["env_steps_per_wall_s"] == pytest.approx(300 / 11)
    assert found["iteration_cpu_s"] == [1.0, 2.0]


def test_cpu_seconds_count_child_processes() -> None:
    before = cpu_seconds()
    code = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert cpu_seconds() - before > 0.25


def group(log):
    def case(name, values):
        return harness.Case(name, name, lambda seed: log.append(name) or {"value": values[seed]}, name)

    ratios = (
        harness.Ratio("faster", "a", "b", bar=1.5),
        harness.Ratio("overhead", "a", "b", bar=0.10, most=True, kind="excess"),
        harness.Ratio("longer", "a", "b", bar=10.0, most=True, kind="difference"),
    )
    return harness.Group("g", "G", "s", (case("a", [2.0, 9.0, 4.0]), case("b", [1.0, 3.0, 4.0])), ratios, {"n": 1})


def test_a_ratio_is_the_median_of_the_rounds_ratios(tmp_path) -> None:
    made = group([])
    store = harness.Store(tmp_path / "g.json", made, "c", fresh=True)
    harness.measure(made, store, 3, lambda text: None)
    faster, overhead, longer = json.loads((tmp_path / "g.json").read_text())["ratios"]
    assert (faster["median"], faster["min"], faster["max"], faster["met"]) == (2.0, 1.0, 3.0, True)
    assert (overhead["median"], overhead["met"]) == (1.0, False)
    assert (longer["median"], longer["met"]) == (1.0, True)
    assert "**missed**" in harness.table(made, store.rounds)


def test_the_quickest_iterations_are_compared_by_their_cpu_seconds() -> None:
    values = {"a": {"iteration_cpu_s": [0.5, 0.2], "cpu_s": 0.7}, "b": {"iteration_cpu_s": [0.3, 0.9], "cpu_s": 1.2}}
    assert harness.Ratio("less", "b", "a", kind="difference", by="cpu").of(values) == pytest.approx(0.5)
    assert harness.Ratio("more", "a", "b", kind="excess", by="quickest").of(values) == pytest.approx(0.5)


def test_an_interrupted_measurement_goes_on_and_every_other_round_runs_backwards(tmp_path) -> None:
    log: list[str] = []
    path = tmp_path / "g.json"
    harness.measure(group(log), harness.Store(path, group(log), "c", fresh=False), 1, lambda text: None)
    harness.measure(group(log), harness.Store(path, group(log), "c", fresh=False), 2, lambda text: None)
    assert log == ["a", "b", "b", "a"]


def test_rounds_of_other_work_are_not_mixed_in(tmp_path) -> None:
    made = group([])
    harness.measure(made, harness.Store(tmp_path / "g.json", made, "c", fresh=False), 1, lambda text: None)
    other = harness.Group(made.name, made.title, made.unit, made.cases, made.ratios, {"n": 2})
    assert harness.Store(tmp_path / "g.json", other, "c", fresh=False).rounds == []


def test_the_last_return_weighs_episodes_and_takes_only_the_last(tmp_path) -> None:
    curve = [(1000, -5.0, 8), (2000, 1.0, 3), (3000, 4.0, 2)]
    assert learning.last_return(curve, 3) == pytest.approx((2 * 4.0 + 1.0) / 3)
    with pytest.raises(ValueError, match="13 episodes"):
        learning.last_return(curve, 14)


def test_a_failing_job_is_an_error_that_shows_its_output() -> None:
    with pytest.raises(harness.JobFailed, match="nonesuch"):
        harness.job(sys.executable, "benchmarks.jobs", {"job": "nonesuch"})


def test_the_recipes_of_the_benchmarks_load_and_say_the_issue_s_setting() -> None:
    for name, (epochs, minibatch) in {"halfcheetah_mb512": (4, 512), "halfcheetah_mb64": (10, 64)}.items():
        recipe = load(REPO / "benchmarks" / "recipes" / f"{name}.yaml")
        assert (recipe.rollout.lanes, recipe.rollout.length) == (8, 256)
        assert (recipe.learner.epochs, recipe.learner.minibatch) == (epochs, minibatch)
        assert recipe.policy.hidden == recipe.objective.critic_hidden == (64, 64)


def test_an_unknown_group_is_refused() -> None:
    with pytest.raises(SystemExit, match="nonesuch"):
        run.main(["nonesuch"])


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_stored_results_are_whole(path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"\"/[a-z]+/|https?:", text)  # nothing of the machine that measured it
    assert {"name", "machine", "command", "title"} <= found.keys()
    assert path.stem == found["name"]
    if found["name"] == "parity_sb3":  # the same rollout and weights through both codes, ten updates
        assert found["weight_difference"] < 1e-5 < found["weight_moved"]
        return
    if found["name"] == "verifier":  # no crash, no hang, and the right verdict on every answer that has one
        assert found["answers"] == 1000
        assert found["product"]["errors"] == found["product"]["wrong_verdicts"] == 0
        assert found["product"]["timeouts"] == found["endless"]
        return
    if found["name"] == "decoding":
        for row in found["rows"].values():
            ratios = [a / b for a, b in zip(row["product"]["rounds"], row["generate"]["rounds"], strict=True)]
            assert row["ratio"]["median"] == pytest.approx(statistics.median(ratios))
        return
    if found["name"].startswith("learning_"):
        for one in found["runs"]:
            assert {"who", "seed", "return", "commit", "versions", "job"} <= one.keys()
        assert found["summary"] == json.loads(json.dumps(learning.verdict(found["runs"])))
        return
    made = suite.groups(quick=False)[found["name"]]
    assert found["work"] == dict(made.work)
    summary = json.loads(json.dumps(harness.summary(made, found["rounds"])))
    assert found["ratios"] == summary["ratios"]
    for case in made.cases:
        values = [values[case.name]["value"] for values in found["rounds"] if case.name in values]
        assert found["cases"][case.name]["median"] == statistics.median(values)


def test_a_measured_process_has_one_thread(monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    given = harness.one_thread(EXTRA="y")
    assert (given["OMP_NUM_THREADS"], given["EXTRA"], given["PATH"]) == ("1", "y", os.environ["PATH"])
