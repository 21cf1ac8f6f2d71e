"""The command line: help, messages, exit codes, and that what it writes can be read by it again."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import m2flow as m2flow_package
from m2flow import cli, config, doctor, scaffold
from m2flow._version import __version__
from m2flow.observe.layout import read_evaluation

REPO = Path(__file__).parents[2]
RECIPE = ("env: point_reach\npolicy: mlp\nobjective: ppo\nsteps: 2\nrollout: {lanes: 2, length: 8}\n"
          "learner: {epochs: 1}\nobserve: {recorders: [], report: false}\n")  # fmt: skip


def m2flow(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(REPO)!r}); from m2flow.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *args], cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )


def call(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command run in this process."""
    with pytest.raises(SystemExit) as end:
        cli.main(args)
    out, err = capsys.readouterr()
    code = end.value.code
    return (code if isinstance(code, int) else 0), out, err


# ---- shape


def test_the_commands_and_options_are_the_agreed_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """This list is the product's face. Adding to it is a decision, not an accident."""
    agreed = {
        "train": {"--run-dir", "--seed", "--plan", "--quiet"},
        "eval": {"--seeds", "--videos", "--step"},
        "check": {"--plan", "--cluster", "--diff"},
        "config": set(),
        "show": set(),
        "report": {"--out", "--metric"},
        "resume": {"--steps", "--step", "--plan", "--quiet"},
        "ls": set(),
        "doctor": {"--runs"},
        "init": {"--from", "--force"},
    }
    code, out, _ = call(capsys, "--help")
    assert code == 0
    listed = [
        line.split()[0]
        for line in out.partition("Commands:")[2].splitlines()
        if line.startswith("  ") and line[2] != " "
    ]
    assert set(agreed) <= set(listed)
    assert set(listed) - set(agreed) <= {"Start"}  # the closing hint
    for name, options in agreed.items():
        code, out, _ = call(capsys, name, "--help")
        assert code == 0
        found = {word.strip(",") for word in out.split() if word.startswith("--") and len(word.strip(",")) > 2}
        assert {option for option in found if not option.startswith("--no-")} == options | {"--help"}, name


def test_the_command_line_does_what_the_functions_do() -> None:
    """One list of commands and functions, with the same arguments."""
    other = {"eval": "evaluate", "config": "describe", "doctor": "diagnose"}  # names that Python or the package uses
    commands = {info.callback.__name__: info.callback for info in cli.app.registered_commands if info.callback}
    functions = {name: getattr(m2flow_package, name) for name in m2flow_package.__all__ if name.islower()}
    functions.pop("__version__")
    assert {other.get(name, name) for name in commands} == set(functions)
    for name, function in commands.items():
        ours, theirs = (inspect.signature(f).parameters for f in (function, functions[other.get(name, name)]))
        assert set(ours) == set(theirs), name


def test_help_fits_a_narrow_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = call(capsys, "--help")
    assert max(map(len, out.splitlines())) <= 80
    assert "..." not in out.partition("Commands:")[2], "a summary is cut off"


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "m2flow", "--version"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout == f"m2flow {__version__}\n"


def test_a_recipe_of_rows_is_written_before_there_are_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = call(capsys, "init", str(tmp_path / "r.yaml"), "--from", "rows/causal_lm/sft")
    assert code == 0
    assert "next: put your rows into data/train.jsonl, then m2flow check" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "--version")[:2] == (0, f"m2flow {__version__}\n")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("train r.yaml --seed 0 1 2", "train r.yaml --seed 0 --seed 1 --seed 2"),
        ("train --seed 0 1 r.yaml a=1 7", "train --seed 0 --seed 1 r.yaml a=1 7"),
        ("train r.yaml --seed 4 --quiet 5", "train r.yaml --seed 4 --quiet 5"),
        ("train r.yaml --seed 4 --seed 5 6", "train r.yaml --seed 4 --seed 5 --seed 6"),
        ("train r.yaml --debug", "--debug train r.yaml"),
        ("train r.yaml a=0 1", "train r.yaml a=0 1"),
    ],
)
def test_several_seeds_follow_one_option(given: str, read: str) -> None:
    assert cli.arguments(given.split()) == read.split()


# ---- messages and exit codes


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("train", "no_such_recipe.yaml"), "no recipe at no_such_recipe.yaml"),
        (("train", "r.yaml", "trainer.lerning_rate=1"), "trainer.lerning_rate (override): unknown key; did you mean"),
        (("check", "r.yaml", "learner.minibatch=7"), "learner.minibatch (override): a step collects 16 rows"),
        (("check", "r.yaml", "learner.minibatch"), "must look like section.key=value"),
        (("train", "r.yaml", "--plan", "colocated"), "did you mean 'collocated'?"),
        (("train", "r.yaml", "--seed", "0", "1", "0"), "0 given more than once"),
        (("config", "r.yaml", "env=point_rech"), "did you mean 'point_reach'?"),
        (("show", "runs/none"), "runs/none"),
        (("resume", "runs/none"), "runs/none: no run here"),
        (("eval", "runs/none"), "runs/none: no run here"),
        (("init", "r.yaml"), "r.yaml exists; choose another name, or --force"),
        (("init", "new.yaml", "--from", "a/b/c/d"), "expected ENV/POLICY"),
        (("init", "env.id=x"), "the first word is the file to write"),
    ],
)
def test_a_wrong_request_ends_in_one_clear_message_and_code_2(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    code, out, err = call(capsys, *args)
    assert code == 2
    assert message in err
    assert err.startswith("m2flow: ")
    assert "Traceback" not in out + err
    assert not (tmp_path / "runs").exists(), "a refused request leaves nothing behind"


def test_debug_shows_where_an_error_was_raised(tmp_path: Path) -> None:
    result = m2flow("train", "none.yaml", "--debug", cwd=tmp_path)
    assert result.returncode not in (0, 2)
    assert "Traceback" in result.stderr
    assert "no recipe at none.yaml" in result.stderr


def test_a_misspelt_command_or_option_is_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "trian")
    assert code == 2
    assert "Did you mean 'train'?" in err
    assert call(capsys, "train", "r.yaml", "--sede", "1")[0] == 2


@pytest.mark.parametrize(
    ("error", "code", "shown", "traceback"),
    [
        (RuntimeError("rollout, replica 1 on host failed: boom\nlog: x.log"), 1, "rollout, replica 1", False),
        (ValueError("plan: too few devices"), 2, "plan: too few devices", False),
        (ModuleNotFoundError("No module named 'envpool'", name="envpool"), 2, "pip install 'm2flow[envpool]'", False),
        (ImportError("package gymnasium is missing: pip install 'm2flow[gymnasium]'"), 2, "package gymnasium", False),
        (ImportError("cannot import name 'x' from 'm2flow.y'", name="m2flow.y"), 1, "cannot import name", True),
        (ModuleNotFoundError("No module named 'm2flow.y'", name="m2flow.y"), 1, "No module named 'm2flow.y'", True),
        (KeyboardInterrupt(), 130, "m2flow: interrupted\n", False),
        (KeyboardInterrupt("ended by SIGTERM; no checkpoint yet"), 130, "m2flow: ended by SIGTERM; no check", False),
        (TypeError("a fault of ours"), 1, "a fault of ours", True),
    ],
)
def test_how_a_command_ends_says_what_happened(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, shown: str,
    traceback: bool,
) -> None:  # fmt: skip
    from m2flow import api

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(api, "train", fail)
    ended, _, err = call(capsys, "train", "r.yaml")
    assert ended == code
    assert shown in err
    assert ("Traceback" in err) == traceback


# ---- commands that need no run


def test_init_writes_a_recipe_that_loads_and_holds_exactly_the_defaults(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "deep" / "my.yaml"
    assert call(capsys, "init", str(path))[0] == 0
    recipe = config.load(path)
    assert recipe == config.load({"env": "point_reach", "policy": "mlp", "objective": "ppo", "evaluation": {}})
    text = path.read_text()
    keys = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all("#" in line for line in keys if not line.startswith("  ")), "every section says what it is"
    assert "# replay:" in text, "sections that are off are shown too"


@pytest.mark.parametrize("start", ["point_reach/mlp", "bandit/mlp/ppo", "point_reach/flow", "count"])
def test_init_from_other_parts_passes_check(capsys: pytest.CaptureFixture[str], tmp_path: Path, start: str) -> None:
    path = tmp_path / "r.yaml"
    assert call(capsys, "init", str(path), "--from", start)[0] == 0
    assert call(capsys, "check", str(path))[0] == 0


def test_init_takes_changes_for_keys_without_a_default(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    code, _, _ = call(capsys, "init", str(path), "env.id=Pendulum-v1", "steps=3", "--from", "gymnasium/mlp")
    assert code == 0
    assert config.load(path).env.id == "Pendulum-v1"
    assert config.load(path).steps == 3


def test_config_prints_a_recipe_that_loads_back_equal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    code, out, _ = call(capsys, "config", str(path), "seed=5")
    assert code == 0
    (tmp_path / "full.yaml").write_text(out)
    assert config.load(tmp_path / "full.yaml") == config.load(path, "seed=5")


def test_check_shows_what_another_plan_changes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    code, out, err = call(capsys, "check", str(path), "--diff", str(REPO / "plans" / "split_two_cores.yaml"))
    assert code == 0, err
    for change in ("learner: devices cpu:0, cpu:1 -> cpu:1", "rollout: process False -> True", "plan: lag 0 -> 1"):
        assert f"change: {change}\n" in out
    assert "change: none" in call(capsys, "check", str(path), "--diff", "collocated")[1]
    code, out, err = call(capsys, "check", str(path), "--diff", "colocated")
    assert code == 2
    assert "did you mean 'collocated'?" in err


def test_report_writes_one_page_about_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from m2flow import api

    run = api.train({"env": "point_reach", "policy": "mlp", "objective": "ppo", "steps": 1, "seed": 0,
                     "rollout": {"lanes": 2, "length": 8}}, run_dir=tmp_path / "run", quiet=True)  # fmt: skip
    page = tmp_path / "page.html"
    code, out, err = call(capsys, "report", str(run.path), "--out", str(page))
    assert code == 0, err
    assert out == f"wrote {page}\n"
    assert "<html" in page.read_text()
    run.folder.report.unlink()
    assert call(capsys, "report", str(run.path))[1] == f"wrote {run.folder.report}\n"
    assert call(capsys, "report", str(run.path), str(run.path))[1] == f"wrote {tmp_path / 'run-and-1-more.html'}\n"
    curve = tmp_path / "curve.svg"
    code, out, _ = call(
        capsys, "report", str(run.path), str(run.path), "--metric", "train/entropy", "--out", str(curve)
    )
    assert (code, out) == (0, f"wrote {curve}\n")
    drawn = ET.fromstring(curve.read_text())
    assert [x.text for x in drawn if x.tag.endswith("text")] == ["train/entropy", "run", "run"]
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}circle"))) == 4  # a point and an entry of the legend each
    code, _, err = call(capsys, "report", str(run.path), "--metric", "train/entorpy")
    assert code == 2
    assert "did you mean 'train/entropy'?" in err


def test_a_shipped_plan_is_found_by_its_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, out, err = call(capsys, "check", "cartpole_ppo", "--plan", "two_rollouts")
    assert "two_rollouts" in out + err
    assert "no plan" not in out + err


def test_diagnose_finds_what_the_doctor_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Path] = []
    monkeypatch.setattr(doctor, "examine", lambda root: seen.append(root) or [])
    assert m2flow_package.diagnose(tmp_path) == []
    assert seen == [tmp_path]


def test_every_key_of_every_part_has_a_meaning() -> None:
    """The reference page, `init` and `config` take them from the comments beside the fields."""
    empty = [
        line.partition("|")[2].partition("|")[0].strip()
        for line in scaffold.reference().splitlines()
        if line.startswith("| `") and line.rstrip().endswith("|  |")
    ]
    assert not empty


def test_meanings_are_found_beside_above_and_below_a_field() -> None:
    assert scaffold.meanings(Explained) == {
        "beside": "at its side", "above": "over it, in two lines", "below": "Under it.",
        "listed": "in the class's text", "none": "",
    }  # fmt: skip


@dataclass
class Explained:
    """Some keys.

    listed: in the class's text
    """

    beside: int = 0  # at its side
    # over it,
    # in two lines
    above: int = 0
    below: int = 0
    """Under it."""
    listed: int = 0
    none: str = "# no comment"


# ---- doctor


def test_doctor_reports_this_machine_and_ends_well(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = call(capsys, "doctor", "--runs", str(tmp_path))
    assert code == 0, out
    for word in ("Python 3.", "torch", "CPU cores usable", "GiB of disk free", "envpool", "no problems"):
        assert word in out


def test_doctor_names_a_run_whose_process_is_gone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from m2flow.observe.layout import RunFolder
    from m2flow.observe.runinfo import write_status

    folder = RunFolder(tmp_path / "runs" / "lost").create()
    child = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    write_status(folder, "running", step=3, steps=9)
    text = folder.status.read_text()
    folder.status.write_text(text.replace(f'"pid": {os.getpid()}', f'"pid": {child.stdout.strip()}'))
    findings = list(doctor._runs(tmp_path / "runs"))
    assert [f.text for f in findings if "lost" in f.text] == [f"{folder.path} stopped without a word after step 3"]


@pytest.mark.parametrize(
    ("versions", "text"),
    [
        ({"envpool": "1.2.5", "envpool-assets": "0.4.0"}, "asset packages >= 0.4"),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0"}, "torchvision of another build"),
        ({"gymnasium": "0.29.1", "mujoco": "3.1.0"}, "gymnasium < 1.0"),
    ],
)
def test_doctor_knows_versions_that_fail_together(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], text: str
) -> None:
    monkeypatch.setattr(doctor, "installed", lambda: versions)
    problems = [f for f in doctor._pairs() if f.level == "problem"]
    assert len(problems) == 1
    assert text in problems[0].text
    assert problems[0].fix


def test_doctor_finds_no_bad_pair_among_good_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    good = {
        "envpool": "1.2.5",
        "envpool-assets": "0.3.0",
        "torch": "2.13.0",
        "torchvision": "0.28.0",
        "gymnasium": "1.4.0",
        "mujoco": "4.0.0",
    }
    monkeypatch.setattr(doctor, "installed", lambda: good)
    assert not list(doctor._pairs())


@pytest.mark.parametrize(
    ("versions", "level"),
    [
        ({"jinja2": "3.1.6"}, "note"),  # torch brings jinja2: nobody asked for language models
        ({"transformers": "5.24.0", "jinja2": "3.1.6"}, "problem"),
        (dict.fromkeys(doctor.EXTRAS["lm"], "1.0"), "ok"),
    ],
)
def test_doctor_calls_an_extra_incomplete_only_where_its_own_package_is_there(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], level: str
) -> None:
    monkeypatch.setattr(doctor, "installed", lambda: versions)
    assert [finding.level for finding in doctor._extras() if finding.text.startswith("lm:")] == [level]


def test_doctor_reports_a_broken_installation_instead_of_dying(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "m2flow.runtime.cluster", None)
    monkeypatch.setattr(doctor, "_torch", lambda: ())
    monkeypatch.setattr(doctor, "_graphics", lambda: ())
    findings = doctor.examine(tmp_path)
    assert any(f.level == "problem" and "cannot look further" in f.text for f in findings)
    assert any("disk free" in f.text for f in findings), "the checks after it still run"


def test_doctor_ends_with_1_where_something_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda root: [doctor.Finding("problem", "no torch", "pip install torch")])
    code, out, _ = call(capsys, "doctor")
    assert code == 1
    assert "problem  no torch" in out
    assert "-> pip install torch" in out
    assert "1 problem\n" in out


# ---- with a real run


def test_train_show_ls_eval_and_resume_agree_about_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE + "evaluation: {seeds: 2, horizon: 10}\n")
    done = m2flow("train", "r.yaml", "--seed", "0", "1", "--run-dir", "runs/both", "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for seed in (0, 1):
        folder = tmp_path / "runs" / "both" / f"seed-{seed}"
        stored = config.load(json.loads((folder / "config.json").read_text()))
        assert stored == config.load(tmp_path / "r.yaml", f"seed={seed}")
        assert (folder / "recipe.yaml").read_text() == (tmp_path / "r.yaml").read_text()
    assert call(capsys, "show", str(tmp_path / "runs/both/seed-0"), str(tmp_path / "runs/both/seed-1"))[0] == 0
    code, out, _ = call(capsys, "ls", str(tmp_path / "runs"))
    assert code == 0
    assert "seed-0" in out
    assert "seed-1" in out
    code, out, _ = call(capsys, "eval", str(tmp_path / "runs/both/seed-0"), "--seeds", "2")
    assert code == 0
    assert "weights after step 2, 2 episodes" in out
    assert "eval/success_once" in out
    code, _, err = call(capsys, "resume", str(tmp_path / "runs/both/seed-0"))
    assert code == 2
    assert "has done 2 of 2 steps" in err
    code, out, err = call(capsys, "resume", str(tmp_path / "runs/both/seed-0"), "--steps", "3", "--quiet")
    assert code == 0, err


def test_eval_takes_a_run_or_one_of_its_checkpoints_and_stores_what_it_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from m2flow import api

    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE + "evaluation: {seeds: 2, horizon: 10}\ncheckpoint: {every: 1}\nseed: 0\n")
    run = api.train(recipe, run_dir=tmp_path / "run", quiet=True)
    own = [path.read_text() for _, path in run.folder.evaluation_files()]
    assert len(own) == 2
    first, last = run.folder.checkpoints / "step_000001", run.path
    for place, step, seeds in ((first, 1, "2"), (last, 2, "2"), (last, 2, "3")):
        code, out, err = call(capsys, "eval", str(place), "--seeds", seeds)
        assert code == 0, err
        assert f"weights after step {step}, {seeds} episodes" in out
        stored = Path(out.rpartition("stored: ")[2].strip())
        assert stored.parent == run.folder.evaluations
        assert stored.name.startswith(f"eval_step_{step:06d}_{seeds}_seeds_")
        found = read_evaluation(stored)
        assert found.step == step
        assert found.protocol["seeds"] == [episode["seed"] for episode in found.episodes]
    assert len(list(run.folder.evaluations.glob("eval_*.json"))) == 3
    assert [path.read_text() for _, path in run.folder.evaluation_files()] == own, "the run's own are as they were"
    assert found.metrics != {}
    again = api.evaluate(run)
    assert again.metrics == run.evaluations()[-1].metrics, "the same weights and protocol give the same numbers"


@pytest.mark.parametrize(
    ("place", "message"),
    [("step_000007", "no complete checkpoint of step 7"), ("none", "no run here")],
)
def test_eval_of_a_checkpoint_that_is_not_there_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, place: str, message: str
) -> None:
    from m2flow import api

    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE + "evaluation: {seeds: 2, horizon: 10}\nseed: 0\n")
    run = api.train(recipe, run_dir=tmp_path / "run", quiet=True)
    code, _, err = call(capsys, "eval", str(run.folder.checkpoints / place))
    assert code == 2
    assert message in err
    with pytest.raises(ValueError, match="give one of the two"):
        api.evaluate(run.folder.checkpoints / "step_000002", step=1)


def test_an_interrupted_run_ends_with_130_and_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE.replace("steps: 2", "steps: 1000000") + "checkpoint: {every: 1}\n")
    code = f"import sys; sys.path.insert(0, {str(REPO)!r}); from m2flow.cli import main; main()"
    run = subprocess.Popen(
        [sys.executable, "-c", code, "train", "r.yaml", "--quiet", "--run-dir", "run"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )  # fmt: skip
    limit = time.monotonic() + 120
    while not (tmp_path / "run" / "checkpoints" / "latest").exists():
        assert time.monotonic() < limit, "the run never saved a step"
        assert run.poll() is None, run.communicate()
        time.sleep(0.1)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=120)
    assert run.returncode == 130
    assert "interrupted" in err
    assert "m2flow resume" in err
    assert "Traceback" not in err
