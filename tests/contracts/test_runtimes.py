"""The Runtime contract, asked of the local runtime with its workers in threads and in processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from m2flow.runtime.local import LocalRuntime
from tests.contracts.runtime_suite import CHECKS, Case

CASES = [
    Case("local_threads", LocalRuntime, process=False),
    Case("local_processes", LocalRuntime, process=True, killed="SIGKILL"),
]


@pytest.mark.parametrize(
    ("case", "check"), [pytest.param(c, k, id=f"{c.name}-{k.__name__[6:]}") for c in CASES for k in CHECKS]
)
def test_runtime_contract(case: Case, check: Callable[[Case, Path], None], tmp_path: Path) -> None:
    check(case, tmp_path)
