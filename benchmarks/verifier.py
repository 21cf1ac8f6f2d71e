"""How quickly mathematical answers are judged, and that no answer crashes or hangs the judge.

    python -m benchmarks.verifier            # 1,000 answers, and math-verify called plainly on the same
    python -m benchmarks.verifier --answers 100

Half of the answers are integers, the rest fractions, expressions, sets, equations, words, and some that never end in a
computer algebra system. math-verify is called as its users call it, in one process, with its own time limit.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.clock import cpu_seconds
from m2flow.rewards.math import MathRewardConfig
from m2flow.types import Sample, Task

SECONDS = 2.0  # limit of one answer on both sides (math-verify's is in whole seconds)
WORKERS = 2
BOMBS = ("10^{10^{10}}", "9^{9^{9^{9}}}", "((((9!)!)!)!)!", "(x+y+z+w)^{99}")
MATHS = (  # right answer, given answer, whether it is right
    ("x^2+2x+1", "(x+1)^2", True),
    ("\\frac{\\sqrt{3}}{3}", "\\frac{1}{\\sqrt{3}}", True),
    ("2\\pi", "\\pi + \\pi", True),
    ("x^2-1", "(x-1)^2", False),
    ("\\sqrt{8}", "2\\sqrt{2}", True),
    ("\\sqrt{8}", "3\\sqrt{2}", False),
    ("\\{1,2,3\\}", "\\{3,2,1\\}", True),
    ("\\{1,2,3\\}", "\\{1,2\\}", False),
    ("(1,2)", "(2,1)", False),
    ("(-\\infty,2]", "x \\le 2", True),
    ("2x+3y=6", "3y+2x=6", True),
    ("2x+3y=6", "2x+3y=7", False),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}2\\\\1\\end{pmatrix}", False),
    ("3+2i", "2i+3", True),
)


def answers(count: int, seed: int = 0) -> list[tuple[str, str, bool | None]]:
    """Right answer, text of the model, and whether it is right (None for what never ends)."""
    draw = random.Random(seed)
    made: list[tuple[str, str, bool | None]] = []
    for number in range(count):
        kind = number % 20
        a, b = draw.randrange(2, 999), draw.randrange(2, 99)
        right = draw.random() < 0.5
        if kind < 10:
            made.append((str(a), f"So it is \\boxed{{{a if right else a + b}}}.", right))
        elif kind < 13:
            made.append((f"\\frac{{{a}}}{{{b}}}", f"Thus \\boxed{{{a if right else a + 1}/{b}}}", right))
        elif kind < 14:
            made.append((f"{a}.5", f"\\boxed{{{a} \\frac{{1}}{{{2 if right else 3}}}}}", right))
        elif kind < 19:
            gold, given, same = draw.choice(MATHS)
            made.append((gold, f"Therefore $\\boxed{{{given}}}$ is what was asked for.", same))
        elif number % 200 == 19:  # one in two hundred
            made.append((str(a), f"\\boxed{{{BOMBS[number // 200 % len(BOMBS)]}}}", None))
        else:
            made.append(("\\text{Evelyn}", f"\\boxed{{\\text{{{'Evelyn' if right else 'Eleven'}}}}}", right))
    draw.shuffle(made)
    return made


def ours(rows: list[tuple[str, str, bool | None]], workers: int) -> dict[str, Any]:
    """The product, verifiers started within the time."""
    reward = MathRewardConfig(workers=workers, seconds=SECONDS).build()
    items = [Sample(Task(i, {"answer": gold}), 0, text, "stop", 1) for i, (gold, text, _) in enumerate(rows)]
    begin, before = time.perf_counter(), cpu_seconds()
    scores = reward.score(items)
    seconds = time.perf_counter() - begin
    reward.close()  # what the verifiers took is counted when they have ended
    cpu = cpu_seconds() - before
    wrong = [
        rows[i][:2]
        for i, (_, _, right) in enumerate(rows)
        if right is not None and scores["correct"][i] != float(right)  # NaN differs from both
    ]
    return {
        "seconds": round(seconds, 3),
        "answers_per_s": round(len(rows) / seconds, 1),
        "cpu_s": round(cpu, 3),
        "answers_per_cpu_s": round(len(rows) / cpu, 1),
        "wrong_verdicts": len(wrong),
        "examples": sorted(set(wrong))[:5],
        "errors": int(scores["error"].sum()),
        "timeouts": int(scores["timeout"].sum()),
    }


def plain(rows: list[tuple[str, str, bool | None]]) -> dict[str, Any]:
    """math-verify, as its documentation calls it, in the main thread of this process."""
    import logging

    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    wrong, crashed, late = [], 0, 0
    begin, before = time.perf_counter(), cpu_seconds()
    for gold, text, right in rows:
        started = time.perf_counter()
        try:
            parsed = parse(f"${gold}$", parsing_timeout=int(SECONDS)), parse(text, parsing_timeout=int(SECONDS))
            found = verify(*parsed, timeout_seconds=int(SECONDS))
        except Exception as error:  # noqa: BLE001  what users see
            crashed, found = crashed + 1, repr(error)
        late += time.perf_counter() - started > 3 * SECONDS + 1
        if right is not None and found != right:
            wrong.append((gold, text))
    seconds, cpu = time.perf_counter() - begin, cpu_seconds() - before
    return {
        "seconds": round(seconds, 3),
        "answers_per_s": round(len(rows) / seconds, 1),
        "cpu_s": round(cpu, 3),
        "answers_per_cpu_s": round(len(rows) / cpu, 1),
        "wrong_verdicts": len(wrong),
        "examples": sorted(set(wrong))[:5],
        "errors": crashed,
        "longer_than_its_limits": late,
    }


def main(arguments: list[str]) -> int:
    """Run both sides and keep what they found."""
    from benchmarks import harness

    parser = argparse.ArgumentParser(prog="python -m benchmarks.verifier", description=__doc__.partition("\n")[0])
    parser.add_argument("--answers", type=int, default=1000)
    count = parser.parse_args(arguments).answers
    rows = answers(count)
    easy = [row for row in rows if row[2] is not None]
    found = {
        "product": ours(rows, WORKERS),
        "product_without_endless": ours(easy, WORKERS),
        "math_verify_without_endless": plain(easy),
    }
    for name, value in found.items():
        print(name, value)
    clean = all(
        not found[name]["wrong_verdicts"] + found[name]["errors"] for name in ("product", "product_without_endless")
    )
    late = found["product"]["timeouts"] == len(rows) - len(easy)
    if count == 1000:
        kept = {
            "name": "verifier",
            "title": "Mathematical answers judged per second, beside math-verify called plainly",
            "command": "python -m benchmarks.verifier",
            "machine": harness.machine(),
            "commit": harness.commit(),
            "written": harness.now(),
            "answers": count,
            "endless": len(rows) - len(easy),
            "workers": WORKERS,
            "seconds_per_answer": SECONDS,
        }
        harness.write(Path(__file__).parent / "results" / "verifier.json", kept | found)
    print("every verdict as expected" if clean and late else "NOT every verdict as expected")
    return int(not (clean and late))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
