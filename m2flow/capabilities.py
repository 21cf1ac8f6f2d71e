"""What a policy may offer besides being a `protocols.Scorer`, and a reward or a source of tasks besides theirs, each a
Protocol asked for with `isinstance`.

Whoever is without one is treated as the docstring says.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from m2flow.types import Array, Observation, Task


@runtime_checkable
class Shares(Protocol):
    """One forward pass for all that is asked about an observation. Without it: one for each question."""

    def sharing(self) -> AbstractContextManager[Any]:
        """Within it results are shared; weights must not change."""


@runtime_checkable
class OffersReference(Protocol):
    """A frozen copy of the start that costs less than a second set of weights. Without it: a deep copy."""

    def reference(self) -> Any:
        """What scores like this policy did at its start."""


@runtime_checkable
class HasConstants(Protocol):
    """Weights that training never changes and the config builds again, neither published nor saved. Without: none."""

    constant: frozenset[str]  # names in `state_dict`, which `load_state_dict` does without


@runtime_checkable
class Sized(Protocol):
    """Rows that cost differently much. Without it: all alike."""

    def sizes(self, obs: Observation) -> Array:
        """int64 [S]: tokens that each row is computed for, at most."""


@runtime_checkable
class Autocasts(Protocol):
    """Products in a narrower dtype that the policy itself switches on. Without it: the trainer casts around it."""

    autocast: Any  # a torch dtype, or None; a trainer sets it

    def casts(self) -> bool:
        """Whether that is of use on the device where the weights are; if not, nobody does it."""


@runtime_checkable
class TellsWidth(Protocol):
    """A known number of features. Without it: found by asking for those of a row of zeros."""

    feature_size: int


@runtime_checkable
class ChecksTasks(Protocol):
    """A reward that knows before the run which tasks it could not score. Without it: found when they are drawn."""

    def check_task(self, task: Task) -> None:
        """Raise ValueError("<key of the reward>: ...") where this task cannot be scored. Quick, and starts nothing."""


@runtime_checkable
class LabelsTasks(Protocol):
    """A source of tasks that users have written themselves, so that each is looked at before the run. Without it: the
    tasks of a long or endless source are only sampled, and named by their number."""

    def label(self, index: int) -> str:
        """File and row of a task, for messages."""

    def example(self, index: int) -> str:
        """The row of a task as it stands in the file, long texts shortened."""


def constants(policy: Any) -> frozenset[str]:
    """Names of what training never changes."""
    return policy.constant if isinstance(policy, HasConstants) else frozenset()
