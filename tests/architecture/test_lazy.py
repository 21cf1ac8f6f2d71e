"""Starting costs little: nothing heavy is imported until something is trained."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from tests.architecture.source import REPO

HEAVY = (
    "torch",
    "ray",
    "numpy",
    "pydantic",
    "rich",
    "gymnasium",
    "envpool",
    "mujoco",
    "tensorboard",
    "plotly",
    "wandb",
)
HELP = "from m2flow.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit as end:\n    assert not end.code"


def loaded(code: str) -> set[str]:
    """Top-level packages in memory after running `code` in a fresh interpreter."""
    tail = "\nimport sys\nprint('\\nLOADED', *sorted({name.partition('.')[0] for name in sys.modules}))"
    result = subprocess.run(
        [sys.executable, "-c", code + tail], cwd=REPO, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.rpartition("LOADED")[2].split())


@pytest.mark.parametrize("code", ["import m2flow", HELP], ids=["import m2flow", "m2flow --help"])
def test_starting_loads_nothing_heavy(code: str) -> None:
    assert not loaded(code) & set(HEAVY)


@pytest.mark.parametrize(
    "module", ["m2flow.config", "m2flow.registry", "m2flow.flow", "m2flow.protocols", "m2flow.types", "m2flow.runtime"]
)
def test_what_plans_and_describes_loads_no_torch(module: str) -> None:
    assert not loaded(f"import {module}") & {"torch", "ray", "gymnasium", "envpool"}


def cpu_seconds(code: str) -> float:
    """The least processor time of five fresh interpreters, so that a busy machine does not count."""
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-c", code], cwd=REPO, check=True, stdout=subprocess.DEVNULL, env=dict(os.environ)
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def test_help_costs_at_most_half_a_second_over_bare_python() -> None:
    assert cpu_seconds(HELP) - cpu_seconds("pass") <= 0.5
