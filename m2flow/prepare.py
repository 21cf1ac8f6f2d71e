"""What is looked at before a run starts. `check`, `train`, `resume` and `init` ask `prepare`, so they cannot disagree.

A recipe has been checked in itself when it was loaded (config/rules.py). Here it meets its environment, its plan and
the machine. Every fault is collected; nothing is started and nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from m2flow import build, memory, prepare_text, registry, sections
from m2flow.config import Recipe
from m2flow.config.rules import divisors_near
from m2flow.flow.cluster import Cluster
from m2flow.flow.graph import Flow
from m2flow.flow.plan import Plan
from m2flow.flow.plan import check as check_plan
from m2flow.flow.sharing import conflicts
from m2flow.pieces import run_seed
from m2flow.runtime.cluster import detect
from m2flow.runtime.wiring import check_runnable
from m2flow.sections import CutsEpisodes, OnDevice, TaskConfig, resets_late
from m2flow.types import Spec

T = TypeVar("T")
# What gives a policy a capability that an objective requires, for the message.
CAPABLE = {"propose": "policy: {name: mlp, dist: squashed} can, where actions are bounded numbers"}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A recipe with what it becomes on a machine: flow, plan, spec of its environment."""

    recipe: Recipe
    cluster: Cluster
    flow: Flow
    plan: Plan
    spec: Spec
    parts: Mapping[str, Any] = field(default_factory=dict)  # parts of nodes that the flow brought along
    memory: Mapping[str, int] = field(default_factory=dict)  # bytes by node
    notes: tuple[str, ...] = ()  # what the user should know and need not mend


class Refused(ValueError):
    """A recipe that cannot run here. `problems` holds every fault, each with its key and what to do."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        self.problems = problems
        title = [f"{len(problems)} problems:"] if len(problems) > 1 else []
        super().__init__("\n".join([*title, *(f"  {text}" if title else text for text in problems)]))


class _Faults:
    """Collects what the checks raise."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.texts: list[str] = []

    def attempt(self, section: str, function: Callable[..., T], *args: Any) -> T | None:
        """The function's result, or None after noting why there is none.

        `section`: where its keys are; what runs then may be another package's code, and raise anything.
        """
        try:
            return function(*args)
        except ValueError as error:
            if str(error) in map(str, self.errors):
                return None  # several checks build one section, and each would tell its fault
            self.errors.append(error)
            self.texts += getattr(error, "problems", None) or [_keyed(section, args[0], str(error))]
        except Exception as error:
            if not section:
                raise  # a fault of ours
            self.errors.append(error)
            told = f"{section}: {type(error).__name__}: {error}"
            if isinstance(error, ModuleNotFoundError):
                told = str(registry.missing(section, "m2flow:parts", error))
            self.texts.append(told)
        return None

    def end(self) -> None:
        """Raise what was found; a single error that tells all its problems itself comes as it is."""
        if len(self.errors) == 1 and getattr(self.errors[0], "problems", None):
            raise self.errors[0]
        if self.errors:
            raise Refused(tuple(map(str, self.texts))) from self.errors[0]


def _keyed(section: str, recipe: Recipe, text: str) -> str:
    """The message under the key that it is about: "horizon: ..." of the evaluation is evaluation.horizon."""
    if not section:
        return text
    head = text.partition(":")[0].partition(".")[0]
    known = {item.name for item in fields(getattr(recipe, section))}
    return f"{section}.{text}" if head in known else f"{section}: {text}"


def prepare(recipe: Recipe, cluster: Cluster | None = None) -> Prepared:
    """Flow, plan, spec and memory of a recipe on this machine, or on a described cluster. Starts nothing.

    Raises:
        ValueError: it would not run; tells every fault at once.
    """
    faults = _Faults()
    for section in sections.REQUIRED:
        faults.attempt("", _offers, recipe, section)
    faults.end()
    machine = cluster or detect()
    made = faults.attempt("", _flow, recipe)
    planned = None if made is None else faults.attempt("", _plan, recipe, made[0], machine)
    spec = faults.attempt("env", _spec, recipe)
    faults.attempt("reward", _reward, recipe)
    model = None
    if spec is not None:
        model = faults.attempt("policy", memory.skeleton, recipe, spec)
        faults.attempt("evaluation", _evaluation, recipe)
    text, short = isinstance(recipe.env, TaskConfig), None
    if text:
        before = len(faults.errors)
        faults.attempt("env", _tasks, recipe)
        if len(faults.errors) == before:
            faults.attempt("policy", _codec, recipe)
        if len(faults.errors) == before:
            faults.attempt("", prepare_text.answers, recipe)
        if len(faults.errors) == before:
            short = faults.attempt("", prepare_text.room, recipe)
    elif spec is not None:
        faults.attempt("", _cuts, recipe)
    if spec is not None and model is not None:
        faults.attempt("policy", _capable, recipe, model.policy)
        if not text:
            faults.attempt("", _joined, recipe, model.policy, spec)
            faults.attempt("", _whole_episodes, recipe, model.policy)
    if cluster is None:  # a described cluster may be another machine, and hold what only a plan can use
        faults.attempt("trainer", _device, recipe)
        faults.attempt("observe", _recorders, recipe)
        faults.attempt("generator", _generator, recipe)
        if made is not None and planned is not None:
            faults.attempt("", _runnable, recipe, made[0], planned[0], machine)
    needs: dict[str, int] = {}
    if made is not None and planned is not None and spec is not None and model is not None:
        needs = memory.estimate(recipe, made[0], planned[0], spec, model)
        faults.attempt("", _fits, recipe, made[0], planned[0], machine, needs)
    faults.end()
    assert made is not None
    assert planned is not None
    assert spec is not None
    told: tuple[str, ...] = ()
    if text and "policy" in made[0].names:
        told = prepare_text.notes(recipe, recipe.generator or registry.resolve("generator", "torch")())
    notes = (*planned[1], *told, *((short,) if short else ()))
    return Prepared(recipe, machine, made[0], planned[0], spec, made[1], needs, notes)


def _offers(recipe: Recipe, section: str) -> None:
    sections.check(section, getattr(recipe, section))


# ---- flow and plan


def _flow(recipe: Recipe) -> tuple[Flow, Mapping[str, Any]]:
    made = registry.resolve("flow", recipe.flow)(recipe)
    flow, own = made if isinstance(made, tuple) else (made, {})
    flow.check()
    homeless = [name for name in flow.names if name not in own and name not in build.BUILT_IN]
    if homeless:
        raise ValueError(f"flow: {recipe.flow!r} has nodes without a part: {', '.join(homeless)}; return (flow, parts)")
    return flow, own


def _plan(recipe: Recipe, flow: Flow, machine: Cluster) -> tuple[Plan, tuple[str, ...]]:
    plan = build.make_plan(recipe, flow, machine)
    notes: tuple[str, ...] = ()
    if recipe.evaluation is None and "evaluator" in plan.places and "evaluator" not in flow.names:
        plan = _without_evaluator(plan, flow, machine)
        notes = (f"plan {plan.name!r} has a place for the evaluator, which is not used: evaluation is null",)
    check_plan(flow, plan, machine)
    _lanes(recipe, flow, plan)
    return plan, notes


def _without_evaluator(plan: Plan, flow: Flow, machine: Cluster) -> Plan:
    """One plan file serves recipes with and without evaluation: its place goes, and the turns that only it made needed.

    Names that the flow does not know stay, so that the plan's own check finds them.
    """
    places = {name: place for name, place in plan.places.items() if name != "evaluator"}
    devices = {name: place.on(machine) for name, place in places.items() if name in flow.names}
    contested = {stage for found in conflicts(flow, devices) for stage in (found.first, found.second)}
    services = {node.name for node in flow.services}
    idle = {node.name for node in flow.stages} - contested | {"evaluator"}
    shifts = [tuple(name for name in group if name not in idle) for group in plan.shifts]
    calls = {key: n for key, n in plan.sub_batches.items() if not key.startswith("evaluator->")}
    return replace(plan, places=places, shifts=tuple(g for g in shifts if set(g) - services), sub_batches=calls)


def _lanes(recipe: Recipe, flow: Flow, plan: Plan) -> None:
    """A plan must not cut the lanes of the rollout finer than they are, nor cut a group."""
    if "rollout" not in plan.places:
        return
    replicas = plan.places["rollout"].replicas
    cuts = max((plan.sub_batches.get(edge.key, 1) for edge in flow.calls_of("rollout")), default=1)
    groups = recipe.rollout.lanes // recipe.rollout.group
    if replicas * cuts > groups:
        what = "lanes" if recipe.rollout.group == 1 else f"groups of {recipe.rollout.group} lanes"
        raise ValueError(
            f"plan: {replicas} replica(s) of rollout in {cuts} sub-batch(es) need as many {what} at least, and "
            f"rollout.lanes {recipe.rollout.lanes} makes {groups}; raise rollout.lanes or cut less"
        )


def _runnable(_recipe: Recipe, flow: Flow, plan: Plan, machine: Cluster) -> None:
    check_runnable(flow, plan, machine)


def _fits(_recipe: Recipe, flow: Flow, plan: Plan, machine: Cluster, needs: Mapping[str, int]) -> None:
    check_plan(flow, plan, machine, needs)


# ---- tasks of a language model


def _tasks(recipe: Recipe) -> None:
    """Both splits can be read, and hold what is asked of them; a task of each can be begun."""
    seed = run_seed(recipe)
    sources = {"train": recipe.env.tasks("train", seed)}
    if recipe.evaluation is not None:
        sources["held_out"] = recipe.env.tasks("held_out", seed)
        there, wanted = sources["held_out"].size, recipe.evaluation.protocol(recipe.env).count
        if there is not None and there < wanted:
            raise ValueError(f"{there} tasks are held out, and evaluation.seeds asks for {wanted}; lower that")
    for split, source in sources.items():
        if source.size == 0:
            raise ValueError(f"no task to {'train on' if split == 'train' else 'evaluate on'}")
        recipe.env.dialogue(source.task(0)).open()


def _codec(recipe: Recipe) -> None:
    """The tokenizer is there, knows what ends an answer, and can write the first task of each split."""
    codec = recipe.policy.codec()
    if not codec.stop:
        raise ValueError("the tokenizer and the generation config name no id that ends an answer")
    for split in ("train", "held_out") if recipe.evaluation is not None else ("train",):
        source = recipe.env.tasks(split, run_seed(recipe))
        codec.opening(list(recipe.env.dialogue(source.task(0)).open()))


# ---- environment and policy


def _spec(recipe: Recipe) -> Spec:
    spec: Spec = recipe.env.spec()
    return spec


def _reward(recipe: Recipe) -> None:
    if recipe.reward is not None:
        recipe.reward.build()


def _evaluation(recipe: Recipe) -> None:
    if recipe.evaluation is not None:
        recipe.evaluation.protocol(recipe.env)


def _cuts(recipe: Recipe) -> None:
    """Checkpoints must not cut every episode of an env that is saved by starting fresh ones: none would ever end."""
    limit, every = recipe.env.time_limit(), recipe.checkpoint.every
    if not (isinstance(recipe.env, CutsEpisodes) and recipe.env.cuts) or limit is None or every <= 0:
        return
    between = every * recipe.rollout.length
    if between < limit:
        raise ValueError(
            f"checkpoint.every: saving {type(recipe.env).__name__.removesuffix('Config')} starts fresh episodes, and "
            f"{every} step(s) of {recipe.rollout.length} are fewer than the {limit} of an episode, so none would "
            f"end; use at least {-(-limit // recipe.rollout.length)}, or 0 for the final checkpoint only"
        )


def _capable(recipe: Recipe, policy: Any) -> None:
    """The policy, as configured, can do what the objective asks of it."""
    missing = sorted(need for need in recipe.objective.requires if not callable(getattr(policy, need, None)))
    if missing:
        dist = getattr(recipe.policy, "dist", None)
        who = type(policy).__name__ + ("" if dist is None else f" with dist {dist}")
        known = "; ".join(CAPABLE[need] for need in missing if need in CAPABLE)
        needs = f"{type(recipe.objective).__name__} needs a policy that can {', '.join(missing)}"
        raise ValueError(f"{needs}, and {who} cannot" + (f"; {known}" if known else ""))


def _joined(_recipe: Recipe, policy: Any, spec: Spec) -> None:
    from m2flow.spec import join

    join(policy.spec, spec)


def _whole_episodes(recipe: Recipe, policy: Any) -> None:
    """A group baseline compares whole episodes, so a step must hold a whole number of them."""
    limit, length = recipe.env.time_limit(), recipe.rollout.length
    if recipe.rollout.group == 1 or limit is None:
        return
    if resets_late(recipe.env):
        who = type(recipe.env).__name__.removesuffix("Config")
        raise ValueError(
            f"rollout.group: {who} takes a step to reset a lane, so a step of training would cut episodes, and a group "
            "baseline compares whole ones; use env.autoreset: same where there is that key, or another env"
        )
    chunk = int(policy.chunk)
    if limit % chunk:  # the rest of an episode's last chunk would be played in the next episode, and shorten it
        near = " or ".join(map(str, divisors_near(limit, chunk)))
        raise ValueError(
            f"policy.chunk: {chunk} actions per decision do not divide the time limit of env, {limit} steps, so "
            f"episodes would differ in length, and a group baseline compares whole ones of one length; use {near}"
        )
    episode = limit // chunk
    if length % episode:
        near = max(1, length // episode) * episode
        raise ValueError(
            f"rollout.length: {length} decisions cut episodes of {episode} (the time limit of env), and a group "
            f"baseline compares whole ones; use a multiple, for instance {near}"
        )


# ---- this machine


def _device(recipe: Recipe) -> None:
    """torch finds the trainer's device here."""
    _found(str(recipe.trainer.device))


def _found(device: str) -> None:
    import torch

    kind, _, number = device.partition(":")
    count = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}.get(kind)
    if count is not None and int(number or 0) >= count:
        raise ValueError(f"device: {device!r}, but torch finds {count} {kind} device(s) here; use cpu, or fix torch")


def _generator(recipe: Recipe) -> None:
    """The package of the engine is there, and the device that it is told to sample on."""
    if recipe.generator is not None:
        registry.require("generator", registry.name_of("generator", type(recipe.generator)))
        if isinstance(recipe.generator, OnDevice):
            _found(recipe.generator.device)


def _recorders(recipe: Recipe) -> None:
    """Every tracker's class is there, and the package that it needs."""
    for name in recipe.observe.recorders:
        try:
            registry.require("recorder", name)
        except ValueError as error:
            raise ValueError(f"recorders: {error}") from error
