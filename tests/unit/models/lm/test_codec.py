"""Messages to ids: openings, replies that are never re-tokenised, demonstrations, stop ids."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from m2flow.models.lm import export
from m2flow.models.lm.codec import HFCodec
from m2flow.models.lm.config import CausalLMConfig
from m2flow.models.lm.inert import Inert
from m2flow.models.lm.tokenizer import CharacterTokenizer
from m2flow.types import Field, Spec
from tests.unit.models.lm.small import config

USER = {"role": "user", "content": "1+1="}
CHAT = [USER, {"role": "assistant", "content": "2"}, {"role": "tool", "content": "3"}]


def letters(**keys: Any) -> HFCodec:
    return config(tokenizer=CharacterTokenizer(characters="0123456789+= abc", **keys)).codec()


def words(tmp_path: Path, template: str | None = None, eos: str = "<eos>") -> Any:
    """A vocabulary with `he`, `llo` and `hello`, where text prefers the longest."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    pieces = ["<pad>", "<eos>", "<end>", "h", "e", "l", "o", "he", "ll", "llo", "hello", "\n", ">", "t"]
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    inner = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, merges))
    inner.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=eos, pad_token="<pad>", extra_special_tokens=["<end>", "<eos>"]
    )
    made.chat_template = template
    made.save_pretrained(tmp_path)
    return made


CHATML = "{% for m in messages %}>{{ m['content'] }}<end>\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def test_characters_are_ids_and_come_back() -> None:
    codec = letters()
    ids = codec.opening([{"role": "user", "content": "12+9= a"}])
    assert ids == [1, 4, 5, 13, 12, 14, 15, 16]
    assert codec.decode([*ids, 2, 0, 0]) == "12+9= a"
    assert codec.stop == {2}
    with pytest.raises(ValueError, match=r"characters: \['x', 'z'\] of '1xz' are not in the tokenizer"):
        codec.opening([{"role": "user", "content": "1xz"}])


def test_plain_text_is_put_together() -> None:
    codec = letters()
    ids, said = codec.demonstration(CHAT)
    assert codec.opening([USER]) == [1, 4, 13, 4, 14] == ids[:5]
    assert ids == [1, 4, 13, 4, 14, 5, 2, 6]
    assert said == [False] * 5 + [True, True, False]
    assert codec.reply(CHAT[2:], last=2) == [6]
    assert codec.reply(CHAT[2:], last=5) == [2, 6]


@pytest.mark.parametrize("ended", [True, False])
def test_a_chat_is_the_same_in_one_piece_and_turn_by_turn(ended: bool) -> None:
    codec = letters(chat=True)
    ids, said = codec.demonstration([*CHAT, {"role": "assistant", "content": "a"}])
    start = codec.opening([USER])
    answer = codec.tokenizer("2", add_special_tokens=False)["input_ids"]
    turn = [*answer, 2] if ended else answer  # with its stop id, or cut by the limit
    more = codec.reply(CHAT[2:], last=turn[-1])
    whole = [*start, *turn, *more]
    assert ids[: len(whole)] == whole
    assert [i for i, mine in zip(ids, said, strict=True) if mine] == [*answer, 2, ids[-2], 2]
    assert sum(said) == 4


def test_a26_sampled_ids_are_never_made_again_from_text(tmp_path: Path) -> None:
    """The engine sampled [he, llo]; the tokenizer itself would say [hello]. A tool's text follows."""
    tokenizer = words(tmp_path, CHATML)
    codec = HFCodec(tokenizer)
    he, llo, hello, end, line, mark, t = (
        tokenizer.convert_tokens_to_ids(x) for x in ("he", "llo", "hello", "<end>", "\n", ">", "t")
    )
    prompt = codec.opening([{"role": "user", "content": "hello"}])
    assert prompt == [mark, hello, end, line, mark]
    sampled = [he, llo, end]
    after = codec.reply([{"role": "tool", "content": "t"}], last=end)
    assert prompt + sampled + after == [mark, hello, end, line, mark, he, llo, end, line, mark, t, end, line, mark]
    assert codec.reply([{"role": "tool", "content": "t"}], last=llo) == [end, *after]
    assert codec.decode(sampled) == "hello"


@pytest.mark.parametrize("last", ["l", ">", "<eos>", "\n"])
def test_a_turn_that_another_stop_id_ended_gets_the_end_that_the_template_writes(tmp_path: Path, last: str) -> None:
    """Once, and behind the sampled ids: what follows is what the template puts behind an answer."""
    tokenizer = words(tmp_path, CHATML)
    stop = tokenizer.convert_tokens_to_ids(last)
    codec = HFCodec(tokenizer, [stop])
    end, line, mark, t = (tokenizer.convert_tokens_to_ids(x) for x in ("<end>", "\n", ">", "t"))
    assert stop in codec.stop
    assert codec.reply([{"role": "tool", "content": "t"}], last=stop) == [end, line, mark, t, end, line, mark]
    assert codec.reply([{"role": "tool", "content": "t"}], last=end) == [line, mark, t, end, line, mark]


def test_a_demonstrated_answer_ends_with_its_turn_whatever_else_may_stop_one(tmp_path: Path) -> None:
    tokenizer = words(tmp_path, CHATML)
    turns = [{"role": "user", "content": "t"}, {"role": "assistant", "content": "hello"}]
    line = tokenizer.convert_tokens_to_ids("\n")
    assert HFCodec(tokenizer, [line]).demonstration(turns) == HFCodec(tokenizer).demonstration(turns)


def test_without_a_special_end_of_turn_the_text_is_not_written_twice(tmp_path: Path) -> None:
    lines = "{% for m in messages %}>{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    tokenizer = words(tmp_path, lines)
    eos, line, mark, t = (tokenizer.convert_tokens_to_ids(x) for x in ("<eos>", "\n", ">", "t"))
    codec = HFCodec(tokenizer, [line])
    assert codec.reply([{"role": "tool", "content": "t"}], last=line) == [mark, t, line, mark]
    assert codec.reply([{"role": "tool", "content": "t"}], last=eos) == [line, mark, t, line, mark]


def test_a25_every_stop_id_counts(tmp_path: Path) -> None:
    """Those of the generation settings, the tokenizer's eos, and what the template ends a turn with."""
    words(tmp_path, CHATML)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9]}))
    assert CausalLMConfig(path=str(tmp_path)).codec().stop == {5, 9, 1, 2}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert CausalLMConfig(path=str(tmp_path)).codec().stop == {7, 1, 2}


def test_a_template_that_rewrites_earlier_turns_is_refused_for_demonstrations(tmp_path: Path) -> None:
    """As those do that drop the reasoning of all answers but the last."""
    forgets = (
        "{% for m in messages %}>{% if m['role'] == 'assistant' and not loop.last %}{% else %}{{ m['content'] }}"
        "{% endif %}<end>\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    codec = HFCodec.__new__(HFCodec)
    codec.tokenizer, codec.template, codec.stop, codec._ends = words(tmp_path, forgets), True, frozenset({2}), ["<end>"]
    codec._turn, codec.inert = "<end>", Inert(codec.tokenizer)
    turns = [{"role": r, "content": "hello"} for r in ("user", "assistant", "user", "assistant")]
    _, said = codec.demonstration(turns[:2])
    assert sum(said) == 2
    with pytest.raises(ValueError, match="message 3 or what is before it in another way"):
        codec.demonstration(turns)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.opening([]), "messages: there are none"),
        (lambda c: c.demonstration([USER]), "messages: none has the role 'assistant'"),
        (lambda c: c.opening([{"role": "user", "content": None}]), "messages: content is NoneType"),
        (lambda _: CharacterTokenizer(characters=""), "characters: is empty"),
        (lambda _: CharacterTokenizer(characters="aba"), "characters: 'a' is there twice"),
    ],
)
def test_what_is_wrong_is_said(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(letters())


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_a_folder_opens_with_the_tokenizer_that_was_saved_whatever_the_model_is(
    tmp_path, caplog, monkeypatch, kind
) -> None:
    """transformers opens every tokenizer beside a Qwen2 model as Qwen2's, which drops line breaks of this one."""
    monkeypatch.setattr(export, "_told", set())  # once per process
    settings = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings["num_key_value_heads"] = 2
    characters = CharacterTokenizer(characters="ab \n", chat=True)
    made = CausalLMConfig(config={"model_type": kind, **settings}, tokenizer=characters)
    made.build(Spec({}, Field(())), 0).save_pretrained(tmp_path / "hf")
    again = CausalLMConfig(path=str(tmp_path / "hf"), stop=("\n",))
    assert again.load_tokenizer()("a\nb ")["input_ids"] == made.load_tokenizer()("a\nb ")["input_ids"]
    assert again.codec().stop == made.codec().stop | {made.load_tokenizer().convert_tokens_to_ids("\n")}
    assert ("PreTrainedTokenizerFast.from_pretrained" in caplog.text) == (kind == "qwen2")


def test_texts_that_end_an_answer_are_single_tokens_and_chat_can_be_left_out() -> None:
    characters = CharacterTokenizer(characters="ab\n", chat=True)
    plain = CausalLMConfig(config={"model_type": "llama"}, tokenizer=characters, chat=False, stop=("\n",))
    codec = plain.codec()
    assert codec.decode(codec.opening([{"role": "user", "content": "ab"}])) == "ab"
    assert len(codec.stop) == 2
    with pytest.raises(ValueError, match=r"stop: 'ab' is 2 tokens of this tokenizer"):
        dataclasses.replace(plain, stop=("ab",)).codec()
