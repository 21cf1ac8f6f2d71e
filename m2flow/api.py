"""What the command line does, as functions. Three lines train from a notebook:

import m2flow
run = m2flow.train("recipes/point_reach_ppo.yaml", "steps=20")
run.metrics()[-1]
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m2flow import build
from m2flow.config import Recipe, dump, dump_yaml, find, load, with_seed
from m2flow.flow.cluster import Cluster
from m2flow.observe.jsonl import rows
from m2flow.observe.layout import RunFolder, read_evaluation, read_json, write_json
from m2flow.prepare import Prepared, prepare
from m2flow.session import Session, open_folder
from m2flow.types import Evaluation

if TYPE_CHECKING:
    from m2flow.doctor import Finding

Source = str | Path | Mapping[str, Any] | Recipe


@dataclass(frozen=True, slots=True)
class Run:
    """A run on disk. `path` is its folder; everything is read from there, so it works for any run, also an old one."""

    path: Path

    @property
    def folder(self) -> RunFolder:
        """Where what is."""
        return RunFolder(self.path)

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe."""
        return _stored(self.folder)

    @property
    def alarmed(self) -> bool:
        """Whether an alarm ended the run: what it has learnt is not to be trusted."""
        status = read_json(self.folder.status) or {}
        return status.get("state") == "stopped" and str(status.get("reason")).startswith("alarm ")

    def metrics(self) -> list[dict[str, Any]]:
        """Metric rows, in order."""
        return list(rows(self.folder.metrics))

    def evaluations(self) -> list[Evaluation]:
        """Evaluations, in order of their step."""
        return [read_evaluation(path) for _, path in self.folder.evaluation_files()]

    def policy(self, step: int | None = None) -> Any:
        """The trained policy, ready to act: of the latest checkpoint, or of that after `step` steps.

        `run.policy().act({"state": rows}, None).action` decides for a batch of observations: [B, C, ...].
        """
        return build.trained_policy(self.recipe, self.folder, step)

    def __str__(self) -> str:
        return show(self.path)


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `check` found. `str()` of it is for people."""

    ok: bool
    problems: tuple[str, ...]
    plan: str = ""
    memory: Mapping[str, int] = field(default_factory=dict)  # bytes by node
    notes: tuple[str, ...] = ()  # nothing to mend
    changes: tuple[str, ...] | None = None  # from this plan to the one it was compared with, if it was

    def __str__(self) -> str:
        lines = [self.plan] if self.plan else []
        if self.changes is not None:
            lines += [f"change: {change}" for change in self.changes or ("none, the plans are equal",)]
        if self.memory:
            lines.append("memory estimate: " + ", ".join(f"{n} {b / 2**20:,.1f} MiB" for n, b in self.memory.items()))
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"problem: {problem}" for problem in self.problems]
        lines.append("ok: nothing was started" if self.ok else f"{len(self.problems)} problem(s); nothing was started")
        return "\n".join(lines)


def check(
    recipe: Source,
    *overrides: str,
    plan: str | None = None,
    cluster: Path | Cluster | None = None,
    diff: str | None = None,
) -> CheckReport:
    """Validate config, data and plan against the machine (or a described cluster) and estimate memory. Starts no
    worker. `diff`: another plan, which is checked as well; the report says what changes from the first to it."""
    from m2flow.flow.plan import diff as compare
    from m2flow.flow.plan import explain

    loaded = with_seed(load(recipe, *overrides, *_plan_override(plan)))
    other = None if diff is None else load(recipe, *overrides, *_plan_override(diff), f"seed={loaded.seed}")
    machine = Cluster.from_yaml(Path(cluster).read_text()) if isinstance(cluster, str | Path) else cluster
    try:
        ready = prepare(loaded, machine)
        changes = None if other is None else tuple(map(str, compare(ready.plan, prepare(other, machine).plan)))
    except ValueError as error:
        return CheckReport(False, tuple(map(str, getattr(error, "problems", None) or [error])))
    return CheckReport(True, (), explain(ready.flow, ready.plan), ready.memory, ready.notes, changes)


def train(
    recipe: Source,
    *overrides: str,
    run_dir: str | Path | None = None,
    seed: int | None = None,
    plan: str | None = None,
    quiet: bool = False,
) -> Run:
    """Train as the recipe says, in a new run folder. Overrides are "section.key=value".

    Everything is checked before anything starts. Raises ValueError for a wrong recipe, RunFailed for a run that failed.
    """
    loaded = with_seed(load(recipe, *overrides, *_plan_override(plan)), seed)
    ready = prepare(loaded)
    folder = RunFolder(Path(run_dir) if run_dir is not None else _new_folder(loaded))
    open_folder(loaded, folder, _text_of(recipe, loaded))
    session = _session(ready, folder, quiet)
    return _finish(session)


def resume(
    run: str | Path | Run,
    *,
    steps: int | None = None,
    step: int | None = None,
    plan: str | None = None,
    quiet: bool = False,
) -> Run:
    """Continue a run exactly, from its latest complete checkpoint or from that of `step`.

    `steps` sets a new total. `plan` says where it runs from now on; it must split the lanes as before. What was
    recorded after the checkpoint is dropped. A resume that ends before its first step leaves the stored recipe as it
    was.
    """
    folder = _folder_of(run)
    _refuse_if_alive(folder)
    before = read_json(folder.config)
    loaded = _stored(folder, *_plan_override(plan))
    if steps is not None:
        loaded = replace(loaded, steps=steps)
    store = loaded.checkpoint.build(folder.checkpoints)
    done = build.saved_step(store, step)
    if done >= loaded.steps:
        raise ValueError(f"resume: {folder.path} has done {done} of {loaded.steps} steps; give a larger steps to go on")
    ready = prepare(loaded)
    session = _session(ready, folder, quiet, store.load(done))
    from m2flow.observe.runinfo import write_env

    write_env(folder, {"run": loaded.seed})
    write_json(folder.config, dump(loaded))
    try:
        return _finish(session)
    finally:
        if session.done <= done:
            write_json(folder.config, before)


def evaluate(
    run: str | Path | Run, *, seeds: int | None = None, videos: int = 0, step: int | None = None
) -> Evaluation:
    """Evaluate a checkpoint of a run (the latest by default), each held-out seed once, in this process.

    `run` may also be the folder of a checkpoint. What was found is stored in the run; see `evaluation_file`.
    """
    folder, step = _checkpoint_of(run, step)
    loaded = Run(folder.path).recipe
    if loaded.evaluation is None:
        raise ValueError(f"{folder.path}: its recipe has no evaluation section, so there is no protocol to evaluate by")
    if seeds is not None:
        listed = loaded.evaluation.seed_list[:seeds]
        if loaded.evaluation.seed_list and len(listed) < seeds:
            raise ValueError(f"seeds: asked for {seeds}, and the recipe's seed_list has {len(listed)}")
        loaded = replace(loaded, evaluation=replace(loaded.evaluation, seeds=seeds, seed_list=listed))
    loaded = replace(loaded, evaluation=replace(loaded.evaluation, videos=videos))
    found = build.evaluate_checkpoint(loaded, folder, step)
    write_json(evaluation_file(folder.path, found), found)
    return found


def evaluation_file(run: str | Path | Run, found: Evaluation) -> Path:
    """Where `evaluate` stores what it found: `evaluations/eval_step_000020_50_seeds_1a2b3c4d.json` of the run.

    The run's own evaluations are `step_000020.json` there. The last part stands for the protocol, so another one never
    takes the place of this one, and the same one gives the same numbers. `read_evaluation` reads both kinds.
    """
    folder, _ = _checkpoint_of(run, None)
    mark = hashlib.sha256(json.dumps(found.protocol, sort_keys=True).encode()).hexdigest()[:8]
    return folder.evaluations / f"eval_step_{found.step:06d}_{len(found.episodes)}_seeds_{mark}.json"


def show(*runs: str | Path) -> str:
    """A summary of runs for a terminal."""
    from m2flow.observe.show import show as summary

    return summary([Path(run) for run in runs])


def ls(root: str | Path = "runs") -> str:
    """The runs under a folder, as a table."""
    from m2flow.observe.show import ls as listing

    return listing(Path(root))


def report(*runs: str | Path, out: str | Path | None = None, metric: str | None = None) -> Path:
    """One self-contained HTML page about one or several runs: by default the run's own, or one beside the first run.

    With a `metric`, an SVG file of its curve, by default beside the first run.
    """
    from m2flow.observe.picture import write_curve
    from m2flow.observe.report import write_report

    folders = [Path(run) for run in runs]
    if metric is not None:
        return write_curve(folders, metric, out or folders[0].resolve().parent / f"{metric.replace('/', '-')}.svg")
    if out is None and folders:
        first = folders[0]
        several = first.resolve().parent / f"{first.resolve().name}-and-{len(folders) - 1}-more.html"
        out = several if len(folders) > 1 else RunFolder(first).report
    return write_report(folders, Path(out or ""))


def describe(recipe: Source, *overrides: str) -> str:
    """A recipe filled in, as YAML with a meaning beside every key: what `m2flow config` prints."""
    from m2flow.scaffold import commented

    return commented(load(recipe, *overrides))


def init(
    path: str | Path = "recipe.yaml", *overrides: str, start: str | Sequence[str] | None = None, force: bool = False
) -> Path:
    """Write a commented recipe to begin with. `start`: "env/policy/objective", each may be left out from the end."""
    from m2flow.scaffold import init_text

    file = Path(path)
    if "=" in str(path):
        raise ValueError(f"init: the first word is the file to write, and {str(path)!r} looks like a change of a key")
    if file.exists() and not force:
        raise FileExistsError(f"{file} exists; choose another name, or --force to overwrite it")
    text = init_text(start, str(file), *overrides)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def awaited(recipe: str | Path) -> tuple[str, ...]:
    """Files of rows that a recipe names and that are not there yet."""
    from m2flow import scaffold

    return scaffold.awaited(load(recipe))


def diagnose(root: str | Path = "runs") -> list[Finding]:
    """What this machine has and what is wrong, line by line: what `m2flow doctor` prints."""
    from m2flow.doctor import examine

    return examine(Path(root))


def _refuse_if_alive(folder: RunFolder) -> None:
    """Two processes must not write one run folder: each would delete what the other is saving."""
    from m2flow.observe.rundata import boot_id

    status = read_json(folder.status) or {}
    pid = status.get("pid")
    if status.get("state") != "running" or status.get("boot") != boot_id() or pid in (None, os.getpid()):
        return
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return
    raise ValueError(f"resume: {folder.path} is still running as process {pid}; stop it first, or wait for its end")


def _session(ready: Prepared, folder: RunFolder, quiet: bool, saved: Any = None) -> Session:
    return Session(
        ready.recipe,
        folder,
        ready.cluster,
        ready.flow,
        ready.plan,
        ready.spec,
        quiet,
        saved=saved,
        parts=ready.parts,
        notes=ready.notes,
    )


def _finish(session: Session) -> Run:
    try:
        session.execute()
    finally:
        if session.recipe.observe.report and session.folder.status.exists():
            report(session.folder.path, out=session.folder.report)
    return Run(session.folder.path)


def _stored(folder: RunFolder, *overrides: str) -> Recipe:
    """The resolved recipe of a run, with changes."""
    data = read_json(folder.config)
    if not isinstance(data, Mapping):
        what = "null" if data is None else type(data).__name__
        raise ValueError(f"{folder.config}: holds {what} and no recipe, so there is nothing to go by")  # noqa: TRY004
    return load(data, *overrides)


def distinct(seeds: Sequence[int]) -> None:
    """Raise ValueError where a seed is asked for twice: the second run would only be the first one again."""
    twice = sorted({seed for seed in seeds if seeds.count(seed) > 1})
    if twice:
        raise ValueError(f"--seed: {', '.join(map(str, twice))} given more than once; the runs would be the same run")


def _plan_override(plan: str | None) -> tuple[str, ...]:
    return () if plan is None else (f"plan={plan}",)


def _new_folder(recipe: Recipe) -> Path:
    """runs/<name>-seed<seed>-<time>, with a number behind it where that exists."""
    stem = f"{recipe.name}-seed{recipe.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = Path(recipe.run_dir) / stem
    number = 2
    while path.exists():
        path = Path(recipe.run_dir) / f"{stem}-{number}"
        number += 1
    return path


def _text_of(source: Source, recipe: Recipe) -> str:
    """The recipe as given where that is a file, else the resolved one."""
    return find(source).read_text(encoding="utf-8") if isinstance(source, str | Path) else dump_yaml(recipe)


def _checkpoint_of(run: str | Path | Run, step: int | None) -> tuple[RunFolder, int | None]:
    """The run, and the step of the checkpoint that was named: by `step`, or by its folder."""
    path = (run.path if isinstance(run, Run) else Path(run)).absolute()
    named = re.fullmatch(r"step_(\d+)", path.name)
    owner = RunFolder(path.parents[1]) if len(path.parents) > 1 else None
    if named is None or owner is None or owner.checkpoints != path.parent:
        return _folder_of(run), step
    if step not in (None, int(named[1])):
        raise ValueError(f"step: {step}, but {path} is the checkpoint of step {int(named[1])}; give one of the two")
    return _folder_of(path.parents[1]), int(named[1])


def _folder_of(run: str | Path | Run) -> RunFolder:
    path = run.path if isinstance(run, Run) else Path(run)
    folder = RunFolder(path)
    if not folder.config.exists():
        raise FileNotFoundError(f"{path}: no run here (no config.json); `m2flow ls` lists runs")
    return folder
