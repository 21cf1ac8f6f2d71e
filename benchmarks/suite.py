"""What `make bench` measures: the groups, their cases, and the bars they are judged by."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import peers, small_lm
from benchmarks.clock import FILE
from benchmarks.harness import Case, Group, JobFailed, Ratio, Value, job, one_thread

RECIPE_LM = "qwen2_4m_grpo.yaml"
RATE = "env steps per CPU second"
HALFCHEETAH = {"env": "HalfCheetah-v5", "lanes": 8, "length": 256}
LIMIT = 600.0  # seconds that one start of a command may take


def groups(quick: bool) -> dict[str, Group]:
    """All groups by name. `quick`: few steps, to see that everything runs; its numbers mean nothing."""
    large, small = (3, 2) if quick else (9, 5)
    made = (
        ppo("ppo_mb512", "PPO, gymnasium HalfCheetah-v5, 8 envs x 256, minibatch 512 x 4 epochs", 512, 4, large),
        ppo("ppo_mb64", "PPO, gymnasium HalfCheetah-v5, 8 envs x 256, minibatch 64 x 10 epochs", 64, 10, small),
        envpool(large),
        start(),
        command_help(),
        grpo("fp32", 1.5, 3 if quick else 7),
        grpo("bf16", 2.5, 3 if quick else 7),
    )
    return {group.name: group for group in made}


def ppo(name: str, title: str, minibatch: int, epochs: int, steps: int) -> Group:
    """The product, the same maths by hand, the peers, and the environments alone."""
    recipe = f"halfcheetah_mb{minibatch}.yaml"
    work = {**HALFCHEETAH, "minibatch": minibatch, "epochs": epochs, "steps": steps}
    cases = [
        ours("product", "m2flow, with its driver, recorders, alarms and trace", "product", recipe, steps),
        ours("handwritten", "the same maths in one function (handwritten_ppo.py)", "handwritten", recipe, steps),
        peer("sb3", "stable-baselines3", "sb3", {"job": "ppo", "library": "sb3", **work}),
    ]
    ratios = [
        Ratio("product / stable-baselines3", "product", "sb3", bar=1.1 if minibatch == 512 else None),
        *overhead(),
    ]
    if minibatch == 512:
        alone = {"job": "env_only", **HALFCHEETAH, "steps": steps}
        cases += [
            ours("env_only", "m2flow's vector env with random actions, nothing else", "env_only", recipe, steps),
            peer("sb3_env_only", "stable-baselines3's vector env with random actions", "sb3", alone),
        ]
        ratios += [
            Ratio("product's share of its env-only limit", "product", "env_only", kind="share"),
            Ratio("stable-baselines3's share of its own", "sb3", "sb3_env_only", kind="share"),
        ]
    else:
        cases.append(peer("sbx", "SBX (JAX, one XLA thread)", "sbx", {"job": "ppo", "library": "sbx", **work}))
        ratios.insert(0, Ratio("product / SBX", "product", "sbx", bar=1.2))
    return Group(name, title, RATE, tuple(cases), tuple(ratios), work)


def overhead() -> tuple[Ratio, Ratio]:
    """What Flow, Plan, loop, recorders and checks cost over the same maths in one function."""
    title, sides = "overhead over the same maths by hand", ("handwritten", "product")
    return (
        Ratio(title, *sides, bar=0.10, most=True, kind="excess"),
        Ratio(f"{title}, quickest iterations", *sides, kind="excess", by="quickest"),
    )


def envpool(steps: int) -> Group:
    """The same PPO with envpool's HalfCheetah-v5 in place of gymnasium's, against the peer with gymnasium's."""
    work = {**HALFCHEETAH, "minibatch": 512, "epochs": 4, "steps": steps}
    recipe = "halfcheetah_envpool.yaml"
    return Group(
        "ppo_envpool",
        "PPO, envpool HalfCheetah-v5, 8 envs x 256, minibatch 512 x 4 epochs",
        RATE,
        (
            ours("product", "m2flow with envpool, 1 thread", "product", recipe, steps),
            ours("handwritten", "the same maths in one function", "handwritten", recipe, steps),
            peer("sb3", "stable-baselines3 with gymnasium", "sb3", {"job": "ppo", "library": "sb3", **work}),
            ours("env_only", "envpool with random actions, nothing else", "env_only", recipe, steps),
        ),
        (
            Ratio("product with envpool / stable-baselines3", "product", "sb3", bar=1.4),
            *overhead(),
            Ratio("product's share of its env-only limit", "product", "env_only", kind="share"),
        ),
        work,
    )


def start() -> Group:
    """From the start of `m2flow train` to the first row of metrics: rollout and training of step 1 are done."""
    arguments = ["train", "recipes/halfcheetah_mb512.yaml", "steps=1", "observe.report=false"]
    work = {**HALFCHEETAH, "minibatch": 512, "epochs": 4, "steps": 1}
    return Group(
        "start",
        "Cold start: from the start of the process to the end of training step 1",
        "s (wall)",
        (
            Case("train", "m2flow train, to its first row of metrics", first_step, f"m2flow {' '.join(arguments)}"),
            Case(
                "sb3",
                "stable-baselines3, a script with one iteration",
                lambda seed: peer_start({"job": "ppo", "library": "sb3", **work}, seed),
                "python -m benchmarks.peer_jobs ...",
            ),
            Case("nothing", "nothing: what the seconds are counted from", lambda _seed: {"value": 0.0}, ""),
        ),
        (
            Ratio("m2flow train to its first step", "train", "nothing", bar=10.0, most=True, kind="difference"),
            Ratio("the same in CPU seconds", "train", "nothing", kind="difference", by="cpu"),
            Ratio("stable-baselines3 to its first step", "sb3", "nothing", kind="difference"),
            Ratio("stable-baselines3 in CPU seconds", "sb3", "nothing", kind="difference", by="cpu"),
        ),
        {"recipe": "halfcheetah_mb512.yaml"},
    )


def command_help() -> Group:
    """What `--help` costs beside a Python that does nothing."""
    return Group(
        "help",
        "m2flow --help",
        "s (wall)",
        (
            Case("help", "m2flow --help", lambda _seed: timed([*m2flow(), "--help"]), "m2flow --help"),
            Case("python", "python -c pass", lambda _seed: timed([sys.executable, "-c", "pass"]), "python -c pass"),
        ),
        (
            Ratio("m2flow --help over bare Python", "help", "python", bar=0.5, most=True, kind="difference"),
            Ratio("the same in CPU seconds", "help", "python", kind="difference", by="cpu"),
        ),
        {"best_of": BEST_OF},
    )


def grpo(kind: str, bar: float, steps: int) -> Group:
    """GRPO on a small language model beside TRL in the same dtype; in bfloat16 its float32 is shown as well."""
    half = kind == "bf16"
    work = {"prompts": 32, "group": 8, "tokens": 32, "dtype": kind, "steps": steps, "hidden": small_lm.HIDDEN}
    overrides = ("generator.dtype=bfloat16", "trainer.autocast=bfloat16") if half else ()
    named = {"trl_bf16": True, "trl_fp32": False} if half else {"trl": False}
    cases = [
        ours("product", f"m2flow in {kind}, with its driver and recorders", "grpo", RECIPE_LM, steps, overrides),
        # without bfloat16 instructions a step of the peer takes minutes: one that counts is enough
        *(_trl(name, bf16, 2 if bf16 else steps) for name, bf16 in named.items()),
    ]
    ratios = [Ratio(f"product / TRL in {kind}", "product", next(iter(named)), bar=bar)]
    if half:
        ratios.append(Ratio("product / TRL in fp32", "product", "trl_fp32"))
    title = f"GRPO in {kind}, Qwen2 of 4M weights, 32 prompts x 8 answers x 32 tokens"
    return Group(f"grpo_{kind}", title, "samples per CPU second", tuple(cases), tuple(ratios), work)


def _trl(name: str, bf16: bool, steps: int) -> Case:
    settings = {"job": "grpo", "bf16": bf16, "prompts": 32, "group": 8, "tokens": 32, "steps": steps}
    run = _with_seed(lambda: _made("trl"), "benchmarks.peer_text_jobs", settings)
    return Case(name, f"TRL, {'bf16=True' if bf16 else 'fp32'}", run, _shown("peer_text_jobs", settings))


def _made(home: str) -> Path:
    small_lm.make()
    return peers.python(home)


# ---- cases


def ours(name: str, what: str, kind: str, recipe: str, steps: int, overrides: tuple[str, ...] = ()) -> Case:
    """A job of benchmarks/jobs.py with this Python."""
    settings: dict[str, Any] = {"job": kind, "recipe": recipe, "steps": steps}
    if overrides:
        settings["overrides"] = overrides
    return Case(name, what, _with_seed(lambda: sys.executable, "benchmarks.jobs", settings), _shown("jobs", settings))


def peer(name: str, what: str, home: str, settings: dict[str, Any]) -> Case:
    """A job of benchmarks/peer_jobs.py with the peer's Python."""
    run = _with_seed(lambda: peers.python(home), "benchmarks.peer_jobs", settings)
    return Case(name, what, run, _shown("peer_jobs", settings))


def _with_seed(python: Callable[[], str | Path], module: str, settings: dict[str, Any]) -> Callable[[int], Value]:
    return lambda seed: job(python(), module, {**settings, "seed": seed})


def _shown(module: str, settings: dict[str, Any]) -> str:
    return f"python -m benchmarks.{module} '{json.dumps({**settings, 'seed': 'ROUND'})}'"


def m2flow() -> list[str]:
    """The command as a user has it, else its module."""
    script = Path(sys.executable).with_name("m2flow")
    return [str(script)] if script.exists() else [sys.executable, "-m", "m2flow.cli"]


BEST_OF = 3  # a start is disturbed by other programs only to the worse, so the best of three is a round's value


def timed(command: list[str]) -> Value:
    """Wall and CPU seconds of a command, the best of three."""
    found = []
    for _ in range(BEST_OF):
        before, began = os.times(), time.monotonic()
        subprocess.run(command, env=one_thread(), stdout=subprocess.DEVNULL, check=True, timeout=LIMIT)
        wall, after = time.monotonic() - began, os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        found.append((wall, cpu))
    return {"value": min(wall for wall, _ in found), "cpu_s": min(cpu for _, cpu in found)}


def first_step(seed: int) -> Value:
    """Wall and CPU seconds until `m2flow train` has logged its first step."""
    folder = Path(tempfile.mkdtemp(prefix="m2flow-bench-"))
    try:
        clock = folder / "clock.json"
        recorders = 'observe.recorders=["tensorboard","benchmarks.clock:Clock"]'
        recipe = Path(__file__).parent / "recipes" / "halfcheetah_mb512.yaml"
        overrides = ("steps=1", "observe.report=false", recorders)
        command = [*m2flow(), "train", recipe, *overrides, "--seed", str(seed), "--run-dir", folder / "run", "--quiet"]
        began = time.time()
        done = subprocess.run(
            [str(part) for part in command],
            cwd=folder,
            env=one_thread(**{FILE: str(clock)}),
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT,
        )
        if done.returncode or not clock.exists():
            raise JobFailed(f"m2flow train ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
        _, cpu, wall = json.loads(clock.read_text(encoding="ascii"))
        return {"value": wall - began, "cpu_s": cpu}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def peer_start(settings: dict[str, Any], seed: int) -> Value:
    """Wall and CPU seconds until the peer has finished its first iteration, in a fresh process."""
    python = peers.python("sb3")
    began = time.time()
    found = job(python, "benchmarks.peer_jobs", {**settings, "seed": seed, "start": True})
    return {"value": found["ended"] - began, "cpu_s": found["cpu_s"], "versions": found["versions"]}
