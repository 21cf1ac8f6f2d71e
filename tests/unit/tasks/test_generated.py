"""Arithmetic and countdown: right answers, disjoint splits, a verifier that cannot be talked round."""

from __future__ import annotations

import re
from collections import Counter
from hashlib import sha256
from itertools import combinations_with_replacement

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.tasks.arithmetic import ArithmeticConfig
from m2flow.tasks.countdown import CountdownConfig, verify
from m2flow.tasks.order import multiset, multisets
from m2flow.types import Sample, Task

NAMES = ("add", "subtract", "multiply")


def all_of(config, side: str, seed: int = 0) -> list[Task]:
    source = config.tasks(side, seed)
    return [source.task(i) for i in range(source.size)]


# ---- arithmetic


@pytest.mark.parametrize("operations", [("add",), ("subtract",), ("multiply", "subtract"), NAMES])
@pytest.mark.parametrize("negative", [False, True])
def test_one_digit_problems_are_all_there_once_and_right(operations: tuple[str, ...], negative: bool) -> None:
    """The whole space, counted independently: unordered pairs, but ordered where a difference may be negative."""
    config = ArithmeticConfig(digits=1, operations=operations, negative=negative)
    tasks = [*all_of(config, "train"), *all_of(config, "held_out")]
    expected = set()
    for name in operations:
        for a in range(10):
            for b in range(10):
                if name == "subtract":
                    expected.add((name, *((a, b) if negative else (max(a, b), min(a, b)))))
                else:
                    expected.add((name, max(a, b), min(a, b)))
    seen = []
    for task in tasks:
        a, sign, b = re.fullmatch(r"(\d+) ([-+*]) (\d+)", task.payload["question"]).groups()
        a, b, name = int(a), int(b), {"+": "add", "-": "subtract", "*": "multiply"}[sign]
        assert task.payload["numbers"] == [a, b]
        assert task.payload["answer"] == task.payload["completion"] == str({"+": a + b, "-": a - b, "*": a * b}[sign])
        seen.append((name, a, b) if name == "subtract" else (name, max(a, b), min(a, b)))
    assert sorted(seen) == sorted(expected)
    assert len(all_of(config, "held_out")) == len(expected) // 5


@given(
    st.integers(1, 12), st.integers(2, 8), st.sets(st.sampled_from(NAMES), min_size=1), st.booleans(),
    st.integers(0, 99), st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_sides_never_meet_whatever_the_seeds(
    digits: int, terms: int, operations: set[str], smaller: bool, seed: int, other: int
) -> None:
    config = ArithmeticConfig(
        digits=digits, terms=terms, operations=tuple(sorted(operations)), smaller=smaller, negative=True
    )
    train, held = config.tasks("train", seed), config.tasks("held_out", other)

    def problems(source) -> set[tuple[str, ...]]:
        rows = [source.task(i).payload for i in range(min(source.size, 60))]
        for row in rows:
            assert all(
                len(str(x)) == digits or ((smaller or digits == 1) and len(str(x)) <= digits) for x in row["numbers"]
            )
            assert row["answer"] == str(eval(row["question"]))
        return {tuple(sorted(row["question"].split())) for row in rows if terms > 2 or "-" not in row["question"]}

    assert not problems(train) & problems(held)


@pytest.mark.parametrize(("terms", "operations"), [(3, ("add",)), (3, ("add", "multiply")), (4, ("subtract",))])
def test_no_order_of_a_problem_that_is_trained_on_is_held_out(terms: int, operations: tuple[str, ...]) -> None:
    """Every set of numbers and signs there is, counted independently, is asked once, on one side."""
    config = ArithmeticConfig(digits=1, terms=terms, operations=operations, negative=True)
    asked = [task.payload["question"].split() for side in ("train", "held_out") for task in all_of(config, side)]
    sets = [tuple(sorted(question)) for question in asked]
    signs = ["+-*"[("add", "subtract", "multiply").index(name)] for name in operations]
    every = [
        tuple(sorted([*map(str, numbers), *between]))
        for numbers in combinations_with_replacement(range(10), terms)
        for between in combinations_with_replacement(signs, terms - 1)
    ]
    assert sorted(sets) == sorted(every)
    firsts = [question[0] > min(question[::2]) for question in asked]
    assert sum(firsts) / len(firsts) > 0.4, "the numbers come in no order"
    assert asked == [t.payload["question"].split() for side in ("train", "held_out") for t in all_of(config, side)]


def test_the_two_digit_sums_that_stored_results_were_measured_on_stay_held_out() -> None:
    held = ArithmeticConfig(digits=2, operations=("add",)).tasks("held_out", 0)
    questions = "\n".join(held.task(i).payload["question"] for i in range(200))
    assert sha256(questions.encode()).hexdigest()[:24] == "a97b774d2789db4439be1a87"


def test_two_digit_sums_split_and_order() -> None:
    config = ArithmeticConfig(held_out=200)
    train, held = all_of(config, "train"), all_of(config, "held_out", 3)
    assert (len(train), len(held)) == (90 * 91 // 2 - 200, 200)
    assert held == all_of(config, "held_out", 4), "what is held out does not depend on the seed"
    other = all_of(config, "train", 1)
    assert [t.payload for t in train] != [t.payload for t in other]
    assert {t.payload["question"] for t in train} == {t.payload["question"] for t in other}
    assert [t.id for t in train] == list(range(len(train)))
    first = sum(t.payload["numbers"][0] > t.payload["numbers"][1] for t in train)
    assert 0.45 < first / len(train) < 0.55, "either number may come first"
    assert train[0].payload["prompt"] == f"What is {train[0].payload['question']}? Give the number only."
    assert all_of(ArithmeticConfig(template="{question}="), "held_out")[0].payload["prompt"].endswith("=")


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"digits": 0}, "digits"),
        ({"terms": 1}, "terms"),
        ({"operations": ()}, "operations"),
        ({"operations": ("add", "add")}, "operations"),
        ({"operations": ("power",)}, "operations"),
        ({"operations": ("subtract",), "terms": 3}, "negative"),
        ({"held_out": 0}, "held_out"),
        ({"digits": 1, "held_out": 55}, "held_out"),
        ({"template": "{nothing}"}, "template"),
        ({"template": "{question} is {answer}"}, "template"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_turns": 0}, "max_turns"),
        ({"tools": ("calculator",)}, "max_turns"),
        ({"tools": ("abacus",), "max_turns": 2}, "tools"),
    ],
)
def test_wrong_keys_of_arithmetic_are_refused(options, key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}: "):
        ArithmeticConfig(**options)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("hi", "template: has no field, so every task would ask the same; there are: {question}, {numbers}"),
        ("{prompt", "template: has no field, so every task would ask the same; there are: {question}, {numbers}"),
        ("{question.__class__}", "template: '{question.__class__}' is no {name} of a field"),
        ("{numbers} {question[0]}", "template: '{question[0]}' is no {name} of a field"),
    ],
)
def test_a_template_without_a_plain_field_is_refused(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        ArithmeticConfig(template=template)


# ---- countdown


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_sets_of_numbers_are_ranked_without_gaps(count: int) -> None:
    expected = sorted(combinations_with_replacement(range(7), count))
    assert len(expected) == multisets(7, count)
    assert sorted(tuple(multiset(rank, count)) for rank in range(len(expected))) == expected


def test_large_sets_are_ranked_in_no_time() -> None:
    many = 9 * 10**11
    assert multiset(0, 8) == [0] * 8
    assert multiset(multisets(many, 8) - 1, 8) == [many - 1] * 8


@given(
    st.integers(2, 6), st.integers(1, 5), st.integers(6, 30), st.booleans(), st.integers(0, 999),
    st.sets(st.sampled_from(("subtract", "multiply", "divide"))),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_every_countdown_has_a_solution_and_held_out_numbers_are_never_trained_on(
    count: int, low: int, high: int, exact: bool, seed: int, others: set[str]
) -> None:
    config = CountdownConfig(
        count=count, low=low, high=high, exact=exact, operations=("add", *sorted(others)), max_target=count * high
    )
    sides = {}
    for side in ("train", "held_out"):
        source = config.tasks(side, seed)
        tasks = [source.task(i) for i in range(min(source.size or 40, 40))]
        sides[side] = {tuple(sorted(task.payload["numbers"])) for task in tasks}
        for task in tasks:
            row = task.payload
            assert 1 <= row["target"] <= count * high
            assert eval(row["completion"]) == row["target"]
            used = Counter(int(x) for x in re.findall(r"\d+", row["completion"]))
            assert used == Counter(row["numbers"]) if exact else used <= Counter(row["numbers"])
            assert all(low <= x <= high for x in row["numbers"])
            assert verify(Sample(task, 0, row["completion"], "stop", 1)) == 1.0
    assert not sides["train"] & sides["held_out"]


def test_countdown_is_a_function_of_seed_and_position() -> None:
    config = CountdownConfig()
    train, again, other = (config.tasks("train", seed) for seed in (1, 1, 2))
    positions = [0, 5, 1231, 1232, 10**9]
    rows = [train.task(p) for p in positions]
    assert rows == [again.task(p) for p in reversed(positions)][::-1]
    assert rows != [other.task(p) for p in positions]
    assert train.size is None
    held = all_of(config, "held_out")
    assert len(held) == 1540 // 5  # C(22, 3) sets of three numbers from 1 to 20
    assert held == all_of(config, "held_out", 9)
    assert len({tuple(sorted(task.payload["numbers"])) for task in held}) == len(held)
    epoch = {tuple(sorted(train.task(p).payload["numbers"])) for p in range(1232)}
    assert len(epoch) == 1232, "every set of numbers once before one comes again"


TASK = Task(0, {"numbers": [3, 5, 5, 2], "target": 17, "operations": ["+", "-", "*"], "exact": True})


@pytest.mark.parametrize(
    "text",
    [
        "3*5+5-3",
        "(5-2)*5+3",  # 18
        "3*5+2",  # one 5 is left
        "2*5+5+3",  # 18
        "5+5+2*3",  # 16
        "(3+5)*2",
        "3*(5-2)+5",  # 14
        "5*5-2*3",  # 19
        "5*(5-2)+3",
        "5*2+5+3-1",
        "3*2*5-5",
        "(2*5-3)+5*1",
        "",
        "17",
        "17+0*3*5*5*2",
        "= 17",
        "5 5 3 2",
        '__import__("os").system("true")',
        "9**9**9",
    ],
)
def test_countdown_answers_that_break_a_rule_score_0(text: str) -> None:
    assert verify(Sample(TASK, 0, text, "stop", 1)) == 0.0


SOLVED = Task(0, {"numbers": [3, 7, 2], "target": 17, "operations": ["+", "-", "*"], "exact": True})


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("7*2+3", 1),
        ("3+2*7", 1),
        ("(7*2)+3", 1),
        (" 7 * 2 + 3 = 17 ", 1),
        ("7 \u00d7 2 + 3", 1),
        ("first 7*2 is 14.\nSo:\n7*2+3", 1),
        ("7*2+3\n\n", 1),
        ("thinking 1+1 <answer>7*2+3</answer> done", 1),
        ("<answer>1</answer> or <answer>7*2+3</answer>", 1),
        ("<answer>7*2+3</answer> or <answer>1</answer>", 0),
        ("<answer>7*2+3", 0),
        ("7*2+3\nor 7*2-3", 0),
        ("7*2+3 = 17 = 17", 0),
        ("7*2+03", 0),
        ("7*2+3.0", 0),
        ("7*2--3", 0),
        ("+7*2+3", 0),
        ("14+3", 0),
        ("7+7+3", 0),
        ("72/3-7", 0),
        ("7*2+3+0", 0),
    ],
)
def test_countdown_answers_are_read_as_documented(text: str, right: int) -> None:
    assert verify(Sample(SOLVED, 0, text, "stop", 1)) == right


def test_countdown_with_some_of_the_numbers_and_exact_division() -> None:
    some = Task(0, {"numbers": [6, 4, 9], "target": 10, "operations": ["+", "/"], "exact": False})
    assert verify(Sample(some, 0, "6+4", "stop", 1)) == 1
    assert verify(Sample(some, 0, "6+4+4", "stop", 1)) == 0
    thirds = Task(0, {"numbers": [1, 3, 3], "target": 1, "operations": ["*", "/"], "exact": True})
    assert verify(Sample(thirds, 0, "1/3*3", "stop", 1)) == 1  # exactly, where floats may not be


@given(st.text(max_size=50) | st.text("0123456789+-*/()= <answer>\n", max_size=80))
def test_no_answer_makes_the_verifier_fail(text: str) -> None:
    assert verify(Sample(SOLVED, 0, text, "stop", 1)) in (0.0, 1.0)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"count": 1}, "count"),
        ({"low": 20}, "high"),
        ({"operations": ("subtract",)}, "operations"),
        ({"operations": ("add", "power")}, "operations"),
        ({"max_target": 59}, "max_target"),
        ({"held_out": 1540}, "held_out"),
        ({"template": "{completion}"}, "template"),
    ],
)
def test_wrong_keys_of_countdown_are_refused(options, key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}: "):
        CountdownConfig(**options)
