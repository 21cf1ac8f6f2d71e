"""Where metric rows go: JSONL always, TensorBoard by default, Weights & Biases and SwanLab by name.

A recorder is any class built as `Class(target: Target)` with `log(step, metrics)` and `close()` (the Recorder
protocol). Third-party packages are imported when a recorder is built, never before.
"""

from __future__ import annotations

import importlib
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from m2flow import registry
from m2flow.observe.jsonl import Appender, encode, keep_until
from m2flow.observe.layout import RunFolder, read_json, write_json
from m2flow.observe.metrics import METRICS


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a recorder may know of the run it records. `resume_step`: the last step whose rows stay; None: a new run."""

    folder: RunFolder
    project: str = "m2flow"
    name: str = ""
    offline: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    resume_step: int | None = None

    @property
    def run_name(self) -> str:
        """The name given, else that of the run folder."""
        return self.name or self.folder.path.resolve().name


class JsonlRecorder:
    """`metrics.jsonl`: one JSON object per row, {"step", "time" (Unix seconds), name: number, ...}, on disk when `log`
    returns.

    NaN is null and infinities are "Infinity" / "-Infinity" (see `m2flow.observe.jsonl`). On resume, rows of later steps
    than the resumed one are dropped first: those steps will be done again. A new run refuses a file that has rows.
    """

    def __init__(self, target: Target) -> None:
        path = target.folder.metrics
        if target.resume_step is not None:
            keep_until(path, target.resume_step)
        elif path.exists() and path.stat().st_size:
            raise ValueError(
                f"{path}: holds rows of an earlier run; resume that run (`m2flow resume {target.folder.path}`) or"
                " choose"
                " another run folder"
            )
        self._file = Appender(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row."""
        self._file.write({"step": int(step), "time": time.time(), **metrics})

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardRecorder:
    """Scalars for TensorBoard in `<run>/tensorboard`, written with the tensorboard package alone (torch is not
    imported).

    On resume a START event tells TensorBoard to forget what came after the resumed step.
    """

    def __init__(self, target: Target) -> None:
        writer = _module("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._event = _module("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summary = _module("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._writer = writer.EventFileWriter(str(target.folder.path / "tensorboard"), flush_secs=10)
        if target.resume_step is not None:
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._writer.add_event(
                self._event.Event(wall_time=time.time(), step=target.resume_step + 1, session_log=start)
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One event with a scalar per metric."""
        values = [self._summary.Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        summary = self._summary.Summary(value=values)
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=int(step), summary=summary))

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbRecorder:
    """Weights & Biases, online or offline (`wandb sync <run>/wandb/offline-*` sends it later).

    The id is kept in `recorders.json`, so that a resumed run continues the same curve. `WANDB_*` variables work as
    ever.
    """

    def __init__(self, target: Target) -> None:
        wandb = _module("wandb", "wandb")
        resuming = target.resume_step is not None and not target.offline
        self._run = wandb.init(
            project=target.project,
            name=target.run_name,
            dir=str(target.folder.path),
            id=_tracker_id(target, "wandb"),
            resume="allow" if resuming else None,
            mode="offline" if target.offline else None,
            config=encode(target.config),
            settings={"console": "off"},  # console capture would garble the progress bar
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row. The step is given, so steps done again after a resume do not shift the curve."""
        self._run.log(dict(metrics), step=int(step))

    def close(self) -> None:
        """Upload the rest and finish."""
        self._run.finish()


class SwanlabRecorder:
    """SwanLab, online or offline (kept under `<run>/swanlab`; `swanlab sync` sends it later)."""

    def __init__(self, target: Target) -> None:
        swanlab = _module("swanlab", "swanlab")
        resuming = target.resume_step is not None and not target.offline
        folder = target.folder.path / "swanlab"
        folder.mkdir(parents=True, exist_ok=True)
        self._run = swanlab.init(
            project=target.project,
            name=target.run_name,
            log_dir=str(folder),
            id=_tracker_id(target, "swanlab"),
            resume="allow" if resuming else None,
            mode="offline" if target.offline else None,
            config=encode(target.config),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row."""
        self._run.log(dict(metrics), step=int(step))

    def close(self) -> None:
        """Upload the rest and finish."""
        self._run.finish()


class MultiRecorder:
    """Hands every row to all recorders, after the metric registry has checked its names.

    A failing recorder does not keep the row from the others; the first failure is raised when all have been served.
    """

    def __init__(self, recorders: Sequence[Any]) -> None:
        self.recorders = tuple(recorders)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row of reduced metrics. An undeclared name is an error under M2FLOW_STRICT_METRICS=1, else one
        warning."""
        for name in metrics:
            METRICS.check(name)
        self._each(lambda recorder: recorder.log(step, metrics))

    def close(self) -> None:
        """Close all."""
        self._each(lambda recorder: recorder.close())

    def _each(self, action: Callable[[Any], None]) -> None:
        first: Exception | None = None
        for recorder in self.recorders:
            try:
                action(recorder)
            except Exception as error:  # noqa: BLE001 - raised below, when every recorder has been served
                if first is None:
                    first = error
        if first is not None:
            raise first


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveConfig:
    """What is recorded of a run, and where. JSONL is always written, whether named or not."""

    recorders: tuple[str, ...] = ("tensorboard",)  # besides JSONL: tensorboard | wandb | swanlab, or one of your own
    project: str = "m2flow"  # project in trackers
    name: str = ""  # of the run in trackers; empty: the name of the run folder
    offline: bool = False  # trackers write files only
    trace: bool = True  # write trace.jsonl and trace.json
    progress: bool = True  # progress bar, or plain lines where there is no terminal
    log_every: int = 1  # steps between metric rows
    report: bool = True  # write report.html at the end
    samples_every: int = 1  # training steps between tables of samples of a language model; 0: none

    def __post_init__(self) -> None:
        object.__setattr__(self, "recorders", tuple(self.recorders))
        for name in self.recorders:
            if not isinstance(name, str) or not name:
                known = ", ".join(registry.names("recorder"))
                raise ValueError(f"recorders: {name!r} is no recorder name; allowed: {known}")
        if len(set(self.recorders)) != len(self.recorders):
            raise ValueError(f"recorders: {list(self.recorders)} names one twice")
        if not re.fullmatch(r"[^/\\#?%:]{1,128}", self.project):
            raise ValueError(f"project: {self.project!r}; allowed: 1 to 128 characters without / \\ # ? % :")
        if self.samples_every < 0:
            raise ValueError(f"samples_every: {self.samples_every}; allowed: 0 or more")
        if self.log_every < 1:
            raise ValueError(f"log_every: {self.log_every}; allowed: 1 or more")

    def build(
        self,
        run_dir: Path,
        config: Mapping[str, Any] | None = None,
        resume_step: int | None = None,
    ) -> MultiRecorder:
        """Open all recorders of a run.

        `config` is the resolved configuration, shown by trackers. `resume_step`: the last step whose rows stay when a
        run is resumed, later ones are dropped; None for a new run. Raises ValueError for an unknown name and for a
        missing package, naming the extra to install.
        """
        target = Target(
            folder=RunFolder(Path(run_dir)),
            project=self.project,
            name=self.name,
            offline=self.offline,
            config=config or {},
            resume_step=resume_step,
        )
        opened: list[Any] = []
        try:
            for name in ("jsonl", *(name for name in self.recorders if name != "jsonl")):
                build = registry.resolve("recorder", name)
                opened.append(build(target))
        except BaseException:
            with _keeping_the_first_error():
                MultiRecorder(opened).close()
            raise
        return MultiRecorder(opened)


@contextmanager
def _keeping_the_first_error() -> Iterator[None]:
    """Closing what was opened must not hide why opening failed."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - printed: it is the second error, the first is being raised
        print(f"while closing recorders: {type(error).__name__}: {error}")


def _module(name: str, extra: str) -> Any:
    """Import a third-party module, or say which extra brings it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        top = name.partition(".")[0]
        if (error.name or "").partition(".")[0] != top:
            raise ValueError(f"recorders: {extra!r} is installed but broken: {error}") from error
        raise ValueError(
            f"recorders: {extra!r} needs the package {top!r}, which is not installed; run: pip install"
            f" 'm2flow[{extra}]',"
            f" or remove {extra!r} from observe.recorders"
        ) from error


def _tracker_id(target: Target, tracker: str) -> str:
    """The id of this run in a tracker: made once, kept in the run folder, used again on resume."""
    path = target.folder.recorders
    known: dict[str, str] = read_json(path) or {}
    if target.resume_step is None or tracker not in known:
        known[tracker] = uuid.uuid4().hex[:12]
        write_json(path, known)
    return known[tracker]
