"""What the sections of a recipe must offer: the configs that other packages write for their environments, policies and
trainers. An objective is its own config (`protocols.Objective`).

A config is a frozen dataclass whose fields are its keys in a recipe. What is optional is a Protocol of its own, asked
for with `isinstance`; a config without it is like one that says no.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from m2flow.protocols import Dialogue, Generator, Objective, Scorer, TaskSource, TextCodec, Trainer, VectorEnv
from m2flow.types import Spec, Task


@runtime_checkable
class EnvConfig(Protocol):
    """The section `env`. Nothing heavy is made but by `build` and `build_seeded`."""

    def spec(self) -> Spec:
        """What the environment shows and accepts."""

    def build(self, lanes: Sequence[int], seed: int, threads: int = 1, group: int = 1) -> VectorEnv:
        """Training lanes with these global ids, on `threads` threads; what a lane starts from depends on its id and
        `seed` only (`envs.lanes`). `group` neighbouring lanes start every episode alike; given only where it is not 1.
        """

    def build_seeded(self, seeds: Sequence[int], threads: int = 1, render: bool = False) -> VectorEnv:
        """One lane per seed, each for one episode of an evaluation. With `render` it is a `Renderer` too."""

    def time_limit(self) -> int | None:
        """Steps after which an episode is truncated; None: never."""

    def renderable(self) -> tuple[bool, str]:
        """Whether frames can be drawn on this machine, and if not, why, in one line."""


@runtime_checkable
class TaskConfig(Protocol):
    """The section `env` of a language model: the tasks that it attempts, and how a conversation about one goes on."""

    max_tokens: int  # sampled tokens of one answer
    max_turns: int  # answers of one conversation

    def spec(self) -> Spec:
        """What tasks show and accept: token ids, of which only the policy knows how many there are."""

    def tasks(self, split: Literal["train", "held_out"], seed: int) -> TaskSource:
        """The tasks to train on, or those to evaluate on; no task is in both. Order and content depend on `seed`."""

    def dialogue(self, task: Task) -> Dialogue:
        """A new conversation about a task."""


@runtime_checkable
class StepLimited(Protocol):
    """An env config whose time limit is a key: an evaluation may set it higher. None: the environment's own."""

    max_episode_steps: int | None


@runtime_checkable
class HorizonLimited(Protocol):
    """The same, where the key is called `horizon`."""

    horizon: int


@runtime_checkable
class CutsEpisodes(Protocol):
    """An env config whose simulator cannot be saved: with `cuts` a checkpoint starts fresh episodes."""

    cuts: bool


@runtime_checkable
class Autoresets(Protocol):
    """An env config that says in which step a finished lane resets: the "same", or the "next", whose action is lost.

    One that does not say so resets in the same, or, if it `cuts`, in the next.
    """

    autoreset: str


@runtime_checkable
class PolicyConfig(Protocol):
    """The section `policy`."""

    def build(self, spec: Spec, seed: int) -> Scorer:
        """A torch module that acts on an environment of this spec; its initial weights depend on `seed` only. A Policy,
        or a language model that a Generator samples from."""


@runtime_checkable
class SpeaksText(Protocol):
    """A policy config of a language model. Reading it loads no weights."""

    temperature: float  # logits are divided by it when sampling and when scoring, one number for both

    def codec(self) -> TextCodec:
        """Its tokenizer with its chat template."""

    def context(self) -> int | None:
        """Tokens that it can see at once; None where it does not say."""


@runtime_checkable
class GeneratorConfig(Protocol):
    """The section `generator`: what samples from a language model."""

    def build(self, policy: Any) -> Generator:
        """An engine that samples from `policy` (a language model of `models.lm`, which it owns from now on)."""


@runtime_checkable
class OnDevice(Protocol):
    """A generator config that says where it samples. One that does not finds its place by itself."""

    device: str  # as torch names it


@runtime_checkable
class TrainerConfig(Protocol):
    """The section `trainer`."""

    dtype: str  # "float32" or "float64", of weights and of what is trained on
    device: str  # as torch names it
    threads: int  # of torch's arithmetic in a process

    def build(self, policy: Scorer, objective: Objective, seed: int) -> Trainer:
        """A trainer that owns `policy` from now on; new heads depend on `seed`."""


@runtime_checkable
class GroupRates(Protocol):
    """A trainer config with learning rates by parameter group; names are checked against the objective's phases."""

    group_learning_rates: Mapping[str, float]


REQUIRED: Mapping[str, type] = {"env": EnvConfig, "policy": PolicyConfig, "trainer": TrainerConfig}


def check(section: str, config: Any) -> None:
    """Raise ValueError with all that a config lacks of what its section must offer."""
    protocol = TaskConfig if section == "env" and callable(getattr(config, "tasks", None)) else REQUIRED[section]
    members = sorted({*vars(protocol), *protocol.__annotations__})
    lacking = [name for name in members if not name.startswith("_") and not hasattr(config, name)]
    if lacking:
        raise ValueError(
            f"{section}: {type(config).__name__} has no {', '.join(lacking)}; m2flow/sections.py says what "
            f"{protocol.__name__} must offer"
        )


def resets_late(env: EnvConfig) -> bool:
    """Whether a finished lane takes a step to reset itself."""
    if isinstance(env, Autoresets):
        return env.autoreset == "next"
    return isinstance(env, CutsEpisodes) and env.cuts
