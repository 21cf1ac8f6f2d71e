"""Parts of the built-in flows for a language model: the same nodes as a robot's, built of other roles.

rollout     AnswerRollout, or Demonstrations where nothing is sampled     (robots: Rollout)
policy      GenerationService around the recipe's generator               (robots: PolicyService)
evaluator   Examiner                                                      (robots: Evaluator)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m2flow import seeds
from m2flow.config import Recipe
from m2flow.observe.layout import RunFolder
from m2flow.pieces import build_policy, run_seed, share_lanes, use_threads
from m2flow.runtime.worker import Context, Part
from m2flow.types import Spec


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """This replica's groups of answers."""

    recipe: Recipe
    samples: Path | None

    def __call__(self, context: Context) -> Any:
        from m2flow.roles.answers import AnswerRollout

        recipe = self.recipe
        [lanes] = share_lanes(recipe, context.size, context.rank, 1)
        source = recipe.env.tasks("train", run_seed(recipe))
        return AnswerRollout(
            talker=_talker(recipe, context, recipe.policy.temperature),
            source=source,
            index=order(recipe, source),
            judge=_judge(recipe),
            config=recipe.rollout,
            lanes=lanes,
            seed=run_seed(recipe),
            table=_table(self.samples, context, recipe.observe.samples_every),
        )


@dataclass(frozen=True, slots=True)
class DemonstrationPart:
    """This replica's demonstrations."""

    recipe: Recipe

    def __call__(self, context: Context) -> Any:
        from m2flow.roles.demonstrations import Demonstrations

        recipe = self.recipe
        [lanes] = share_lanes(recipe, context.size, context.rank, 1)
        source = recipe.env.tasks("train", run_seed(recipe))
        return Demonstrations(
            codec=recipe.policy.codec(),
            dialogue=recipe.env.dialogue,
            source=source,
            index=order(recipe, source),
            config=recipe.rollout,
            lanes=lanes,
            max_tokens=recipe.env.max_tokens,
        )


@dataclass(frozen=True, slots=True)
class GenerationPart:
    """The engine that samples, on this replica's devices."""

    recipe: Recipe
    spec: Spec

    def __call__(self, context: Context) -> Any:  # noqa: ARG002 - every part is called alike
        from m2flow import registry
        from m2flow.roles.generation import GenerationService

        use_threads(self.recipe)
        config = self.recipe.generator or registry.resolve("generator", "torch")()
        return GenerationService(config.build(build_policy(self.recipe, self.spec)))


@dataclass(frozen=True, slots=True)
class ExaminerPart:
    """Held-out tasks with the current weights."""

    recipe: Recipe
    samples: Path | None

    def __call__(self, context: Context) -> Any:
        from m2flow.roles.examination import Examiner

        recipe = self.recipe
        greedy = recipe.evaluation.deterministic
        return Examiner(
            recipe.evaluation.protocol(recipe.env),
            _talker(recipe, context, 0.0 if greedy else recipe.policy.temperature),
            recipe.env.tasks("held_out", run_seed(recipe)),
            _judge(recipe),
            rank=context.rank,
            size=context.size,
            together=recipe.evaluation.lanes,
            table=_table(self.samples, context, 1),
        )


def text_parts(recipe: Recipe, spec: Spec, folder: RunFolder | None) -> dict[str, Part]:
    """A part for every node that is a language model's own."""
    samples = None if folder is None else folder.samples
    return {
        "rollout": DemonstrationPart(recipe) if recipe.flow == "supervised" else AnswerPart(recipe, samples),
        "policy": GenerationPart(recipe, spec),
        "evaluator": ExaminerPart(recipe, samples),
    }


def order(recipe: Recipe, source: Any) -> Any:
    """Position -> row: every row once an epoch, in an order keyed by the run's seed; as they come without end."""
    from m2flow.tasks.order import Order

    if source.size is None:
        return int
    return Order(source.size, seeds.derive(run_seed(recipe), "order")).index


def _judge(recipe: Recipe) -> Any:
    from m2flow.roles.conversation import LIMIT_SHARE, Judge

    return Judge(recipe.reward.build(), LIMIT_SHARE * recipe.stall_limit)


def _talker(recipe: Recipe, context: Context, temperature: float) -> Any:
    from m2flow.roles.conversation import Talker

    return Talker(
        policy=context.services["policy"],
        codec=recipe.policy.codec(),
        dialogue=recipe.env.dialogue,
        max_tokens=recipe.env.max_tokens,
        max_turns=recipe.env.max_turns,
        temperature=temperature,
        context=context_of(recipe),
    )


def context_of(recipe: Recipe) -> int | None:
    """Tokens of a conversation that model and engine can hold; None where neither says."""
    bounds = (recipe.policy.context(), getattr(recipe.generator, "max_context", None))
    return min((bound for bound in bounds if bound is not None), default=None)


def _table(samples: Path | None, context: Context, every: int) -> Any:
    from m2flow.observe.samples import SampleFolder

    return None if samples is None or every < 1 else SampleFolder(samples, context.rank, every)
