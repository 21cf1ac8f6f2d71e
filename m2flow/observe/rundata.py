"""A run folder read back, whole or not: what `report`, `show` and `ls` have in common.

Nothing here raises for a run that is still going, crashed early, or has a broken file: what could not be read is listed
in `problems` and shown.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from m2flow.intervals import mean_interval, wilson
from m2flow.observe.jsonl import decode, rows
from m2flow.observe.layout import RunFolder, read_evaluation, read_json
from m2flow.observe.metrics import METRICS
from m2flow.observe.trace import Span, read_spans
from m2flow.types import Evaluation

T = TypeVar("T")
NONE = "\u2013"  # what stands for "no number" in tables


def attempted(evaluation: Evaluation) -> tuple[str, str]:
    """What an evaluation counts, and what each of them began with: episodes and seeds, or answers and tasks."""
    options = evaluation.protocol.get("options")
    text = isinstance(options, Mapping) and "max_tokens" in options
    return ("answers", "held-out task") if text else ("episodes", "held-out seed")


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric over steps; ascending, one point per step (the last row wins)."""

    steps: list[int]
    values: list[float]

    @property
    def last(self) -> float:
        """Newest value, NaN if there is none."""
        return self.values[-1] if self.values else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """Everything readable in a run folder."""

    folder: RunFolder
    status: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    recipe: str = ""
    curves: Mapping[str, Curve] = field(default_factory=dict)
    times: Curve = field(default_factory=lambda: Curve([], []))  # step -> Unix time of its row
    evaluations: Sequence[Evaluation] = ()
    alarms: Sequence[Mapping[str, Any]] = ()
    spans: Sequence[Span] = ()
    problems: Sequence[str] = ()
    title: str = ""  # what it is called beside runs that its seed does not tell it from

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return self.folder.path.resolve().name

    @property
    def seed(self) -> int | None:
        """The run's seed, if it was stored."""
        seeds = self.env.get("seeds")
        seed = seeds.get("run") if isinstance(seeds, Mapping) else None
        found = self.config.get("seed") if seed is None else seed
        return int(found) if isinstance(found, int) else None

    @property
    def label(self) -> str:
        """What the run is called beside others: "seed 3", or `title`."""
        return self.title or (self.name if self.seed is None else f"seed {self.seed}")

    @property
    def text(self) -> bool:
        """Whether it is one of a language model: its steps are answers, and lengths are counted in tokens."""
        env = self.config.get("env")
        return isinstance(env, Mapping) and "max_tokens" in env

    @property
    def acts(self) -> str:
        """What `env_steps` metrics count."""
        return "answers" if self.text else "environment steps"

    def unit(self, name: str) -> str:
        """The unit of a metric, empty where it has none."""
        info = METRICS.find(name)
        unit = info.unit if info else ""
        if not self.text or unit != "env steps":
            return unit
        return "tokens" if name.endswith("/length") else "answers"

    @property
    def state(self) -> str:
        """running | finished | failed | stopped | unknown. A running one whose process is gone is "died"."""
        state = str(self.status.get("state", "unknown"))
        return "died" if state == "running" and not self._alive() else state

    def _alive(self) -> bool:
        """Whether the driver may still be at work: unknown (other host, no pid) counts as alive."""
        pid, host = self.status.get("pid"), self.status.get("boot")
        if not isinstance(pid, int) or host != boot_id():
            return True
        return Path(f"/proc/{pid}").exists() if Path("/proc").is_dir() else True

    @property
    def step(self) -> int | None:
        """Last step with anything to show."""
        steps = [int(s) for s in (self.status.get("step"), *self.times.steps[-1:]) if isinstance(s, int)]
        return max(steps, default=None)

    @property
    def seconds(self) -> float:
        """Wall time that the run has been at work so far, NaN if unknown."""
        worked, updated = self.status.get("seconds"), self.status.get("updated")
        if isinstance(worked, (int, float)) and isinstance(updated, (int, float)):
            return float(worked) + (time.time() - updated if self.state == "running" else 0.0)
        start = self.status.get("started")
        end = self.status.get("ended") or (time.time() if self.state == "running" else self.status.get("updated"))
        if not isinstance(start, (int, float)) or not isinstance(end, (int, float)):
            return self.times.values[-1] - self.times.values[0] if self.times.values else math.nan
        return float(end) - float(start)

    @property
    def before(self) -> Evaluation | None:
        """The evaluation before training, if there was one: step 0."""
        return self.evaluations[0] if self.evaluations and self.evaluations[0].step == 0 else None

    @property
    def after(self) -> Evaluation | None:
        """The latest evaluation of trained weights."""
        return self.evaluations[-1] if self.evaluations and self.evaluations[-1].step > 0 else None

    def videos(self) -> list[Path]:
        """Video files, of the newest step first (the first number in a name is its step), then by name."""

        def order(path: Path) -> tuple[int, str]:
            found = re.search(r"\d+", path.name)
            return (-int(found[0]) if found else 0, path.name)

        if not self.folder.videos.is_dir():
            return []
        return sorted((p for p in self.folder.videos.glob("*.mp4") if not p.name.startswith(".")), key=order)


def boot_id() -> str:
    """Names this host since its last start, so that a process id can be believed; empty where there is no such file."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def load_runs(paths: Sequence[Path | str], spans: bool = True) -> list[RunData]:
    """Runs that are shown together. Those that share a seed are called by their folders."""
    runs = [load_run(path, spans) for path in paths]
    if len({run.label for run in runs}) == len(runs):
        return runs
    return [replace(run, title=run.name) for run in runs]


def load_run(path: Path | str, spans: bool = True, tail: int | None = None) -> RunData:
    """Read a run folder. Raises FileNotFoundError only if there is no such folder.

    `spans` False skips the trace; `tail` reads only so many bytes from the end of the metrics (for lists of runs).
    """
    folder = RunFolder(Path(path))
    if not folder.path.is_dir():
        raise FileNotFoundError(f"{folder.path}: no such run folder")
    problems: list[str] = []

    def attempt(read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except (OSError, ValueError, TypeError, KeyError) as error:
            problems.append(str(error) or type(error).__name__)
            return otherwise

    def mapping(file: Path) -> Mapping[str, Any]:
        found = attempt(lambda: read_json(file), None)
        return found if isinstance(found, dict) else {}

    nothing: tuple[dict[str, Curve], Curve] = ({}, Curve([], []))
    curves, times = attempt(lambda: _curves(folder.metrics, tail), nothing)
    evaluations = [attempt(lambda file=file: read_evaluation(file), None) for _, file in folder.evaluation_files()]  # type: ignore[misc]
    return RunData(
        folder=folder,
        status=mapping(folder.status),
        env=mapping(folder.env),
        config=mapping(folder.config),
        recipe=attempt(lambda: folder.recipe.read_text(encoding="utf-8"), "") if folder.recipe.exists() else "",
        curves=curves,
        times=times,
        evaluations=[evaluation for evaluation in evaluations if evaluation is not None],
        alarms=attempt(lambda: list(rows(folder.alarms)), []),
        spans=attempt(lambda: read_spans(folder.trace), []) if spans else [],
        problems=problems,
    )


def _curves(path: Path, tail: int | None) -> tuple[dict[str, Curve], Curve]:
    """Columns of metrics.jsonl, and the time of each step."""
    points: dict[str, dict[int, float]] = {}
    times: dict[int, float] = {}
    for row in rows(path, tail):
        step = int(row.pop("step"))
        times[step] = decode(row.pop("time", None))
        for name, value in row.items():
            points.setdefault(name, {})[step] = decode(value)
    curves = {name: Curve(sorted(by_step), [by_step[s] for s in sorted(by_step)]) for name, by_step in points.items()}
    return curves, Curve(sorted(times), [times[s] for s in sorted(times)])


EPISODE_COLUMNS = {
    "eval/success_once": "success_once",
    "eval/success_at_end": "success_at_end",
    "eval/return": "ret",
    "eval/length": "length",
}


def interval(evaluation: Evaluation, metric: str) -> tuple[float, float]:
    """(low, high) of an evaluation number at 95 %: as stored, else from its episodes, else NaN."""
    if metric in evaluation.intervals:
        return evaluation.intervals[metric]
    column = EPISODE_COLUMNS.get(metric)
    values = [episode.get(column) for episode in evaluation.episodes] if column else []
    known = [value for value in values if value is not None]
    if column is None or not known:
        return math.nan, math.nan
    if column.startswith("success"):
        return wilson(successes=sum(bool(value) for value in known), trials=len(known))
    return mean_interval([decode(value) for value in known])[1:]


def gain(run: RunData, metric: str) -> tuple[float, float, float, int] | None:
    """Mean change of an evaluation number from before to after training, with its 95 % interval (Student's t over the
    differences of the same episodes) and their count. None where the two were not measured by the same protocol."""
    before, after, column = run.before, run.after, EPISODE_COLUMNS.get(metric)
    if before is None or after is None or column is None or before.protocol != after.protocol:
        return None
    old = {episode["seed"]: episode.get(column) for episode in before.episodes}
    pairs = [(old.get(episode["seed"]), episode.get(column)) for episode in after.episodes]
    if not pairs or any(value is None for pair in pairs for value in pair):
        return None
    return (*mean_interval([decode(new) - decode(earlier) for earlier, new in pairs]), len(pairs))


def show_gain(run: RunData, metric: str) -> str:
    """`success_once +57.5 points [50.1, 64.9], paired over 200 episodes`; empty where there is none."""
    found = gain(run, metric)
    if found is None:
        return ""
    mean, low, high, count = found
    scale, unit, form = (100.0, " points", ".1f") if "success" in metric else (1.0, "", ".4g")
    numbers = [f"{scale * x:+{form}}" if i == 0 else f"{scale * x:{form}}" for i, x in enumerate((mean, low, high))]
    name = metric.removeprefix("eval/")
    return f"{name} {numbers[0]}{unit} [{numbers[1]}, {numbers[2]}], paired over {count} episodes"


def headline(runs: Sequence[RunData]) -> list[str]:
    """Evaluation metrics worth a column: those of the table above that any run has, success_at_end only if it
    differs."""
    present = [m for m in EPISODE_COLUMNS if any(m in e.metrics for run in runs for e in run.evaluations)]
    pairs = [
        (e.metrics.get("eval/success_once"), e.metrics.get("eval/success_at_end")) for r in runs for e in r.evaluations
    ]
    if "eval/success_at_end" in present and all(once == end for once, end in pairs):
        present.remove("eval/success_at_end")
    return present


def show_number(value: float, metric: str = "") -> str:
    """A number for people: shares in percent for success, four digits otherwise, a dash for NaN."""
    if math.isnan(value):
        return NONE
    if "success" in metric:
        return f"{100 * value:.1f} %".replace(".0 %", " %")
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"


def show_interval(pair: tuple[float, float], metric: str = "") -> str:
    """`[low, high]` for people, `[92.9, 100] %` for success rates, empty where unknown."""
    if any(math.isnan(end) for end in pair):
        return ""
    if "success" in metric:
        low, high = (show_number(end, metric).removesuffix(" %") for end in pair)
        return f"[{low}, {high}] %"
    return f"[{show_number(pair[0], metric)}, {show_number(pair[1], metric)}]"


def show_seconds(seconds: float) -> str:
    """`4 min 12 s`."""
    if not math.isfinite(seconds):
        return NONE
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
