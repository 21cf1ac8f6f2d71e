"""Conversations, groups and trajectories of a language model, with answers that are written down."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from m2flow.algorithms.onpolicy import GRPO
from m2flow.roles.answers import AnswerRollout
from m2flow.roles.columns import merge
from m2flow.roles.generation import GenerationService
from m2flow.roles.rollout import RolloutConfig
from m2flow.runtime.worker import LocalHandle
from m2flow.tasks.dialogue import SingleAnswer, ToolDialogue
from m2flow.tools import table
from m2flow.types import Report, Request, Tick, Trajectory, Weights
from tests.unit import scripted


def single(task: Any) -> SingleAnswer:
    return SingleAnswer(({"role": "user", "content": task.payload["prompt"]},))


def rollout(say: Any, rows: list[dict[str, Any]], lanes: list[int] | None = None, **changes: Any) -> AnswerRollout:
    config = RolloutConfig(**({"lanes": 4, "length": 1, "group": 2} | changes.pop("config", {})))
    talk, _ = scripted.talker(say, changes.pop("dialogue", single), **changes)
    return AnswerRollout(
        talker=talk,
        source=scripted.Rows(rows),
        index=lambda position: position % len(rows),
        judge=scripted.judge(),
        config=config,
        lanes=list(range(config.lanes)) if lanes is None else lanes,
        seed=1,
    )


def step(stage: AnswerRollout, number: int = 0) -> tuple[Trajectory, dict[str, float]]:
    async def collect() -> list[Any]:
        return [made async for made in stage.work([Tick(number, number)])]

    made, report = asyncio.run(collect())
    assert isinstance(report, Report)
    return made, {name: metric.value for name, metric in report.metrics.items()}


def advantage(made: Trajectory) -> torch.Tensor:
    objective = GRPO(level="action")
    model = type("Model", (), {"policy": torch.nn.Linear(1, 1).double(), "reference": None})()
    batch, _ = objective.targets(model, made)  # type: ignore[arg-type]
    return batch.columns["advantage"]


ROWS = [{"prompt": "q", "answer": "a"}, {"prompt": "q", "answer": "a"}, {"prompt": "r", "answer": "b"}]


def test_an_answer_is_one_decision_whose_chunk_is_its_tokens() -> None:
    stage = rollout(lambda prompt, seed: "a" if seed % 2 else "abc", ROWS)
    made, metrics = step(stage)
    lengths = [2 if row[1] == 2 else 4 for row in made.valid[0].sum(1)[:, None] * [1, 1]]
    assert made.shape == (1, 4) and made.valid[0].sum(1).tolist() == lengths
    for row in range(4):
        at = made.obs["at"][row]
        count = int(made.valid[0, row].sum())
        assert at[:count].tolist() == list(range(at[0], at[0] + count)) and not at[count:].any()
        assert made.obs["length"][row] == at[count - 1] + 1
        np.testing.assert_allclose(made.units.logprob[row, :count], -0.1 * np.arange(1, count + 1))
        assert made.reward[0, row].nonzero()[0].tolist() in ([], [count - 1])
    assert made.terminated.all() and not made.truncated.any()
    assert metrics["rollout/episodes"] == 4 and metrics["rollout/success"] == made.reward.sum() / 4


def test_a08_a_group_is_what_was_sampled_together_also_where_rows_are_alike() -> None:
    """Rows 0 and 1 are the same text: two tasks, two groups, two baselines."""
    count = iter(range(100))
    answers = iter(["a", "x", "a", "a"])
    said = {}

    def say(_prompt: str, seed: int) -> str:
        return said.setdefault(seed, (next(count), next(answers)))[1]

    made, _ = step(rollout(say, ROWS[:2]))
    assert len(set(made.group[0].tolist())) == 2
    assert made.group[0].tolist()[0] == made.group[0].tolist()[1]
    by_row = advantage(made)[:, 0].tolist()
    scores = made.reward[0].sum(1).tolist()
    for first in (0, 2):
        pair, given = by_row[first : first + 2], scores[first : first + 2]
        assert pair == [0.0, 0.0] if given[0] == given[1] else pytest.approx(sum(pair)) == 0 and max(pair) > 0


def test_a10_a25_truncated_answers_are_counted_by_the_engines_word() -> None:
    words = {True: "abc", False: "abcdefgh~"}
    stage = rollout(lambda _prompt, seed: words[seed % 2 == 0], ROWS, config={"lanes": 8}, max_tokens=8)
    made, metrics = step(stage)
    cut = made.truncated[0]
    assert set(made.valid[0].sum(1)[cut].tolist()) <= {8} and set(made.valid[0].sum(1)[~cut].tolist()) <= {4}
    assert 0 < cut.sum() < 8 and metrics["rollout/truncated"] == cut.mean()
    assert metrics["rollout/length"] == made.valid.sum() / 8
    assert (metrics["rollout/length_min"], metrics["rollout/length_max"]) == (4, 8)


def test_a26_what_was_sampled_is_kept_as_it_was_and_tool_text_is_no_unit() -> None:
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "12*12"}}</tool_call>'

    def say(prompt: str, _seed: int) -> str:
        return "144" if "144" in prompt else call

    def talk(task: Any) -> ToolDialogue:
        messages = ({"role": "user", "content": task.payload["prompt"]},)
        return ToolDialogue(messages, table.build(("calculator",)))

    rows = [{"prompt": "12 times 12?", "answer": "144"}]
    stage = rollout(say, rows, config={"lanes": 2, "group": 2}, dialogue=talk, max_tokens=200, max_turns=3)
    made, metrics = step(stage)
    coder = scripted.codec()
    assert metrics["rollout/tool_calls"] == 1 and metrics["rollout/tool_errors"] == 0
    assert metrics["rollout/turns"] == 2 and metrics["rollout/return"] == 1.0
    for row in range(2):
        ids, at = made.obs["tokens"][row].tolist(), made.obs["at"][row][made.valid[0, row]].tolist()
        sampled = coder.decode([ids[p] for p in at])
        assert sampled == call + "144"  # both answers, nothing of the tool's
        between = coder.decode([ids[p] for p in range(at[0], at[-1]) if p not in at])
        assert "144" in between and "calculator" not in between
        first = coder.opening(list(talk(stage.source.task(0)).open()))
        assert ids[: len(first)] == first and at[0] == len(first)  # the prompt, then the sampled ids themselves
        assert made.units.logprob[row][: len(call) + 1].tolist() == pytest.approx(
            (-0.1 * np.arange(1, len(call) + 2)).tolist()
        )
        assert made.valid[0, row].sum() == len(call) + 1 + len("144") + 1


def test_a_conversation_that_is_not_over_at_its_limit_was_cut() -> None:
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'

    def talk(task: Any) -> ToolDialogue:
        return ToolDialogue(({"role": "user", "content": task.payload["prompt"]},), table.build(("calculator",)))

    stage = rollout(lambda *_: call, ROWS[:1], config={"lanes": 2}, dialogue=talk, max_tokens=200, max_turns=2)
    made, metrics = step(stage)
    assert made.truncated.all() and metrics["rollout/turns"] == 2


def test_a30_groups_without_spread_give_way_until_the_bound_and_are_counted() -> None:
    """Task "r" is always right, "q" always wrong: no group can be kept."""
    rows = [{"prompt": "q", "answer": "z"}, {"prompt": "r", "answer": "b"}]
    kind = {"lanes": 4, "resample": 9}
    made, metrics = step(rollout(lambda prompt, _: prompt[-1].replace("r", "b"), rows, config=kind))
    found = metrics["rollout/rejected_all_right"], metrics["rollout/rejected_all_wrong"]
    assert sum(found) == 20 and metrics["rollout/rejected_all_equal"] == 0  # 2 groups, 10 tries each
    assert made.valid.any(-1).all()  # keep: trained on with advantage 0

    made, _ = step(rollout(lambda prompt, _: prompt[-1].replace("r", "b"), rows, config=kind | {"when_dry": "drop"}))
    assert not made.valid.any() and not made.reward.any()

    with pytest.raises(ValueError, match=r"2 of 2 groups found no task .* within 10 tries \(kept 0; rejected: .*all "):
        step(rollout(lambda prompt, _: prompt[-1].replace("r", "b"), rows, config=kind | {"when_dry": "error"}))


def test_a_group_that_is_kept_without_spread_pays_all_its_attempts_alike() -> None:
    """Wrong answers of different lengths: a punishment of length alone would be what they teach."""
    rows = [{"prompt": "q", "answer": "z"}]
    stage = rollout(lambda _, seed: "a" if seed % 2 else "abc", rows, config={"lanes": 8, "group": 8, "resample": 1})
    score = stage.judge.score

    async def punished(attempts: Any) -> Any:
        found = await score(attempts)
        return {"correct": found["reward"], "reward": found["reward"] - [float(len(a.at)) for a in attempts]}

    stage.judge.score = punished  # type: ignore[method-assign]
    made, metrics = step(stage)
    paid = made.reward.sum(-1)
    assert made.valid.any(-1).all() and len(set(paid[0].tolist())) == 1
    assert -4.0 < float(paid[0, 0]) < -2.0
    assert metrics["rollout/return"] == pytest.approx(float(paid[0, 0]), abs=1.0)  # what is reported is not flattened
    assert not advantage(made).any()


def test_dynamic_sampling_draws_the_next_task_of_the_slot_and_stops_at_the_first_with_spread() -> None:
    rows = [{"prompt": str(i), "answer": "y"} for i in range(8)]
    mixed = {"5", "4"}

    def say(prompt: str, seed: int) -> str:
        return ("y" if seed % 2 else "n") if prompt in mixed else "n"

    stage = rollout(say, rows, config={"lanes": 16, "group": 8, "resample": 5, "when_dry": "drop"})
    made, metrics = step(stage)
    assert sorted(set(made.group[0].tolist())) == [4, 5]  # slot 0: 0, 2, 4; slot 1: 1, 3, 5
    assert metrics["rollout/rejected_all_wrong"] == 4
    assert stage.state() == {"cursor": [[0, 3], [1, 3]], "tasks": 8}
    assert metrics["rollout/episodes"] == 48 and metrics["rollout/success"] == made.reward.sum() / 48
    with pytest.raises(ValueError, match="there were 8 tasks, and now env has 2"):
        rollout(say, rows[:2], config={"lanes": 16, "group": 8}).restore(stage.state())


def test_law_1_slots_over_replicas_give_the_same_columns_in_lane_order() -> None:
    rows = [{"prompt": str(i), "answer": "y"} for i in range(8)]

    def say(_prompt: str, seed: int) -> str:
        return "y" if seed % 3 else "no" * (seed % 5 + 1)

    kind = {"lanes": 8, "resample": 1}
    whole, _ = step(rollout(say, rows, config=kind))
    parts = [step(rollout(say, rows, lanes, config=kind))[0] for lanes in ([4, 5, 6, 7], [0, 1, 2, 3])]
    joined = merge(parts)
    for field in dataclasses.fields(Trajectory):
        a, b = getattr(whole, field.name), getattr(joined, field.name)
        if isinstance(a, np.ndarray) and field.name not in ("obs_at", "next_at"):
            np.testing.assert_array_equal(a, b, err_msg=field.name)
    for name, x in whole.obs.items():
        np.testing.assert_array_equal(x[whole.obs_at[0]], joined.obs[name][joined.obs_at[0]], err_msg=name)
    np.testing.assert_array_equal(whole.units.logprob, joined.units.logprob)


def test_a18_a_resumed_rollout_goes_on_with_the_next_tasks() -> None:
    rows = [{"prompt": str(i), "answer": "y"} for i in range(10)]

    def say(prompt: str, seed: int) -> str:
        return "y" if seed % 2 else prompt

    straight = rollout(say, rows)
    groups = [step(straight, n)[0].group[0].tolist() for n in range(5)]
    first = rollout(say, rows)
    for n in range(2):
        step(first, n)
    second = rollout(say, rows)
    second.restore(first.state())
    assert [step(second, n)[0].group[0].tolist() for n in range(2, 5)] == groups[2:]
    with pytest.raises(ValueError, match=r"groups \[0, 1\] of the rollout do not fit \[0\]"):
        rollout(say, rows, [0, 1]).restore(first.state())


class Broken:
    """Fails at its first step, and at no later one."""

    def __init__(self, engine: scripted.Scripted) -> None:
        self.engine, self.failed = engine, False

    def step(self) -> list[Any]:
        if not self.failed:
            self.failed = True
            self.engine.waiting.clear()
            raise RuntimeError("the engine is on fire")
        return self.engine.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def test_an_engine_that_fails_tells_everybody_who_waits() -> None:
    coder = scripted.codec()
    service = GenerationService(Broken(scripted.Scripted(lambda *_: "ok", coder)))
    request = Request(7, np.array(coder.opening([{"role": "user", "content": "q"}])), 8, coder.stop)

    async def ask() -> Any:
        asked = [LocalHandle(service).generate([request]) for _ in range(3)]
        failed = await asyncio.gather(*asked, return_exceptions=True)
        assert [str(error) for error in failed] == ["the engine is on fire"] * 3
        return await service.generate([request, dataclasses.replace(request, id=8)])

    answers = asyncio.run(ask())
    assert [answer.id for answer in answers] == [7, 8] and answers[0].finish == "stop"
    service.load(Weights(4, {}))
    [answer] = asyncio.run(service.generate([request]))
    assert service.version == 4 and set(answer.version.tolist()) == {4}
    service.close()
    assert service.generator.engine.closed
