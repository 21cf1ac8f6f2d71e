"""What is measured of peers, each in a process of its own and in the peer's environment; m2flow is not imported.

Settings are the peer's defaults wherever the issue does not name one: for both stable-baselines3 and SBX that is gamma
0.99, lambda 0.95, clip 0.2, learning rate 3e-4, Adam epsilon 1e-5, value coefficient 0.5, gradient norm 0.5, entropy
coefficient 0, advantages normalised per minibatch, orthogonal initialisation, log standard deviation 0.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.clock import Stamps, answer, versions

Curve = list[tuple[int, float, int]]  # (env steps, return, 1) of every episode that ended
PACKAGES = ("stable-baselines3", "sbx-rl", "torch", "jax", "jaxlib", "numpy", "gymnasium", "mujoco")


def _library(name: str) -> Any:
    if name == "sbx":
        import sbx as library
    else:
        import stable_baselines3 as library
        import torch

        torch.set_num_threads(1)
    return library


def _envs(env: str, lanes: int, seed: int) -> Any:
    """The peer's usual way: `make_vec_env`, all environments in this process."""
    from stable_baselines3.common.env_util import make_vec_env

    return make_vec_env(env, lanes, seed=seed)


def _callback(stamps: Stamps, per_rollout: bool, curve: Curve) -> Any:
    from stable_baselines3.common.callbacks import BaseCallback

    class Watch(BaseCallback):
        """Stamps at the end of each iteration (rollout and training), and the returns of ended episodes."""

        def _on_rollout_start(self) -> None:
            if per_rollout and self.num_timesteps:
                stamps.take(self.num_timesteps)

        def _on_training_end(self) -> None:
            stamps.take(self.num_timesteps)

        def _on_step(self) -> bool:
            for info in self.locals["infos"]:
                if "episode" in info:
                    curve.append((self.num_timesteps, float(info["episode"]["r"]), 1))
            return True

    return Watch()


def ppo(
    stamps: Stamps,
    curve: Curve,
    library: str,
    env: str,
    lanes: int,
    length: int,
    minibatch: int,
    epochs: int,
    steps: int,
    seed: int,
) -> None:
    """PPO with separate 64x64 tanh networks, `steps` iterations of `lanes` times `length` env steps."""
    device = {} if library == "sbx" else {"device": "cpu"}
    model = _library(library).PPO(
        "MlpPolicy",
        _envs(env, lanes, seed),
        n_steps=length,
        batch_size=minibatch,
        n_epochs=epochs,
        learning_rate=3e-4,
        policy_kwargs={"net_arch": {"pi": [64, 64], "vf": [64, 64]}},
        seed=seed,
        **device,
    )
    model.learn(lanes * length * steps, callback=_callback(stamps, True, curve))


def sac(
    stamps: Stamps, curve: Curve, library: str, env: str, steps: int, seed: int, episodes: int, **settings: Any
) -> dict[str, Any]:
    """SAC on one env for `steps` env steps, then `episodes` evaluation episodes by the policy's mode.

    `settings` in place of the peer's defaults. The initial states are those of the product's evaluation: env seeds
    1000000, 1000001, ...
    """
    import gymnasium

    device = {} if library == "sbx" else {"device": "cpu"}
    model = _library(library).SAC("MlpPolicy", _envs(env, 1, seed), seed=seed, **settings, **device)
    stamps.take(0)
    model.learn(steps, callback=_callback(stamps, False, curve))
    held_out, returns = gymnasium.make(env), []
    for k in range(episodes):
        obs, _ = held_out.reset(seed=1_000_000 + k)
        total, over = 0.0, False
        while not over:
            action, _ = model.predict(obs, deterministic=True)
            obs, reward, terminated, truncated, _ = held_out.step(action)
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    return {"return": sum(returns) / episodes, "episodes": episodes}


def env_only(stamps: Stamps, _curve: Curve, env: str, lanes: int, length: int, steps: int, seed: int) -> None:
    """The peer's vector env with random actions."""
    import numpy as np

    envs = _envs(env, lanes, seed)
    shape = envs.action_space.shape
    actions = np.random.default_rng(seed).standard_normal((steps, length, lanes, *shape)).clip(-1, 1).astype(np.float32)
    envs.reset()
    for step in range(steps):
        for action in actions[step]:
            envs.step(action)
        stamps.take((step + 1) * lanes * length)


JOBS = {"ppo": ppo, "sac": sac, "env_only": env_only}


def main(argument: str) -> None:
    """Run one job and hand its result to the harness. `curve`: episodes too. `start`: only when iteration 1 ended."""
    settings = json.loads(argument)
    with_curve, start, job = (settings.pop(key, False) for key in ("curve", "start", "job"))
    stamps, curve = Stamps(), []
    found = JOBS[job](stamps, curve, **settings) or {}
    if start:
        _, cpu, wall = stamps.taken[0]
        found |= {"cpu_s": cpu, "ended": wall}
    else:
        found |= stamps.summary()
    if with_curve:
        found["curve"] = curve
    answer(found | {"versions": versions(PACKAGES)})


if __name__ == "__main__":
    main(sys.argv[1])
