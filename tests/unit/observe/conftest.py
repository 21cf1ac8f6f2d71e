"""A metric nobody declared is an error in these tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def strict_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M2FLOW_STRICT_METRICS", "1")
