"""Functions of a recipe's own folder are found, and nothing there hides what is installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from m2flow import addresses, registry
from m2flow.rewards.function import FunctionRewardConfig
from m2flow.tools import table


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_own_score.py").write_text("def score(sample):\n    return 1.0\n")
    (tmp_path / "json.py").write_text("raise RuntimeError\n")
    return tmp_path


@pytest.mark.parametrize("where", ["my_own_score:score", "./my_own_score.py:score", "my_own_score.py:score"])
def test_a_module_or_file_of_the_working_folder_is_found(folder: Path, where: str) -> None:
    assert FunctionRewardConfig(function=where).build().function(None) == 1.0
    assert addresses.find("json:dumps")(1) == "1"
    assert str(folder) not in sys.path[:-1]
    sys.modules.pop("my_own_score", None)


@pytest.mark.parametrize("where", ["./nowhere.py:score", "./nowhere:score", "..:score", "my_own_score:nope", "a b:c"])
def test_what_is_not_there_is_told_by_its_key(folder: Path, where: str) -> None:
    with pytest.raises(ValueError, match=r"^function: .* cannot be imported"):
        FunctionRewardConfig(function=where).build()
    assert str(folder) not in sys.path or where.startswith("my_own")
    with pytest.raises(ValueError, match="env"):
        registry.load(where, "env")
    sys.modules.pop("my_own_score", None)


def test_a_tool_may_stand_in_a_file(folder: Path) -> None:
    (folder / "clock.py").write_text("class Clock:\n    spec = {'name': 'clock'}\n")
    assert list(table.build(["./clock.py:Clock"])) == ["clock"]
    with pytest.raises(ValueError, match=r"^tools: './nowhere:Clock' is no tool"):
        table.build(["./nowhere:Clock"])
