"""The walk-through of docs/text-recipes.md is run as it stands there, with a tiny model."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import m2flow
from m2flow.tools import table
from m2flow.tools.calls import Call
from tests.architecture.lm_files import TINY
from tests.architecture.source import REPO
from tests.integration.small_text import CHARACTERS

PAGE = (REPO / "docs" / "text-recipes.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    reward, tool = blocks("python")
    (tmp_path / "my_rewards.py").write_text(reward)
    (tmp_path / "my_tools.py").write_text(tool)
    row = json.loads(blocks("json")[0])
    rows = [row | {"query": f"What is {k} + 30?", "gold": str(k + 30)} for k in range(40)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_the_recipe_with_its_reward_trains(folder: Path) -> None:
    recipe: dict[str, Any] = yaml.safe_load(blocks("yaml")[0])
    del recipe["policy"]["path"]
    recipe["policy"] |= {"config": TINY | {"max_position_embeddings": 128}, "tokenizer": {"characters": CHARACTERS}}
    recipe["rollout"] |= {"lanes": 16}
    recipe["env"]["max_tokens"] = 6
    recipe["learner"]["minibatch"] = 8
    recipe |= {"steps": 1, "evaluation": {"seeds": 2}, "observe": {"recorders": [], "report": False}}
    run = m2flow.train(recipe, run_dir=folder / "run", quiet=True)
    written = sorted(path.name for path in (run.path / "samples").iterdir())
    import pyarrow.parquet as parquet

    rows = parquet.read_table(run.path / "samples" / next(n for n in written if n.startswith("step"))).to_pylist()
    listed = re.findall(r"`([a-z/]+)`", PAGE.partition("have a row per answer:")[2].partition("```")[0])
    assert {*listed, "reward/correct", "reward/ended", "reward/error"} == set(rows[0])
    assert rows[0]["gold"] == str(int(rows[0]["prompt"].split()[2]) + 30)


def test_the_tool_answers(folder: Path) -> None:
    tools = table.build(["my_tools:Capital"])
    assert asyncio.run(table.run(tools, Call("capital", {"country": "Japan"}))) == ("Tokyo", True)
    told = asyncio.run(table.run(tools, Call("capital", {"country": ["x"]})))
    assert told == ("error: capital failed", False) or "must be one of" in told[0]
