"""The product's PPO beside stable-baselines3's own code, on the same data: `python -m benchmarks.parity`.

The peer collects one rollout (8 envs x 256 steps, an episode cut every 50) and makes ten optimiser steps on all of it.
From the same rollout and the same initial weights the product computes advantages and returns, and makes the same
steps. Runs in the peer's environment: of m2flow only the algorithm, the policy and the trainer are imported, which need
torch alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.clock import answer, versions

STEPS, LANES, EPISODE, UPDATES = 256, 8, 50, 10
NAMES = {  # of the product's parameters, and the peer's
    "policy.trunk.layers.0": "mlp_extractor.policy_net.0",
    "policy.trunk.layers.1": "mlp_extractor.policy_net.2",
    "policy.last": "action_net",
    "heads.value.{}.0": "mlp_extractor.value_net.0",
    "heads.value.{}.1": "mlp_extractor.value_net.2",
    "heads.value.{}.2": "value_net",
}


def collect() -> tuple[Any, list[Any], list[tuple[int, int, Any]]]:
    """The peer's model with a full buffer, the plain rewards of every step, and (step, lane, final observation)."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)
    rewards: list[Any] = []
    finals: list[tuple[int, int, Any]] = []

    class Watch(BaseCallback):
        """Notes what the buffer does not keep."""

        def _on_step(self) -> bool:
            rewards.append(self.locals["rewards"].copy())  # before the peer adds the value of a cut episode's end
            for lane, info in enumerate(self.locals["infos"]):
                if "terminal_observation" in info:
                    finals.append((len(rewards) - 1, lane, info["terminal_observation"]))
            return True

    envs = make_vec_env("HalfCheetah-v5", LANES, seed=0, env_kwargs={"max_episode_steps": EPISODE})
    net = {"net_arch": {"pi": [64, 64], "vf": [64, 64]}}
    rows = STEPS * LANES
    sizes = {"n_steps": STEPS, "batch_size": rows, "n_epochs": UPDATES}
    model = PPO("MlpPolicy", envs, seed=0, policy_kwargs=net, device="cpu", **sizes)
    _, callback = model._setup_learn(rows, Watch())
    model.collect_rollouts(model.env, callback, model.rollout_buffer, STEPS)
    return model, rewards, finals


def trajectory(model: Any, rewards: list[Any], finals: list[tuple[int, int, Any]], policy: Any) -> Any:
    """The peer's rollout as the product holds it, with the log-probs of `policy`, which has the peer's weights."""
    import torch

    from m2flow.types import Trajectory, Units

    buffer, rows = model.rollout_buffer, STEPS * LANES
    seen = [*buffer.observations.reshape(rows, -1), *model._last_obs, *(final for _, _, final in finals)]
    obs = np.stack(seen).astype(np.float32)
    next_at = np.arange(LANES, rows + LANES).reshape(STEPS, LANES)
    cut = np.zeros((STEPS, LANES), bool)
    for k, (step, lane, _) in enumerate(finals):
        next_at[step, lane], cut[step, lane] = rows + LANES + k, True
    action = buffer.actions.reshape(rows, 1, -1).astype(np.float32)
    with torch.no_grad():
        record = {"action": torch.from_numpy(action)}
        logprob = policy.score({"state": torch.from_numpy(obs[:rows])}, record).logprob.numpy()
    zeros = np.zeros((STEPS, LANES), np.int64)
    return Trajectory(
        obs={"state": obs},
        obs_at=np.arange(rows).reshape(STEPS, LANES),
        next_at=next_at,
        reward=np.stack(rewards)[:, :, None].astype(np.float32),
        valid=np.ones((STEPS, LANES, 1), bool),
        terminated=np.zeros((STEPS, LANES), bool),
        truncated=cut,
        version=zeros,
        episode=zeros,
        group=zeros,
        lane=np.arange(LANES),
        units=Units(policy.axes, logprob, {"action": action}),
    )


def product() -> tuple[Any, Any, Any]:
    """Policy, objective and trainer with the settings of recipes/halfcheetah_mb512.yaml."""
    from m2flow.algorithms.onpolicy import PPO
    from m2flow.backends.torch.trainer import TorchTrainerConfig
    from m2flow.models.mlp import MLPConfig
    from m2flow.types import Field, Spec

    spec = Spec({"state": Field((17,))}, Field((6,), low=-1.0, high=1.0))
    policy, objective = MLPConfig(hidden=(64, 64), activation="tanh").build(spec, 0), PPO(whiten="minibatch")
    config = TorchTrainerConfig(learning_rate=3e-4, eps=1e-5, max_grad_norm=0.5, threads=1)
    return policy, objective, config.build(policy, objective, 0)


def peers_name(name: str) -> str:
    """The peer's name of a parameter of the product."""
    if name.endswith("log_std"):
        return "log_std"
    kind = "weight" if "weight" in name else "bias"
    for ours, theirs in NAMES.items():
        if name in (f"{ours}.{kind}", ours.format("weights"), ours.format("biases")):
            return f"{theirs}.{kind}"
    raise KeyError(name)


def compare() -> dict[str, float]:
    """Largest differences, and the sizes of what is compared."""
    import torch

    model, rewards, finals = collect()
    policy, objective, trainer = product()
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(before[peers_name(name)].reshape(parameter.shape))
    batch, _ = objective.targets(trainer.model, trajectory(model, rewards, finals, policy))
    columns, buffer = batch.columns, model.rollout_buffer
    mine = {name: columns[name].reshape(STEPS, LANES).numpy() for name in ("advantage", "return", "logprob")}
    theirs = {"advantage": buffer.advantages, "return": buffer.returns, "logprob": buffer.log_probs}
    found = {f"{name}_difference": float(np.abs(mine[name] - theirs[name]).max()) for name in mine}
    found["advantage_largest"] = float(np.abs(mine["advantage"]).max())
    model.train()
    for _ in range(UPDATES):
        prepared = objective.prepare(batch, batch.size)
        [phase] = objective.phases
        trainer.forward_backward(prepared, phase, objective.counts(prepared), None)
        trainer.step(phase)
    after = model.policy.state_dict()
    found["weight_difference"] = max(
        float((parameter.detach() - after[peers_name(name)].reshape(parameter.shape)).abs().max())
        for name, parameter in trainer.model.named_parameters()
    )
    found["weight_moved"] = max(float((after[name] - before[name]).abs().max()) for name in before)
    return found | {"cut_episodes": len(finals), "updates": UPDATES}


def main() -> int:
    """Start the comparison in the peer's environment and keep what it found."""
    from benchmarks import harness, peers

    found = harness.job(peers.python("sb3"), "benchmarks.parity", {})
    kept = {
        "name": "parity_sb3",
        "title": "The product's PPO beside stable-baselines3's code, on the same rollout and weights",
        "command": "python -m benchmarks.parity",
        "machine": harness.machine(),
        "commit": harness.commit(),
        "written": harness.now(),
    }
    harness.write(Path(__file__).parent / "results" / "parity_sb3.json", kept | found)
    for name, value in found.items():
        print(f"{name:22} {value}")
    same = found["advantage_difference"] < 1e-4 and found["weight_difference"] < 1e-5
    print("the same to round-off" if same else "NOT the same")
    return int(not same)


if __name__ == "__main__":
    if sys.argv[1:]:
        answer(compare() | {"versions": versions(("stable-baselines3", "torch", "numpy", "gymnasium", "mujoco"))})
    else:
        raise SystemExit(main())
