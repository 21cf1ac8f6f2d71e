"""A reward that is asked from an event loop: its limit, and that a process ends though its reward does not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from m2flow.rewards.combined import CombinedReward
from m2flow.rewards.function import FunctionRewardConfig
from m2flow.roles.conversation import Attempt, Judge
from m2flow.types import Task

LET_GO = threading.Event()


def hangs(_: Any) -> float:
    """A reward function that waits for something that does not come."""
    LET_GO.wait(60)
    return 1.0


class Slow:
    """A reward that takes its time, and says whether it was closed."""

    def __init__(self, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.seconds, self.error, self.closed = seconds, error, False
        self.threads: set[str] = set()
        self.asked = 0

    def score(self, items: Sequence[Any]) -> Any:
        self.threads.add(threading.current_thread().name)
        self.asked += 1
        time.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return {"reward": np.ones(len(items), np.float32)}

    def close(self) -> None:
        self.closed = True


def attempts(count: int) -> list[Attempt]:
    return [Attempt(Task(1, {"answer": "7"}), k) for k in range(count)]


@pytest.fixture
def hanging() -> Any:
    LET_GO.clear()
    yield FunctionRewardConfig(function=f"{__name__}:hangs").build()
    LET_GO.set()


def test_a_reward_that_hangs_ends_the_run_with_its_name_and_since_when(hanging: Any) -> None:
    judge = Judge(CombinedReward({"mine": 1.0}, {"mine": hanging}), limit=0.3)
    began = time.monotonic()
    told = rf"reward combined, part 'mine': function {__name__}:hangs .* on 3 answers.* since .*limit.* 0.3 s"
    with pytest.raises(RuntimeError, match=told):
        asyncio.run(judge.score(attempts(3)))
    assert 0.3 <= time.monotonic() - began < 5
    judge.close()  # returns though the thread does not


def test_who_waits_behind_a_reward_that_hangs_is_told_of_the_call_that_does(hanging: Any) -> None:
    judge = Judge(hanging, limit=0.3)

    async def both() -> list[Any]:
        return await asyncio.gather(judge.score(attempts(3)), judge.score(attempts(2)), return_exceptions=True)

    assert ["on 3 answers" in str(error) for error in asyncio.run(both())] == [True, True]
    judge.close()


def test_the_limit_counts_for_each_call_and_not_for_the_wait_before_it() -> None:
    reward = Slow(0.2)
    judge = Judge(reward, limit=0.5)

    async def many() -> list[Any]:
        return await asyncio.gather(*(judge.score(attempts(k)) for k in range(1, 6)))

    assert [len(scores["reward"]) for scores in asyncio.run(many())] == [1, 2, 3, 4, 5]
    assert reward.threads == {"reward"}
    judge.close()
    assert reward.closed


def test_an_error_of_a_reward_reaches_who_asked_and_the_next_call_works() -> None:
    reward = Slow(error=ValueError("no answer"))
    judge = Judge(reward)
    with pytest.raises(ValueError, match="^no answer$"):
        asyncio.run(judge.score(attempts(1)))
    reward.error = None
    assert asyncio.run(judge.score(attempts(1)))["reward"].tolist() == [1.0]
    judge.close()


def test_what_nobody_waits_for_any_more_is_not_asked() -> None:
    reward = Slow(0.3)
    judge = Judge(reward)

    async def some() -> None:
        tasks = [asyncio.create_task(judge.score(attempts(1))) for _ in range(3)]
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await judge.score(attempts(1))

    asyncio.run(some())
    judge.close()
    assert reward.asked == 2, "the one that ran already, and the last"


def test_a_process_ends_though_its_reward_hangs() -> None:
    code = (
        "import asyncio\nfrom tests.unit.test_judge import *\n"
        "judge = Judge(FunctionRewardConfig(function='tests.unit.test_judge:hangs').build(), limit=0.2)\n"
        "try: asyncio.run(judge.score(attempts(1)))\nexcept RuntimeError: print('told')\njudge.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=40, check=False)
    assert (done.stdout, done.returncode) == ("told\n", 0), done.stderr
