"""What must hold between sections. All of it is checked before anything starts, and all faults are told at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from m2flow import registry
from m2flow.config.errors import Path, Problem
from m2flow.config.recipe import PLANS
from m2flow.protocols import Levelled, NeedsGroups
from m2flow.sections import GroupRates, SpeaksText, TaskConfig

# Keys of an evaluation that only episodes have, and what text tasks have in their place.
OF_EPISODES: Mapping[str, str] = {
    "first_seed": "held-out tasks are taken from the first one on; use evaluation.seeds",
    "seed_list": "held-out tasks are taken from the first one on; use evaluation.seeds",
    "success": "an answer is judged once, at its end; remove it",
    "traces": "an answer has one reward, and samples/ has all of them; remove it",
    "stride": "conversations cannot be filmed; remove it",
}
EVALUATION_METRICS = ("eval/success", "eval/success_once", "eval/success_at_end", "eval/return", "eval/length")


@dataclass(frozen=True, slots=True)
class Rule:
    """A check and the keys it reads; it is skipped where one of these is itself wrong."""

    needs: tuple[str, ...]  # dotted
    check: Callable[[Any], Iterator[Problem]]


def broken(values: Any, known: Sequence[Problem]) -> list[Problem]:
    """Faults between the keys of `values` (with a recipe's attributes), but for rules that read a wrong key."""
    wrong = {problem.path for problem in known}
    return [problem for rule in RULES if not _spoilt(rule, wrong) for problem in rule.check(values)]


def unwritten(values: Any, data: Mapping[str, Any], known: Sequence[Problem]) -> list[Problem]:
    """A key that must be written for text tasks: the default `level` is a ratio per decision, so one per whole answer,
    and nearly every algorithm for language models has one per token. `data`: the recipe as it was written."""
    key, given = ("objective", "level"), data.get("objective")
    wrong = any(problem.path[:1] in (("objective",), ("env",)) for problem in known)
    if wrong or not isinstance(values.env, TaskConfig) or not isinstance(given, Mapping) or "level" in given:
        return []
    if not any(item.name == "level" and item.default == "chunk" for item in fields(values.objective)):
        return []
    message = (
        "is required for text tasks: action is a probability ratio per token (GRPO, DAPO, PPO), chunk one per answer"
    )
    return [Problem(key, f"{message} (RLOO), sequence its length-normalised one (GSPO); for instance level: action")]


def _spoilt(rule: Rule, wrong: set[Path]) -> bool:
    """Whether a wrong key is one that the rule reads, holds one, or lies inside one."""
    for need in (tuple(need.split(".")) for need in rule.needs):
        if any(path[: len(need)] == need[: len(path)] for path in wrong):
            return True
    return False


def divisors_near(total: int, wanted: int) -> tuple[int, ...]:
    """The divisors of `total` on both sides of `wanted`. Example: `divisors_near(1000, 256)` is `(250, 500)`."""
    small = [d for d in range(1, int(total**0.5) + 1) if total % d == 0]
    every = sorted({*small, *(total // d for d in small)})
    below = [d for d in every if d <= wanted][-1:]
    above = [d for d in every if d > wanted][:1]
    return (*below, *above)


def _minibatch(r: Any) -> Iterator[Problem]:
    """The optimiser batches of a step have one size: no rows are dropped and none are trained on twice."""
    rows, mini = r.rollout.lanes * r.rollout.length, r.learner.minibatch
    if mini is None or r.flow == "offpolicy" or rows % mini == 0:
        return
    if mini > rows:
        fix = f"use at most {rows}, or null for all rows at once"
    else:
        fix = "nearest that fit: " + ", ".join(map(str, divisors_near(rows, mini)))
    origin = f"a step collects {rows} rows (rollout.lanes {r.rollout.lanes} x rollout.length {r.rollout.length})"
    yield Problem(("learner", "minibatch"), f"{origin}, which {mini} does not divide; {fix}")


def _microbatch(r: Any) -> Iterator[Problem]:
    """A micro-batch is part of an optimiser batch. It need not divide it: a smaller last part changes nothing."""
    micro = r.learner.microbatch
    if micro is None:
        return
    batch, name = _optimiser_batch(r)
    if batch is not None and micro > batch:
        yield Problem(("learner", "microbatch"), f"{micro} is larger than {name} {batch}; use at most {batch}")
    if r.objective.couples_batch and (batch is None or micro < batch):
        kind = type(r.objective).__name__
        message = (
            f"{kind} couples the rows of a batch (batch norm), so it cannot be cut into {micro} of {batch}; use null"
        )
        yield Problem(("learner", "microbatch"), message)


def _optimiser_batch(r: Any) -> tuple[int | None, str]:
    """Rows per optimiser step and where that number is written."""
    if r.flow == "offpolicy":
        return (None, "") if r.replay is None else (r.replay.batch, "replay.batch")
    if r.learner.minibatch is not None:
        return r.learner.minibatch, "learner.minibatch"
    return r.rollout.lanes * r.rollout.length, "the rows of a step, rollout.lanes x rollout.length ="


def _flow(r: Any) -> Iterator[Problem]:
    """The flow is known; a replay buffer is given exactly where something samples from it."""
    try:
        registry.address("flow", r.flow)
    except ValueError as error:
        yield Problem(("flow",), str(error))
        return
    if r.flow == "offpolicy" and r.replay is None:
        yield Problem(("replay",), "flow offpolicy trains from a replay buffer; add a replay section (replay: {})")
    if r.flow == "onpolicy" and r.replay is not None:
        yield Problem(("replay",), "flow onpolicy never reads a replay buffer; remove it, or use flow: offpolicy")


def _objective(r: Any) -> Iterator[Problem]:
    """One that proposes actions of its own learns from replayed steps; one that scores what was done does not."""
    name, proposes = type(r.objective).__name__, "propose" in r.objective.requires
    if proposes and r.flow == "onpolicy":
        yield Problem(("flow",), f"{name} learns from a replay buffer; use flow: offpolicy and a replay section")
    if not proposes and r.flow == "offpolicy":
        yield Problem(
            ("flow",), f"{name} learns from fresh trajectories and cannot read a replay buffer; use flow: onpolicy"
        )


def _replay(r: Any) -> Iterator[Problem]:
    """The buffer fills up to its start before the run ends, or nothing would ever be trained."""
    if r.flow != "offpolicy" or r.replay is None:
        return
    total = r.steps * r.rollout.lanes * r.rollout.length
    if r.replay.start >= total:
        origin = f"steps {r.steps} x rollout.lanes {r.rollout.lanes} x rollout.length {r.rollout.length} = {total} rows"
        yield Problem(("replay", "start"), f"{r.replay.start} is not less than all that the run collects ({origin})")


def _plan(r: Any) -> Iterator[Problem]:
    """A plan by name is one we know (a path has been read before); every replica has a lane to step."""
    if isinstance(r.plan, str):
        if r.plan not in PLANS:
            hint = registry.suggest(r.plan, PLANS)
            yield Problem(
                ("plan",), f"{r.plan!r} is no plan{hint} (known: {', '.join(PLANS)}; or the path of a YAML file)"
            )
        return
    for stage, replicas in _replicas(r.plan).items():
        if stage.startswith("rollout") and replicas > r.rollout.lanes:
            yield Problem(
                ("rollout", "lanes"),
                f"{r.rollout.lanes} lanes cannot be split over the {replicas} replicas that the plan gives stage "
                f"{stage!r}; use at least {replicas} lanes, or at most {r.rollout.lanes} replicas",
            )


def _replicas(plan: Mapping[str, Any]) -> dict[str, int]:
    """Stage -> replicas, as a plan mapping states them (its full check needs flow and machine: `m2flow check`)."""
    places = plan.get("places", {})
    if not isinstance(places, Mapping):
        return {}
    found = {name: place.get("replicas", 1) for name, place in places.items() if isinstance(place, Mapping)}
    return {name: count for name, count in found.items() if isinstance(count, int)}


def _early_stop(r: Any) -> Iterator[Problem]:
    """Early stopping judges evaluations, so there must be some on the way."""
    if r.early_stop is None:
        return
    if r.early_stop.metric not in EVALUATION_METRICS:
        hint = registry.suggest(r.early_stop.metric, EVALUATION_METRICS)
        known = ", ".join(EVALUATION_METRICS)
        yield Problem(
            ("early_stop", "metric"), f"{r.early_stop.metric!r} is no number of an evaluation{hint} ({known})"
        )
    if r.evaluation is None:
        message = "judges the evaluations of a run, and evaluation is null; add an evaluation section"
        yield Problem(("early_stop",), message)
    elif r.evaluation.every < 1:
        message = "evaluates only before and after training, so early_stop could not stop it; use 1 or more"
        yield Problem(("evaluation", "every"), f"{r.evaluation.every} {message}")


def _best(r: Any) -> Iterator[Problem]:
    """The best checkpoint is chosen by evaluations: it needs a number of theirs, and the weights of each on disk."""
    metric = r.checkpoint.best_metric
    if metric is None:
        return
    if metric not in EVALUATION_METRICS:
        hint = registry.suggest(metric, EVALUATION_METRICS)
        message = f"{metric!r} is no number of an evaluation{hint} ({', '.join(EVALUATION_METRICS)})"
        yield Problem(("checkpoint", "best_metric"), message)
    if r.evaluation is None:
        yield Problem(
            ("checkpoint", "best_metric"), "is judged by evaluations, and evaluation is null; add that section"
        )
        return
    judged, saved = r.evaluation.every, r.checkpoint.every
    if judged < 1:
        message = "evaluates only before and after training, so the last checkpoint would always be the best one"
        yield Problem(("evaluation", "every"), f"{judged} {message}; use 1 or more, or checkpoint.best_metric: null")
    elif saved < 1 or judged % saved:
        message = f"does not save after each evaluation (evaluation.every {judged}), so the best weights could be lost"
        yield Problem(("checkpoint", "every"), f"{saved} {message}; use {judged} or a divisor of it")


def _recorders(r: Any) -> Iterator[Problem]:
    """Every recorder has a class."""
    for name in r.observe.recorders:
        try:
            registry.address("recorder", name)
        except ValueError as error:
            yield Problem(("observe", "recorders"), str(error))


def _groups(r: Any) -> Iterator[Problem]:
    """A group baseline of one attempt is that attempt: every advantage would be 0, and training a silent no-op."""
    if isinstance(r.objective, NeedsGroups) and r.objective.needs_groups and r.rollout.group < 2:
        name = type(r.objective).__name__
        yield Problem(("rollout", "group"), f"{name} compares attempts at one task, and groups have one; use 2 or more")


def _text(r: Any) -> Iterator[Problem]:
    """Tasks are attempted by a language model, one conversation per decision, and judged by a reward."""
    tasks, speaks = isinstance(r.env, TaskConfig), isinstance(r.policy, SpeaksText)
    names = type(r.env).__name__.removesuffix("Config"), type(r.policy).__name__.removesuffix("Config")
    if tasks != speaks:
        if tasks:
            message = (
                f"{names[1]} is no language model, and env {names[0]} has text tasks; use policy: {{name: causal_lm}}"
            )
        else:
            message = f"{names[1]} is a language model, and env {names[0]} has no text tasks; use env: {{name: rows}}"
        yield Problem(("policy",), message)
    if not tasks:
        for key, unread in (("generator", r.generator is not None), ("flow", r.flow == "supervised")):
            if unread:
                yield Problem((key,), f"is for language models, and env {names[0]} has no text tasks; remove it")
        if r.learner.microbatch_tokens is not None:
            message = f"counts tokens, and env {names[0]} has no text tasks; use learner.microbatch, which counts rows"
            yield Problem(("learner", "microbatch_tokens"), message)
        if r.rollout.resample:
            yield Problem(("rollout", "resample"), f"is for text tasks, and env {names[0]} has none; remove it")
        return
    if r.rollout.length != 1:
        message = f"{r.rollout.length}, and a conversation is one decision; use 1 (env.max_turns bounds its answers)"
        yield Problem(("rollout", "length"), message)
    if r.reward is None and (r.flow != "supervised" or r.evaluation is not None):
        yield Problem(("reward",), "text tasks are judged by a reward, and reward is null; for instance {name: math}")
    objective: Any = r.objective
    if r.flow == "offpolicy":
        yield Problem(("flow",), "offpolicy replays steps of robots; use onpolicy or supervised for text tasks")
    critic = isinstance(r.objective, Levelled) and bool(objective.heads(r.env.spec()))
    if critic and not getattr(r.objective, "per_action", True):
        message = f"{r.objective.level!r} with a critic: its values are per token of an answer; use level: action"
        yield Problem(("objective", "level"), message)
    if r.env.max_turns > 1 and not getattr(r.env, "tools", True):
        yield Problem(("env", "max_turns"), f"{r.env.max_turns}, and without tools there is one answer; use 1")
    if r.flow == "supervised" and (r.rollout.group > 1 or r.rollout.resample):
        key = "group" if r.rollout.group > 1 else "resample"
        yield Problem(("rollout", key), "is of attempts, and demonstrations are shown once; remove it")


def _unread(r: Any) -> Iterator[Problem]:
    """What only robots' parts read would change nothing for text tasks, so it is not set for them."""
    if not isinstance(r.env, TaskConfig):
        return
    if r.evaluation is not None:
        defaults = {item.name: item.default for item in fields(r.evaluation)}
        for key, instead in OF_EPISODES.items():
            given = getattr(r.evaluation, key)
            if given != defaults[key]:
                yield Problem(("evaluation", key), f"{given!r} is of episodes, and env has text tasks: {instead}")
    cuts = r.plan.get("sub_batches") if isinstance(r.plan, Mapping) else None
    if isinstance(cuts, Mapping) and any(count != 1 for count in cuts.values()):
        message = "cuts the lanes of a robot's rollout, and env has text tasks, whose generator fills its own batch"
        yield Problem(("plan", "sub_batches"), f"{message}; remove it (the torch generator has slots)")


def _overlong(r: Any) -> Iterator[Problem]:
    """Punishing length is only felt where answers can be that long."""
    if r.reward is None or not isinstance(r.env, TaskConfig):
        return
    parts: dict[Path, Any] = {("reward",): r.reward}
    if registry.name_of("reward", type(r.reward)) == "combined":
        parts = {("reward", "parts", name, "reward"): part.reward for name, part in r.reward.parts.items()}
    longest = r.env.max_tokens * r.env.max_turns
    for path, reward in parts.items():
        if registry.name_of("reward", type(reward)) == "overlong" and reward.max_tokens > longest:
            message = f"{reward.max_tokens} tokens, and answers end at {longest} (env.max_tokens x env.max_turns)"
            fix = f"so its whole punishment is never given; use {longest} or less"
            yield Problem((*path, "max_tokens"), f"{message}, {fix}")


def _learning(r: Any) -> Iterator[Problem]:
    """What imitates needs demonstrations, and what does not has no use for them."""
    name, imitates = type(r.objective).__name__, getattr(r.objective, "imitates", False)
    if imitates and r.flow != "supervised":
        yield Problem(("flow",), f"{name} learns demonstrations; use flow: supervised")
    if not imitates and r.flow == "supervised":
        yield Problem(("objective",), f"{name} learns from its own attempts; use flow: onpolicy, or objective: sft")


def _rates(r: Any) -> Iterator[Problem]:
    """A learning rate belongs to a group that the objective moves."""
    rates = r.trainer.group_learning_rates if isinstance(r.trainer, GroupRates) else {}
    groups = tuple(dict.fromkeys(phase.group for phase in r.objective.phases)) if rates else ()
    for name in rates:
        if name not in groups:
            who = type(r.objective).__name__
            message = f"{who} has no parameter group {name!r}{registry.suggest(name, groups)} ({', '.join(groups)})"
            yield Problem(("trainer", "group_learning_rates", name), message)


RULES: tuple[Rule, ...] = (
    Rule(("env", "policy", "objective", "reward", "generator", "flow", "rollout", "learner"), _text),
    Rule(("env", "evaluation", "plan"), _unread),
    Rule(("env", "reward"), _overlong),
    Rule(("flow", "objective"), _learning),
    Rule(("objective", "rollout.group"), _groups),
    Rule(("flow", "replay"), _flow),
    Rule(("flow", "objective"), _objective),
    Rule(("flow", "replay", "steps", "rollout.lanes", "rollout.length"), _replay),
    Rule(("plan", "rollout.lanes"), _plan),
    Rule(("rollout.lanes", "rollout.length", "learner.minibatch", "flow"), _minibatch),
    Rule(("rollout.lanes", "rollout.length", "learner", "flow", "replay", "objective"), _microbatch),
    Rule(("objective", "trainer.group_learning_rates"), _rates),
    Rule(("early_stop", "evaluation"), _early_stop),
    Rule(("checkpoint", "evaluation"), _best),
    Rule(("observe.recorders",), _recorders),
)
