"""Whether a reward can score the tasks, and whether prompt and answer have room in the context of the model."""

from __future__ import annotations

from typing import Any

from m2flow.capabilities import ChecksTasks, LabelsTasks
from m2flow.config import Recipe
from m2flow.pieces import run_seed
from m2flow.sections import OnDevice

LISTED = 20_000  # tasks of a source that are looked at; of a longer one, or one without end, the first FEW
FEW = 500
ENCODED = 500  # of them, the longest, are turned into tokens
EXAMPLE = '{"prompt": "2 + 2 =", "answer": "4"}'  # a row to show where none of the user's own is valid
HALF = ("bfloat16", "float16")


def room(recipe: Recipe) -> str | None:
    """What the user should know of prompts that leave less than env.max_tokens; None where there is nothing.

    Raises:
        ValueError: no answer of that length fits, or a prompt leaves no room at all.
    """
    bound, where = _bound(recipe)
    if bound is None:
        return None
    wanted = recipe.env.max_tokens if recipe.flow != "supervised" or recipe.evaluation is not None else 0
    if wanted + 1 > bound:
        raise ValueError(
            f"env.max_tokens: {wanted} tokens of an answer and a prompt do not fit into {bound} ({where}); "
            f"use less than {bound - 1}, or a longer context"
        )
    codec, short, seen = recipe.policy.codec(), 0, 0
    for split in ("train", "held_out") if recipe.evaluation is not None else ("train",):
        source = recipe.env.tasks(split, run_seed(recipe))
        texts = _texts(recipe, source)
        seen += len(texts)
        slack = len(codec.opening(_opening(recipe, source, 0)))  # more than what a chat template adds
        longest = sorted(texts, key=texts.__getitem__, reverse=True)[:ENCODED]
        if texts[longest[0]] + slack + wanted <= bound:
            continue
        for index in longest:
            length = len(codec.opening(_opening(recipe, source, index)))
            if length >= bound:
                raise ValueError(
                    f"env: task {index} of {split} has a prompt of {length} tokens, which leaves no room for an answer "
                    f"in {bound} ({where}); raise that, or leave out such tasks (rows: env.max_prompt_chars)"
                )
            short += length + wanted > bound
    if not short:
        return None
    return (
        f"{short} of {seen} prompts looked at leave less than env.max_tokens {wanted} of {bound} ({where}): "
        "their answers end earlier"
    )


def answers(recipe: Recipe) -> None:
    """The reward can score the tasks: all that users have written, of others the first.

    Raises:
        ValueError: names the first task that it cannot score, its fault, and a row that it can.
    """
    reward = None if recipe.reward is None else recipe.reward.build()
    if not isinstance(reward, ChecksTasks):
        return
    bad, first, valid, written = 0, "", "", False
    for split in _scored(recipe):
        source = recipe.env.tasks(split, run_seed(recipe))
        for index in range(_looked_at(source, everything=isinstance(source, LabelsTasks))):
            task = source.task(index)
            try:
                reward.check_task(task)
                valid = valid or (source.example(index) if isinstance(source, LabelsTasks) else "")
            except ValueError as error:
                where = source.label(index) if isinstance(source, LabelsTasks) else f"task {index} of {split}"
                bad, first, written = bad + 1, first or f"reward.{error} ({where})", isinstance(source, LabelsTasks)
    if bad:
        more = f"; {bad} tasks are like that, this is the first" if bad > 1 else ""
        shown = valid or (EXAMPLE if written else "")
        raise ValueError(first + more + (f"; a valid row: {shown}" if shown else ""))


def notes(recipe: Recipe, engine: Any) -> tuple[str, ...]:
    """What runs, and is rarely meant: sampling on the CPU, rounded old log-probs, one ratio for a whole answer.
    `engine`: the generator's config, also where the recipe leaves it out."""
    found: list[str] = []
    objective: Any = recipe.objective
    trainer = str(recipe.trainer.device)
    if isinstance(engine, OnDevice) and engine.device == "cpu" and trainer.startswith("cuda"):
        found.append(
            f"generator.device is cpu and trainer.device {trainer}: answers are sampled on the CPU; set it to cuda"
        )
    dtype = getattr(engine, "dtype", None)
    if dtype in HALF and not getattr(objective, "decoupled", True):
        found.append(
            f"generator.dtype is {dtype} and objective.decoupled false: the engine's rounded log-probs stand for the "
            "old policy's, so ratios begin away from 1; set objective.decoupled: true (one more forward pass a step), "
            "or generator.dtype: float32"
        )
    if getattr(objective, "level", None) == "chunk":
        found.append(
            "objective.level is chunk: one probability ratio for a whole answer, as RLOO has it; the ratio of a long "
            "answer is soon outside of the clip range; use action for one per token (GRPO, DAPO, PPO)"
        )
    return tuple(found)


def _scored(recipe: Recipe) -> tuple[str, ...]:
    """The splits whose answers are scored; imitation scores none of those it trains on."""
    train = ("train",) if recipe.flow != "supervised" else ()
    return (*train, "held_out") if recipe.evaluation is not None else train


def _looked_at(source: Any, *, everything: bool = False) -> int:
    size: int | None = source.size
    return FEW if size is None or (size > LISTED and not everything) else size


def _bound(recipe: Recipe) -> tuple[int | None, str]:
    """Tokens that prompt and answer have together, and the key that says so."""
    model, engine = recipe.policy.context(), getattr(recipe.generator, "max_context", None)
    if engine is None:
        return model, "max_position_embeddings of the model"
    if model is not None and engine > model:
        raise ValueError(
            f"generator.max_context: {engine} is more than the model can see, {model} (max_position_embeddings); "
            f"use at most {model}, or null"
        )
    return engine, "generator.max_context"


def _opening(recipe: Recipe, source: Any, index: int) -> list[Any]:
    return list(recipe.env.dialogue(source.task(index)).open())


def _texts(recipe: Recipe, source: Any) -> dict[int, int]:
    """Index -> bytes of the prompt."""
    return {
        index: sum(len(str(message.get("content", "")).encode()) for message in _opening(recipe, source, index))
        for index in range(_looked_at(source))
    }
