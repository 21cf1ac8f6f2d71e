"""Who may import whom. The table is the architecture; a new arrow is a decision, made here and nowhere else."""

from __future__ import annotations

import ast
import sys
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.architecture.source import REPO, Module, imports, modules

BASE = {"types", "seeds", "protocols", "capabilities", "sections", "intervals"}
# Part of the package -> the other parts it may import.
ALLOWED: dict[str, set[str]] = {
    "": {"api", "_version", "config"},  # the package's own face: names handed on lazily
    "_version": set(),
    "types": set(),
    "seeds": set(),
    "protocols": {"types"},
    "capabilities": {"types"},
    "sections": {"types", "protocols"},
    "spec": BASE,
    "addresses": set(),
    "registry": {"addresses"},
    "activations": set(),
    "intervals": set(),
    "logits": set(),
    "algorithms": BASE | {"logits"},
    "flow": BASE | {"registry"},  # registry: the nearest name to an unknown one
    "comm": BASE,
    "observe": BASE | {"registry"},  # recorders by name
    "models": BASE | {"spec", "activations", "logits"},
    "tasks": BASE | {"spec", "tools"},
    "tools": BASE | {"addresses"},
    "envs": BASE | {"spec", "comm"},  # comm: shared memory without a name
    "rewards": BASE | {"spec", "addresses"},
    "backends": BASE | {"comm", "activations", "logits"},
    "runtime": BASE | {"comm", "flow", "observe"},
    "roles": BASE | {"algorithms", "spec"},
    "config": BASE | {"registry"},
    "doctor": {"_version", "observe", "registry", "runtime"},
    "scaffold": BASE | {"config", "registry", "prepare"},
    # The builder and what stands in front of it are the only ones that see both sides.
    "memory": BASE | {"config", "flow", "backends"},
    "prepare_text": BASE | {"pieces", "config"},
    "prepare": BASE | {"prepare_text", "registry", "spec", "pieces", "build", "memory", "config", "flow", "runtime"},
    "pieces": BASE | {"config"},
    "build_text": BASE | {"pieces", "registry", "config", "runtime", "roles", "tasks", "observe"},
    "build": BASE
    | {"pieces", "build_text"}
    | {"spec", "config", "flow", "runtime", "roles", "comm", "backends", "observe"},
    "session": BASE
    | {"registry", "spec", "build", "memory", "config", "flow", "runtime", "roles", "comm", "backends", "observe"},
    "api": BASE
    | {"registry", "_version", "spec", "session", "prepare", "build", "config", "flow", "roles", "backends", "observe"}
    | {"doctor", "scaffold"},
    "__main__": {"cli"},
    "cli": {"_version", "api", "doctor", "observe", "registry"},
}
# Third-party package -> where alone it may be imported (a part of m2flow, or one module). One foreign world, one place.
HOMES: dict[str, tuple[str, ...]] = {
    "torch": (
        "activations", "logits", "algorithms", "backends", "models", "roles", "comm", "build", "memory", "pieces",
        "prepare", "spec",
    ),
    "ray": ("runtime.ray",),
    "envpool": ("envs.envpool",),
    "gymnasium": ("envs",),
    "mujoco": ("envs",),
    "imageio": ("envs", "observe", "roles"),
    "imageio_ffmpeg": ("envs", "observe", "roles"),
    "tensorboard": ("observe",),
    "wandb": ("observe",),
    "swanlab": ("observe",),
    "plotly": ("observe",),
    "rich": ("observe",),
    "safetensors": ("backends", "models"),
    "transformers": ("models.lm",),
    "tokenizers": ("models.lm",),
    "peft": ("models.lm",),
    "gguf": ("models.lm",),
    "vllm": ("backends.vllm",),
    "pyarrow": ("tasks", "observe"),
    "datasets": ("tasks.rows",),
    "reasoning_gym": ("tasks.gym", "rewards.gym_worker"),
    "math_verify": ("rewards",),
    "latex2sympy2_extended": ("rewards",),
    "sympy": ("rewards",),
    "pydantic": ("config",),
    "yaml": ("config", "flow", "scaffold"),
    "typer": ("cli",),
    "numpy": (
        "activations", "intervals", "seeds", "spec", "algorithms", "flow", "comm", "observe", "backends", "runtime",
        "roles", "models", "envs", "rewards", "tasks",
    ),
}  # fmt: skip


def under(target: str, package: str) -> bool:
    return target == package or target.startswith(package + ".")


def test_every_import_follows_an_allowed_arrow() -> None:
    wrong = []
    for module in modules():
        for target, line in imports(module):
            if not under(target, "m2flow") or target == "m2flow":
                continue
            unit = target.split(".")[1]
            if unit != module.unit and unit not in ALLOWED.get(module.unit, set()):
                wrong.append(f"{module.where}:{line}: {module.unit or 'm2flow'} may not import {unit}")
    assert not wrong, "\n".join(wrong)


def test_every_part_of_the_package_has_its_row() -> None:
    assert {module.unit for module in modules()} <= set(ALLOWED)


def test_third_party_packages_are_imported_only_where_they_belong() -> None:
    wrong = []
    for module in modules():
        inside = module.name.removeprefix("m2flow").removeprefix(".")
        for target, line in imports(module):
            top = target.partition(".")[0]
            if top in ("m2flow", "__future__") or top in sys.stdlib_module_names:
                continue
            homes = HOMES.get(top)
            if homes is None or not any(under(inside, home) for home in homes):
                wrong.append(f"{module.where}:{line}: imports {top}, which belongs to {homes or 'no part of m2flow'}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("level", ["file", "part"])
def test_imports_make_no_circle(level: str) -> None:
    """Also imports inside functions count, and those that only a type checker reads: a circle of files cannot be read
    from one end."""
    graph: dict[str, set[str]] = {}
    for module in modules():
        name = module.name if level == "file" else module.unit
        for target, _ in imports(module):
            other = target if level == "file" else target.partition(".")[2].partition(".")[0]
            if under(target, "m2flow") and target != "m2flow" and other != name:
                graph.setdefault(name, set()).add(other)
    circle = circle_in(graph)
    assert not circle, "imports go in a circle: " + " -> ".join(circle)


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_a_circle_through_a_function_or_a_type_checker_is_seen() -> None:
    lazy = "def f():\n    import m2flow.flow.plan"
    typing = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from m2flow.flow.plan import Plan"
    for text in (lazy, typing):
        low = Module(REPO / "m2flow/flow/low.py", "m2flow.flow.low", text, ast.parse(text))
        found = {target for target, _ in imports(low)}
        assert circle_in({"m2flow.flow.low": found, "m2flow.flow.plan": {"m2flow.flow.low"}})
