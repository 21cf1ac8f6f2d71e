"""Between messages and token ids, over a tokenizer of transformers.

Ids that a model sampled are never made again from text (A26): what follows an answer is taken from what the chat
template writes behind a sentinel answer, and appended. Special tokens come from the template alone: their text in what
users, data and tools say is broken up (`Inert`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from m2flow.models.lm.inert import Inert

Message = Mapping[str, Any]
SENTINEL = "M2FLOWANSWER"  # stands for an answer while its surroundings are rendered


class HFCodec:
    """See `protocols.TextCodec`. `stop` holds `stop_ids`, the tokenizer's eos, and what its template ends a turn with.

    Without a chat template messages are texts put one after another, and an answer ends with the eos token.
    """

    stop: frozenset[int]

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.template = bool(tokenizer.chat_template)
        self.inert = Inert(tokenizer)
        eos = tokenizer.eos_token_id
        stop = {int(i) for i in stop_ids} | ({int(eos)} if eos is not None else set())
        self._turn = ""  # the special token that the template writes behind an answer, if any
        if self.template and (found := self._end_of_turn()) is not None:
            stop.add(found)
            self._turn = self._text(found)
        if not stop:
            raise ValueError("tokenizer: it has no eos token, so nothing ends an answer; set eos_token in its config")
        self.stop = frozenset(stop)
        self._asked: tuple[list[Any], list[int]] | None = None  # the last opening's roles and texts, and its ids
        # Longest first: one may begin with another.
        self._ends = sorted((self._text(i) for i in self.stop), key=len, reverse=True)

    # ---- the Protocol

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation up to where the model answers."""
        if not messages:
            raise ValueError("messages: there are none; a conversation needs at least one before the model answers")
        key = [(m.get("role"), m.get("content")) for m in messages]
        if all(m.keys() == {"role", "content"} and isinstance(m["content"], str) for m in messages):
            if self._asked is None or self._asked[0] != key:  # attempts at one task ask for the same, one after another
                self._asked = key, self._opening(messages)
            return list(self._asked[1])
        return self._opening(messages)

    def _opening(self, messages: Sequence[Message]) -> list[int]:
        if not self.template:
            ids = self._plain(messages)[0]
            if not ids:
                raise ValueError("messages: the prompt is empty and the tokenizer adds no first token; add text")
            return ids
        return self._ids(self._render(self.inert.messages(messages), prompt=True))

    def reply(self, messages: Sequence[Message], *, last: int) -> list[int]:
        """Ids to append behind an answer whose last id is `last`, up to where the model answers again.

        They begin with the template's end of the turn, unless the answer has just that: one that ended with another
        stop id (a text of `policy.stop`, a second eos) has not said it, and the model knows no turn without.
        """
        if not self.template:
            text = self.inert.text("".join(_content(m) for m in messages))
            return ([] if last in self.stop else [self._eos]) + self._ids(text)
        tail = self._behind([{"role": "user", "content": "?"}], self.inert.messages(messages))
        end = next((end for end in self._ends if tail.startswith(end)), "")
        if last in self.stop and self._text(last) == end:
            tail = tail.removeprefix(end)
        return self._ids(tail)

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        text: str = self.tokenizer.decode(
            [int(i) for i in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def demonstration(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Ids of a whole conversation, and which of them the model should have said (the stop id of each answer
        included). Ids before an answer are those of `opening`.

        Raises:
            ValueError: no message is an answer, or the template changes earlier turns when later ones come.
        """
        if not any(m["role"] == "assistant" for m in messages):
            raise ValueError("messages: none has the role 'assistant', so there is nothing to learn from")
        if not self.template:
            return self._plain(messages)
        messages = self.inert.messages(messages)
        ids: list[int] = []
        said: list[bool] = []
        done = ""  # text whose ids are there already
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:i], prompt=True) if i else ""
            upto = self._render(messages[: i + 1], prompt=False)
            if not (before.startswith(done) and upto.startswith(before)):
                raise ValueError(
                    f"messages: the chat template writes message {i} or what is before it in another way when more "
                    "follows; cut the conversation so that it ends with this answer"
                )
            answer, rest = self._cut(upto[len(before) :])
            for part, mine in ((self._ids(before[len(done) :]), False), (answer, True)):
                ids += part
                said += [mine] * len(part)
            done = upto[: len(upto) - len(rest)]
        return ids, said

    # ---- pieces

    @property
    def _eos(self) -> int:
        return int(self.tokenizer.eos_token_id) if self.tokenizer.eos_token_id is not None else min(self.stop)

    def _cut(self, piece: str) -> tuple[list[int], str]:
        """Ids of an answer up to its stop id, and the text behind it (a line break, usually)."""
        ends = [self._turn] if self._turn and self._turn in piece else self._ends  # not what is a text of policy.stop
        found = [piece.rfind(end) + len(end) for end in ends if end in piece]
        if not found:
            return [*self._ids(piece), self._eos], ""
        at = max(found)
        return self._ids(piece[:at]), piece[at:]

    def _plain(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Texts one after another; what is not an answer is put together before it becomes ids."""
        ids: list[int] = []
        said: list[bool] = []
        text, first = "", True
        for message in [*messages, None]:
            if message is not None and message["role"] != "assistant":
                text += _content(message)
                continue
            part = self._ids(self.inert.text(text), special=first)
            ids, said, text, first = ids + part, said + [False] * len(part), "", False
            if message is not None:
                part = [*self._ids(_content(message)), self._eos]
                ids, said = ids + part, said + [True] * len(part)
        return ids, said

    def _render(self, messages: Sequence[Message], *, prompt: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(
            [dict(m) for m in messages], tokenize=False, add_generation_prompt=prompt
        )
        return text

    def _behind(self, before: Sequence[Message], after: Sequence[Message]) -> str:
        """What the template writes behind an answer that stands between these messages."""
        sentinel = SENTINEL
        while sentinel in repr(after):  # a tool may say this word, too
            sentinel += "X"
        text = self._render([*before, {"role": "assistant", "content": sentinel}, *after], prompt=bool(after))
        if text.count(sentinel) != 1:
            raise ValueError("tokenizer: its chat template changes what an answer says, so nothing can follow one")
        return text.partition(sentinel)[2]

    def _end_of_turn(self) -> int | None:
        """The special token that the template writes behind an answer, if any."""
        ids = self._ids(self._behind([{"role": "user", "content": "?"}], ()))
        return ids[0] if ids and ids[0] in self.tokenizer.added_tokens_decoder else None

    def _ids(self, text: str, *, special: bool = False) -> list[int]:
        if not text and not special:
            return []
        try:
            ids = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        except Exception as error:  # the tokenizers package raises a plain Exception for an unknown token
            known = self.tokenizer.get_vocab()
            alien = sorted({c for c in text if c not in known})
            raise ValueError(f"characters: {alien} of {text[:80]!r} are not in the tokenizer; add them") from error
        return [int(i) for i in ids]

    def _text(self, token: int) -> str:
        text: str = self.tokenizer.decode([token], skip_special_tokens=False)
        return text


def _content(message: Message) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise ValueError(  # noqa: TRY004  of a user's data
            f"messages: content is {type(content).__name__}; without a chat template it must be text"
        )
    return content
