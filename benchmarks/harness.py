"""How a group of cases is measured: in turn, in fresh processes, round by round, every value kept on disk."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

REPO = Path(__file__).parents[1]
Value = dict[str, Any]  # what a case gives: "value", and whatever else it knows
Rounds = list[dict[str, Value]]  # case -> value, one dict a round
JOB_LIMIT = 3600.0  # seconds that one job may take

# One thread for everybody, and no GPU. XLA would use every core otherwise.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "CUDA_VISIBLE_DEVICES": "",
}


class JobFailed(RuntimeError):
    """A measured process ended without a result."""


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that is measured. `run(seed)` does it once, in a process of its own."""

    name: str
    what: str
    run: Callable[[int], Value]
    command: str


@dataclass(frozen=True, slots=True)
class Ratio:
    """Two cases of one round compared: `a / b`, `a / b - 1` (excess) or `a - b`. The median over rounds counts.

    Of several `b`, joined by " or ", the one with the largest value in that round counts.
    """

    what: str
    a: str
    b: str
    bar: float | None = None
    most: bool = False  # the bar is what it may be at most, else at least
    kind: Literal["times", "share", "excess", "difference"] = "times"
    # what is compared: the values, the quickest iteration of each (which others disturb least), or CPU seconds
    by: Literal["value", "quickest", "cpu"] = "value"

    @property
    def others(self) -> list[str]:
        """The cases that `a` is compared with."""
        return self.b.split(" or ")

    def of(self, values: Mapping[str, Value]) -> float:
        """The comparison in one round."""
        others = [values[name] for name in self.others]
        best = others[0] if len(others) == 1 else max(others, key=lambda side: float(side["value"]))
        sides = (values[self.a], best)
        if self.by == "quickest":
            a, b = (1.0 / min(side["iteration_cpu_s"]) for side in sides)
        elif self.by == "cpu":
            a, b = (side.get("cpu_s", 0.0) for side in sides)  # "nothing" takes none
        else:
            a, b = (side["value"] for side in sides)
        if self.kind == "difference":
            return float(a - b)
        return float(a / b - 1.0 if self.kind == "excess" else a / b)

    def show(self, value: float) -> str:
        """For people."""
        if self.kind in ("share", "excess"):
            return f"{100 * value:.1f} %"
        return f"{value:.2f}{' s' if self.kind == 'difference' else 'x'}"


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that are measured in turn. `work` is what each of them is given to do."""

    name: str
    title: str
    unit: str
    cases: tuple[Case, ...]
    ratios: tuple[Ratio, ...]
    work: Mapping[str, Any] = field(default_factory=dict)


# ---- processes


def one_thread(**extra: str) -> dict[str, str]:
    """The environment variables of a measured process."""
    return {**os.environ, **ONE_THREAD, "PYTHONPATH": str(REPO), **extra}


def job(python: str | Path, module: str, settings: Mapping[str, Any]) -> Value:
    """Run `python -m module settings` and return what it answers.

    Raises:
        JobFailed: it ended without an answer, or took too long; the end of its output is in the message.
    """
    shown = f"{module} {json.dumps(dict(settings))}"
    command = [str(python), "-m", module, json.dumps(dict(settings))]
    try:
        done = subprocess.run(
            command, cwd=REPO, env=one_thread(), capture_output=True, text=True, check=False, timeout=JOB_LIMIT
        )
    except subprocess.TimeoutExpired as error:
        raise JobFailed(f"{shown} took longer than {JOB_LIMIT:g} s") from error
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            value: Value = json.loads(line.removeprefix("RESULT "))
            return value
    raise JobFailed(f"{shown} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")


# ---- rounds


class Store:
    """The rounds of a group on disk. An interrupted measurement goes on where it was."""

    def __init__(self, path: Path, group: Group, command: str, fresh: bool) -> None:
        self.path, self.group, self.command = path, group, command
        found = read(path)
        same = found is not None and found["work"] == dict(group.work)
        self.rounds: Rounds = found["rounds"] if found is not None and same and not fresh else []

    def write(self) -> None:
        """Values, their summary, and what they were measured with."""
        group = self.group
        write(
            self.path,
            {
                "name": group.name,
                "title": group.title,
                "unit": group.unit,
                "command": self.command,
                "written": now(),
                "machine": machine(),
                "work": dict(group.work),
                "commands": {case.name: case.command for case in group.cases},
                **summary(group, self.rounds),
                "rounds": self.rounds,
            },
        )


def measure(group: Group, store: Store, rounds: int, tell: Callable[[str], None]) -> None:
    """Fill the store up to `rounds` rounds. Every other round runs the cases backwards, so that drift cancels."""
    head = commit()
    for number in range(rounds):
        if number == len(store.rounds):
            store.rounds.append({})
        values = store.rounds[number]
        for case in group.cases if number % 2 == 0 else group.cases[::-1]:
            if case.name in values:
                continue
            load = round(os.getloadavg()[0], 2)
            value = case.run(number)
            values[case.name] = value | {"seed": number, "load": load, "at": now(), "commit": head}
            tell(f"[bench]   round {number + 1} {case.name}: {value['value']:.4g} {group.unit}")
            store.write()


def summary(group: Group, rounds: Rounds) -> dict[str, Any]:
    """Medians and spreads of cases and ratios, over the rounds that have them."""
    cases = {}
    for case in group.cases:
        values = [values[case.name]["value"] for values in rounds if case.name in values]
        if values:
            cases[case.name] = {"what": case.what, "rounds": len(values)} | spread(values)
    ratios = []
    for ratio in group.ratios:
        values = [ratio.of(values) for values in rounds if values.keys() >= {ratio.a, *ratio.others}]
        if values:
            found = spread(values)
            met = None if ratio.bar is None else (found["median"] <= ratio.bar) == ratio.most
            if ratio.bar is not None and found["median"] == ratio.bar:
                met = True
            ratios.append(
                {"what": ratio.what, "a": ratio.a, "b": ratio.b, "kind": ratio.kind}
                | found
                | {"bar": ratio.bar, "bar_is": "at most" if ratio.most else "at least", "met": met}
            )
    return {"cases": cases, "ratios": ratios}


def table(group: Group, rounds: Rounds) -> str:
    """The summary for people, as Markdown."""
    found = summary(group, rounds)
    lines = [
        f"### {group.title}",
        "",
        f"| {group.unit} | median | smallest | largest | rounds |",
        "|---|---|---|---|---|",
    ]
    for name, case in found["cases"].items():
        numbers = " | ".join(f"{case[key]:,.0f}" if case["max"] >= 100 else f"{case[key]:.2f}" for key in SPREAD)
        lines.append(f"| {name}: {case['what']} | {numbers} | {case['rounds']} |")
    lines += ["", "| comparison | median | smallest | largest | bar | |", "|---|---|---|---|---|---|"]
    shown = {ratio.what: ratio for ratio in group.ratios}
    for row in found["ratios"]:
        ratio = shown[row["what"]]
        bar = "-" if ratio.bar is None else f"{row['bar_is']} {ratio.show(ratio.bar)}"
        verdict = {True: "met", False: "**missed**", None: ""}[row["met"]]
        lines.append(f"| {ratio.what} | {' | '.join(ratio.show(row[key]) for key in SPREAD)} | {bar} | {verdict} |")
    return "\n".join(lines) + "\n"


# ---- small things


SPREAD = ("median", "min", "max")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def now() -> str:
    """UTC, to the second."""
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"{platform.system()} {platform.machine()}"
    cores = os.cpu_count()
    return {
        "cpu": model,
        "cores": cores,
        "memory_gib": round(memory),
        "system": system,
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit of the product, with + where its files differ from it."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPO, capture_output=True, text=True, check=False)
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "m2flow"], cwd=REPO, check=False).returncode
    return head.stdout.strip() + ("+" if changed else "") if head.returncode == 0 else "unknown"


def read(path: Path) -> dict[str, Any] | None:
    """A stored result, or None where there is none."""
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Store a result in one move: an interruption leaves the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
