"""What is measured of m2flow, each in a process of its own: `python -m benchmarks.jobs '{"job": "product", ...}'`."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.clock import Clock, Stamps, answer, versions

RECIPES = Path(__file__).parent / "recipes"
PACKAGES = ("m2flow", "torch", "numpy", "gymnasium", "mujoco", "envpool", "transformers")


def product(recipe: str, steps: int, seed: int, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """A run of the product through its public API, as a user runs it: real driver, recorders, alarms, trace."""
    import m2flow

    folder = Path(tempfile.mkdtemp(prefix="m2flow-bench-"))
    try:
        m2flow.train(
            RECIPES / recipe,
            f"steps={steps}",
            'observe.recorders=["tensorboard","benchmarks.clock:Clock"]',
            "observe.report=false",
            *overrides,
            run_dir=folder / "run",
            seed=seed,
            quiet=True,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Clock.stamps.summary()


def grpo(recipe: str, steps: int, seed: int, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """A run of the product on the small language model; an env step is an answer."""
    from benchmarks import small_lm

    small_lm.make()
    return product(recipe, steps, seed, tuple(overrides))


def handwritten(recipe: str, steps: int, seed: int) -> dict[str, Any]:
    """The same maths in one function, with the settings of the same recipe."""
    import torch

    from benchmarks.handwritten_ppo import train
    from m2flow.config import load

    loaded = load(RECIPES / recipe)
    torch.set_num_threads(loaded.trainer.threads)
    rows, stamps = loaded.rollout.lanes * loaded.rollout.length, Stamps()
    train(
        loaded.env.build(range(loaded.rollout.lanes), seed),
        steps=steps,
        seed=seed,
        length=loaded.rollout.length,
        minibatch=loaded.learner.minibatch,
        epochs=loaded.learner.epochs,
        learning_rate=loaded.trainer.learning_rate,
        eps=loaded.trainer.eps,
        on_step=lambda step, _metrics: stamps.take((step + 1) * rows),
    )
    return stamps.summary()


def env_only(recipe: str, steps: int, seed: int) -> dict[str, Any]:
    """The recipe's vector env stepped with actions of a fresh policy (standard normal, clipped), and nothing else."""
    from m2flow.config import load

    loaded = load(RECIPES / recipe)
    lanes, length = loaded.rollout.lanes, loaded.rollout.length
    env, stamps = loaded.env.build(range(lanes), seed), Stamps()
    shape = env.spec.action.shape
    actions = np.random.default_rng(seed).standard_normal((steps, length, lanes, *shape)).clip(-1, 1).astype(np.float32)
    env.reset()
    for step in range(steps):
        for action in actions[step]:
            env.send(action)
            env.recv()
        stamps.take((step + 1) * lanes * length)
    env.close()
    return stamps.summary()


def learn(recipe: str, steps: int, seed: int) -> dict[str, Any]:
    """A run of the product to its end, with its learning curve."""
    result = product(recipe, steps, seed)
    return result | {"curve": Clock.curve}


def learn_sac(recipe: str, seed: int) -> dict[str, Any]:
    """One of the product's own recipes to its end; the last evaluation counts."""
    import m2flow

    folder = Path(tempfile.mkdtemp(prefix="m2flow-bench-"))
    try:
        run = m2flow.train(
            RECIPES.parents[1] / "recipes" / recipe,
            'observe.recorders=["tensorboard","benchmarks.clock:Clock"]',
            "observe.report=false",
            run_dir=folder / "run",
            seed=seed,
            quiet=True,
        )
        found = run.evaluations()
        last = found[-1]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Clock.stamps.summary() | {
        "curve": [[e.step, e.metrics["eval/return"], len(e.episodes)] for e in found],
        "return": last.metrics["eval/return"],
        "episodes": len(last.episodes),
    }


JOBS: dict[str, Any] = {
    "product": product,
    "grpo": grpo,
    "handwritten": handwritten,
    "env_only": env_only,
    "learn": learn,
    "learn_sac": learn_sac,
}


def main(argument: str) -> None:
    """Run one job and hand its result to the harness."""
    settings = json.loads(argument)
    result = JOBS[settings.pop("job")](**settings)
    answer(result | {"versions": versions(PACKAGES)})


if __name__ == "__main__":
    main(sys.argv[1])
