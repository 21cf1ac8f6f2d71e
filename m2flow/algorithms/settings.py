"""What the fields of the on-policy objectives may be, and which go together. Errors name the field and the fix."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from m2flow.algorithms.losses import ESTIMATORS
from m2flow.algorithms.reduce import AGGREGATIONS, LEVELS

CRITIC = ("gae_lambda", "value_clip", "huber", "value_coef", "critic_hidden", "critic_activation")


def check_ppo(o: Any) -> None:
    """Raise ValueError where a field of `PPO` is out of range or does not fit another."""
    _check_ranges(o)
    if (o.kl == "none") != (o.kl_coef == 0.0):
        raise ValueError(f"kl_coef: {o.kl_coef} with kl {o.kl!r}; set both to use a KL term, or neither")
    if o.kl == "none" and o.kl_in != "loss":
        raise ValueError(
            f"kl_in: {o.kl_in!r} with kl 'none', so nothing is counted there; set kl and kl_coef, or remove it"
        )
    if o.kl == "k1" and o.kl_in == "loss":
        raise ValueError("kl: k1 in a loss teaches nothing, its gradient averages to 0; use k2, k3 or kl_in reward")
    if o.level in ("chunk", "sequence") and o.reward_level == "action":
        raise ValueError("reward_level: 'action' needs a ratio per action or finer; set level to action or token")
    if o.surrogate == "cispo" and o.dual_clip is not None:
        raise ValueError("dual_clip: only read with surrogate clip; remove it")
    if o.surrogate == "cispo" and o.level == "sequence":
        raise ValueError("surrogate: cispo weighs log-probs, of which level sequence has none; set level to action")
    _check_aggregation(o)
    _check_behaviour(o)


def check_without_critic(o: Any) -> None:
    """Raise ValueError where a field of `GRPO` is out of range, or one that only a critic reads is set."""
    for name, allowed in (
        ("std", ("sample", "population", "none")),
        ("baseline", ("group", "leave_one_out", "none")),
        ("credit", ("episode", "to_go")),
    ):
        _one_of(o, name, allowed)
    for item in fields(o):
        if item.name in CRITIC and getattr(o, item.name) != item.default:
            raise ValueError(f"{item.name}: GRPO has no critic and does not read it; remove it")
    if o.gamma != 1.0 and o.credit == "episode":
        raise ValueError(f"gamma: {o.gamma}, only read with credit to_go; set that, or remove this")
    if o.std != "none" and (o.baseline != "group" or o.credit == "to_go"):
        which = "credit 'to_go'" if o.baseline == "group" else f"baseline {o.baseline!r}"
        raise ValueError(f"std: {o.std!r} with {which}, which divides by no deviation; set std to none")


def _check_ranges(o: Any) -> None:
    for name in ("gamma", "gae_lambda"):
        _require(0.0 <= getattr(o, name) <= 1.0, name, getattr(o, name), "expected 0 to 1")
    for name in ("clip_high", "reward_scale", "log_ratio_clamp"):
        _require(getattr(o, name) > 0.0, name, getattr(o, name), "expected more than 0")
    _require(0.0 < o.clip_low <= 1.0, "clip_low", o.clip_low, "expected more than 0 and at most 1")
    for name, least in (
        ("value_clip", 0.0),
        ("huber", 0.0),
        ("target_kl", 0.0),
        ("behaviour_threshold", 0.0),
        ("aggregation_constant", 0.0),
        ("dual_clip", 1.0),
    ):
        given = getattr(o, name)
        expected = f"expected more than {least:g}, or null to switch it off"
        _require(given is None or given > least, name, given, expected)
    for name in ("value_coef", "entropy_coef", "kl_coef"):
        _require(getattr(o, name) >= 0.0, name, getattr(o, name), "expected 0 or more")
    for name, allowed in (
        ("surrogate", ("clip", "cispo")),
        ("kl", ("none", *ESTIMATORS)),
        ("kl_in", ("loss", "reward")),
        ("whiten", ("batch", "minibatch", "none")),
        ("level", LEVELS),
        ("reward_level", (None, "action", "chunk")),
        ("aggregation", AGGREGATIONS),
        ("behaviour_rule", ("drop", "truncate", "mask")),
        ("behaviour_level", ("unit", "sequence")),
    ):
        _one_of(o, name, allowed)


def _check_aggregation(o: Any) -> None:
    if o.aggregation_constant is not None and o.aggregation != "sequence-mean-token-sum":
        raise ValueError(
            "aggregation_constant: only read with aggregation sequence-mean-token-sum; set that, or remove this"
        )
    if o.level == "sequence" and o.aggregation != "token-mean":
        raise ValueError(
            f"aggregation: {o.aggregation!r} with level sequence, where a decision is one unit; leave token-mean"
        )


def _check_behaviour(o: Any) -> None:
    for name in ("behaviour_threshold", "behaviour_rule", "behaviour_level"):
        default = next(item.default for item in fields(o) if item.name == name)
        if getattr(o, name) != default and not o.decoupled:
            raise ValueError(f"{name}: only read with decoupled: true; set that, or remove this")
    if o.behaviour_threshold is None and o.behaviour_rule != "drop":
        raise ValueError(f"behaviour_rule: {o.behaviour_rule!r} needs behaviour_threshold; set it, 2.0 for instance")
    if o.behaviour_rule == "mask" and o.behaviour_threshold < 1.0:
        raise ValueError(
            f"behaviour_threshold: {o.behaviour_threshold} with rule mask, which keeps 1 / threshold to threshold; "
            "expected 1 or more"
        )


def _one_of(o: Any, name: str, allowed: tuple[Any, ...]) -> None:
    _require(getattr(o, name) in allowed, name, getattr(o, name), f"expected one of {allowed}")


def _require(ok: bool, name: str, given: object, expected: str) -> None:
    if not ok:
        raise ValueError(f"{name}: {given!r}, {expected}")
