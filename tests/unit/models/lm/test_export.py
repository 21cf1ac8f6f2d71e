"""What users are told of a checkpoint's folder."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import m2flow
from m2flow.models.lm import export
from tests.integration import small_text


def test_a_tokenizer_that_others_open_wrongly_is_told_of_once_and_without_a_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_told", set())
    recipe = small_text.recipe(steps=2, checkpoint={"every": 1})
    recipe["policy"]["config"] = recipe["policy"]["config"] | {"model_type": "qwen2"}
    with caplog.at_level(logging.WARNING, logger="m2flow.lm"):
        for name in ("one", "two"):
            m2flow.train(recipe, run_dir=tmp_path / name, quiet=True)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "m2flow.lm"]
    assert "AutoTokenizer of this transformers opens its tokenizer as Qwen2Tokenizer" in said
    assert str(tmp_path) not in said
