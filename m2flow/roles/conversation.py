"""One attempt at a text task: a conversation between a language model and the task's Dialogue, held as token ids.

    ids of the opening -> answer -> ids of the reply -> answer -> ...

Ids that were sampled are appended as they are and never made again from text; text is a view for dialogues and rewards.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np

from m2flow import seeds
from m2flow.protocols import Closes, Dialogue, Reward, TextCodec
from m2flow.types import Array, Request, Sample, Task

LIMIT = 1500.0  # seconds that a reward may take for one group
# of the recipe's stall_limit, after which the driver calls the run stuck and does not know why
LIMIT_SHARE = 0.8


@dataclass(slots=True)
class Attempt:
    """A conversation as token ids, while it is being held and afterwards."""

    task: Task
    number: int  # within the group
    tokens: list[int] = field(default_factory=list)  # the whole conversation
    at: list[int] = field(default_factory=list)  # positions in it that were sampled
    logprob: list[float] = field(default_factory=list)  # of these
    version: list[int] = field(default_factory=list)  # of the weights that drew these
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    text: str = ""  # the last answer
    finish: Literal["stop", "length", "abort"] = "stop"
    info: Mapping[str, float] = field(default_factory=dict)

    def sample(self) -> Sample:
        """As a Reward sees it."""
        return Sample(self.task, self.number, self.text, self.finish, len(self.at), tuple(self.messages), self.info)


@dataclass(frozen=True, slots=True)
class Talker:
    """Holds conversations. `policy` is the handle of a `GenerationService`."""

    policy: Any
    codec: TextCodec
    dialogue: Callable[[Task], Dialogue]
    max_tokens: int  # of one answer
    max_turns: int  # answers of a conversation
    temperature: float  # 0: greedy
    context: int | None = None  # tokens of a whole conversation that the model can see; None: no bound

    async def attempt(self, task: Task, number: int, seed: int) -> Attempt:
        """One conversation. Its randomness is keyed by `seed`, the answer's turn in it, and the token's place.

        A conversation that is not over after `max_turns` answers was cut, and counts as one that ran out of length.
        """
        dialogue = self.dialogue(task)
        made = Attempt(task, number, messages=list(dialogue.open()))
        made.tokens = self.codec.opening(made.messages)
        for turn in range(self.max_turns):
            await self._answer(made, seeds.derive(seed, turn))
            if made.finish != "stop":
                break
            said = await dialogue.reply(made.text)
            if not said:
                break
            if turn == self.max_turns - 1:
                made.finish = "length"
                break
            made.messages += said
            made.tokens += self.codec.reply(said, last=made.tokens[-1])
        made.info = dialogue.info()
        return made

    async def _answer(self, made: Attempt, seed: int) -> None:
        """One answer of the model, appended."""
        room = self.max_tokens if self.context is None else min(self.max_tokens, self.context - len(made.tokens))
        if room < 1:  # what was said already fills the model's context
            made.finish = "length"
            return
        prompt = np.array(made.tokens, np.int64)
        request = Request(0, prompt, room, self.codec.stop, seed, self.temperature)
        [answer] = await self.policy.generate([request])
        ids = [int(token) for token in answer.tokens]
        made.at += range(len(made.tokens), len(made.tokens) + len(ids))
        made.tokens += ids
        made.logprob += [float(x) for x in answer.logprob]
        made.version += [int(x) for x in answer.version]
        made.text, made.finish = self.codec.decode(ids), answer.finish
        made.messages.append({"role": "assistant", "content": made.text})


@dataclass(slots=True)
class _Call:
    """Answers that wait for their scores."""

    samples: Sequence[Sample]
    scores: Future[Mapping[str, Array]] = field(default_factory=Future)


class Judge:
    """A reward that is asked from an event loop: in a thread of its own, so that generation goes on meanwhile, and for
    one group after another.

    A call that takes longer than `limit` seconds is an error, and nothing more is asked. A thread cannot be ended; this
    one is a daemon, so that it keeps no process alive.
    """

    def __init__(self, reward: Reward, limit: float = LIMIT) -> None:
        self.reward, self.limit = reward, limit
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._busy: tuple[float, int] | None = None  # the call that the reward has: since when, how many answers
        self._stuck = False

    async def score(self, attempts: Sequence[Attempt]) -> Mapping[str, Array]:
        """Components by name, each [len(attempts)].

        Raises:
            RuntimeError: the reward took longer than the limit; says which, on how many answers, and since when.
            ValueError: it gave something else than a number for each.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="reward", daemon=True)
            self._thread.start()
        call = _Call([attempt.sample() for attempt in attempts])
        self._calls.put(call)
        future = asyncio.wrap_future(call.scores)
        try:
            scores = await self._wait(future)
        finally:
            future.cancel()  # a call that nobody waits for any more is not asked
        wrong = [n for n, x in scores.items() if len(x) != len(attempts)]
        if wrong or "reward" not in scores:
            raise ValueError(f"reward: gave {sorted(scores)}; {wrong or ['reward']} must be [{len(attempts)}] numbers")
        return scores

    async def _wait(self, scores: asyncio.Future[Mapping[str, Array]]) -> Mapping[str, Array]:
        while not scores.done():
            busy = self._busy
            left = self.limit if busy is None else busy[0] + self.limit - time.monotonic()
            if busy is not None and left <= 0:
                self._stuck = True
                ago = time.monotonic() - busy[0]
                since = datetime.now().astimezone() - timedelta(seconds=ago)
                raise RuntimeError(
                    f"reward {getattr(self.reward, 'name', type(self.reward).__name__)} has been busy on {busy[1]} "
                    f"answers for {ago:.4g} s, since {since:%H:%M:%S}; the limit (a share of stall_limit) is "
                    f"{self.limit:.4g} s. Give the reward a limit of its own, or raise stall_limit"
                )
            await asyncio.wait({scores}, timeout=left)
        return scores.result()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if not call.scores.set_running_or_notify_cancel():
                continue  # nobody waits for it any more
            self._busy = time.monotonic(), len(call.samples)
            try:
                call.scores.set_result(self.reward.score(call.samples))
            except BaseException as error:  # noqa: BLE001  whoever asked gets it
                call.scores.set_exception(error)
            finally:
                self._busy = None

    def close(self) -> None:
        """End the thread, and what the reward has started; not where it hangs, which holds what it has started."""
        self._calls.put(None)
        if isinstance(self.reward, Closes) and not self._stuck:
            self.reward.close()
