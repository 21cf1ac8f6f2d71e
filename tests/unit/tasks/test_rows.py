"""Rows of files as tasks (cases A08 and A29)."""

from __future__ import annotations

import json
import logging
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2flow.config.errors import Problem
from m2flow.config.typed import construct
from m2flow.tasks.rows import RowsConfig
from m2flow.tasks.tables import json_line

ROWS = [{"prompt": f"{i} + 1 =", "answer": str(i + 1), "level": i} for i in range(10)]


def write(path: Path, rows: list[Any]) -> str:
    """A JSONL, Parquet or `datasets` file, by its ending."""
    if path.suffix == ".parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    elif path.suffix == "":
        import datasets

        datasets.disable_progress_bars()
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    else:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def payloads(config: RowsConfig, side: str = "train") -> list[dict[str, Any]]:
    source = config.tasks(side, 0)
    return [dict(source.task(i).payload) for i in range(source.size)]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows"])
def test_a29_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    config = RowsConfig(files=write(tmp_path / name, ROWS), held_out=0)
    assert payloads(config) == ROWS
    source = config.tasks("train", 0)
    assert [source.task(i).id for i in (9, 0, 5)] == [9, 0, 5]
    assert source.task(7) == config.tasks("train", 99).task(7)
    for index in (-1, 10):
        with pytest.raises(ValueError, match="^index: there is no task"):
            source.task(index)


def test_folders_and_several_files_follow_each_other(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "b.parquet", ROWS[4:6])
    write(tmp_path / "data" / "a.jsonl", ROWS[:4])
    (tmp_path / "data" / "README.txt").write_text("not data")
    last = write(tmp_path / "last.jsonl", ROWS[6:])
    assert payloads(RowsConfig(files=(str(tmp_path / "data"), last), held_out=0)) == ROWS


def test_a08_two_equal_rows_stay_two_tasks_on_one_side(tmp_path: Path) -> None:
    twice = [row for row in ROWS for _ in range(2)]
    path = write(tmp_path / "rows.jsonl", twice)
    assert payloads(RowsConfig(files=path, held_out=0)) == twice
    config = RowsConfig(files=path, held_out=0.3)
    train, held = payloads(config), payloads(config, "held_out")
    assert (len(train), len(held)) == (14, 6)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held}
    ids = [config.tasks("held_out", 0).task(i).id for i in range(6)]
    assert ids == [0, 1, 2, 3, 4, 5]


@given(prompts=st.lists(st.text(min_size=1).filter(str.strip), min_size=2, max_size=30), part=st.floats(0.01, 0.99))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_prompt_is_on_both_sides_and_no_row_is_lost(tmp_path: Path, prompts: list[str], part: float) -> None:
    rows = [{"prompt": prompt, "answer": str(i)} for i, prompt in enumerate(prompts)]
    config = RowsConfig(files=write(tmp_path / "rows.jsonl", rows), held_out=part)
    train = payloads(config)
    if len(set(prompts)) == 1:
        assert train == rows
        with pytest.raises(ValueError, match="held_out: no row is held out"):
            config.tasks("held_out", 0)
        return
    held = payloads(config, "held_out")
    assert held
    assert train
    assert sorted(map(repr, train + held)) == sorted(map(repr, rows))
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held}


def test_which_rows_are_held_out_does_not_depend_on_their_order_or_the_seed(tmp_path: Path) -> None:
    one = RowsConfig(files=write(tmp_path / "one.jsonl", ROWS), held_out=0.3)
    other = RowsConfig(files=write(tmp_path / "other.jsonl", ROWS[::-1]), held_out=0.3)
    assert payloads(one, "held_out") == payloads(other, "held_out")[::-1]
    assert len(payloads(one, "held_out")) == 3


def test_training_goes_without_what_is_held_out_in_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files, held = write(tmp_path / "a.jsonl", ROWS[:8]), write(tmp_path / "b.jsonl", ROWS[6:])
    config = RowsConfig(files=files, held_out_files=held)
    with caplog.at_level(logging.WARNING):
        assert payloads(config) == ROWS[:6]
    assert "2 rows to train on are left out" in caplog.text
    assert payloads(config, "held_out") == ROWS[6:]
    with pytest.raises(ValueError, match="nothing is left to train on"):
        payloads(RowsConfig(files=files, held_out_files=files))


# ---- prompts


def test_a29_without_a_limit_every_prompt_is_kept_as_it_is(tmp_path: Path) -> None:
    rows = [
        {"prompt": "\U0001f600 \u4f60\u597d \U0001f468\u200d\U0001f469\u200d\U0001f467", "answer": "\u4e00"},
        {"prompt": "x" * 1_000_000, "answer": "1"},
        {"prompt": "  spaces around \n", "answer": "2"},
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], "answer": "3"},
        {"prompt": "{question} {{x}} \\boxed{}", "answer": "4"},
    ]
    got = payloads(RowsConfig(files=write(tmp_path / "rows.jsonl", rows), held_out=0))
    expected = [*rows[:3], {"messages": rows[3]["prompt"], "answer": "3"}, rows[4]]
    assert got == expected


def test_a29_long_prompts_are_dropped_and_counted_or_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "x" * n, "answer": "1"} for n in (5, 6, 1_000_000, 1)]
    rows.append({"messages": [{"role": "user", "content": "xxx"}, {"role": "tool", "content": "xxx"}], "answer": "1"})
    path = write(tmp_path / "rows.jsonl", rows)
    config = RowsConfig(files=path, held_out=0, max_prompt_chars=5)
    with caplog.at_level(logging.WARNING):
        source = config.tasks("train", 0)
    assert [source.task(i).payload["prompt"] for i in range(source.size)] == ["xxxxx", "x"]
    assert source.dropped == 3
    assert "3 rows dropped" in caplog.text
    with pytest.raises(
        ValueError, match=r"row 2 \(line 2\): field 'prompt' has 6 characters, more than max_prompt_chars"
    ):
        RowsConfig(files=path, max_prompt_chars=5, too_long="error").tasks("train", 0)
    with pytest.raises(ValueError, match="files: all 5 rows have longer prompts"):
        RowsConfig(files=write(tmp_path / "long.jsonl", rows[2:3] * 5), max_prompt_chars=3).tasks("train", 0)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "q"}, "field 'answer' is missing or empty"),
        ({"prompt": "q", "answer": None}, "field 'answer' is missing or empty"),
        ({"prompt": "q", "answer": " "}, "field 'answer' is missing or empty"),
        ({"prompt": "", "answer": "1"}, "field 'prompt' is empty"),
        ({"prompt": " \n\u3000", "answer": "1"}, "field 'prompt' is empty"),
        ({"prompt": 3, "answer": "1"}, "field 'prompt' is a int, not text"),
        ({"answer": "1"}, "field 'prompt' is missing"),
        ({"messages": [], "answer": "1"}, "field 'messages' is no list of messages"),
        ({"messages": ["q"], "answer": "1"}, "field 'messages.0' is a str, not a message"),
        (
            {"messages": [{"role": "User", "content": "q"}], "answer": "1"},
            "field 'messages.0.role' is 'User', not one of",
        ),
        ({"messages": [{"role": "user", "content": None}], "answer": "1"}, "field 'messages.0.content' is no text"),
        ({"messages": [{"role": "user", "content": " "}], "answer": "1"}, "field 'messages.0.content' is empty"),
        (
            {"messages": [{"role": "assistant", "content": "a"}], "answer": "1"},
            "no message of a user or a tool to answer",
        ),
    ],
)
def test_a29_a_bad_row_is_named_with_its_field_and_a_valid_row_is_shown(tmp_path: Path, row: Any, words: str) -> None:
    good = {"prompt": "p" * 100, "answer": "1"}
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "\n".join([json.dumps(good), "", json.dumps(good), json.dumps(row), json.dumps(row), json.dumps(good)])
    )
    with pytest.raises(ValueError) as caught:
        RowsConfig(files=str(path)).tasks("train", 0)
    text = str(caught.value)
    assert text.startswith(f"files: {path} row 3 (line 4): ")
    assert words in text
    assert "(2 rows are wrong, this is the first)" in text
    assert text.endswith('a valid row: {"prompt": "' + "p" * 60 + '...", "answer": "1"}')


@pytest.mark.parametrize("name", ["rows.parquet", "rows"])
def test_a29_the_same_fault_is_named_in_every_format(tmp_path: Path, name: str) -> None:
    rows = [*ROWS[:2], {**ROWS[2], "answer": None}, *ROWS[3:]]
    path = write(tmp_path / name, rows)
    with pytest.raises(ValueError) as caught:
        RowsConfig(files=path).tasks("held_out", 0)
    assert str(caught.value) == (
        f"files: {path} row 3: field 'answer' is missing or empty; a valid row: {json.dumps(ROWS[0])}"
    )


def test_a29_an_empty_column_that_the_recipe_requires(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "answer": "1", "data_source": source} for source in ("math", "")]
    path = write(tmp_path / "rows.jsonl", rows)
    assert len(payloads(RowsConfig(files=path, held_out=0))) == 2
    with pytest.raises(ValueError, match=r"row 2 \(line 2\): field 'data_source' is missing or empty"):
        RowsConfig(files=path, required=("answer", "data_source")).tasks("train", 0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"prompt": "q", "answer": "1"}\n{"prompt": \n', "row 2 (line 2): no JSON object"),
        (b"[1, 2]\n", "row 1 (line 1): a list, not an object"),
        (b"\xff\xfe\n", "row 1 (line 1): no JSON object"),
        (b"[" * 100_000, "row 1 (line 1): no JSON object"),
        (b"\n  \n", "no rows in"),
        (b"", "no rows in"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        RowsConfig(files=str(path)).tasks("train", 0)
    assert str(caught.value).startswith("files: ")
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_files_that_are_not_there_or_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b")
    (tmp_path / "x.parquet").write_text("no parquet")
    (tmp_path / "empty").mkdir()
    for name, words in (
        ("gone.jsonl", "there is no"),
        ("x.csv", "ends with none of"),
        ("x.parquet", "no Parquet file"),
        ("empty", "no .jsonl"),
    ):
        with pytest.raises(ValueError, match=f"^files: .*{words}"):
            RowsConfig(files=str(tmp_path / name)).tasks("train", 0)
    good = write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ValueError, match="^held_out_files: there is no"):
        RowsConfig(files=good, held_out_files="gone").tasks("train", 0)
    with pytest.raises(ValueError, match="^held_out: no row is held out"):
        RowsConfig(files=good, held_out=0).tasks("held_out", 0)


def test_a_folder_with_several_splits_asks_for_one(tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "all"))
    with pytest.raises(ValueError, match=r"holds several splits; name one of them: .*train"):
        RowsConfig(files=str(tmp_path / "all")).tasks("train", 0)
    assert payloads(RowsConfig(files=str(tmp_path / "all" / "train"), held_out=0)) == ROWS


def test_without_datasets_its_folders_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "rows", ROWS)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'm2flow\[datasets\]'"):
        RowsConfig(files=path, held_out=0.2).tasks("train", 0)


# ---- fields, templates, conversations


def test_a29_fields_are_mapped_to_columns_and_what_is_inside_them(tmp_path: Path) -> None:
    row = {"question": "1+1?", "reward_model": {"ground_truth": 2, "style": "rule"}, "id": 7}
    path = write(tmp_path / "rows.parquet", [row])
    config = RowsConfig(files=path, held_out=0, fields={"prompt": "question", "answer": "reward_model.ground_truth"})
    assert payloads(config) == [{**row, "prompt": "1+1?", "answer": "2"}]
    templated = RowsConfig(
        files=path,
        held_out=0,
        fields={"answer": "reward_model.ground_truth"},
        template="{question} In \\boxed{{}}, {id}.",
    )
    [task] = payloads(templated)
    assert task["prompt"] == "1+1? In \\boxed{}, 7."
    with pytest.raises(ValueError, match="field 'answer' is missing; a row has an 'answer' or a 'completion'"):
        RowsConfig(files=path, fields={"prompt": "question"}).tasks("train", 0)


def test_a_template_needs_its_fields(tmp_path: Path) -> None:
    rows = [{"q": "1+1", "hint": "", "answer": "2"}, {"q": "", "hint": "", "answer": "2"}]
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ValueError, match=r"row 2 \(line 2\): field 'q' is empty"):
        RowsConfig(files=path, template="{q} {hint}").tasks("train", 0)
    with pytest.raises(ValueError, match="field 'nope' is missing, and env.template asks for it"):
        RowsConfig(files=path, template="{nope}").tasks("train", 0)
    chats = write(tmp_path / "chats.jsonl", [{"prompt": [{"role": "user", "content": "q"}], "answer": "1"}])
    with pytest.raises(ValueError, match="field 'prompt' is a list of messages"):
        RowsConfig(files=chats, template="{prompt}").tasks("train", 0)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_an_answer_at_the_end_of_a_chat_is_its_completion(tmp_path: Path, name: str) -> None:
    chat = [
        {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"},
        {"role": "user", "content": "and 2+2?"}, {"role": "assistant", "content": "4"},
    ]  # fmt: skip
    config = RowsConfig(files=write(tmp_path / name, [{"messages": chat}]), held_out=0, system="Be short.")
    task = config.tasks("train", 0).task(0)
    assert task.payload == {"messages": chat[:3], "completion": "4"}
    assert list(config.dialogue(task).open()) == [{"role": "system", "content": "Be short."}, *chat[:3]]


def test_a_changed_file_is_read_again_and_a_config_travels(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    config = RowsConfig(files=path, held_out=0)
    assert len(payloads(config)) == 10
    assert pickle.loads(pickle.dumps(config)) == config
    write(tmp_path / "rows.jsonl", ROWS[:4])
    assert payloads(config) == ROWS[:4]


def test_a_byte_order_mark_and_other_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(row).encode() for row in ROWS))
    assert payloads(RowsConfig(files=str(path), held_out=0)) == ROWS


def test_unknown_and_wrong_keys_are_refused() -> None:
    problems: list[Problem] = []
    construct(RowsConfig, {"files": ["a.jsonl"], "subset": "main"}, ("env",), problems)
    assert "unknown key" in str(problems[0].message)
    for options, key in (
        ({"files": ()}, "files"),
        ({"files": "a", "held_out": 1.0}, "held_out"),
        ({"files": "a", "max_prompt_chars": 0}, "max_prompt_chars"),
        ({"files": "a", "template": "{answer}"}, "template"),
    ):
        with pytest.raises(ValueError, match=f"^{key}: "):
            RowsConfig(**options)


def test_a29_rows_with_numpy_in_them_become_valid_json_lines() -> None:
    row = {
        "i": np.int64(3),
        "f": np.float32(0.5),
        "a": np.arange(4).reshape(2, 2),
        "n": float("nan"),
        "t": (np.bool_(1), "\u4f60"),
    }
    line = json_line(row)
    assert json.loads(line) == {"i": 3, "f": 0.5, "a": [[0, 1], [2, 3]], "n": None, "t": [True, "\u4f60"]}
    assert "NaN" not in line
    assert "\n" not in line


@pytest.mark.parametrize("name", ["answer", "completion"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_what_is_no_number_is_refused_with_file_row_and_field(tmp_path: Path, name: str, value: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"prompt": "2", "{name}": "4"}}\n{{"prompt": "1", "{name}": {value}}}\n')
    with pytest.raises(ValueError, match=rf"rows.jsonl row 2 \(line 2\): field '{name}' is -?(nan|inf)"):
        RowsConfig(files=str(file), held_out=0).tasks("train", 0)


def test_a_template_is_not_filled_with_what_is_no_number(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": NaN, "answer": "4"}\n')
    with pytest.raises(ValueError, match="field 'a' is nan"):
        RowsConfig(files=str(file), held_out=0, template="{a}?").tasks("train", 0)


@pytest.mark.parametrize("key", ["files", "held_out_files"])
@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "a.csv",
            "prompt,answer\n",
            "ends with none of .jsonl, .ndjson, .json, .parquet; a valid row of a .jsonl file",
        ),
        ("a.csv", "prompt,answer\n", "orient='records', lines=True) makes one of it"),
        ("a.txt", "x", "ends with none of"),
        ("a.jsonl", "", "no rows in"),
        ("a.parquet", "", "no Parquet file"),
        ("a.parquet", "PAR1", "no Parquet file"),
        ("a.json", '[{"prompt": "a"}]', "turns a list of objects into that"),
        ("a.json", '[\n{"prompt": "a"}\n]', "turns a list of objects into that"),
        ("a.jsonl", "{", "row 1 (line 1): no JSON object"),
        ("a.jsonl", '{"question": "a", "answer": 1}', "row 1 (line 1): field 'prompt' is missing (env.fields says in"),
        ("a.jsonl", '{"question": "a", "answer": 1}', "; there are: question, answer); a valid row"),
        ("folder", None, "no .jsonl, .ndjson, .json, .parquet in the folder"),
        ("folder/state.json", "{}", "`datasets` cannot open it"),
    ],
)
def test_a_file_that_is_none_is_told_with_its_key_its_path_and_a_valid_row(
    tmp_path: Path, key: str, name: str, text: str | None, said: str
) -> None:
    path = tmp_path / name
    if text is None:
        path.mkdir()
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    given = {"files": write(tmp_path / "good.jsonl", ROWS)} | {key: str(tmp_path / Path(name).parts[0])}
    with pytest.raises(ValueError, match=f"^{key}: ") as caught:
        RowsConfig(**given).tasks("train", 0)
    assert said in str(caught.value)
    assert str(tmp_path / Path(name).parts[0]) in str(caught.value)
    assert name.endswith("state.json") or '{"prompt": "2 + 2 =", "answer": "4"}' in str(caught.value)


def test_a_field_under_another_name_is_told_with_its_column(tmp_path: Path) -> None:
    rows = [{"query": "a", "gold": {"value": "1"}}, {"query": "b", "gold": {}}]
    config = RowsConfig(
        files=write(tmp_path / "a.jsonl", rows), fields={"prompt": "query", "answer": "gold.value"}, held_out=0
    )
    with pytest.raises(ValueError, match=r"field 'answer' \(column 'gold.value'\) is missing or empty; a valid row"):
        config.tasks("train", 0)
