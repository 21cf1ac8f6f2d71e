"""Whether the last answer of a conversation about a mathematical task is right.

The answer is cut out of the text here (`rewards.answers`). Numbers in simple forms, words, and texts that look the same
are decided here, exactly (`rewards.exact`); what is left goes to math-verify, in processes that can be killed
(`rewards.math_pool`). They are started when the first such answer comes, so integers need neither.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, get_args

import numpy as np

from m2flow.rewards.answers import LONGEST, Extract, extract, last_box
from m2flow.rewards.exact import tidy, verdict
from m2flow.rewards.math_pool import Outcome, Pool
from m2flow.types import Array, Task

_LOG = logging.getLogger("m2flow.rewards")
_LONGEST_WAIT = 3600.0  # seconds
_LEAST_MEMORY = 256  # MiB: sympy and math-verify themselves


@dataclass(frozen=True, kw_only=True, slots=True)
class MathRewardConfig:
    """Compares the model's last answer with the task's: 1 where it is right, 0 where it is wrong or there is none.

    `auto` takes the first of these that the text has: its last box, the last <answer> tag, what stands behind the last
    "answer is" or "####", all of it where that is one line without words, the last number. Where it thinks in
    <think>...</think>, only what follows is looked at; a thought without an end has no answer.
    """

    answer: str = "answer"  # key of the right answer in a task; there it may stand in a box or behind "####"
    extract: Extract = "auto"  # where the answer stands: boxed, last_number, whole (text), or auto
    # a last box without its closing brace: no answer, or what stands behind it up to the end of the line
    unclosed: Literal["refuse", "take"] = "refuse"
    # by how much a number may differ, as a share of the right one; 0: two numbers are compared exactly, 0.33 is not 1/3
    tolerance: float = 0.0
    # what decides where numbers and text do not: math-verify, which compares decimals to six places; none: it is wrong
    verifier: Literal["math_verify", "none"] = "math_verify"
    workers: int = 2  # verifier processes, started when they are first needed
    seconds: float = 5.0  # longest time for one sample in a verifier; longer counts in "timeout"
    memory_mib: int = 1024  # address space of one verifier; an answer that needs more counts in "error"
    right: float = 1.0  # reward of a right answer
    wrong: float = 0.0  # reward of a wrong answer, and of none
    # where the verifier failed or took too long, at most `wrong`: a policy would learn to provoke it; null: `wrong`
    error_reward: float | None = None

    def __post_init__(self) -> None:
        if not self.answer:
            raise ValueError("answer: must be the name of a key of the tasks, got ''")
        for name, known in (
            ("extract", get_args(Extract)),
            ("unclosed", ("refuse", "take")),
            ("verifier", ("math_verify", "none")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance: must be at least 0 and less than 1, got {self.tolerance}")
        if self.workers < 1:
            raise ValueError(f"workers: must be at least 1, got {self.workers}")
        if not 0 < self.seconds <= _LONGEST_WAIT:
            raise ValueError(f"seconds: must be more than 0 and at most {_LONGEST_WAIT:g}, got {self.seconds}")
        if self.memory_mib < _LEAST_MEMORY:
            raise ValueError(f"memory_mib: must be at least {_LEAST_MEMORY}, got {self.memory_mib}")
        self._check_rewards()

    @property
    def failed(self) -> float:
        """The reward of a sample without a verdict."""
        return self.wrong if self.error_reward is None else self.error_reward

    def _check_rewards(self) -> None:
        for name in ("right", "wrong", "error_reward"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name}: must be a finite number, got {value}")
        if self.right <= self.wrong:
            raise ValueError(f"right: must be more than wrong ({self.wrong}), got {self.right}")
        if self.failed > self.wrong:
            raise ValueError(
                f"error_reward: must be at most wrong ({self.wrong}), or failing would pay better than a wrong answer; "
                f"got {self.error_reward}; leave it out to use wrong"
            )

    def build(self) -> MathReward:
        """Starts nothing. Raises ValueError where math-verify is asked for and not installed, unless answers are
        numbers only (`last_number`)."""
        if self.verifier == "math_verify" and self.extract != "last_number":
            _require_math_verify()
        return MathReward(self)


def _require_math_verify() -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError(
            "verifier: math_verify needs the package 'math-verify', which is not installed: pip install 'm2flow[lm]', "
            "or set it to none, which compares numbers and text only"
        )


class MathReward:
    """Scores `Sample`s. Made by `MathRewardConfig.build`; safe to share between threads, copied by its config."""

    name, says_correct = "math", True

    def __init__(self, config: MathRewardConfig) -> None:
        self.config = config
        self.pool = Pool(config.workers, config.seconds, config.memory_mib)
        self._told: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return MathReward, (self.config,)  # another process starts verifiers of its own

    def score(self, items: Sequence[Any]) -> Mapping[str, Array]:
        """float32 [len(items)] by name: "reward"; "correct", 0 or 1, NaN where the verifier gave no verdict;
        "extracted", 1 where the text had an answer; "error" and "timeout", 1 where the verifier failed or was too slow.

        Raises:
            ValueError: a task without a right answer; names the sample.
            RuntimeError: the verifier does not start.
        """
        pairs = [(self._gold(index, item), self._answer(index, item)) for index, item in enumerate(items)]
        known = [None if a is None else verdict(g, a, self.config.tolerance) for g, a in pairs]
        asked = dict.fromkeys(
            (g, a) for (g, a), said in zip(pairs, known, strict=True) if said is None and a is not None
        )
        outcomes = self._ask([*asked])
        rows = []
        for (gold, answer), said in zip(pairs, known, strict=True):
            if answer is None or said is not None:
                outcome = Outcome("right" if said else "wrong")
            else:
                outcome = outcomes[gold, answer]
            rows.append(self._row(outcome, extracted=answer is not None))
        columns = np.array(rows, np.float32).reshape(len(rows), len(_COLUMNS))
        return {name: columns[:, at].copy() for at, name in enumerate(_COLUMNS)}

    def check_task(self, task: Task) -> None:
        """Raise ValueError where the task has no right answer that could be compared; asks no verifier."""
        key = self.config.answer
        if key not in task.payload:
            raise ValueError(f"answer: tasks have no {key!r} (keys: {', '.join(task.payload)}); name the key of theirs")
        _text(task.payload[key], f"answer: field {key!r}")

    def close(self) -> None:
        """End the verifiers; scoring again starts new ones."""
        self.pool.close()

    def _row(self, outcome: Outcome, extracted: bool) -> tuple[float, ...]:
        config = self.config
        if outcome.verdict in ("right", "wrong"):
            right = outcome.verdict == "right"
            return config.right if right else config.wrong, float(right), float(extracted), 0.0, 0.0
        late = outcome.verdict == "timeout"
        return config.failed, math.nan, float(extracted), float(not late), float(late)

    def _ask(self, questions: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Outcome]:
        if not questions:
            return {}
        if self.config.verifier == "none":
            return dict.fromkeys(questions, Outcome("wrong"))
        if not self.pool.pids():
            _require_math_verify()
        asked = [{"gold": gold, "answer": answer} for gold, answer in questions]
        outcomes = dict(zip(questions, self.pool(asked), strict=True))
        for (gold, answer), outcome in outcomes.items():
            if outcome.why and outcome.why not in self._told and len(self._told) < 20:  # each kind once
                self._told.add(outcome.why)
                kind = "a time-out" if outcome.verdict == "timeout" else "an error"
                text = "reward math: %r against %r: %s; counted as %s"
                _LOG.warning(text, answer[:80], gold[:80], outcome.why, kind)
        return outcomes

    def _answer(self, index: int, item: Any) -> str | None:
        if not isinstance(getattr(item, "text", None), str):
            raise ValueError(f"reward math: sample {index} is {item!r:.80}, expected a Sample with text")  # noqa: TRY004
        found = extract(item.text, self.config.extract, self.config.unclosed)
        return (tidy(found) or None) if found is not None else None

    def _gold(self, index: int, item: Any) -> str:
        """The right answer of a sample's task, as text."""
        where = f"reward math: sample {index}"
        task = getattr(item, "task", None)
        if task is None:
            raise ValueError(f"{where} is {item!r:.80}, expected a Sample of a task")
        where += f" (task {task.id})"
        key = self.config.answer
        if key not in task.payload:
            raise ValueError(f"{where} has no {key!r} (keys: {', '.join(task.payload)}); name the right key in answer")
        return _text(task.payload[key], f"{where}, {key!r}")


_COLUMNS = ("reward", "correct", "extracted", "error", "timeout")


def _text(value: Any, where: str) -> str:
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where}: the right answer is {value}")
        value = format(Decimal(str(value)), "f")  # 1e-05 as 0.00001
    if type(value) is int:  # true is no number
        value = str(value)
    if not isinstance(value, str):
        raise ValueError(f"{where}: expected text or a number, got {value!r:.80}")  # noqa: TRY004  a user's error
    box = last_box(value)
    gold = tidy(box[0] if box is not None and box[1] else value.rpartition("####")[2])
    if not 0 < len(gold) <= LONGEST:
        raise ValueError(f"{where}: a right answer has 1 to {LONGEST} characters, got {len(gold)}: {value!r:.80}")
    return gold
