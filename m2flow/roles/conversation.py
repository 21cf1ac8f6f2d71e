"""One attempt at a text task: a conversation between a language model and the task's Dialogue, held as token ids.

    ids of the opening -> answer -> ids of the reply -> answer -> ...

Ids that were sampled are appended as they are and never made again from text; text is a view for dialogues and rewards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from m2flow import seeds
from m2flow.protocols import Closes, Dialogue, Reward, TextCodec
from m2flow.types import Array, Request, Sample, Task


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


class Judge:
    """A reward that is asked from an event loop: in a thread of its own, so that generation goes on meanwhile, and for
    one group after another."""

    def __init__(self, reward: Reward) -> None:
        self.reward = reward
        self._thread = ThreadPoolExecutor(1, "reward")

    async def score(self, attempts: Sequence[Attempt]) -> Mapping[str, Array]:
        """Components by name, each [len(attempts)]."""
        samples = [attempt.sample() for attempt in attempts]
        scores = await asyncio.get_running_loop().run_in_executor(self._thread, self.reward.score, samples)
        wrong = [n for n, x in scores.items() if len(x) != len(samples)]
        if wrong or "reward" not in scores:
            raise ValueError(f"reward: gave {sorted(scores)}; {wrong or ['reward']} must be [{len(samples)}] numbers")
        return scores

    def close(self) -> None:
        """End the thread, and what the reward has started."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if isinstance(self.reward, Closes):
            self.reward.close()
