"""The report: self-contained, complete, honest about what is missing, and safe against hostile text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from m2flow.observe import runinfo
from m2flow.observe.layout import RunFolder, read_json, write_json
from m2flow.observe.report import island, write_report
from m2flow.observe.report_curves import axes
from m2flow.observe.report_sections import HOW_TO_GET_VIDEOS, NO_VIDEOS, brief, pick
from m2flow.observe.report_timeline import KEEP_STEPS, gantt, gantt_svg, typical
from m2flow.observe.rundata import load_run, load_runs
from m2flow.observe.timeline import utilisation
from m2flow.observe.trace import Span
from tests.unit.observe.make_run import HOSTILE, make_run

VOID = {"meta", "input", "img", "br", "link"}


class Page(HTMLParser):
    """Collects tags, attributes and text, and checks that tags are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.setdefault(self.open[-1] if self.open else "", []).append(data)

    @property
    def words(self) -> str:
        return " ".join(part for tag, parts in self.text.items() if tag not in ("script", "style") for part in parts)

    @property
    def data(self) -> Any:
        return json.loads(next(part for part in self.text["script"] if part.startswith('{"charts"')))


def report(*folders: RunFolder, out: Path) -> Page:
    return Page(write_report([folder.path for folder in folders], out).read_text(encoding="utf-8"))


def test_a_finished_run_shows_everything(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", seed=5)
    page = report(folder, out=tmp_path / "report.html")
    for text in (
        "reach", "Reach-v1", "ppo", "finished", "12 of 12", "1,200",  # what ran
        "0 %", "90 %", "[59.6, 98.2] %", "suite: Reach-v1",  # result
        "train/policy_loss", "rollout/return", "training step", "environment steps",  # curves
        "rollout/0", "learner/0", "cpu:1", "time since the first span (s)",  # timeline
        "train/approx_kl is 2 nats",  # alarm
        "1000", NO_VIDEOS, "recipe as given", "resolved configuration", "m2flow train seed=5",
    ):  # fmt: skip
        assert text in page.words, text


def test_nothing_is_fetched_from_anywhere(tmp_path: Path) -> None:
    page = report(make_run(tmp_path / "r"), out=tmp_path / "report.html")
    for tag, attributes in page.tags:
        for name in ("src", "href", "data", "poster", "srcset", "action"):
            assert (attributes.get(name) or "data:").startswith(("data:", "#")), (tag, attributes)
        assert tag not in ("link", "iframe", "object", "embed", "base", "img")
    text = (tmp_path / "report.html").read_text()
    assert "@import" not in text
    assert "url(" not in text
    assert "http-equiv" not in text


def test_the_numbers_behind_the_curves_are_those_of_the_run(tmp_path: Path) -> None:
    page = report(make_run(tmp_path / "r"), out=tmp_path / "report.html")
    chart = page.data["charts"]["rollout/return step"]
    assert chart["series"] == [{"label": "seed 0", "c": 0, "x": list(range(12)), "y": [10.0 * i for i in range(12)]}]
    by_env = page.data["charts"]["rollout/return env"]["series"][0]["x"]
    assert by_env == [100.0 * (i + 1) for i in range(12)]
    assert page.data["charts"]["eval/success_once step"]["series"][0]["y"] == [0.0, 0.9]
    assert page.data["charts"]["train/explained_variance step"]["series"][0]["y"][0] is None


def test_several_seeds_are_overlaid_and_averaged(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / f"s{seed}", seed=seed, successes=(0, 8 + seed)) for seed in range(3)]
    page = report(*folders, out=tmp_path / "report.html")
    series = page.data["charts"]["rollout/success step"]["series"]
    assert [(s["label"], s["c"]) for s in series] == [("seed 0", 0), ("seed 1", 1), ("seed 2", 2)]
    assert "mean of 3" in page.words
    assert "80 % to 100 %" in page.words
    assert len(page.data["timelines"]) == 3
    assert "0, 1, 2" in page.words


@pytest.mark.parametrize("done", [0, 1, 3])
def test_a_run_that_is_still_going_is_reported_as_far_as_it_is(tmp_path: Path, done: int) -> None:
    page = report(make_run(tmp_path / "r", done=done, state="running"), out=tmp_path / "report.html")
    assert "still running" in page.words
    assert ("rollout/return" in page.words) == (done > 0)
    assert ("no step has finished yet" in page.words) == (done == 0)


def test_a_failed_run_shows_the_first_error(tmp_path: Path) -> None:
    error = "learner/0 on this host: ValueError: shapes (64, 39) and (40, 128)\nlog: logs/learner-0.log"
    page = report(make_run(tmp_path / "r", done=2, state="failed", error=error), out=tmp_path / "report.html")
    assert "failed at step 2" in page.words
    assert error in page.words


def test_an_empty_folder_and_broken_files_still_give_a_report(tmp_path: Path) -> None:
    empty = RunFolder(tmp_path / "empty").create()
    broken = make_run(tmp_path / "broken")
    broken.config.write_text("{")
    broken.trace.write_text("nonsense\n{}\n")
    page = report(empty, broken, out=tmp_path / "deep" / "report.html")
    assert "Could not be read" in page.words
    assert "config.json" in page.words
    assert "trace.jsonl:1" in page.words
    assert "unknown" in page.words


def test_no_run_and_a_missing_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run_dirs"):
        write_report([], tmp_path / "x.html")
    with pytest.raises(FileNotFoundError, match="no such run folder"):
        write_report([tmp_path / "none"], tmp_path / "x.html")
    assert list(tmp_path.iterdir()) == []


def test_text_from_the_run_cannot_become_markup(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", note=HOSTILE, state="failed", error=HOSTILE)
    folder.no_videos.write_text(HOSTILE)
    with folder.alarms.open("a") as file:
        file.write(json.dumps(dict.fromkeys(("step", "kind", "action", "text"), HOSTILE)) + "\n")
    with folder.trace.open("a") as file:
        row = {"stage": HOSTILE, "replica": 0, "device": HOSTILE, "step": 1, "start": 1, "end": 2, "kind": HOSTILE}
        file.write(json.dumps(row) + "\n")
    with folder.metrics.open("a") as file:
        file.write(json.dumps({"step": 1, "time": 1.0, f"x/{HOSTILE}": 1.0}) + "\n")
    page = report(folder, out=tmp_path / "report.html")
    clean = report(make_run(tmp_path / "clean", state="failed", error="x"), out=tmp_path / "clean.html")
    assert not any(tag == "img" for tag, _ in page.tags)
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert sum(tag == "script" for tag, _ in page.tags) == sum(tag == "script" for tag, _ in clean.tags) == 2
    assert HOSTILE in page.words
    assert any(HOSTILE in row for row in page.data["timelines"][0]["rows"])


def test_the_data_island_cannot_end_its_script() -> None:
    value = {"a": "</script><!--<script>", "b": "\u2028&"}
    text = island(value)
    assert "<" not in text
    assert ">" not in text
    assert json.loads(text) == value


def test_videos_are_inside_the_page_and_the_newest_come_first(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    for step in (0, 12):
        (folder.videos / f"step_{step:06d}_seed_1000.mp4").write_bytes(b"video" + bytes([step]))
    (folder.videos / ".step_000012_seed_1001.mp4.77.mp4").write_bytes(b"half written")
    page = report(folder, out=tmp_path / "report.html")
    videos = [attributes["src"] for tag, attributes in page.tags if tag == "video"]
    assert videos == ["data:video/mp4;base64,dmlkZW8M", "data:video/mp4;base64,dmlkZW8A"]
    assert "after step 12, seed 1000, success, return 100" in page.words


def test_where_there_is_no_video_the_reason_is_given(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    folder.no_videos.write_text("no EGL here: apt-get install libegl1\n")
    assert "no EGL here: apt-get install libegl1" in report(folder, out=tmp_path / "report.html").words


def test_videos_that_were_asked_for_and_are_missing_are_explained(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    for videos, said in ((0, NO_VIDEOS), (2, HOW_TO_GET_VIDEOS)):
        write_json(folder.config, {"name": "reach", "evaluation": {"videos": videos}})
        assert said in report(folder, out=tmp_path / "report.html").words


def test_a_resumed_run_is_repeated_by_the_command_it_began_with(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", seed=5)
    for steps in ("20", "30"):
        runinfo.write_env(folder, {"run": 5}, ["m2flow", "resume", "r", "--steps", steps])
    words = report(folder, out=tmp_path / "report.html").words
    # of a table, all headings come first, then all cells
    assert re.search(r"command +continued by", words)
    assert re.search(r"m2flow train seed=5 +m2flow resume r --steps 20; m2flow resume r --steps 30", words)


def test_the_time_between_a_stop_and_a_resume_is_no_wall_time(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    status = read_json(folder.status) | {"started": 0.0, "seconds": 252.0}
    write_json(folder.status, status)
    rows = [{"step": step, "time": 1e6 * step, "time/total_s": 60.0 * step} for step in (1, 2)]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "4 min 12 s" in report(folder, out=tmp_path / "report.html").words
    minutes = next(axis for axis in axes([load_run(folder.path)]) if axis.key == "time")
    assert minutes.points[0].values == [1.0, 2.0]


def test_a_device_is_said_to_be_taken_not_busy(tmp_path: Path) -> None:
    words = report(make_run(tmp_path / "r"), out=tmp_path / "report.html").words
    assert "device taken" in words
    assert "stage busy" in words
    assert "the stage may use only some" in words


def test_sample_episodes_are_the_filmed_ones_then_worst_to_best() -> None:
    episodes = [{"seed": i, "ret": float(-i), "steps": {"reward": [1.0]} if i == 50 else {}} for i in range(100)]
    shown = pick(episodes, 5)
    assert shown[0]["seed"] == 50
    assert [e["ret"] for e in shown[1:]] == [-99.0, -66.0, -33.0, 0.0]
    assert pick([], 5) == []
    assert len(pick(episodes[:3], 5)) == 3


def many_spans(steps: int) -> list[Span]:
    return [
        Span(stage, 0, device, step, step + offset, step + offset + 0.4, "work")
        for step in range(steps)
        for stage, device, offset in (("rollout", "cpu:0", 0.0), ("learner", "cpu:1", 0.5))
    ]


def test_the_timeline_stays_small_with_many_spans_and_keeps_the_newest_whole() -> None:
    spans = many_spans(5000)
    chart = gantt(spans, limit=1000)
    assert len(chart.bars) <= 1000
    assert chart.merged_s > 0
    newest = [bar for bar in chart.bars if bar.step > 4999 - KEEP_STEPS]
    assert len(newest) == 2 * KEEP_STEPS
    assert all(bar.length == pytest.approx(0.4) for bar in newest)
    covered = [bar for bar in chart.bars if bar.row == 0]
    assert covered[0].start == 0.0
    assert covered[-1].start + covered[-1].length == pytest.approx(4999.4)
    svg = gantt_svg(gantt(spans), (0.0, 5000.0))
    assert svg.count("<rect") < 4000


def test_the_timeline_window_shows_just_what_is_inside() -> None:
    chart = gantt(many_spans(10))
    assert gantt_svg(chart, (2.0, 3.0)).count("<rect") == 3  # two bars of step 2, and the edge of step 3
    widths = [float(w) for w in re.findall(r'width="([\d.]+)" height', gantt_svg(chart, (2.0, 2.2)))]
    assert widths == [920.0]  # the rollout fills the window: 1080 - 150 - 10


def test_the_timeline_opens_at_a_typical_pair_of_steps() -> None:
    spans = many_spans(8)
    spans[2 * 4] = spans[2 * 4]._replace(start=0.0)  # step 4 takes far longer than 5, 6 and 7
    assert typical(utilisation(spans)) in ((5, 6), (6, 7))
    assert typical([]) is None
    assert typical(utilisation(many_spans(1))) == (0, 0)
    assert typical(utilisation(many_spans(2))) == (0, 1)


def test_protocols_are_shown_in_few_words() -> None:
    assert brief(list(range(1000, 1050))) == "1000 to 1049"
    assert brief([3, 1, 4, 1, 5]) == "3, 1, 4, ... (5 in all)"
    assert brief([True, None]) == "[true, null]"
    assert brief({"env": "toy", "radius": 0.1}) == "env toy, radius 0.1"


def test_runs_that_their_seeds_do_not_tell_apart_are_called_by_their_folders(tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "grpo").path, make_run(tmp_path / "ppo").path
    assert [run.label for run in load_runs([one, other])] == ["grpo", "ppo"]
    assert [run.label for run in load_runs([one])] == [load_run(one).label] != ["grpo"]
