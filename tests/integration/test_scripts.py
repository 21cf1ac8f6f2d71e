"""Training with processes from where users really call it: a bare script, standard input, a notebook."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from m2flow.observe.layout import RunFolder, read_json
from m2flow.runtime.cluster import detect
from m2flow.runtime.driver import Driver, DriverConfig
from m2flow.runtime.failures import RunFailed
from tests.integration import toy_flow

REPO = Path(__file__).parents[2]
SCRIPT = """
from dataclasses import dataclass
import m2flow
from m2flow.envs.toy import PointReachConfig

print("the script runs")

@dataclass(frozen=True, kw_only=True, slots=True)
class Mine(PointReachConfig):
    pass

run = m2flow.train(
    {"env": ENV, "policy": "mlp", "objective": "ppo", "steps": 2, "seed": 1, "rollout": {"lanes": 2, "length": 8},
     "learner": {"epochs": 1}, "observe": {"recorders": [], "report": False}, "evaluation": {"seeds": 2, "horizon": 5}},
    plan="disaggregated", run_dir="run", quiet=True,
)
print("trained", len(run.evaluations()), m2flow.evaluate(run).metrics["eval/episodes"])
"""
NOTEBOOK = """
import asyncio, sys
del __file__

async def cell():  # a notebook has an event loop in its main thread
    exec(compile(open("script.py").read(), "<cell 1>", "exec"), globals())

asyncio.run(cell())
"""


def python(tmp_path: Path, *arguments: str, env: str = '"point_reach"', stdin: bool = False) -> tuple[int, str]:
    """Exit code and everything printed, also what the workers printed into their logs."""
    text = SCRIPT.replace("ENV", env)
    (tmp_path / "script.py").write_text(text)
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    result = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, input=text if stdin else "", text=True, check=False, timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(REPO)},
    )  # fmt: skip
    logs = sorted((tmp_path / "run" / "logs").glob("*.log"))
    return result.returncode, "\n".join([result.stdout, *(log.read_text() for log in logs)])


@pytest.mark.parametrize("how", ["script.py", "-", "notebook.py"])
def test_a_script_without_a_guard_trains_once_with_processes(tmp_path: Path, how: str) -> None:
    code, said = python(tmp_path, how, stdin=how == "-")
    assert code == 0, said
    assert said.count("the script runs") == 1
    assert "trained 2 2.0" in said
    assert len(list((tmp_path / "run" / "logs").glob("*.log"))) == 2, "every worker had a process"


@pytest.mark.parametrize("how", ["script.py", "-", "notebook.py"])
def test_what_a_script_defines_cannot_go_to_a_process_and_says_so(tmp_path: Path, how: str) -> None:
    code, said = python(tmp_path, how, env='{"name": "__main__:Mine"}', stdin=how == "-")
    assert code == 1
    assert said.count("the script runs") == 1
    assert "Mine is defined in the script or notebook that was started" in said
    assert "move it to a module of its own; or let it run in a thread" in said
    assert read_json(RunFolder(tmp_path / "run").status)["state"] == "failed"
    assert not list((tmp_path / "run" / "logs").glob("*.log")), "nothing was started"


@dataclass(frozen=True)
class Dies:
    """A part whose worker ends before it can say a word."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


def test_a_process_that_dies_at_once_is_no_thread(tmp_path: Path) -> None:
    driver = Driver(
        toy_flow.FLOW,
        toy_flow.plan("processes"),
        toy_flow.parts() | {"sink": Dies()},
        cluster=detect(),
        config=DriverConfig(steps=1, stall_limit=60.0, stop_limit=5.0),
        logs=tmp_path,
    )
    with pytest.raises(RunFailed, match="exited with code 3") as failure:
        driver.run()
    assert "thread" not in str(failure.value)
    assert Path(failure.value.log).parent == tmp_path
    assert Path(failure.value.log).exists()
