"""Alarms: numbers that say a run goes wrong, each with what to look at. Silent wrong training is the worst failure.

Every rule reads reduced metrics of a step, so a rule without its metric stays silent. `AlarmConfig` holds the bounds
and what to do; "stop" asks the driver to end the run with the diagnosis. A reading that is NaN says nothing, except to
the rules that look for it: it neither counts nor breaks a row.

| kind          | fires when                                                        | default                    |
|---------------|-------------------------------------------------------------------|----------------------------|
| logprob_gap   | train/logprob_gap or its mean above its bound, or NaN             | first step stop, then warn |
| non_finite    | a loss or gradient norm is NaN or infinite                        | stop                       |
| nothing       | train/samples is 0, or train/advantage_std is NaN: all was masked | warn                       |
| reward        | the reward failed on half of a step's or evaluation's samples     | stop                       |
| no_signal     | advantage spread 0, or all groups dead, for k steps               | stop                       |
| zero_gradient | gradient norm exactly 0 for k steps                               | stop                       |
| entropy       | train/entropy below its floor                                     | warn                       |
| kl            | train/approx_kl above its bound                                   | warn                       |
| truncated     | nearly all answers cut by their length limit for k steps          | warn                       |
| stuck         | success exactly 0 for k steps (rollout) or k evaluations          | warn                       |
"""

from __future__ import annotations

import fnmatch
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal, TypeAlias

from m2flow.observe.jsonl import Appender, keep_until

Action: TypeAlias = Literal["off", "warn", "stop"]
# Bounds in nats of the largest and the mean log-prob gap, in float32 and in less. bfloat16 against float32 on 135M
# weights: mean 0.035, largest 0.45; a stale output layer: mean 0.25.
FINE, COARSE = (1e-2, 1e-3), (3.0, 0.1)
ACTIONS: tuple[Action, ...] = ("off", "warn", "stop")
NO_LATER_CHECKPOINT = (
    " On the CPU the trainer refuses such a gradient before the weights move, on other devices it does not; so the run"
    " ends without saving, and its latest checkpoint, if there is one, is of an earlier step: resume continues from it."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmConfig:
    """Bounds of the alarms, and what each does: "off", "warn", or "stop"."""

    # nats, the largest of the units looked at; null: 0.01, or 3 where one side computes in less than float32
    logprob_gap_max: float | None = None
    logprob_gap_mean_max: float | None = None  # nats, their mean; null: 0.001, or 0.1 with less than float32
    logprob_gap_first: Action = "stop"  # when the first step of a run or of a resumed run is above it
    logprob_gap_later: Action = "warn"  # when a later one is
    non_finite: Action = "stop"  # a loss or gradient norm is NaN or infinite
    nothing: Action = "warn"  # a step had no valid sample
    reward: Action = "stop"  # the reward failed on half of a step's or an evaluation's samples or more
    no_signal: Action = "stop"  # all advantages are equal, or all groups are
    no_signal_steps: int = 10  # for so many steps
    spread_floor: float = 1e-6  # below it a spread is zero: eight equal rewards in float32 have a deviation of 8e-9
    zero_gradient: Action = "stop"  # a gradient norm is exactly 0
    zero_gradient_steps: int = 10  # for so many steps
    entropy: Action = "warn"  # the policy has all but stopped exploring
    entropy_floor: float | None = None  # nats per unit; null: 1 % of uniform, or a standard deviation of 1e-3
    kl: Action = "warn"  # one step moves the policy very far
    kl_max: float = 1.0  # nats of train/approx_kl
    truncated: Action = "warn"  # nearly all answers of a language model are cut by their length limit
    truncated_share: float = 0.95  # from this share of answers on
    truncated_steps: int = 5  # for so many steps
    stuck: Action = "warn"  # no episode ever succeeds
    stuck_steps: int = 200  # training steps without a success
    stuck_evaluations: int = 10  # evaluations without a success

    def __post_init__(self) -> None:
        for name in ("logprob_gap_first", "logprob_gap_later", "non_finite", "nothing", "reward", "no_signal",
                     "zero_gradient", "entropy", "kl", "truncated", "stuck"):  # fmt: skip
            if getattr(self, name) not in ACTIONS:
                raise ValueError(f"{name}: {getattr(self, name)!r}; allowed: {', '.join(ACTIONS)}")
        for name in (
            "no_signal_steps", "zero_gradient_steps", "truncated_steps", "stuck_steps", "stuck_evaluations",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}; allowed: 1 or more")
        for name in ("logprob_gap_max", "logprob_gap_mean_max", "kl_max", "truncated_share"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}: {value}; allowed: above 0")
        if not self.spread_floor >= 0:
            raise ValueError(f"spread_floor: {self.spread_floor}; allowed: 0 or more")

    def build(
        self,
        path: Path | None = None,
        lag: int = 0,
        floor: float | None = None,
        resume_step: int | None = None,
        coarse: bool = False,
    ) -> Alarms:
        """Alarms of one run, appended to `path` (alarms.jsonl) as they fire.

        `lag`: of the plan; with stale data a log-prob gap is the policy's movement, so only the first step is checked.
        `floor`: of the entropy where the config leaves it open (`automatic_floor`). `resume_step` drops later alarms.
        `coarse`: who acts or who trains computes in less than float32.
        """
        largest, mean = COARSE if coarse else FINE
        config = replace(
            self,
            logprob_gap_max=largest if self.logprob_gap_max is None else self.logprob_gap_max,
            logprob_gap_mean_max=mean if self.logprob_gap_mean_max is None else self.logprob_gap_mean_max,
        )
        if lag > 0:
            config = replace(config, logprob_gap_later="off")
        if config.entropy_floor is None:
            config = replace(config, entropy_floor=floor)
        if path is not None and resume_step is not None:
            keep_until(path, resume_step)
        return Alarms(config, path)


def automatic_floor(entries: int, categories: int | None) -> float:
    """Nats per unit of `entries` action numbers at which exploring has all but stopped: 1 % of a uniform choice among
    `categories`, or a Gaussian with a standard deviation of 1e-3 where actions are continuous (None)."""
    if categories is not None:
        return entries * 0.01 * math.log(categories)
    return entries * (math.log(1e-3) + 0.5 * math.log(2 * math.pi * math.e))


@dataclass(frozen=True, slots=True)
class Alarm:
    """One alarm: `metric` was `value` at `step`; `text` says what that means and what to look at."""

    step: int
    kind: str
    action: Action
    metric: str
    value: float
    text: str
    time: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """`bad(value)` for `after` readings in a row of a metric that matches a pattern. `first`: action at its first
    reading."""

    kind: str
    patterns: tuple[str, ...]
    bad: Callable[[float], bool]
    action: Action
    text: str
    after: int = 1
    first: Action | None = None


class Alarms:
    """Checks the reduced metrics of every step. A lasting condition fires after k readings, then at 2k, 4k, 8k, ..."""

    def __init__(self, config: AlarmConfig | None = None, path: Path | None = None) -> None:
        self.config = config or AlarmConfig()
        self.rules = _rules(self.config)
        self._counts: dict[str, int] = {}
        self._read: set[str] = set()  # not part of the state: the first step after a resume is a first step
        self._file = Appender(path) if path is not None else None

    def check(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Alarms that fire at this step, in the order of the table above. Those with action "stop" should end the
        run."""
        nothing = metrics.get("train/samples") == 0 or math.isnan(metrics.get("train/advantage_std", 0.0))
        fired = []
        for rule in self.rules:
            for name in _matching(rule.patterns, metrics):
                if nothing and rule.kind in ("non_finite", "no_signal", "zero_gradient") and "grad_norm" not in name:
                    continue  # a mean over nothing is NaN, and says so once, as "nothing"
                alarm = self._apply(rule, name, step, metrics)
                if alarm is not None:
                    fired.append(alarm)
        if self._file is not None:
            self._file.write(*fired)
        return fired

    def _apply(self, rule: _Rule, name: str, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        value = float(metrics[name])
        key = f"{rule.kind} {name}"
        action = rule.first if rule.first is not None and key not in self._read else rule.action
        self._read.add(key)
        if not rule.bad(value):
            if not math.isnan(value):
                self._counts.pop(key, None)
            return None
        count = self._counts[key] = self._counts.get(key, 0) + 1
        if action == "off" or count % rule.after or not _power_of_two(count // rule.after):
            return None
        row = defaultdict(lambda: math.nan, metrics)  # a text may name numbers that this run does not have
        text = rule.text.format(name=name, value=f"{value:.4g}", count=count, row=row)
        return Alarm(step, rule.kind, action, name, value, text)

    def state(self) -> dict[str, int]:
        """How long each condition has lasted; part of the checkpoint."""
        return dict(self._counts)

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue counting."""
        self._counts = {key: int(count) for key, count in state.items()}

    def close(self) -> None:
        """Close alarms.jsonl."""
        if self._file is not None:
            self._file.close()


def as_metrics(alarms: list[Alarm]) -> dict[str, float]:
    """`alarm/<kind>`: how many fired, for the recorders."""
    out: dict[str, float] = {}
    for alarm in alarms:
        out[f"alarm/{alarm.kind}"] = out.get(f"alarm/{alarm.kind}", 0.0) + 1.0
    return out


def _matching(patterns: tuple[str, ...], metrics: Mapping[str, float]) -> Iterator[str]:
    return (name for name in metrics if _matches(patterns, name))


@lru_cache(maxsize=4096)  # the same names come with every step
def _matches(patterns: tuple[str, ...], name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def _rules(config: AlarmConfig) -> list[_Rule]:
    rules = [*_broken(config), *_silent(config), *_drifting(config)]
    return [rule for rule in rules if rule.action != "off" or rule.first not in (None, "off")]


def _broken(config: AlarmConfig) -> list[_Rule]:
    """Conditions under which nothing that follows can be trusted."""
    return [
        *(
            _Rule(
                kind="logprob_gap",
                patterns=(name,),
                bad=partial(_above, bound),
                first=config.logprob_gap_first,
                action=config.logprob_gap_later,
                text=f"{{name}} is {{value}} nats, the bound is {bound:g}: what the policy recorded when it acted is"
                " not what the learner computes for the same weights, so every probability ratio is wrong. Look at: did"
                " the weights reach the acting policy (version and checksum in its log); is anything random or batch"
                " dependent inside `score` (dropout, batch norm, normaliser statistics that moved in between); are"
                " action transforms (clip, squash, scale) applied before the log-prob on one side only; is the sampling"
                " temperature the same. If the gap is known to come from low precision, raise"
                f" alarms.{key}; objective.decoupled with a truncated weight corrects for it.",
            )
            for name, key, bound in (
                ("train/logprob_gap", "logprob_gap_max", config.logprob_gap_max or FINE[0]),
                ("train/logprob_gap_mean", "logprob_gap_mean_max", config.logprob_gap_mean_max or FINE[1]),
            )
        ),
        _Rule(
            kind="non_finite",
            patterns=("train/*loss", "train/grad_norm*"),
            bad=lambda value: not math.isfinite(value),
            action=config.non_finite,
            text=f"{{name}} is {{value}}.{NO_LATER_CHECKPOINT if config.non_finite == 'stop' else ''}"
            " Look at: the learning rate and gradient clipping (trainer.max_grad_norm); NaN or huge numbers in rewards"
            " or observations; the log standard deviation of the policy; the first metric that turned non-finite in"
            " metrics.jsonl.",
        ),
        *(
            _Rule(
                kind="nothing",
                patterns=(name,),
                bad=bad,
                action=config.nothing,
                text="{name} is {value}: every sample of this step was masked or filtered, so it changed nothing"
                " ({count} steps in a row). Look at: the length limits of episodes and answers (all cut?), the group"
                " filter, the mask of the data.",
            )
            for name, bad in (("train/samples", _is_zero), ("train/advantage_std", math.isnan))
        ),
        _Rule(
            kind="reward",
            patterns=("*/error_share", "*/timeout_share"),  # of a step (reward/) and of an evaluation (eval/)
            bad=lambda value: value >= 0.5,
            action=config.reward,
            text="{name} is {value}: the reward failed on that share of the samples, which counted as no success and as"
            " reward.error_reward. Look at: the warnings of m2flow.rewards in the log; with reward.errors: raise the"
            " first failure ends the run with its cause.",
        ),
    ]


def _above(bound: float, value: float) -> bool:
    return not value <= bound  # also where it is NaN


def _is_zero(value: float) -> bool:
    return value == 0


def _silent(config: AlarmConfig) -> list[_Rule]:
    """Conditions under which a run goes on for ever and learns nothing."""
    return [
        _Rule(
            kind="no_signal",  # before the spread of the advantage, which is then 0 as well: this one says why
            patterns=("train/dead_groups",),
            bad=lambda value: value >= 1,
            action=config.no_signal,
            after=config.no_signal_steps,
            text="{name} is {value} for {count} steps: within every group all scores are equal. Groups of the last"
            " step: {row[train/groups_all_right]:.0f} all right (score 1 or more),"
            " {row[train/groups_all_wrong]:.0f} all wrong (0 or less), {row[train/groups_all_equal]:.0f} all equal"
            " otherwise, {row[train/groups_kept]:.0f} kept. Such groups train nothing and are not drawn again"
            f" (alarms.no_signal: {config.no_signal}). Look at: tasks that are too hard (all wrong) or solved (all"
            " right); a reward that fails silently (reward/error); the length limit.",
        ),
        _Rule(
            kind="no_signal",
            patterns=("train/advantage_std",),
            bad=lambda value: abs(value) <= config.spread_floor,
            action=config.no_signal,
            after=config.no_signal_steps,
            text="{name} is {value} for {count} steps: all advantages are equal, so there is nothing to learn"
            " from. Look at:"
            " is the reward the same everywhere (rollout/return, rollout/success); are episodes cut before any reward"
            " (horizon, rollout length); is the group size 1; is the task already solved.",
        ),
        _Rule(
            kind="zero_gradient",
            patterns=("train/grad_norm*",),
            bad=_is_zero,
            action=config.zero_gradient,
            after=config.zero_gradient_steps,
            text="{name} is exactly 0 for {count} steps: the weights do not move. Look at: the learning rate and its"
            " schedule; are the parameters in the optimiser's group (frozen, requires_grad=False, another model"
            " object);"
            " is the loss masked out (train/samples) or fully clipped (train/clip_fraction); is the advantage zero.",
        ),
    ]


def _drifting(config: AlarmConfig) -> list[_Rule]:
    """Conditions that are often, not always, the beginning of a failure."""
    rules = [
        _Rule(
            kind="kl",
            patterns=("train/approx_kl",),
            bad=lambda value: value > config.kl_max,
            action=config.kl,
            text=f"{{name}} is {{value}} nats, above {config.kl_max:g}: one step moves the policy far from the"
            " one that acted."
            " Look at: learning rate, number of epochs, target-KL stop, advantage whitening, stale data"
            " (train/staleness).",
        ),
    ]
    if config.entropy_floor is not None:
        floor = config.entropy_floor
        rules.append(
            _Rule(
                kind="entropy",
                patterns=("train/entropy",),
                bad=lambda value: value < floor,
                action=config.entropy,
                text=f"{{name}} is {{value}} nats, below {floor:.3g}: the policy has all but stopped exploring."
                " Look at: the entropy coefficient, clip-higher, the lower bound of the log standard deviation, the"
                " learning rate, whether one action is always rewarded.",
            )
        )
    rules.append(
        _Rule(
            kind="truncated",
            patterns=("rollout/truncated",),
            bad=lambda value: value >= config.truncated_share,
            action=config.truncated,
            after=config.truncated_steps,
            text="{name} is {value} for {count} steps: the length limit cuts nearly every answer, so what is rewarded"
            " is hardly what the model would say. Look at: env.max_tokens; does the chat template make the model end"
            " its answers (policy's stop ids); objective's masking of truncated answers; the reward for length.",
        )
    )
    for patterns, after in (
        (("rollout/success",), config.stuck_steps),
        (("eval/success_once",), config.stuck_evaluations),
    ):
        rules.append(
            _Rule(
                kind="stuck",
                patterns=patterns,
                bad=_is_zero,
                action=config.stuck,
                after=after,
                text="{name} has been 0 for {count} readings: not one episode succeeded. Look at: the horizon"
                " (can the task be"
                " done in so many steps); the reward's scale and shape; exploration (train/entropy); the success"
                " definition of the environment; a video of an evaluation episode.",
            )
        )
    return rules
