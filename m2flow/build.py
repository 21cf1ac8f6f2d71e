"""From a recipe to (flow, plan, parts): the only place that knows roles, models, envs and the runtime at once.

A part builds one node inside the worker that hosts it. Parts are picklable and import nothing heavy until they are
called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from m2flow.capabilities import constants
from m2flow.config import Recipe
from m2flow.flow.cluster import Cluster
from m2flow.flow.graph import Call, Flow, Node, Stream, Weights
from m2flow.flow.plan import Plan, collocated, disaggregated, hybrid
from m2flow.observe.layout import RunFolder
from m2flow.pieces import build_policy, run_seed, share_lanes, use_threads
from m2flow.runtime.worker import Context, Part
from m2flow.sections import SpeaksText, TaskConfig
from m2flow.types import Evaluation, Spec

# ---- flows


def onpolicy(recipe: Recipe) -> Flow:
    """Rollout asks the policy, the learner trains on whole steps and sends weights back."""
    return _flow("onpolicy", recipe, Stream("rollout", "learner"))


def offpolicy(recipe: Recipe) -> Flow:
    """The same, with a replay channel between rollout and learner."""
    return _flow("offpolicy", recipe, Stream("rollout", "learner", channel="replay"))


def supervised(recipe: Recipe) -> Flow:
    """Demonstrations instead of a rollout: nothing asks the policy but an evaluation."""
    flow = _flow("supervised", recipe, Stream("rollout", "learner"))
    edges = [edge for edge in flow.edges if not (isinstance(edge, Call) and edge.src == "rollout")]
    nodes = flow.nodes
    if recipe.evaluation is None:
        nodes = tuple(node for node in nodes if node.name != "policy")
        edges = [edge for edge in edges if not isinstance(edge, Weights)]
    return Flow(flow.name, nodes, tuple(edges))


def _flow(name: str, recipe: Recipe, stream: Stream) -> Flow:
    objective = recipe.objective
    unknown = len(objective.denominators)  # what is masked is known only when a batch is complete
    nodes = [
        Node("rollout", "stage", trigger="step", atom="trajectory"),
        Node("policy", "service"),
        Node(
            "learner",
            "stage",
            scope=objective.scope,
            batch=recipe.rollout.lanes,
            unknown_denominators=unknown,
            resident=True,
        ),
    ]
    edges: list[Any] = [Call("rollout", "policy"), stream, Weights("learner", "policy")]
    if recipe.evaluation is not None:
        nodes.append(Node("evaluator", "stage", trigger="evaluate"))
        edges.append(Call("evaluator", "policy"))
    return Flow(name, tuple(nodes), tuple(edges))


# ---- parts

BUILT_IN = ("rollout", "policy", "learner", "evaluator")


@dataclass(frozen=True, slots=True)
class PolicyPart:
    """A policy service on this replica's devices."""

    recipe: Recipe
    spec: Spec

    def __call__(self, context: Context) -> Any:  # noqa: ARG002 - every part is called alike
        from m2flow.roles.policy import PolicyService

        use_threads(self.recipe)
        return PolicyService(build_policy(self.recipe, self.spec))


@dataclass(frozen=True, slots=True)
class RolloutPart:
    """This replica's lanes, split into sub-batches."""

    recipe: Recipe
    spec: Spec

    def __call__(self, context: Context) -> Any:
        from m2flow.roles.rollout import Acting, Rollout
        from m2flow.spec import join

        recipe, cuts = self.recipe, context.sub_batches
        lanes = share_lanes(recipe, context.size, context.rank, cuts)
        grouped = {"group": recipe.rollout.group} if recipe.rollout.group > 1 else {}
        policy = build_policy(recipe, self.spec)
        threads = max(1, len(context.devices) // cuts)
        return Rollout(
            envs=[recipe.env.build(part, run_seed(recipe), threads=threads, **grouped) for part in lanes],
            policy=context.services["policy"],
            join=join(policy.spec, self.spec),
            acting=Acting(policy.noise, policy.axes, policy.chunk, recipe.trainer.dtype),
            config=recipe.rollout,
            seed=run_seed(recipe),
            reward=None if recipe.reward is None else recipe.reward.build(),
        )


@dataclass(frozen=True, slots=True)
class LearnerPart:
    """Trainer, objective and learner."""

    recipe: Recipe
    spec: Spec

    def __call__(self, context: Context) -> Any:  # noqa: ARG002 - every part is called alike
        from m2flow.roles.learner import Learner

        recipe = self.recipe
        use_threads(recipe)
        policy = build_policy(recipe, self.spec)
        return Learner(
            trainer=recipe.trainer.build(policy, recipe.objective, run_seed(recipe)),
            objective=recipe.objective,
            config=recipe.learner,
            seed=run_seed(recipe),
            noise=policy.noise,
        )


@dataclass(frozen=True, slots=True)
class ReplayPart:
    """The sampling rule between rollout and learner."""

    recipe: Recipe

    def __call__(self, context: Context) -> Any:  # noqa: ARG002 - every part is called alike
        return self.recipe.replay.build(run_seed(self.recipe))


@dataclass(frozen=True, slots=True)
class EvaluatorPart:
    """Held-out episodes with the current policy."""

    recipe: Recipe
    spec: Spec
    videos: Path | None = None

    def __call__(self, context: Context) -> Any:
        from m2flow.observe.video import VideoFolder
        from m2flow.roles.evaluation import Evaluator

        writer = None if self.videos is None else VideoFolder(self.videos)
        return Evaluator.build(self.recipe, build_policy(self.recipe, self.spec), context, writer)


def parts(recipe: Recipe, spec: Spec, folder: RunFolder | None = None) -> dict[str, Part]:
    """A part for every node of the built-in flows. Those of a language model are others than those of a robot."""
    if isinstance(recipe.env, TaskConfig):
        from m2flow.build_text import text_parts

        return text_parts(recipe, spec, folder) | {"learner": LearnerPart(recipe, spec)}
    return {
        "rollout": RolloutPart(recipe, spec),
        "policy": PolicyPart(recipe, spec),
        "learner": LearnerPart(recipe, spec),
        "evaluator": EvaluatorPart(recipe, spec, None if folder is None else folder.videos),
        "rollout->learner": ReplayPart(recipe),
    }


# ---- evaluation outside of a run


def trained_policy(recipe: Recipe, folder: RunFolder, step: int | None) -> Any:
    """The policy with the weights of a checkpoint (the latest if `step` is None)."""
    from m2flow.backends.checkpoint import read_policy

    policy = build_policy(recipe, recipe.env.spec())
    arrays = read_policy(recipe.checkpoint.build(folder.checkpoints).path(step))
    missing, unknown = policy.load_state_dict(arrays, strict=False)
    wrong = sorted({*missing, *unknown} - constants(policy))
    if wrong:
        raise ValueError(f"{folder.path}: the checkpoint's weights do not fit its recipe: {', '.join(wrong[:5])}")
    return policy.eval()


def evaluate_checkpoint(recipe: Recipe, folder: RunFolder, step: int | None) -> Evaluation:
    """Evaluate the policy of a checkpoint (the latest if `step` is None) in this process, and return what was found."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    from m2flow.backends.checkpoint import read_policy
    from m2flow.protocols import Closes
    from m2flow.roles.evaluation import summarise
    from m2flow.runtime.cluster import detect
    from m2flow.runtime.worker import LocalHandle
    from m2flow.types import Tick
    from m2flow.types import Weights as Arrays

    store = recipe.checkpoint.build(folder.checkpoints)
    done = saved_step(store, step)
    arrays = {f"policy.{name}": x for name, x in read_policy(store.path(step)).items()}
    # Nothing of the run is written over: a language model's tables of samples are those of the run itself.
    made = parts(recipe, recipe.env.spec(), None if isinstance(recipe.env, TaskConfig) else folder)
    devices = tuple(device.id for device in detect().devices if device.kind == "cpu")
    service = made["policy"](Context("policy", 0, 1, devices))
    service.load(Arrays(done, arrays))
    evaluator = made["evaluator"](Context("evaluator", 0, 1, devices, {"policy": LocalHandle(service)}))

    async def play() -> list[Any]:
        return [report async for report in evaluator.work([Tick(done, done, kind="evaluate")])]

    try:
        with ThreadPoolExecutor(1) as pool:  # a thread of its own: a notebook already runs an event loop in this one
            [found] = pool.submit(lambda: asyncio.run(play())).result()
    finally:
        for node in (evaluator, service):
            if isinstance(node, Closes):
                node.close()
    result = summarise(done, evaluator.protocol, found.payload)
    for alarm in recipe.alarms.build().check(done, result.metrics):
        if alarm.kind == "reward" and alarm.action == "stop":  # a rate that counts failures of the reward is no result
            raise RuntimeError(f"evaluation: {alarm.text}")
    return result


def coarse(recipe: Recipe) -> bool:
    """Whether who acts or who trains computes in less than float32, so that their log-probs differ visibly."""
    sides = (recipe.generator, "dtype"), (recipe.trainer, "autocast"), (recipe.policy, "dtype")
    kinds = {getattr(section, key, None) for section, key in sides}
    return not kinds.isdisjoint({"bfloat16", "float16"})


def store(recipe: Recipe, spec: Spec, folder: RunFolder) -> Any:
    """Where a run's checkpoints go. Those of a language model hold a folder that `from_pretrained` opens."""
    if not isinstance(recipe.policy, SpeaksText):
        return recipe.checkpoint.build(folder.checkpoints)
    from m2flow.backends.export import Exporter

    return recipe.checkpoint.build(folder.checkpoints, export=Exporter(partial(build_policy, recipe, spec)))


def saved_step(store: Any, step: int | None = None) -> int:
    """Steps done in the given or the latest complete checkpoint, without reading it."""
    return int(store.path(step).name.rpartition("_")[2])


# ---- shared pieces


def make_plan(recipe: Recipe, flow: Flow, cluster: Cluster) -> Plan:
    """The recipe's plan: a named function or the plan itself (a file has been read when the recipe was loaded)."""
    makers: Mapping[str, Callable[..., Plan]] = {
        "collocated": collocated,
        "disaggregated": disaggregated,
        "hybrid": hybrid,
    }
    plan = recipe.plan
    if isinstance(plan, str):
        # A trainer on the CPU has no use for a GPU's place; the simulator has use for the cores.
        cores = cluster.labelled("cpu") if recipe.trainer.device == "cpu" else ()
        options = {"sub_batches": 1} if plan == "hybrid" and isinstance(recipe.env, TaskConfig) else {}
        return makers[plan](flow, cluster, devices=cores or None, **options)
    return Plan.from_dict(plan)
