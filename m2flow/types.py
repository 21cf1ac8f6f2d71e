"""The nouns of m2flow: what travels between stages. Nothing here computes, and nothing here imports torch.

Shapes: T steps, B lanes (columns), C actions in a chunk, D action dimensions, S = T*B steps flattened (row t*B+b),
N unit rows, M observation rows. An `Array` is a numpy array, or a torch tensor where the data lives on a device.
Observations are always a dict of named arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Array: TypeAlias = Any  # numpy.ndarray | torch.Tensor; naming torch here would import it everywhere
Tree: TypeAlias = Any  # nested dict / list / tuple of Array and plain values
Observation: TypeAlias = dict[str, Array]


@dataclass(frozen=True, slots=True)
class Field:
    """One named array of an observation or action: shape without batch axes, dtype, range, unit.

    Example: `Field(shape=(4,), low=-1.0, high=1.0, unit="m")`; a discrete action is `Field((), "int64", categories=6)`.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    low: float | tuple[float, ...] | None = None
    high: float | tuple[float, ...] | None = None
    unit: str = ""
    categories: int | None = None

    @property
    def size(self) -> int:
        """Number of scalars in one sample."""
        size = 1
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True, slots=True)
class Spec:
    """What an environment shows and accepts, or what a policy reads and emits.

    Example: `Spec(observation={"state": Field((39,), "float64")}, action=Field((4,), low=-1.0, high=1.0))`.
    """

    observation: Mapping[str, Field]
    action: Field


@dataclass(frozen=True, slots=True)
class Task:
    """Something for a language model to attempt. Robots start from seeds instead.

    `payload` holds the row of a data set: `prompt` (text) or `messages` (a chat), usually `answer` (what is right), and
    whatever else its reward reads. `id` is the row's position in its source.
    Example: `Task(id=7, payload={"prompt": "2+2=", "answer": "4"})`.
    """

    id: int
    payload: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a Generator made of a Request: the sampled token ids, which are the record; text is only a view of them.

    Example: `Answer(3, tokens=[284, 19, 2], logprob=[-0.1, -0.3, -0.0], version=[5, 5, 5], finish="stop")`.
    """

    id: int
    tokens: Array  # int64 [n], the stop id included where one ended it
    logprob: Array  # float [n], under the temperature that they were drawn with (1 where the request was greedy)
    version: Array  # int64 [n], of the weights that each token was drawn with
    finish: Literal["stop", "length", "abort"]  # as the engine says: a stop id, the limit, or an abort


@dataclass(frozen=True, slots=True)
class Request:
    """One answer that a Generator is asked for.

    Token i of the answer is drawn with `seeds.uniform(seed, [0], [i], ())`, so it depends neither on the batch it is
    computed in nor on how often the request was aborted and went on.
    """

    id: int  # unique among the requests in flight
    prompt: Array  # int64 [P], P >= 1
    max_tokens: int  # of the whole answer, `begun` included
    stop: frozenset[int]  # ids that end the answer
    seed: int = 0
    temperature: float = 1.0  # 0: always the most probable token
    begun: Answer | None = None  # what an aborted request had got; the answer goes on behind it, and contains it


@dataclass(frozen=True, slots=True)
class Sample:
    """A finished attempt at a Task, as a Reward sees it."""

    task: Task
    attempt: int  # within its group
    text: str  # the model's last answer, without special tokens
    finish: Literal["stop", "length", "abort"]  # of the last answer
    length: int  # sampled tokens of all answers
    messages: Sequence[Mapping[str, Any]] = ()  # the whole conversation
    info: Mapping[str, float] = field(default_factory=dict)  # what its Dialogue counted, for instance "tool_calls"


@dataclass(frozen=True, slots=True)
class Step:
    """What B lanes answered to one action each (the return value of `VectorEnv.step`).

    `obs` is what the policy sees next; `final_obs` is the true successor of the action, which differs from `obs`
    only in
    lanes that were reset within the same step. `valid` is False where a lane only reset itself and the action was
    ignored.
    Example: 2 lanes, lane 1 hit its time limit: `truncated=[False, True]`, `final_obs[1]` the last observation of
    the old
    episode, `obs[1]` the first of the new one.
    """

    obs: Observation  # [B, ...]
    reward: Array  # float32 [B]
    terminated: Array  # bool [B]
    truncated: Array  # bool [B]
    final_obs: Observation  # [B, ...]
    valid: Array  # bool [B]
    info: Mapping[str, Array] = field(default_factory=dict)  # name -> [B], for instance "success"


@dataclass(slots=True)
class Action:
    """What a policy decided for B lanes: the action to execute, and all that is needed to score it again.

    Not frozen, because the policy service stamps the version on what its policy has just made.

    Example (Gaussian, 6 dims): `action [B, 1, 6]`, `logprob [B, 1, 6]`, `record={"action": [B, 1, 6]}`.
    """

    action: Array  # [B, C, *action shape]
    logprob: Array  # [B, *unit axes]
    record: Mapping[str, Array]  # name -> [B, ...]
    version: int = 0  # of the weights that decided; stamped by the policy service


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probability and entropy of recorded actions, per unit: both `[N, *unit axes]`, differentiable."""

    logprob: Array
    entropy: Array


@dataclass(frozen=True, slots=True)
class Units:
    """The scored parts of all steps. One row per step when `step_of` is None, else row n belongs to step `step_of[n]`.

    `axes` names the dense axes behind the row axis: ("chunk", "dim") for a Gaussian robot policy, ("denoise", "chunk",
    "dim") for a flow policy, ("chunk",) for text, whose chunk is its tokens. Token, action and chunk
    level are sums over them.
    """

    axes: tuple[str, ...]
    logprob: Array  # [N, *axes], by the policy that acted
    record: Mapping[str, Array]  # name -> [N, ...]
    step_of: Array | None = None  # int64 [N]
    mask: Array | None = None  # bool [N, *axes]; None: every unit counts


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What travels to training: B columns, each a segment of one lane, T steps long; a column may hold two episodes.

    Observations are stored once. `obs_at[t, b]` is the row seen at a step and `next_at[t, b]` the row that followed
    (the
    true final observation at an episode end). Example: T=2, B=1, no episode end: `obs [3, ...]`, `obs_at [[0], [1]]`,
    `next_at [[1], [2]]`.
    """

    obs: Observation  # [M, ...]
    obs_at: Array  # int64 [T, B]
    next_at: Array  # int64 [T, B]
    reward: Array  # float32 [T, B, C]
    valid: Array  # bool [T, B, C]; False: no such action was executed
    terminated: Array  # bool [T, B]
    truncated: Array  # bool [T, B]
    version: Array  # int64 [T, B], of the weights that acted
    episode: Array  # int64 [T, B], unique in the run
    group: Array  # int64 [T, B]
    lane: Array  # int64 [B], global lane ids
    units: Units
    value: Array | None = None  # [T, B, C or 1], where a critic has already spoken
    bootstrap: Array | None = None  # [T, B], value of the observation at `next_at` where an episode was cut
    info: Mapping[str, Array] = field(default_factory=dict)  # name -> [T, B]
    step: int = 0  # training step these columns were collected for

    @property
    def shape(self) -> tuple[int, int]:
        """(T, B)."""
        return int(self.reward.shape[0]), int(self.reward.shape[1])

    def transitions(self) -> Batch:
        """Every step with its successor, the axes [T, B] kept: what an algorithm that replays steps learns from.

        The columns are `reward`, `valid` [T, B, C] and `terminated` [T, B]. Observations are copies, the rest is not.
        """
        if self.units.step_of is not None:
            raise ValueError("replay needs one unit row per step; these units have `step_of`")
        obs, after = ({name: x[at] for name, x in self.obs.items()} for at in (self.obs_at, self.next_at))
        record = {name: x.reshape(*self.shape, *x.shape[1:]) for name, x in self.units.record.items()}
        return Batch(obs, record, {"reward": self.reward, "terminated": self.terminated, "valid": self.valid}, after)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows ready for an Objective: S steps with their units. Made by `Objective.targets`, cut by `take` and `rows`.

    `columns` holds whatever the Objective computed per step or per unit row (advantage, return, behaviour log-prob,
    ...).
    Only dense units (one row per step) can be cut by row.
    """

    obs: Observation  # [S, ...]
    record: Mapping[str, Array]  # name -> [S, ...]
    columns: Mapping[str, Array]  # name -> [S, ...]
    next_obs: Observation | None = None  # [S, ...]

    @property
    def size(self) -> int:
        """Number of steps S."""
        return int(next(iter(self.columns.values())).shape[0])

    def map(self, fn: Any) -> Batch:
        """Apply `fn` to every array."""
        nxt = None if self.next_obs is None else {k: fn(v) for k, v in self.next_obs.items()}
        return Batch(
            {k: fn(v) for k, v in self.obs.items()},
            {k: fn(v) for k, v in self.record.items()},
            {k: fn(v) for k, v in self.columns.items()},
            nxt,
        )

    def take(self, index: Array) -> Batch:
        """The rows `index` [S'], in that order (a copy)."""
        return self.map(lambda x: x[index])

    def rows(self, start: int, stop: int) -> Batch:
        """Rows start..stop (views, no copy)."""
        return self.map(lambda x: x[start:stop])


@dataclass(frozen=True, slots=True)
class Metric:
    """A number with the rule by which it is combined. `mean` carries its weight, so that means of parts combine
    exactly.

    Example: `Metric(3.0, "mean", weight=2)` and `Metric(6.0, "mean", weight=1)` combine to 4.0 with weight 3.
    """

    value: float
    reduce: Literal["mean", "sum", "min", "max", "last"] = "mean"
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Term:
    """One part of a loss: a differentiable sum, what it is counted per, and its coefficient. Only the trainer
    divides."""

    name: str
    total: Array  # 0-d tensor
    per: str  # name of a denominator, for instance "steps" or "units"
    coef: float = 1.0


@dataclass(frozen=True, slots=True)
class Loss:
    """Terms of one phase, and sums for metrics: name -> (0-d tensor sum, denominator name)."""

    terms: tuple[Term, ...]
    metrics: Mapping[str, tuple[Array, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Phase:
    """One optimiser step within an update: which parameter group moves, and every how many updates."""

    name: str
    group: str
    every: int = 1


@dataclass(frozen=True, slots=True)
class Head:
    """A network hung on `Policy.features`: an MLP of width `hidden` with `outputs` values, `copies` of them in
    parallel.

    With `takes_action` the action joins the features (a Q head). `ema` > 0 keeps a slow copy: slow += ema * (fast -
    slow).
    """

    outputs: int = 1
    hidden: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    copies: int = 1
    takes_action: bool = False
    ema: float = 0.0
    gain: float = 1.0  # orthogonal gain of the last layer


@dataclass(frozen=True, slots=True)
class Weights:
    """A versioned set of parameters and buffers, by name, with a checksum per name."""

    version: int
    arrays: Mapping[str, Array]
    checksums: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tick:
    """Wakes a source stage: `kind` is "step" or "evaluate", `step` the training step, `version` the weights to act
    with."""

    step: int
    version: int
    kind: str = "step"


@dataclass(frozen=True, slots=True)
class Report:
    """What a stage tells the driver: metrics of a step, and a payload for whoever asked."""

    step: int
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    payload: Any = None
    kind: str = "step"


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """One finished episode of an evaluation or of training, as it is reported.

    Example: `EpisodeResult(seed=1003, lane=3, length=500, ret=812.4, success_once=True, success_at_end=True)`.
    """

    seed: int  # of an evaluation's episode; in training, the k-th episode of its lane
    lane: int
    length: int
    ret: float  # sum of the environment's rewards
    success_once: bool | None = None
    success_at_end: bool | None = None
    info: Mapping[str, float] = field(default_factory=dict)
    video: str = ""  # file name, where the episode was filmed
    steps: Mapping[str, list[float]] = field(default_factory=dict)  # name -> one number per environment step, if kept


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation: its numbers, the protocol that produced them, and every episode. Stored together.

    `metrics` have names of the metric registry ("eval/success_once"), `intervals` (low, high) at 95 % for some of them.
    `protocol` and `episodes` are plain values: those of `roles.results.EvalProtocol`, and of an `EpisodeResult` each.
    """

    step: int  # training steps before it
    metrics: Mapping[str, float]
    protocol: Mapping[str, Any] = field(default_factory=dict)
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    episodes: Sequence[Mapping[str, Any]] = ()
