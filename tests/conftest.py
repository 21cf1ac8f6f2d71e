"""Shared by all tests: which machine parts a test may ask for, and the gate against tests that skip in silence.

With M2FLOW_STRICT_SKIPS=1 (CI) a skipped test fails the run, unless it is marked `gpu` or `hardware` and this machine
has no such thing. A test that needs a package must therefore find it: `make test` installs every extra.
"""

from __future__ import annotations

import os

os.environ.setdefault("M2FLOW_STRICT_METRICS", "1")  # a metric nobody declared is an error here
os.environ.setdefault("OMP_NUM_THREADS", "1")  # small nets are slower with more, and tests share the cores

import pytest

STRICT = os.environ.get("M2FLOW_STRICT_SKIPS") == "1"
EXCUSED = ("gpu", "hardware")
_skipped: list[str] = []


def _missing(marker: str) -> str | None:
    """Why this machine cannot run tests of a marker; None where it can."""
    if marker == "gpu":
        import torch

        return None if torch.cuda.is_available() else "no CUDA GPU on this machine"
    return None if os.environ.get("M2FLOW_HARDWARE") == "1" else "set M2FLOW_HARDWARE=1 where the devices are connected"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for marker in EXCUSED:
        chosen = [item for item in items if item.get_closest_marker(marker)]
        reason = _missing(marker) if chosen else None
        for item in chosen:
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
                item.user_properties.append(("excused", reason))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if (
        report.skipped
        and not hasattr(report, "wasxfail")
        and not any(k == "excused" for k, _ in report.user_properties)
    ):
        _skipped.append(f"{report.nodeid}: {_reason(report)}")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _skipped.append(f"{report.nodeid}: {_reason(report)}")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if STRICT and _skipped and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if STRICT and _skipped:
        terminalreporter.section("skipped, though this machine could run them", sep="=", red=True, bold=True)
        for line in _skipped:
            terminalreporter.line(line)
