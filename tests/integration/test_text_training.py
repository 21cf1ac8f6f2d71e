"""Supervised fine-tuning and what follows it: a model from nothing is shown answers, then learns by their reward."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from m2flow.algorithms.imitation import SFT
from m2flow.models.lm.config import CausalLMConfig
from m2flow.models.lm.tokenizer import CharacterTokenizer
from m2flow.roles.demonstrations import Demonstrations
from m2flow.roles.rollout import RolloutConfig
from m2flow.tasks.rows import RowsConfig
from m2flow.types import Batch, Field, Sample, Spec, Tick, Trajectory
from tests.integration import small_text

NETWORK = small_text.NETWORK | {"model_type": "llama"}
LETTERS = "0123456789=abcdefghijklmnopqrstuvwxyz ?"
SHOWN = 18  # steps of fine-tuning, which leave something to learn
CHATS: list[list[tuple[str, str]]] = [
    [("system", "be brief"), ("user", "one?"), ("assistant", "1"), ("user", "two?"), ("assistant", "22")],
    [
        ("user", "a?"),
        ("assistant", "bcd"),
        ("user", "and"),
        ("user", "so"),
        ("assistant", "e"),
        ("user", "then"),
        ("assistant", "f"),
    ],
]


def exact(sample: Sample) -> float:
    """1 for the answer of the task."""
    return float(sample.text == sample.task.payload["answer"])


def written(folder: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def shown(folder: Path, chats: Sequence[Sequence[tuple[str, str]]], *, chat: bool) -> tuple[Any, Batch]:
    """A policy in float64, and the batch that SFT makes of the chats, by way of rows, demonstrations and codec."""
    rows = [{"messages": [{"role": role, "content": text} for role, text in messages]} for messages in chats]
    tasks = RowsConfig(files=written(folder, rows), held_out=0.0, max_tokens=16)
    model = CausalLMConfig(config=NETWORK, tokenizer=CharacterTokenizer(characters=LETTERS, chat=chat))
    stage = Demonstrations(
        codec=model.codec(),
        dialogue=tasks.dialogue,
        source=tasks.tasks("train", 0),
        index=int,
        config=RolloutConfig(lanes=len(rows), length=1),
        lanes=range(len(rows)),
        max_tokens=16,
    )
    made, _ = stage.work([Tick(0, 0)])
    assert isinstance(made, Trajectory)
    policy = model.build(Spec({"tokens": Field((), "int64")}, Field((), "int64")), 0).to(torch.float64)
    batch, _ = SFT().targets(Holder(policy), made)
    return policy, batch


class Holder:
    """A model that is nothing but its policy."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy


class Poisoned:
    """A policy whose scores are not a number wherever no token was to be said."""

    def __init__(self, policy: Any, there: Tensor) -> None:
        self.policy, self.there = policy, there

    def score(self, obs: Any, record: Any) -> Any:
        score = self.policy.score(obs, record)
        return replace(score, logprob=score.logprob.where(self.there, torch.nan))


def loss_of(policy: Any, batch: Batch, *, poison: bool = False) -> tuple[float, dict[str, Tensor]]:
    """The mean loss in nats per token, and its gradient."""
    policy.zero_grad()
    model = Holder(Poisoned(policy, batch.columns["mask"]) if poison else policy)
    loss = SFT().losses(model, batch, "update").terms[0].total / SFT().counts(batch)["units"]
    loss.backward()
    return float(loss.detach()), gradient(policy)


def gradient(policy: Any) -> dict[str, Tensor]:
    return {name: x.grad.clone() for name, x in policy.named_parameters() if x.grad is not None}


def by_labels(policy: Any, batch: Batch, wanted: Sequence[str], tokenizer: Any) -> tuple[float, dict[str, Tensor]]:
    """The same by plain forward passes of single rows and by labels, -100 wherever the text is not the answers'.

    Those are looked for in the row from the left, each with the eos token behind it."""
    policy.zero_grad()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row, answers in enumerate(wanted):
        ids = batch.obs["tokens"][row, : batch.obs["length"][row]].tolist()
        labels, start = [-100] * len(ids), 0
        for answer in answers.split(","):
            piece = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            start = next(i for i in range(start, len(ids)) if ids[i : i + len(piece)] == piece)
            labels[start : start + len(piece)] = piece
            start += len(piece)
        logits = policy.network(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        total = total + cross_entropy(logits[:-1], torch.tensor(labels[1:]), ignore_index=-100, reduction="sum")
        count += sum(label != -100 for label in labels)
    (total / count).backward()
    return float(total.detach()) / count, gradient(policy)


@pytest.mark.parametrize("chat", [True, False], ids=["chat template", "plain text"])
def test_a_chat_is_learnt_by_its_answers_only(tmp_path: Path, chat: bool) -> None:
    """Several messages per row: all answers count, and no word of the system, a user or a tool does."""
    policy, batch = shown(tmp_path, CHATS, chat=chat)
    tokenizer = policy.config.load_tokenizer()
    at, there = batch.obs["at"], batch.columns["mask"]
    said = [tokenizer.decode(batch.obs["tokens"][row, at[row][there[row]]].tolist()) for row in range(len(CHATS))]
    assert said == ["1<eos>22<eos>", "bcd<eos>e<eos>f<eos>"]
    loss, slope = loss_of(policy, batch)
    expected, by_hand = by_labels(policy, batch, ["1,22", "bcd,e,f"], tokenizer)
    assert loss == pytest.approx(expected, abs=1e-9)
    assert slope.keys() == by_hand.keys()
    for name, x in slope.items():
        torch.testing.assert_close(x, by_hand[name], atol=1e-9, rtol=0)
    whole, _ = by_labels(policy, batch, ["1,22", "bcd,e"], tokenizer)
    assert abs(loss - whole) > 1e-4  # the comparison sees a single answer that is left out


@pytest.mark.parametrize("chat", [True, False], ids=["chat template", "plain text"])
def test_what_is_not_an_answer_is_never_read(tmp_path: Path, chat: bool) -> None:
    """Poisoned: the row behind its last answer, and the log-prob where an answer is shorter than the longest."""
    policy, batch = shown(tmp_path, CHATS, chat=chat)
    assert int((~batch.columns["mask"]).sum()) > 0
    loss, slope = loss_of(policy, batch)
    obs = {name: x.clone() for name, x in batch.obs.items()}
    for row, length in enumerate(obs["length"].tolist()):
        assert length == int(obs["at"][row].max()) + 1  # nothing behind the last answer counts as text
        obs["tokens"][row, length:] = 10**6
    again, same = loss_of(policy, Batch(obs, batch.record, batch.columns), poison=True)
    assert again == loss
    assert all(torch.equal(x, same[name]) for name, x in slope.items())


def rehearsed(folder: Path) -> dict[str, Any]:
    """Sections that both halves share: two digits are to be said the other way round; 20 of 100 are held out."""
    pairs = [(f"{a}{b}", f"{b}{a}") for a in range(10) for b in range(10)]
    file = written(folder, [{"prompt": f"{x}=", "completion": y, "answer": y} for x, y in pairs])
    return {
        "env": {"name": "rows", "files": file, "held_out": 0.2, "max_tokens": 4},
        "reward": {"name": "function", "function": "tests.integration.test_text_training:exact"},
        "generator": {"name": "torch"},
        "evaluation": {"seeds": 20, "lanes": 20},
    }


def test_shown_then_rewarded_a_model_from_nothing_learns_its_task(tmp_path: Path) -> None:
    """SFT on 80 rows; GRPO and PPO with a critic each go on from its folder hf/, with its weights and tokenizer."""
    shared = rehearsed(tmp_path)
    first = small_text.train(
        tmp_path,
        "sft",
        **shared,
        flow="supervised",
        steps=SHOWN,
        policy={"name": "causal_lm", "config": NETWORK, "tokenizer": {"characters": "0123456789="}},
        objective={"name": "sft"},
        trainer={"learning_rate": 1e-2, "optimizer": "adamw", "max_grad_norm": 1.0},
        rollout={"lanes": 40, "length": 1},
    )
    losses = [row["train/sft_loss"] for row in first.metrics() if "train/sft_loss" in row]
    assert losses[0] > 2.3 and losses[-1] < 1.2  # ln(10) nats is to know that a digit comes
    kept = {
        "policy": {"name": "causal_lm", "path": str(tmp_path / f"sft/checkpoints/step_{SHOWN:06d}/hf")},
        "trainer": {"learning_rate": 5e-3, "optimizer": "adamw", "max_grad_norm": 1.0},
    }
    critic = {"name": "ppo", "level": "action", "gamma": 1.0, "gae_lambda": 1.0, "critic_hidden": [16]}
    ppo = {"objective": critic, "rollout": {"lanes": 64, "length": 1}, "learner": {"epochs": 1, "minibatch": 32}}
    for name, changes in {"grpo": {"rollout": {"lanes": 64, "length": 1, "group": 8}}, "ppo": ppo}.items():
        run = small_text.train(tmp_path, name, **(shared | kept | changes), steps=30)
        before, after = (found.metrics["eval/success_once"] for found in run.evaluations())
        assert before == first.evaluations()[-1].metrics["eval/success_once"], name  # the same network, greedy
        success = [row["rollout/success"] for row in run.metrics() if "rollout/success" in row]
        assert np.mean(success[-3:]) > np.mean(success[:3]) + 0.1, (name, success)
        assert after >= before, name
