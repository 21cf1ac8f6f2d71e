"""Equal learning: product and peer train with the same settings, and the returns that they reach are compared.

    python -m benchmarks.learning              # both, all seeds; about 25 minutes of CPU
    python -m benchmarks.learning ppo --who product --seeds 0

Every finished run is stored at once; a run that is stored is not repeated, so an interrupted call goes on where it was.
"""

from __future__ import annotations

import argparse
import fcntl
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness, peers

RESULTS = Path(__file__).parent / "results"
LAST = 100  # training episodes that count at the end
PPO_RECIPE, PPO_STEPS = "halfcheetah_mb512.yaml", 489
PPO_PEER = {"env": "HalfCheetah-v5", "lanes": 8, "length": 256, "minibatch": 512, "epochs": 4}
SAC_PEER = {
    "env": "Pendulum-v1",
    "steps": 10_240,
    "learning_rate": 1e-3,
    "buffer_size": 50_000,
    "learning_starts": 256,
    "batch_size": 256,
}
JOBS: dict[str, dict[str, dict[str, Any]]] = {
    "ppo": {
        "product": {"job": "learn", "recipe": PPO_RECIPE, "steps": PPO_STEPS},
        "sb3": {"job": "ppo", "library": "sb3", "curve": True, "steps": PPO_STEPS, **PPO_PEER},
    },
    "sac": {
        "product": {"job": "learn_sac", "recipe": "pendulum_sac.yaml"},
        "sb3": {"job": "sac", "library": "sb3", "episodes": 20, **SAC_PEER},
    },
}
TITLES = {
    "ppo": "HalfCheetah-v5, 1M env steps, mean return of the last 100 training episodes",
    "sac": "Pendulum-v1, 10240 env steps, mean return of 20 evaluation episodes",
}


def last_return(curve: Sequence[Sequence[float]], count: int = LAST) -> float:
    """Mean return of the last `count` episodes of a curve of (env steps, mean return, episodes)."""
    left, total = count, 0.0
    for _, value, episodes in reversed(curve):
        used = min(left, int(episodes))
        total += used * value
        left -= used
        if left == 0:
            return total / count
    raise ValueError(f"the curve holds {count - left} episodes, {count} are needed")


def thin(curve: Sequence[Sequence[float]], every: int = 16_000) -> list[list[float]]:
    """(env steps, mean return, episodes) of every `every` env steps."""
    bins: dict[int, list[Sequence[float]]] = {}
    for point in curve:
        bins.setdefault(int((point[0] - 1) // every), []).append(point)
    thinned = []
    for points in bins.values():
        episodes = sum(int(p[2]) for p in points)
        mean = sum(p[1] * p[2] for p in points) / episodes
        thinned.append([int(points[-1][0]), round(mean, 2), episodes])
    return thinned


def verdict(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns by side, and whether the product's mean lies within the spread of the peer's seeds, or above it."""
    sides = {who: [r["return"] for r in runs if r["who"] == who] for who in ("product", "sb3")}
    out: dict[str, Any] = {
        who: {"returns": [round(v, 1) for v in values], "mean": statistics.fmean(values)} | harness.spread(values)
        for who, values in sides.items()
        if values
    }
    if all(sides.values()):
        out["within_peer_spread"] = min(sides["sb3"]) <= out["product"]["mean"] <= max(sides["sb3"])
        out["not_below_peer_spread"] = out["product"]["mean"] >= min(sides["sb3"])
    return out


def _keep(path: Path, name: str, run: dict[str, Any]) -> None:
    """Add a run to the stored ones. Two processes may do so at the same time."""
    with (path.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = harness.read(path) or {"name": f"learning_{name}", "title": TITLES[name], "runs": []}
        found["runs"] = sorted([*found["runs"], run], key=lambda r: (r["who"], r["seed"]))
        found |= {"summary": verdict(found["runs"]), "machine": harness.machine()}
        found["command"] = f"python -m benchmarks.learning {name}"
        harness.write(path, found)


def measure(name: str, who: Sequence[str], seeds: Sequence[int]) -> None:
    """Train what is not stored yet, product and peer in turn."""
    path = RESULTS / f"learning_{name}.json"
    for seed in seeds:
        for side in who:
            done = harness.read(path) or {"runs": []}
            if any(r["who"] == side and r["seed"] == seed for r in done["runs"]):
                continue
            print(f"[bench] learning {name}: {side} seed {seed} ...", flush=True)
            job = JOBS[name][side] | {"seed": seed}
            if side == "product":
                result = harness.job(sys.executable, "benchmarks.jobs", job)
            else:
                result = harness.job(peers.python(side), "benchmarks.peer_jobs", job)
            result.pop("iteration_cpu_s", None)
            if "return" not in result:
                result["return"] = last_return(result["curve"])
            if name == "ppo":
                result["curve"] = thin(result["curve"])
            _keep(path, name, {"who": side, "seed": seed, "job": job, "commit": harness.commit(), **result})
            print(f"[bench] learning {name}: {side} seed {seed}: return {result['return']:.1f}", flush=True)
    found = harness.read(path)
    if found is not None:
        for side in JOBS[name]:
            if side in found["summary"]:
                print(f"{name} {side}: {found['summary'][side]}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*JOBS, []], help="what to train; default: all")
    parser.add_argument("--who", nargs="+", choices=["product", "sb3"], default=["product", "sb3"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    given = parser.parse_args(arguments)
    RESULTS.mkdir(exist_ok=True)
    for name in given.names or JOBS:
        measure(name, given.who, given.seeds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
