"""A synthetic run folder, written only through the public writers, with numbers that tests can state."""

from __future__ import annotations

import math
import time
from pathlib import Path

from m2flow.observe import runinfo
from m2flow.observe.alarms import AlarmConfig, as_metrics
from m2flow.observe.layout import RunFolder, write_json
from m2flow.observe.sinks import ObserveConfig
from m2flow.observe.timeline import export_chrome
from m2flow.observe.trace import Tracer
from m2flow.types import Evaluation

HOSTILE = "</script><img src=x onerror=alert(1)>&\"'"


def make_run(
    path: Path,
    *,
    seed: int = 0,
    steps: int = 12,
    done: int | None = None,
    state: str = "finished",
    error: str | None = None,
    note: str = "",
    successes: tuple[int, int] = (0, 9),
) -> RunFolder:
    """Two rollout replicas on their own cores, then a learner on both, per step; evaluations of 10 episodes."""
    folder = RunFolder(path).create()
    done = steps if done is None else done
    config = {
        "name": f"reach{note}",
        "seed": seed,
        "steps": steps,
        "env": {"name": "toy", "task": f"Reach-v1{note}"},
        "objective": {"name": "ppo"},
        "policy": {"name": "mlp"},
    }
    folder.recipe.write_text(f"name: reach # {note}\n", encoding="utf-8")
    write_json(folder.config, config)
    runinfo.write_env(folder, {"run": seed}, ["m2flow", "train", f"seed={seed}", note])
    runinfo.write_status(folder, "running", step=0, steps=steps)
    recorder = ObserveConfig(recorders=()).build(path, config)
    alarms = AlarmConfig().build(folder.alarms)
    tracer = Tracer(folder.trace)
    start = time.monotonic()
    for step in range(done):
        t = start + 2.0 * step
        tracer.extend(
            [
                ("rollout", 0, "cpu:0", step, t, t + 1.0, "step"),
                ("rollout", 1, "cpu:1", step, t, t + 0.5, "step"),
                ("learner", 0, "cpu:0,cpu:1", step, t + 1.0, t + 2.0, "work"),
            ]
        )
        row = {
            "train/policy_loss": -0.01 * step,
            "train/approx_kl": 2.0 if step == 3 else 0.01,
            "train/grad_norm": 1.0,
            "rollout/return": 10.0 * step,
            "rollout/success": step / steps,
            "rollout/env_steps": 100.0,
            "time/rollout_s": 1.0,
            "time/learn_s": 1.0,
            "time/step_s": 2.0,
            "throughput/env_steps_per_s": 50.0,
            "train/explained_variance": math.nan if step == 0 else 0.5,
        }
        recorder.log(step, row | as_metrics(alarms.check(step, row)))
    recorder.close()
    alarms.close()
    tracer.close()
    export_chrome(folder.trace, folder.chrome_trace)
    for step, count in ((0, successes[0]), *([(steps, successes[1])] if done == steps else [])):
        write_json(folder.evaluation(step), _evaluation(step, count, note))
    runinfo.write_status(folder, state, step=done, steps=steps, error=error)
    return folder


def _evaluation(step: int, successes: int, note: str) -> Evaluation:
    episodes = [
        {
            "seed": 1000 + i,
            "lane": i,
            "length": 50,
            "ret": 100.0 + i,
            "success_once": i < successes,
            "success_at_end": i < successes,
            "info": {},
            "steps": {f"reward{note}": [0.0, 1.0, None, 2.0]} if i == 0 else {},
            "video": f"step_{step:06d}_seed_1000.mp4" if i == 0 else "",
        }
        for i in range(10)
    ]
    metrics = {"eval/success_once": successes / 10, "eval/success_at_end": successes / 10, "eval/return": 104.5}
    return Evaluation(step, metrics, {"suite": f"Reach-v1{note}", "seeds": 10}, {}, episodes)
