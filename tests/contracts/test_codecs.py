"""The TextCodec contract, asked of every codec. A new one adds a line to CODECS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from m2flow.models.lm.codec import HFCodec
from m2flow.models.lm.tokenizer import CharacterTokenizer
from m2flow.protocols import TextCodec
from tests.unit.models.lm.test_codec import CHATML, words

PROTOCOLS = ("TextCodec",)


def letters(*, chat: bool) -> Callable[[Any], TextCodec]:
    return lambda _: HFCodec(CharacterTokenizer(characters="helot", chat=chat).build())


CODECS: dict[str, Callable[[Any], TextCodec]] = {
    "characters": letters(chat=False),
    "characters_chat": letters(chat=True),
    "words_chat": lambda folder: HFCodec(words(folder, CHATML)),
}
codecs = pytest.mark.parametrize("make", CODECS.values(), ids=CODECS.keys())
START = [{"role": "system", "content": "he"}, {"role": "user", "content": "hello"}]
SAID = {"role": "assistant", "content": "ello"}
MORE = [{"role": "tool", "content": "t"}, {"role": "user", "content": "he"}]


@codecs
def test_an_opening_is_ids_and_always_the_same(make: Any, tmp_path: Any) -> None:
    codec = make(tmp_path)
    ids = codec.opening(START)
    assert ids == codec.opening(START)
    assert ids
    assert all(type(i) is int for i in ids)
    assert isinstance(codec.stop, frozenset)
    assert codec.stop


@codecs
def test_a_demonstration_is_an_opening_an_answer_and_its_stop(make: Any, tmp_path: Any) -> None:
    codec = make(tmp_path)
    ids, said = codec.demonstration([*START, SAID])
    first = codec.opening(START)
    assert len(ids) == len(said)
    assert ids[: len(first)] == first
    assert not any(said[: len(first)])
    answer = [i for i, mine in zip(ids, said, strict=True) if mine]
    assert answer[-1] in codec.stop
    assert not codec.stop & set(answer[:-1])
    assert codec.decode(answer) == SAID["content"]


@codecs
@pytest.mark.parametrize("ended", [True, False])
def test_a26_a_reply_goes_on_behind_sampled_ids(make: Any, tmp_path: Any, ended: bool) -> None:
    """Turn by turn it is what a demonstration of the whole conversation is, where the model samples as the tokenizer
    would have written; the sampled ids are not looked at."""
    codec = make(tmp_path)
    ids, said = codec.demonstration([*START, SAID, *MORE, SAID])
    first = codec.opening(START)
    answer = ids[len(first) : said.index(False, len(first))]
    assert answer[-1] in codec.stop
    turn = answer if ended else answer[:-1]
    whole = first + turn + codec.reply(MORE, last=turn[-1])
    assert ids[: len(whole)] == whole
    assert said[len(whole)]
    assert sum(said) == 2 * len(answer)


@codecs
def test_decoding_leaves_out_special_tokens(make: Any, tmp_path: Any) -> None:
    codec = make(tmp_path)
    ids = codec.opening([{"role": "user", "content": "hello"}])
    assert codec.decode(sorted(codec.stop)) == ""
    assert "hello" in codec.decode(ids)
    assert "<" not in codec.decode([*ids, *codec.stop])
