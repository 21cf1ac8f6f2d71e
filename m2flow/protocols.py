"""The seams of m2flow: each a Protocol of at most six methods, each with a contract suite in tests/contracts.

Whoever implements one needs nothing else from the package than `m2flow.types`. What is optional is a small Protocol of
its own, asked for with `isinstance` (of policies: m2flow/capabilities.py; of a recipe's sections: sections.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from m2flow.types import (
    Action,
    Answer,
    Array,
    Batch,
    Head,
    Loss,
    Metric,
    Observation,
    Phase,
    Request,
    Score,
    Spec,
    Step,
    Task,
    Trajectory,
    Tree,
    Weights,
)


@runtime_checkable
class Resident(Protocol):
    """Something that lives on devices and can be moved off them when its lease ends."""

    def onload(self) -> None:
        """Bring state back to the device."""

    def offload(self) -> None:
        """Move state to host memory."""


@runtime_checkable
class Stateful(Protocol):
    """Something that a checkpoint holds: `restore(state())` changes nothing."""

    def state(self) -> Tree:
        """Arrays and plain values, nested; safe to keep (copies, no views)."""

    def restore(self, state: Tree) -> None:
        """Continue exactly from `state`."""


@runtime_checkable
class Scorer(Protocol):
    """A torch module that can score what was done. It does not know which algorithm trains it.

    A language model is one: a Generator samples from it, and what it scores are the tokens of an answer, the actions of
    one long chunk. Its observation is the whole conversation, see `models.lm`.
    """

    spec: Spec
    axes: tuple[str, ...]  # names of the unit axes behind the row axis
    noise: tuple[str, tuple[int, ...]]  # ("normal" | "uniform", shape per decision)
    chunk: int  # actions per decision, C

    def score(self, obs: Observation, record: Mapping[str, Array]) -> Score:
        """Log-prob and entropy of recorded actions, [S, *axes], with gradients."""

    def features(self, obs: Observation) -> Array:
        """[S, F] to hang a value or Q head on, or [S, C, F] where every action of a chunk has features of its own."""

    def observe(self, obs: Observation) -> None:
        """A training step is over and these were its observations: update running statistics, move schedules on."""


@runtime_checkable
class Policy(Scorer, Protocol):
    """A Scorer that acts itself, within one forward pass.

    `act` is a pure function of weights, observation and noise: randomness is handed in, keyed by (run seed, lane,
    turn), so that an action does not depend on the batch it was computed in. `score(obs, act(obs, noise).record)`
    equals the recorded log-prob.
    """

    def act(self, obs: Observation, noise: Array | None) -> Action:
        """Decide for B lanes without gradients. `noise` [B, *shape]; None: the mode, deterministic."""


@runtime_checkable
class Proposer(Protocol):
    """A policy that offers a differentiable sample (what SAC needs)."""

    def propose(self, obs: Observation, noise: Array) -> tuple[Array, Array]:
        """Action [S, *action shape] and its joint log-prob [S], both with gradients to the policy's weights."""


class Model(Protocol):
    """What an Objective sees of the trained network: the policy, the heads it asked for, and their slow copies."""

    policy: Any
    reference: Any  # a frozen copy of the starting policy where the objective `needs_reference`, else None

    def value(self, name: str, obs: Observation, action: Array | None = None, *, slow: bool = False) -> Array:
        """Head `name` on the policy's features: [S, outputs], or [copies, S, outputs] if it has copies."""

    def scalar(self, name: str) -> Array:
        """A learnt scalar parameter asked for by `Objective.heads` (an entropy temperature, for instance)."""


class Objective(Protocol):
    """An algorithm: what to compute from trajectories and what to minimise. Pure, no loop, no optimiser.

    `scope`: "group" when advantages can be made as groups arrive, "batch" when whole-batch statistics come first.
    `couples_batch`: rows of a batch influence each other (batch norm), so it is never cut into micro-batches.
    """

    scope: str
    denominators: tuple[str, ...]
    couples_batch: bool
    phases: tuple[Phase, ...]
    requires: frozenset[str]  # capabilities of the Policy, for instance {"propose"}
    needs_reference: bool  # reads `Model.reference` (a KL term)

    def heads(self, spec: Spec, chunk: int = 1) -> Mapping[str, Head | float]:
        """Networks (Head) and learnt scalars (their start value) needed besides the policy; `chunk`: Policy.chunk."""

    def targets(self, model: Model, trajectory: Trajectory) -> tuple[Batch, Mapping[str, Metric]]:
        """Advantages, returns and whatever else `losses` reads; no gradients. [T, B] becomes S = T*B rows in the order
        t*B + b, or those of them that were decisions."""

    def counts(self, batch: Batch) -> Mapping[str, Array | float]:
        """Denominators of these rows; additive over any cut of a batch."""

    def prepare(self, batch: Batch, rows: int) -> Batch:
        """An epoch's rows, in the order in which they will be cut into optimiser batches of `rows` rows. What looks at
        a whole optimiser batch is done here, for all of them at once (advantage whitening)."""

    def losses(self, model: Model, batch: Batch, phase: str, noise: Array | None = None) -> Loss:
        """Terms to minimise in this phase, as sums over these rows."""

    def after_update(self, metrics: Mapping[str, float]) -> bool:
        """Called after each optimiser batch with its metrics; True stops the remaining epochs (target-KL)."""


@runtime_checkable
class NeedsGroups(Protocol):
    """An objective that says whether it compares attempts at one task: then `rollout.group` is 2 or more."""

    needs_groups: bool


@runtime_checkable
class Levelled(Protocol):
    """An objective that counts by a unit of its choice; one without a `level` counts by whole decisions."""

    level: str  # token | action | chunk | sequence


class Trainer(Resident, Stateful, Protocol):
    """Owns weights and optimisers. It knows no algorithm beyond calling `Objective.losses`."""

    model: Any
    version: int

    def forward_backward(
        self, batch: Batch, phase: Phase, counts: Mapping[str, Array | float], noise: Array | None = None
    ) -> Mapping[str, tuple[Array, str]]:
        """Add the gradient of these rows, each term divided by `counts` (of the whole optimiser batch). Metric sums
        over these rows, each with the name of its denominator."""

    def step(self, phase: Phase) -> Mapping[str, Array]:
        """Clip, move the phase's parameter group, clear gradients, move slow copies. Gradient norm as a metric."""

    def weights(self, prefix: str = "") -> Weights:
        """The current weights whose name starts with `prefix` (copies), stamped with the version."""


@runtime_checkable
class VectorEnv(Protocol):
    """B lanes stepped together. Lane seeds depend on the global lane, never on how lanes are split over workers.

    `send` and `recv` are the two halves of a step, so that several sub-batches can be in flight.
    """

    spec: Spec
    lanes: Array  # int64 [B], global lane ids

    def reset(self) -> Observation:
        """Start (or restart) every lane at its first episode."""

    def send(self, action: Array) -> None:
        """Start a step with `action` [B, *action shape]."""

    def recv(self) -> Step:
        """Finish the step."""

    def snapshot(self) -> Tree:
        """A state to continue from. An env that cannot be saved mid-episode starts fresh episodes here, and its state
        says `cut: True`; what follows is the same after `snapshot` as after `restore`."""

    def restore(self, state: Tree) -> Observation:
        """Continue from a snapshot; the observation each lane stands at."""

    def close(self) -> None:
        """Free the simulator."""


class Renderer(Protocol):
    """A VectorEnv that can draw one lane."""

    def render(self, lane: int) -> Array:
        """uint8 [H, W, 3]."""


class Stage(Protocol):
    """A plain class that turns items into items. It has no loop, no queue, no device; awaiting a service is its only
    wait."""

    def work(self, items: Sequence[Any]) -> Iterator[Any] | AsyncIterator[Any]:
        """Yield items for the next stage; `Weights` go along weights edges, `Report` to the driver."""


@runtime_checkable
class Opens(Protocol):
    """A stage with something to say before the first step: the weights that the first rollouts act with."""

    def start(self) -> Iterator[Any]:
        """Yields like `Stage.work`."""


@runtime_checkable
class ClosesSteps(Protocol):
    """A stage that works when it has got everything of a training step."""

    def close_step(self, step: int) -> Iterator[Any] | AsyncIterator[Any]:
        """Yields like `Stage.work`."""


@runtime_checkable
class SeesInserted(Protocol):
    """A stage behind a replay channel that wants to know what went into it, drawn or not."""

    def inserted(self, items: Sequence[Trajectory]) -> None:
        """The trajectories of a step, in lane order."""


@runtime_checkable
class Closes(Protocol):
    """A stage or service that holds what must be freed at the end."""

    def close(self) -> None:
        """Free it."""


class Service(Protocol):
    """A class with batched calls, reached by other stages as an awaitable handle."""

    def load(self, weights: Weights) -> None:
        """Take new weights; caches that depend on the old ones are dropped here."""


class Reward(Protocol):
    """Scores episodes (`EpisodeResult`) or attempts at text tasks (`Sample`)."""

    def score(self, items: Sequence[Any]) -> Mapping[str, Array]:
        """Named components, each [len(items)] float; "reward" is what is trained on."""


class Generator(Protocol):
    """Samples answers from a language model, many at a time. Requests join and leave the running batch at any step."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests in; those that do not fit into the batch yet wait in order."""

    def step(self) -> list[Answer]:
        """Go on by some tokens; the answers that are complete now. Empty while all go on, or where nothing waits."""

    def abort(self, ids: Sequence[int] | None = None) -> list[Answer]:
        """Stop these requests, or all: what they have got so far, finish "abort"."""

    def load(self, weights: Weights) -> None:
        """Take new weights. Requests in flight go on with them; everything computed with the old ones is dropped."""

    def close(self) -> None:
        """Free the engine."""


class TaskSource(Protocol):
    """Tasks by position, always the same at the same position."""

    size: int | None  # how many there are; None: without end

    def task(self, index: int) -> Task:
        """The task at a position, 0 <= index < size. Raises ValueError naming file, row and field where it is bad."""


class Dialogue(Protocol):
    """One conversation about one task, used once. The model's answers come in, what is said next comes out."""

    def open(self) -> Sequence[Mapping[str, Any]]:
        """The messages before the model's first answer."""

    async def reply(self, text: str) -> Sequence[Mapping[str, Any]]:
        """The messages that follow an answer (of a tool, of a user). Empty: the conversation is over."""

    def info(self) -> Mapping[str, float]:
        """What it counted, for instance `tool_calls` and `tool_errors`."""


class TextCodec(Protocol):
    """Between messages and token ids. Ids that were sampled are never made again from text."""

    stop: frozenset[int]  # ids that end an answer

    def opening(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation up to where the model answers."""

    def reply(self, messages: Sequence[Mapping[str, Any]], *, last: int) -> list[int]:
        """Ids to append behind an answer whose last id is `last`, up to where the model answers again; they begin with
        the end of the turn where the answer has not said it."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""

    def demonstration(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        """Ids of a whole conversation, and which of them the model should have said (its stop ids included)."""


class Channel(Protocol):
    """A bounded queue between stages. FIFO, or with a sampling rule (replay)."""

    def put(self, item: Any, *, key: str = "", weight: int = 1, timeout: float | None = None) -> None:
        """Add an item; blocks while the channel is full."""

    def get(self, weight: int = 1, *, key: str = "", timeout: float | None = None) -> list[Any]:
        """Items until their weights reach `weight`. Raises `Closed` when nothing can come any more."""

    def close(self) -> None:
        """No more puts."""


class Transport(Protocol):
    """Moves one payload from producer to consumer."""

    def send(self, payload: Tree, timeout: float | None = None) -> None:
        """Hand over a nested tree of arrays and plain values."""

    def recv(self, timeout: float | None = None) -> Tree:
        """The next payload, in order. Raises `Closed` when the other side is gone."""

    def close(self) -> None:
        """Free buffers; the other side sees `Closed`."""


class Runtime(Protocol):
    """Starts the workers of a program somewhere, and ends them. Two implementations: local, and (later) ray."""

    def start(self) -> Mapping[str, Transport]:
        """Start every worker; the driver's end of the link to each, by worker id."""

    def exit_reason(self, worker: str) -> str:
        """How a worker ended, in words."""

    def stop(self, limit: float) -> Sequence[str]:
        """Wait for every worker up to `limit` seconds, then kill. Ids of those that had to be killed."""


class VideoSink(Protocol):
    """Where videos go. `write` returns only when the file is complete."""

    def write(self, name: str, frames: Sequence[Array]) -> str:
        """Store uint8 frames [H, W, 3] under `name`; the file name."""

    def none(self, reason: str) -> None:
        """There will be no videos; the reason is one line."""


class Recorder(Protocol):
    """Where metrics go (JSONL, TensorBoard, wandb, ...)."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row of reduced metrics."""

    def close(self) -> None:
        """Flush and finish."""


class Store(Protocol):
    """Where checkpoints go: complete or not there at all."""

    def save(self, step: int, state: Tree, meta: Mapping[str, Any]) -> None:
        """Write atomically, then retire old ones."""

    def load(self, step: int | None = None) -> tuple[int, Tree, Mapping[str, Any]]:
        """The given or the latest complete checkpoint."""

    def steps(self) -> Iterable[int]:
        """Steps of complete checkpoints, ascending."""
