"""The tables of a report: what ran, results before and after, alarms, sample episodes, videos, and how to repeat it.

Everything that comes from a run folder is text and passes `escape`; only this package's own markup does not.
"""

from __future__ import annotations

import base64
import json
import math
import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from m2flow.observe.rundata import (
    NONE,
    RunData,
    headline,
    interval,
    show_gain,
    show_interval,
    show_number,
    show_seconds,
)
from m2flow.observe.svg import spark
from m2flow.types import Evaluation

MAX_EPISODES = 10
MAX_CURVES = 4
MAX_VIDEOS = 4  # per run
MAX_VIDEO_BYTES = 24 * 1024 * 1024  # in the whole page
NO_VIDEOS = "No videos were asked for; `evaluation.videos: 1` in a recipe films one episode of each evaluation."
HOW_TO_GET_VIDEOS = "No video was finished. They need OpenGL on this machine; `m2flow doctor` says what is missing."


def _dig(tree: Mapping[str, Any], *path: str) -> Any:
    for key in path:
        tree = tree.get(key) if isinstance(tree, Mapping) else None  # type: ignore[assignment]
    return tree


def what_ran(run: RunData) -> list[tuple[str, str]]:
    """(what, value) pairs that say in one line what a run is."""
    config, env = run.config, run.env
    task = next((v for k in ("task", "id", "name") if isinstance(v := _dig(config, "env", k), str)), None)
    steps = run.status.get("steps", config.get("steps"))
    done = NONE if run.step is None else f"{run.step:,}"
    env_steps = run.curves.get("progress/env_steps") or run.curves.get("rollout/env_steps")
    counted = math.nan
    if env_steps is not None:
        finite = [v for v in env_steps.values if math.isfinite(v)]
        counted = finite[-1] if "progress/env_steps" in run.curves and finite else sum(finite)
    plan = config.get("plan")
    facts = [
        ("task", task),
        ("algorithm", _dig(config, "objective", "name")),
        ("policy", _dig(config, "policy", "name")),
        ("plan", plan if isinstance(plan, str) else None),
        ("steps", f"{done} of {steps:,}" if isinstance(steps, int) else done),
        (run.acts, None if math.isnan(counted) else show_number(counted)),
        ("wall time", show_seconds(run.seconds)),
        ("cores", _dig(env, "machine", "cores")),
        ("GPUs", ", ".join(gpus) if isinstance(gpus := _dig(env, "machine", "gpus"), list) else None),
    ]
    return [(name, str(value)) for name, value in facts if value not in (None, "")]


def header(runs: Sequence[RunData], problems: Sequence[str]) -> str:
    """Title, the state of each run, what ran, and what went wrong."""
    names = list(dict.fromkeys(str(run.config.get("name") or run.name) for run in runs))
    facts = what_ran(runs[0])
    if len(runs) > 1:
        seeds = ", ".join(NONE if run.seed is None else str(run.seed) for run in runs)
        facts = [f for f in facts if f[0] not in ("wall time", runs[0].acts, "steps")] + [("seeds", seeds)]
    elif runs[0].seed is not None:
        facts.append(("seed", str(runs[0].seed)))
    cells = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts)
    badges = "".join(
        f'<span class="badge s-{escape(run.state)}">'
        f"{escape(f'{run.label}: {run.state}' if len(runs) > 1 else run.state)}</span>"
        for run in runs
    )
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    boxes = "".join(_banner(run, len(runs) > 1) for run in runs)
    if problems:
        items = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
        boxes += f'<div class="box warn"><strong>Could not be read</strong><ul>{items}</ul></div>'
    return (
        f"<header><h1>{escape(', '.join(names))}</h1><p>{badges}<span class='dim'>report of {written}</span></p>"
        f"<dl>{cells}</dl>{boxes}</header>"
    )


def _banner(run: RunData, several: bool) -> str:
    who = f"{run.label}: " if several else ""
    if run.state in ("failed", "died"):
        error = (
            run.status.get("error") or "the process is gone without a word (killed?); see the logs of the run folder"
        )
        head = f"{who}{'failed' if run.state == 'failed' else 'died'} at step {run.step}"
        return f'<div class="box bad"><strong>{escape(head)}</strong><pre>{escape(str(error))}</pre></div>'
    if run.state == "stopped":
        reason = escape(str(run.status.get("reason") or ""))
        return f'<div class="box warn"><strong>{escape(who)}stopped early</strong> {reason}</div>'
    if run.state == "running":
        return f'<div class="box info">{escape(who)}still running when this was written</div>'
    return ""


def results(runs: Sequence[RunData]) -> str:
    """Evaluation before and after training, per run, with 95 % intervals, and the mean over runs."""
    metrics = headline(runs)
    if not metrics:
        return '<section id="results"><h2>Result</h2><p class="empty">No evaluation has finished yet.</p></section>'
    head1 = "".join(f'<th colspan="2" class="num group">{escape(m)}</th>' for m in metrics)
    head2 = "".join('<th class="num group">before</th><th class="num">after</th>' for _ in metrics)
    rows = "".join(
        f"<tr><td>{escape(run.label)}</td>{''.join(_pair(run, m) for m in metrics)}"
        f"<td class='num group'>{_at(run)}</td><td class='num'>{show_seconds(run.seconds)}</td></tr>"
        for run in runs
    )
    if len(runs) > 1:
        cells = "".join(_mean_cells(runs, m) for m in metrics)
        rows += (
            f"<tr class='total'><td class='name'>mean of {len(runs)}</td>{cells}<td class='group'></td><td></td></tr>"
        )
    return (
        f'<section id="results"><h2>Result</h2><div class="scroll"><table><thead><tr><th></th>{head1}'
        f'<th class="num group">after</th><th class="num">wall</th></tr><tr><th>run</th>{head2}'
        f'<th class="num group">step</th><th class="num">time</th></tr></thead><tbody>{rows}</tbody></table></div>'
        f"{_gains(runs, metrics[0])}{_protocol(runs)}</section>"
    )


def _gains(runs: Sequence[RunData], metric: str) -> str:
    """Change of the first number, episode by episode."""
    told = [(run.label, show_gain(run, metric)) for run in runs]
    return "".join(f'<p class="note">Gain, {escape(label)}: {escape(text)}.</p>' for label, text in told if text)


def _at(run: RunData) -> str:
    return NONE if run.after is None else f"{run.after.step:,}"


def _pair(run: RunData, metric: str) -> str:
    return _cell(run.before, metric, "group") + _cell(run.after, metric, "strong")


def _cell(evaluation: Evaluation | None, metric: str, style: str) -> str:
    if evaluation is None or metric not in evaluation.metrics:
        return f'<td class="num {style}">{NONE}</td>'
    between = show_interval(interval(evaluation, metric), metric)
    small = f"<small>{escape(between)}</small>" if between else ""
    return f'<td class="num {style}">{escape(show_number(evaluation.metrics[metric], metric))}{small}</td>'


def _mean_cells(runs: Sequence[RunData], metric: str) -> str:
    out = []
    for which, style in (("before", "group"), ("after", "strong")):
        found = [e.metrics[metric] for run in runs if (e := getattr(run, which)) is not None and metric in e.metrics]
        text = show_number(sum(found) / len(found), metric) if found else NONE
        span = (
            f"<small>{show_number(min(found), metric)} to {show_number(max(found), metric)}</small>"
            if len(found) > 1
            else ""
        )
        out.append(f'<td class="num {style}">{escape(text)}{span}</td>')
    return "".join(out)


def _protocol(runs: Sequence[RunData]) -> str:
    seen = list(
        dict.fromkeys(json.dumps(e.protocol, sort_keys=True) for run in runs for e in run.evaluations if e.protocol)
    )
    if not seen:
        return ""
    lines = []
    for text in seen[:3]:
        protocol = json.loads(text)
        lines.append("; ".join(f"{k}: {brief(v)}" for k, v in protocol.items()))
    return "".join(f'<p class="note">Protocol: {escape(line[:600])}. Small: 95 % interval.</p>' for line in lines)


def brief(value: Any) -> str:
    """A value in few words: a run of whole numbers as its ends, long lists cut."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) > 3:
        first, last = value[0], value[-1]
        if all(isinstance(v, int) for v in value) and value == list(range(first, last + 1)):
            return f"{first} to {last}"
        return f"{', '.join(map(brief, value[:3]))}, ... ({len(value)} in all)"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {brief(v)}" for k, v in value.items())
    return json.dumps(value)


def alarms(runs: Sequence[RunData]) -> str:
    """All alarms, or one line that there were none."""
    rows = "".join(
        f"<tr><td>{escape(run.label)}</td><td class='num'>{escape(str(a.get('step', '')))}</td>"
        f"<td><span class='badge a-{escape(str(a.get('action', '')))}'>{escape(str(a.get('action', '')))}</span></td>"
        f"<td>{escape(str(a.get('kind', '')))}</td><td>{escape(str(a.get('text', '')))}</td></tr>"
        for run in runs
        for a in run.alarms[-50:]
    )
    if not rows:
        return '<section id="alarms"><h2>Alarms</h2><p class="empty">None.</p></section>'
    head = (
        "<tr><th>run</th><th class='num'>step</th><th>action</th><th>kind</th><th>what, and what to look at</th></tr>"
    )
    return f'<section id="alarms"><h2>Alarms</h2><table class="top">{head}{rows}</table></section>'


def pick(episodes: Sequence[Mapping[str, Any]], limit: int = MAX_EPISODES) -> list[Mapping[str, Any]]:
    """A sample to show: episodes with a video or stored steps first, the others evenly from worst to best return."""
    rich = [e for e in episodes if e.get("video") or e.get("steps")][:limit]
    others = sorted(
        (e for e in episodes if not (e.get("video") or e.get("steps"))), key=lambda e: float(e.get("ret") or 0)
    )
    room = min(limit - len(rich), len(others))
    spread = [others[round(i * (len(others) - 1) / max(1, room - 1))] for i in range(room)]
    return [*rich, *spread]


def episodes(runs: Sequence[RunData]) -> str:
    """Sample episodes of each run's latest evaluation, with curves where steps were stored."""
    parts = [_episode_table(run) for run in runs if run.evaluations and run.evaluations[-1].episodes]
    if not parts:
        return ""
    folded = (f"<details{'' if i else ' open'}>{part}</details>" for i, part in enumerate(parts))
    return f'<section id="episodes"><h2>Sample episodes</h2>{"".join(folded)}</section>'


def _episode_table(run: RunData) -> str:
    evaluation = run.evaluations[-1]
    shown = pick(evaluation.episodes)
    names = list(dict.fromkeys(n for e in shown for n in (e.get("steps") or {})))
    names = [n for n in names if any(_numbers(e, n) for e in shown)][:MAX_CURVES]
    rows = []
    for e in shown:
        success = e.get("success_once")
        mark = NONE if success is None else ("yes" if success else "no")
        style = "" if success is None else f"ok-{mark}"
        curves = "".join(f"<td>{spark(_numbers(e, n), i)}</td>" for i, n in enumerate(names))
        ret = e.get("ret")
        rows.append(
            f"<tr><td class='num'>{escape(str(e.get('seed', NONE)))}</td><td class='{style}'>{mark}</td>"
            f"<td class='num'>{escape(show_number(float(ret))) if isinstance(ret, (int, float)) else NONE}</td>"
            f"<td class='num'>{escape(str(e.get('length', NONE)))}</td>{curves}</tr>"
        )
    heads = "".join(f"<th>{escape(n)}</th>" for n in names)
    head = (
        "<tr><th class='num'>seed</th><th>success</th><th class='num'>return</th>"
        f"<th class='num'>length</th>{heads}</tr>"
    )
    title = f"{run.label}, after step {evaluation.step:,}: {len(shown)} of {len(evaluation.episodes)} episodes"
    table = f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>'
    return f"<summary>{escape(title)}</summary>{table}"


def _numbers(episode: Mapping[str, Any], name: str) -> list[float]:
    values = (episode.get("steps") or {}).get(name)
    if not isinstance(values, list) or not all(v is None or isinstance(v, (int, float)) for v in values):
        return []
    return [math.nan if v is None else float(v) for v in values]


def videos(runs: Sequence[RunData]) -> str:
    """Videos inside the page, newest evaluation first, or a line that says how to get them."""
    cards, room, left_out = [], MAX_VIDEO_BYTES, 0
    for run in runs:
        files = run.videos()
        for file in files[:MAX_VIDEOS]:
            size = file.stat().st_size
            if size > room:
                left_out += 1
                continue
            room -= size
            data = base64.b64encode(file.read_bytes()).decode("ascii")
            caption = f"{run.label}: {_caption(run, file.name)}" if len(runs) > 1 else _caption(run, file.name)
            cards.append(
                f'<figure class="card"><video controls muted loop playsinline preload="metadata"'
                f' src="data:video/mp4;base64,{data}"></video>'
                f"<figcaption>{escape(caption)}</figcaption></figure>"
            )
        left_out += max(0, len(files) - MAX_VIDEOS)
    if not cards:
        reasons = {r.folder.no_videos.read_text(encoding="utf-8").strip() for r in runs if r.folder.no_videos.exists()}
        asked = any(_dig(run.config, "evaluation", "videos") for run in runs)
        text = " ".join(sorted(filter(None, reasons))) or (HOW_TO_GET_VIDEOS if asked else NO_VIDEOS)
        if left_out:
            text = f"{left_out} videos are too large for this page; they are in the videos folder of each run."
        return f'<section id="videos"><h2>Videos</h2><p class="empty">{escape(text)}</p></section>'
    more = f'<p class="note">{left_out} more in the videos folder of each run.</p>' if left_out else ""
    return f'<section id="videos"><h2>Videos</h2><div class="grid three">{"".join(cards)}</div>{more}</section>'


def _caption(run: RunData, video: str) -> str:
    """What the filmed episode was, where an evaluation says so, else the file name."""
    for evaluation in run.evaluations:
        for e in evaluation.episodes:
            if e.get("video") == video:
                success = {True: ", success", False: ", no success"}.get(e.get("success_once"), "")  # type: ignore[arg-type]
                ret = f", return {show_number(float(e['ret']))}" if isinstance(e.get("ret"), (int, float)) else ""
                return f"after step {evaluation.step:,}, seed {e.get('seed')}{success}{ret}"
    return video


def _section(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = tree.get(key)
    return found if isinstance(found, Mapping) else {}


def _command(env: Mapping[str, Any]) -> str:
    return " ".join(map(str, env.get("command", [])))


def setup(runs: Sequence[RunData]) -> str:
    """Commands, versions, git state and machine of the first run; recipe and resolved configuration of every run,
    folded. A resumed run is repeated by the command it began with, and by those that continued it."""
    env = runs[0].env
    earlier = env.get("resumed_from")
    first, *resumed = [*(e for e in earlier if isinstance(e, Mapping)), env] if isinstance(earlier, list) else [env]
    packages, git, machine = (_section(env, key) for key in ("packages", "git", "machine"))
    memory = machine.get("memory_bytes")
    rows = [
        ("command", _command(first)),
        ("continued by", "; ".join(filter(None, map(_command, resumed)))),
        ("seeds", "; ".join(json.dumps(run.env["seeds"]) for run in runs if run.env.get("seeds"))),
        (
            "git",
            f"{git['commit']}{' with uncommitted changes' if git.get('dirty') else ''}" if git.get("commit") else "",
        ),
        ("python", str(machine.get("python", ""))),
        ("packages", ", ".join(f"{k} {v}" for k, v in packages.items())),
        ("machine", ", ".join(str(machine[k]) for k in ("os", "processor") if machine.get(k))),
        ("memory", f"{memory / 2**30:.1f} GiB" if isinstance(memory, (int, float)) else ""),
    ]
    table = "".join(f"<tr><th>{k}</th><td>{escape(v)}</td></tr>" for k, v in rows if v)
    folded = []
    for run in runs:
        for title, text in (
            ("recipe as given", run.recipe),
            ("resolved configuration", json.dumps(run.config, indent=2, ensure_ascii=False) if run.config else ""),
        ):
            if text:
                name = f"{run.label}: {title}" if len(runs) > 1 else title
                folded.append(f"<details><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>")
    return f'<section id="setup"><h2>How to repeat it</h2><table class="top">{table}</table>{"".join(folded)}</section>'
