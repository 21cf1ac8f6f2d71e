"""An engine that says what it is told, through the real protocol, so that conversations can be written down.

It holds requests back and answers some at each step, in an order of its own, as an engine would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from m2flow.models.lm.config import CausalLMConfig
from m2flow.models.lm.tokenizer import CharacterTokenizer
from m2flow.roles.conversation import Judge, Talker
from m2flow.roles.generation import GenerationService
from m2flow.runtime.worker import LocalHandle
from m2flow.types import Answer, Request, Weights

CHARACTERS = "".join(chr(c) for c in range(32, 127)) + "\n"


def codec(*, chat: bool = True) -> Any:
    config = CausalLMConfig(
        config={"model_type": "qwen2"}, tokenizer=CharacterTokenizer(characters=CHARACTERS, chat=chat)
    )
    return config.codec()


class Scripted:
    """`say(prompt text, seed)` is the answer's text; one that ends in "~" never stops, and is cut at the limit."""

    def __init__(self, say: Callable[[str, int], str], coder: Any, *, at_once: int = 2) -> None:
        self.say, self.codec, self.at_once = say, coder, at_once
        self.waiting: list[Request] = []
        self.seen: list[Request] = []
        self.version = 0
        self.closed = False

    def submit(self, requests: Sequence[Request]) -> None:
        self.waiting += requests
        self.seen += requests

    def step(self) -> list[Answer]:
        now, self.waiting = self.waiting[-self.at_once :], self.waiting[: -self.at_once]  # the last come first
        return [self._answer(request) for request in now]

    def _answer(self, request: Request) -> Answer:
        text = self.say(self.codec.decode(request.prompt.tolist()), request.seed)
        ids = self.codec.opening([{"role": "user", "content": text.removesuffix("~")}])
        start = ids.index(self.codec.tokenizer.convert_tokens_to_ids("<user>")) + 1
        body = ids[start : start + len(text.removesuffix("~"))]
        tokens = (body if text.endswith("~") else [*body, min(request.stop)])[: request.max_tokens]
        finish: Any = "length" if text.endswith("~") or len(body) >= request.max_tokens else "stop"
        n = len(tokens)
        return Answer(request.id, np.array(tokens), -0.1 * np.arange(1, n + 1), np.full(n, self.version), finish)

    def abort(self, ids: Sequence[int] | None = None) -> list[Answer]:
        raise NotImplementedError

    def load(self, weights: Weights) -> None:
        self.version = weights.version

    def close(self) -> None:
        self.closed = True


def talker(say: Callable[[str, int], str], dialogue: Any, **changes: Any) -> tuple[Talker, Scripted]:
    coder = codec()
    engine = Scripted(say, coder)
    made = {"max_tokens": 64, "max_turns": 1, "temperature": 1.0} | changes
    return Talker(LocalHandle(GenerationService(engine)), coder, dialogue, **made), engine


class Rows:
    """A task source of these payloads."""

    def __init__(self, payloads: Sequence[dict[str, Any]]) -> None:
        from m2flow.types import Task

        self.size = len(payloads)
        self._tasks = [Task(i, payload) for i, payload in enumerate(payloads)]

    def task(self, index: int) -> Any:
        return self._tasks[index]


class Right:
    """A reward: 1 where the text is the payload's answer."""

    def score(self, items: Sequence[Any]) -> Any:
        right = np.array([float(item.text == item.task.payload["answer"]) for item in items], np.float32)
        return {"reward": right, "correct": right}


def judge() -> Judge:
    return Judge(Right())
