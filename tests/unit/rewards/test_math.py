from __future__ import annotations

import asyncio
import gc
import logging
import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m2flow.rewards.answers import extract, last_box
from m2flow.rewards.math import MathReward, MathRewardConfig
from m2flow.rewards.math_pool import Outcome, Pool
from tests.unit.rewards.samples import sample

BOMB = "\\boxed{10^{10^{10}}}"
THIRD = ("\\frac{1}{3}", "\\boxed{\\frac{1}{3}}")
ALGEBRA = ("x^2+2x+1", "\\boxed{(x+1)^2}")  # only a computer algebra system knows


@pytest.fixture(scope="module")
def reward() -> Iterator[MathReward]:
    made = MathRewardConfig(seconds=20.0, workers=1).build()
    yield made
    made.close()


def one(reward: MathReward, gold: Any, text: str) -> dict[str, float]:
    return {name: float(column[0]) for name, column in reward.score([sample(text, gold)]).items()}


def alone(gold: str, text: str) -> tuple[float, float]:
    """In whatever process this runs: the reward, and whether the verifier failed."""
    made = MathRewardConfig(workers=1, seconds=60.0).build()
    try:
        got = one(made, gold, text)
    finally:
        made.close()
    return got["reward"], got["error"] + got["timeout"]


A01 = [
    ("\\frac{2}{3}", "2/3", 1),
    ("\\frac12", "\\frac{1}{2}", 1),
    ("5/4", "1 1/4", 1),
    ("9/4", "2 1/4", 1),
    ("1", "2 1/4", 0),
    ("2\\frac{1}{2}", "2.5", 1),
    ("\\frac{3}{4}", "\\dfrac{3}{4}", 1),
    ("-\\frac{1}{2}", "\\frac{-1}{2}", 1),
    ("\\frac{1}{3}", "0.33", 0),
    # more of the kind
    ("-2.25", "-2 1/4", 1),
    ("1,234", "1234", 1),
    ("1234", "1{,}234", 1),
    ("3", "\\frac{6}{2}", 1),
    ("11/2", "5\\frac12", 1),
    ("2/3", "2", 0),
    ("1/3", "0.333333", 0),
    ("0.5", ".50", 1),
    ("12", "1 2", 0),
    ("7", "7.", 1),
    ("-7", "\u22127", 1),
    ("30", "30\\text{ cm}", 1),
    ("30", "30\\text{ million}", 0),
    ("5", "x = 5", 1),
]


@pytest.mark.parametrize(("gold", "answer", "expected"), A01)
@pytest.mark.parametrize("boxed", [False, True])
def test_a01_fractions_and_mixed_numbers(
    reward: MathReward, gold: str, answer: str, expected: int, boxed: bool
) -> None:
    got = one(reward, gold, f"So it is \\boxed{{{answer}}}, I think." if boxed else answer)
    assert (got["reward"], got["correct"], got["extracted"]) == (expected, expected, 1)


@pytest.mark.parametrize(("gold", "answer", "expected"), A01)
def test_a01_is_decided_without_a_verifier(gold: str, answer: str, expected: int) -> None:
    made = MathRewardConfig(verifier="none").build()
    assert one(made, gold, f"\\boxed{{{answer}}}")["reward"] == expected
    assert made.pool.pids() == []


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("3*x-1*y+13=0", "3x + 4y + 14=0"),
        ("x^2 = = 0", "\\boxed{y = = 0}"),
        ("\\foo == = 0", "\\boxed{\\bar = = 0}"),
        ("a = b = 0", "\\boxed{c = d = 0}"),
        ("\\frac{", "\\boxed{\\sqrt[}"),
        ("see above", "\\boxed{see below}"),
        ("sets", "\\boxed{tess}"),  # as products of letters they are equal
        ("6", "\\boxed{1 2 3}"),  # and this is 6 to a LaTeX parser
    ],
)
def test_a02_what_cannot_be_read_is_equal_to_nothing(reward: MathReward, gold: str, answer: str) -> None:
    got = one(reward, gold, answer)
    assert (got["reward"], got["correct"], got["error"], got["timeout"]) == (0, 0, 0, 0)
    assert one(reward, answer, gold)["reward"] == 0


def test_a02_the_same_equation_is_right(reward: MathReward) -> None:
    assert one(reward, "3*x-1*y+13=0", "3x - y + 13 = 0")["reward"] == 1


@pytest.mark.parametrize(
    ("text", "extracted"), [("", 0), ("\\boxed{}", 0), ("\\boxed{ }", 0), ("\\boxed{7", 0), ("I don't know", 0)]
)
def test_a02_no_answer_is_wrong_and_an_unclosed_box_none(reward: MathReward, text: str, extracted: int) -> None:
    got = one(reward, "7", text)
    assert (got["reward"], got["correct"], got["extracted"], got["error"]) == (0, 0, extracted, 0)


def test_a02_an_unclosed_box_counts_where_the_recipe_says_so() -> None:
    made = MathRewardConfig(unclosed="take").build()
    assert one(made, "7", "\\boxed{7")["reward"] == 1
    assert one(made, "7", "\\boxed{8} no, \\boxed{7\nbecause 3")["reward"] == 1
    assert one(MathRewardConfig().build(), "8", "\\boxed{8} no, \\boxed{7")["reward"] == 0


@pytest.mark.parametrize(
    ("gold", "text", "expected"),
    [
        ("840", "\\boxed{840}. but ... **Final Answer** \\boxed{840}", 1),
        ("4", "... \\boxed{004} ... 2,552,004 ... \\boxed{004}", 1),
        ("8", "\\boxed{7} wait, \\boxed{8}", 1),
        ("7", "\\boxed{7} wait, \\boxed{8}", 0),
        ("7", "\\boxed{5, 7}", 0),
        ("7", "\\boxed{\\boxed{7}}", 1),
        ("7", "\\boxed{x = \\boxed{7}}", 1),
        ("8", "\\boxed{7 wait, \\boxed{8}", 1),
        ("7", "\\fbox{7}", 1),
        ("72", "\\boxed 72.", 1),
        ("\\frac{1}{2}", "\\boxed{\\frac{1}{2}}", 1),
    ],
)
def test_a03_the_last_box_wins(reward: MathReward, gold: str, text: str, expected: int) -> None:
    assert one(reward, gold, text)["reward"] == expected
    if "5, 7" not in text:
        assert one(MathRewardConfig(verifier="none").build(), gold, text)["reward"] == expected


@pytest.mark.parametrize(("gold", "text"), [THIRD, ALGEBRA])
def test_a04_the_same_verdict_in_every_kind_of_worker(reward: MathReward, gold: str, text: str) -> None:
    def shared() -> dict[str, float]:
        return one(reward, gold, text)

    async def task() -> dict[str, float]:
        return await asyncio.create_task(coroutine())

    async def coroutine() -> dict[str, float]:
        return shared()

    with ThreadPoolExecutor(4) as threads:
        rows = [shared(), asyncio.run(task()), *threads.map(lambda _: shared(), range(8))]
        rows.append(threads.submit(asyncio.run, task()).result())
    assert rows == [{"reward": 1, "correct": 1, "extracted": 1, "error": 0, "timeout": 0}] * len(rows)
    for start in ("spawn", "fork"):  # forked: with verifiers of the parent already there
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(start)) as processes:
            assert processes.submit(alone, gold, text).result() == (1, 0), start
            assert processes.submit(one, reward, gold, text).result()["reward"] == 1, start
    assert shared()["reward"] == 1, "the parent's verifiers answer as before"


def test_a04_a_fork_leaves_the_verifiers_of_its_parent_alone(reward: MathReward) -> None:
    assert one(reward, *ALGEBRA)["reward"] == 1
    before = reward.pool.pids()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if reward.pool.pids() == [] and one(reward, *ALGEBRA)["reward"] == 1 else 2
            reward.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert reward.pool.pids() == before
    assert one(reward, *ALGEBRA)["reward"] == 1
    assert reward.pool.pids() == before


def test_a04_an_exception_in_the_verifier_is_counted(reward: MathReward, caplog: pytest.LogCaptureFixture) -> None:
    got = one(reward, "1/0", "\\boxed{2/0}")  # math-verify raises "Can't evaluate nan or zoo"
    assert (got["reward"], got["error"], got["timeout"], got["extracted"]) == (0, 1, 0, 1), caplog.text
    assert math.isnan(got["correct"])
    assert "counted as an error" in caplog.text


def test_a04_a_verifier_that_dies_is_an_error_that_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    made = MathRewardConfig(workers=1, seconds=60.0, error_reward=-0.5).build()
    assert one(made, *ALGEBRA)["reward"] == 1
    [pid] = made.pool.pids()
    killer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
    killer.start()
    got = made.score([sample(BOMB), sample("\\boxed{7}"), sample("\\boxed{(x+1)^2}", "x^2+2x+1")])
    killer.join()
    made.close()
    assert got["reward"].tolist() == [-0.5, 1, 1]
    assert got["error"].tolist() == [1, 0, 0]
    assert got["timeout"].tolist() == [0, 0, 0]
    assert math.isnan(got["correct"][0]) and got["correct"].tolist()[1:] == [1, 1]
    assert "the verifier ended with -9; counted as an error" in caplog.text


def test_a04_a_verifier_without_memory_is_an_error_and_replaced() -> None:
    starved = Pool(1, 60.0, 1)  # MiB: less than it has already
    [first] = starved([{"gold": "x^2+2x+1", "answer": "(x+1)^2"}])
    assert first.verdict == "error"
    before = starved.pids()
    [second] = starved([{"gold": "x^2+2x+1", "answer": "(x+1)^2"}])
    assert second.verdict == "error"
    assert not set(before) & set(starved.pids())
    starved.close()


def test_a04_a_time_out_is_counted_and_the_others_keep_their_verdicts(caplog: pytest.LogCaptureFixture) -> None:
    made = MathRewardConfig(workers=2, seconds=1.5).build()
    items = [sample(BOMB), sample("\\boxed{(x+1)^2}", "x^2+2x+1"), sample(BOMB), sample("\\boxed{x^2}", "x^3")]
    with caplog.at_level(logging.WARNING):
        got = made.score(items)
        first = made.pool.pids()
        again = made.score(items[1:2] * 3)
    assert got["timeout"].tolist() == [1, 0, 1, 0]
    assert got["error"].tolist() == [0, 0, 0, 0]
    assert got["reward"].tolist() == [0, 1, 0, 0]
    assert np.isnan(got["correct"]).tolist() == [True, False, True, False]
    assert again["correct"].tolist() == [1, 1, 1]
    assert len(caplog.records) == 1, "each kind is told once"
    assert len(first) <= 2
    made.close()
    assert made.pool.pids() == []
    assert one(made, *ALGEBRA)["reward"] == 1, "a closed reward starts anew"
    made.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int]) -> bool:
    end = time.monotonic() + 30
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


@pytest.mark.parametrize("busy", [False, True])
def test_verifiers_end_with_the_process_that_started_them_even_if_it_is_killed(busy: bool) -> None:
    code = (
        "import sys, threading, time\nfrom m2flow.rewards.math import MathRewardConfig\n"
        "from tests.unit.rewards.samples import sample\n"
        "r = MathRewardConfig(workers=1, seconds=3.0).build()\n"
        "r.score([sample('\\\\boxed{(x+1)^2}', 'x^2+2x+1')])\n"
        f"if {busy}: threading.Thread(target=r.score, args=([sample({BOMB!r})],)).start(); time.sleep(0.5)\n"
        "print(*r.pool.pids(), flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 1 and alive(pids[0])
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(pids)


def test_verifiers_end_with_the_reward() -> None:
    made = MathRewardConfig(workers=1, seconds=60.0).build()
    one(made, *ALGEBRA)
    pids = made.pool.pids()
    assert pids and all(map(alive, pids))
    del made
    gc.collect()
    assert gone(pids)


def test_integers_by_the_lenient_extractor_need_neither_math_verify_nor_processes(tmp_path: Path) -> None:
    code = (
        "import importlib.util, subprocess, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'math_verify' else find(name, *a)\n"
        "sys.modules['math_verify'] = sys.modules['sympy'] = None\n"
        "class Refused:\n    def __init__(self, *a, **k): raise AssertionError('a process')\n"
        "from m2flow.rewards.math import MathRewardConfig\nsubprocess.Popen = Refused\n"
        "from tests.unit.rewards.samples import sample\n"
        "r = MathRewardConfig(extract='last_number').build()\n"
        "print(r.score([sample('3 + 4 = 7.', 7), sample('3+4 is 12', 7), sample('none', 7)])['reward'].tolist())\n"
        "try: MathRewardConfig().build()\nexcept ValueError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "[1.0, 0.0, 0.0]"
    assert second.startswith("verifier: math_verify needs the package") and "pip install 'm2flow[lm]'" in second


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12-7", "7"),
        ("so 5 - 3 = 2.", "2"),
        ("it is -7 degrees", "-7"),
        ("5-7=-2", "-2"),
        ("1,234.50 dollars", "1,234.50"),
        ("1,2,3", "3"),
        ("a) 3/4", "3/4"),
        ("3.", "3"),
        (".5", ".5"),
        ("x2 and y_3", None),
        ("v1.2.3", None),
        ("", None),
        ("(-4)", "-4"),
        ("f(x)-4", "4"),
        ("\u0663\u0664", None),
        ("12/25.", "12/25"),
        ("$42$", "42"),
        ("7\u22129=\u22122", "-2"),
        ("**99**", "99"),
        ("1,2345", "2345"),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str | None) -> None:
    assert extract(text, "last_number") == number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3 + 4 <answer>7</answer> or <answer> 8 </answer>", "8"),
        ("2+2=4\n#### 72", "72"),
        ("The answer is 5. No, the answer is: $\\frac{1}{2}$", "$\\frac{1}{2}$"),
        ("The answer is twelve, or 13", "13"),
        ("First 3.\nThen 4 apples", "4"),
        ("\\frac{1}{2} + x", "\\frac{1}{2} + x"),
        ("answer: 3 \\boxed{4}", "4"),
    ],
)
def test_where_auto_finds_the_answer(text: str, answer: str) -> None:
    assert extract(text, "auto") == answer
    if "boxed" not in text:
        assert extract(text, "boxed") is None


def test_escaped_braces_and_braces_outside_belong_to_no_box() -> None:
    assert last_box("{ \\boxed{\\{1, 2\\}} }") == ("\\{1, 2\\}", True)
    assert last_box("\\boxed{a{b}c}} {") == ("a{b}c", True)
    assert last_box("\\boxedness{3}") is None


@pytest.mark.parametrize(
    ("gold", "text", "expected"),
    [
        ("\\{1,2\\}", "\\boxed{\\{2,1\\}}", 1),
        ("(1,2)", "\\boxed{(2,1)}", 0),
        ("(1, 2)", "\\boxed{(1,2)}", 1),
        ("\\frac{\\sqrt{3}}{3}", "\\boxed{1/sqrt(3)}", 1),
        ("x^{10}", "\\boxed{x^10}", 1),
        ("(1,2]", "\\boxed{1<x\\le 2}", 1),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\boxed{\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}}", 1),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\boxed{\\begin{pmatrix} 2 \\\\ 1 \\end{pmatrix}}", 0),
        ("\\text{Evelyn}", "\\boxed{evelyn}", 1),
        ("Evelyn", "\\boxed{\\text{Eleven}}", 0),
        ("B", "\\boxed{\\text{(B)}}", 1),
        ("x", "\\boxed{y}", 0),
        ("3+2i", "\\boxed{2i+3}", 1),
        ("50\\%", "\\boxed{0.5}", 1),
        ("x=5", "\\boxed{5}", 1),
    ],
)
def test_sets_tuples_expressions_and_words(reward: MathReward, gold: str, text: str, expected: int) -> None:
    got = one(reward, gold, text)
    assert (got["reward"], got["error"], got["timeout"]) == (expected, 0, 0)


def test_a_tolerance_is_a_share_of_the_right_number() -> None:
    made = MathRewardConfig(verifier="none", tolerance=0.01).build()
    golds, texts = ["100"] * 4 + ["0", "1/3"], ["101", "99", "101.01", "98.9", "0.001", "0.333"]
    got = made.score([sample(text, gold) for gold, text in zip(golds, texts, strict=True)])
    assert got["reward"].tolist() == [1, 1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    "gold", [7, 7.0, np.int64(7), np.float32(7), "7", " 7 ", "3 + 4 = 7\n#### 7", "so \\boxed{7}", "$7$"]
)
def test_the_right_answer_may_be_a_number_or_a_solution(gold: Any) -> None:
    assert one(MathRewardConfig(verifier="none").build(), gold, "\\boxed{7}")["reward"] == 1
    assert one(MathRewardConfig(verifier="none").build(), gold, "\\boxed{3}")["reward"] == 0


@pytest.mark.parametrize("gold", [None, True, math.nan, math.inf, "", "  ", "####", [7], "7" * 1001])
def test_a05_a_task_without_a_right_answer_is_an_error_that_names_the_sample(gold: Any) -> None:
    made = MathRewardConfig(verifier="none").build()
    with pytest.raises(ValueError, match=r"sample 1 \(task 44\), 'answer'"):
        made.score([sample("7"), sample("7", gold, task=44)])
    with pytest.raises(ValueError, match=r"sample 0 \(task 1\) has no 'solution' \(keys: prompt, answer\)"):
        MathRewardConfig(verifier="none", answer="solution").build().score([sample("7")])
    with pytest.raises(ValueError, match="sample 0 is 'text', expected a Sample"):
        made.score(["text"])


def test_rewards_of_right_and_wrong_are_the_recipe_s() -> None:
    made = MathRewardConfig(verifier="none", right=2.0, wrong=-1.0).build()
    got = made.score([sample("\\boxed{7}"), sample("\\boxed{8}"), sample("")])
    assert got["reward"].tolist() == [2, -1, -1]
    assert got["correct"].tolist() == [1, 0, 0]
    assert got["extracted"].tolist() == [1, 1, 0]


def test_failing_pays_no_more_than_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    for keys, expected in (({}, -1.0), ({"error_reward": -2.0}, -2.0)):
        made = MathRewardConfig(wrong=-1.0, **keys).build()
        monkeypatch.setattr(made, "pool", lambda questions: [Outcome("error", "why") for _ in questions])
        monkeypatch.setattr("m2flow.rewards.math._require_math_verify", lambda: None)
        made.pool.pids = lambda: [1]  # type: ignore[attr-defined]
        assert one(made, *ALGEBRA)["reward"] == expected


def test_a_copy_by_pickle_has_verifiers_of_its_own(reward: MathReward) -> None:
    one(reward, *ALGEBRA)
    copy = pickle.loads(pickle.dumps(reward))
    assert copy.config == reward.config and copy.pool.pids() == []


def test_a_verifier_that_cannot_start_is_loud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2flow.rewards.math_pool._BOOT", "raise SystemExit('no such thing')")
    made = MathRewardConfig(workers=1).build()
    with pytest.raises(RuntimeError, match=r"does not start: it ended with 1: no such thing"):
        one(made, *ALGEBRA)
    assert made.pool.pids() == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"extract": "first"}, "extract: must be one of auto, boxed, last_number, whole"),
        ({"unclosed": "x"}, "unclosed: must be one of refuse, take"),
        ({"verifier": "sympy"}, "verifier: must be one of math_verify, none"),
        ({"answer": ""}, "answer: must be the name"),
        ({"tolerance": -0.1}, "tolerance: must be at least 0"),
        ({"workers": 0}, "workers: must be at least 1"),
        ({"seconds": 0.0}, "seconds: must be more than 0"),
        ({"memory_mib": 10}, "memory_mib: must be at least 256"),
        ({"error_reward": math.nan}, "error_reward: must be a finite number"),
        ({"right": 0.0}, "right: must be more than wrong"),
        ({"error_reward": 0.5}, r"error_reward: must be at most wrong \(0.0\)"),
        ({"wrong": -1.0, "error_reward": 0.0}, r"error_reward: must be at most wrong \(-1.0\)"),
    ],
)
def test_config_errors_name_the_key(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        MathRewardConfig(**keys)
