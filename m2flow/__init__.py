"""m2flow: say once what happens (Flow), and where it runs (Plan) is another value.

`import m2flow` is light: torch and everything else heavy is loaded when a function needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from m2flow._version import __version__

if TYPE_CHECKING:
    from m2flow.api import (
        CheckReport,
        Run,
        check,
        describe,
        diagnose,
        evaluate,
        init,
        ls,
        report,
        resume,
        show,
        train,
    )

__all__ = [
    "CheckReport",
    "Run",
    "__version__",
    "check",
    "describe",
    "diagnose",
    "evaluate",
    "init",
    "ls",
    "report",
    "resume",
    "show",
    "train",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in __all__:
        from m2flow import api

        return getattr(api, name)
    raise AttributeError(f"module 'm2flow' has no attribute {name!r}")
