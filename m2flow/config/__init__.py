"""Typed recipes: a YAML file and dotted overrides become one frozen `Recipe`, or one error that tells every fault.

layers.py reads and merges, typed.py checks each section against its class, rules.py checks sections against each
other, recipe.py is the tree itself, files.py puts them together (`load`, `dump`). To add a key: add a field to the
config class it belongs to. To add a part: one line in m2flow/registry.py, or an entry point of your own package.
"""

from m2flow.config.errors import ConfigError, Problem
from m2flow.config.files import dump, dump_json, dump_yaml, find, load, shipped
from m2flow.config.layers import to_yaml
from m2flow.config.recipe import PLANS, EarlyStopConfig, Recipe, with_seed

__all__ = [
    "PLANS",
    "ConfigError",
    "EarlyStopConfig",
    "Problem",
    "Recipe",
    "dump",
    "dump_json",
    "dump_yaml",
    "find",
    "load",
    "shipped",
    "to_yaml",
    "with_seed",
]
