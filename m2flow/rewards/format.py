"""Whether the model's last answer has the wanted form, whatever it says."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from m2flow.types import Array

DEFAULT_TAGS = ("think", "answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatRewardConfig:
    """1 where the text is well formed, else 0: each tag once, in this order, with something inside; or a pattern.

    With the defaults `<think>so 3</think> <answer>3</answer>` is well formed. Tags cost one pass over the text. A
    pattern is as quick as it is written: one with nested repeats can take very long on a text made for it.
    """

    # names of the tags, in order, one after the other; null: think and answer, or none where there is a pattern
    tags: tuple[str, ...] | None = None
    opened: bool = False  # whether the first tag is opened by the prompt already, as some chat templates do
    rest: Literal["none", "allowed", "required"] = "none"  # text behind the last tag
    pattern: str | None = None  # regular expression that the whole text must match (a dot matches line breaks too)
    right: float = 1.0  # reward of a well-formed text
    wrong: float = 0.0  # reward of any other

    def __post_init__(self) -> None:
        if self.tags is None:
            object.__setattr__(self, "tags", DEFAULT_TAGS if self.pattern is None else ())
        assert self.tags is not None
        if self.rest not in ("none", "allowed", "required"):
            raise ValueError(f"rest: must be none, allowed or required, got {self.rest!r}")
        odd = [tag for tag in self.tags if not re.fullmatch(r"[\w-]+", tag)]
        if odd or len(set(self.tags)) < len(self.tags):
            raise ValueError(f"tags: different names of letters, digits, - and _, got {list(self.tags)}")
        if (self.pattern is None) == (not self.tags):
            raise ValueError("pattern: give either tags or a pattern (with `tags: []` or none)")
        if self.pattern is not None:
            try:
                re.compile(self.pattern, re.DOTALL)
            except re.error as error:
                raise ValueError(f"pattern: {self.pattern!r} is no regular expression: {error}") from error
        for name in ("right", "wrong"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}: must be a finite number, got {getattr(self, name)}")

    def build(self) -> FormatReward:
        """A reward without state."""
        return FormatReward(self)


class FormatReward:
    """Scores `Sample`s. Made by `FormatRewardConfig.build`."""

    def __init__(self, config: FormatRewardConfig) -> None:
        self.config = config
        self._pattern = None if config.pattern is None else re.compile(config.pattern, re.DOTALL)

    def score(self, items: Sequence[Any]) -> Mapping[str, Array]:
        """float32 [len(items)]: "reward".

        Raises:
            ValueError: an item without text; names it.
        """
        scores = [
            self.config.right if self._fits(index, item) else self.config.wrong for index, item in enumerate(items)
        ]
        return {"reward": np.array(scores, np.float32)}

    def _fits(self, index: int, item: Any) -> bool:
        text = getattr(item, "text", None)
        if not isinstance(text, str):
            raise ValueError(f"reward format: sample {index} is {item!r:.80}, expected a Sample with text")  # noqa: TRY004
        if self._pattern is not None:
            return self._pattern.fullmatch(text) is not None
        return self._tagged(text)

    def _tagged(self, text: str) -> bool:
        config, at = self.config, 0
        for number, tag in enumerate(config.tags or ()):
            opening, closing = f"<{tag}>", f"</{tag}>"
            given = config.opened and number == 0
            if text.count(opening) != (0 if given else 1) or text.count(closing) != 1:
                return False
            begin = at if given else text.find(opening)
            end = text.find(closing)
            inside = begin if given else begin + len(opening)
            if text[at:begin].strip() or not text[inside:end].strip():
                return False  # something before the tag or out of order, or nothing inside
            at = end + len(closing)
        behind = bool(text[at:].strip())
        return behind if config.rest == "required" else not behind or config.rest == "allowed"
