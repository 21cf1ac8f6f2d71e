"""The run folder: which file is where and what is in it. The driver writes it; `report`, `show` and `ls` read it.

    <run>/
      recipe.yaml                    as the user gave it
      config.json                    resolved: every value, defaults included
      env.json                       versions, git, machine, command, seeds        (runinfo.collect)
      status.json                    state, step, steps, error, times              (runinfo.write_status)
      metrics.jsonl                  one row per log call: {"step", "time", "<metric>": number, ...}
      trace.jsonl                    one span per line                             (trace.Tracer)
      trace.json                     the same for Perfetto / chrome://tracing      (trace.export_chrome)
      alarms.jsonl                   one alarm per line                            (alarms.Alarms)
      evaluations/step_000000.json   protocol, numbers, episodes                   (types.Evaluation)
      evaluations/eval_*.json        the same, of `m2flow eval` after the run
      samples/*.parquet              a language model's answers with their rewards (samples.SampleFolder)
      videos/*.mp4                   sample episodes, or videos/none.txt: one line that says why there are none
      checkpoints/                   owned by the checkpoint store
      logs/<worker>.log              what a worker printed, "rollout+policy-0.log"
      recorders.json                 ids by which external trackers continue this run
      report.html                    report.write_report

Every file may be missing: a run that crashed early is still a run.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m2flow.observe.jsonl import decode, dumps, replace_text
from m2flow.types import Evaluation

STATES = ("running", "finished", "failed", "stopped")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside one run folder. Nothing is created until `create` is called."""

    path: Path

    @property
    def recipe(self) -> Path:
        """The recipe as given."""
        return self.path / "recipe.yaml"

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.json"

    @property
    def env(self) -> Path:
        """Versions, git, machine, command, seeds."""
        return self.path / "env.json"

    @property
    def status(self) -> Path:
        """State of the run."""
        return self.path / "status.json"

    @property
    def metrics(self) -> Path:
        """Metric rows."""
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """Tables of a language model's answers."""
        return self.path / "samples"

    @property
    def trace(self) -> Path:
        """Spans, one per line."""
        return self.path / "trace.jsonl"

    @property
    def chrome_trace(self) -> Path:
        """Spans in Chrome's trace format."""
        return self.path / "trace.json"

    @property
    def alarms(self) -> Path:
        """Alarms, one per line."""
        return self.path / "alarms.jsonl"

    @property
    def evaluations(self) -> Path:
        """Folder of evaluations."""
        return self.path / "evaluations"

    @property
    def videos(self) -> Path:
        """Folder of videos."""
        return self.path / "videos"

    @property
    def no_videos(self) -> Path:
        """One line that says why there are no videos, where there are none."""
        return self.videos / "none.txt"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoint store."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Folder of stage logs."""
        return self.path / "logs"

    @property
    def recorders(self) -> Path:
        """Ids of this run in external trackers."""
        return self.path / "recorders.json"

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.path / "report.html"

    def evaluation(self, step: int) -> Path:
        """File of the evaluation done with the weights of `step`."""
        return self.evaluations / f"step_{step:06d}.json"

    def evaluation_files(self) -> list[tuple[int, Path]]:
        """(step, file) of every evaluation, ascending."""
        if not self.evaluations.is_dir():
            return []
        found = ((re.fullmatch(r"step_(\d+)\.json", p.name), p) for p in self.evaluations.iterdir())
        return sorted((int(match[1]), path) for match, path in found if match)

    def later_evaluations(self) -> list[Path]:
        """Files of what `m2flow eval` found after the run, by name."""
        return sorted(self.evaluations.glob("eval_*.json")) if self.evaluations.is_dir() else []

    def create(self) -> RunFolder:
        """Make the folder and its sub-folders."""
        for folder in (self.path, self.evaluations, self.videos, self.checkpoints, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        return self


def read_evaluation(path: Path) -> Evaluation:
    """The evaluation in a file. Raises ValueError if the file is no evaluation.

    An episode may hold `steps`: name -> one number per environment step, for instance {"reward": [...]}, which the
    report draws, and `video`: a file name in `videos/`. Where `intervals` are missing, the report computes them.
    """
    row = read_json(path)
    if not isinstance(row, dict) or "step" not in row:
        raise ValueError(f"{path}: not an evaluation (expected an object with 'step' and 'metrics')")
    intervals = {name: (decode(low), decode(high)) for name, (low, high) in row.get("intervals", {}).items()}
    metrics = {name: decode(value) for name, value in row.get("metrics", {}).items()}
    return Evaluation(int(row["step"]), metrics, row.get("protocol", {}), intervals, row.get("episodes", []))


def write_json(path: Path, value: Any) -> Path:
    """Write JSON so that a reader sees the old file or the new one, never half of one."""
    return replace_text(path, dumps(value, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """The JSON value in a file, or None if there is no such file. A broken file is a ValueError that names it."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
