"""Tests that need vLLM, which lives in an environment of its own: `make test-vllm` makes it and runs them.

Where vLLM cannot be imported this folder is not collected at all, and the summary says so.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = importlib.util.find_spec("vllm") is not None
FOLDER = Path(__file__).parent
collect_ignore_glob = [] if HERE else ["test_*.py"]

if HERE:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """vLLM touches every attribute of every module it finds, deprecated ones too; their warnings are not ours."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not HERE:
        terminalreporter.write_line("tests/vllm: not run, vLLM is not installed here; `make test-vllm` runs them")


if HERE:
    from m2flow.backends.vllm import VLLMGenerator
    from tests.vllm.tiny import engine, published, tiny

    # Starting an engine takes seconds, so tests share two of them. Each test gets one without requests, with the
    # weights it was built with.
    @pytest.fixture(scope="session")
    def _exact() -> Iterator[VLLMGenerator]:
        made = engine(tiny("qwen2"), dtype="float32")
        yield made
        made.close()

    @pytest.fixture(scope="session")
    def _rounded() -> Iterator[VLLMGenerator]:
        made = engine(tiny("qwen3"), dtype="bfloat16")
        yield made
        made.close()

    def fresh(made: VLLMGenerator) -> VLLMGenerator:
        made.abort()
        made.load(published(tiny(made.policy.network.config.model_type), 0))
        return made

    @pytest.fixture
    def exact(_exact: VLLMGenerator) -> VLLMGenerator:
        """Qwen2, tied embeddings, float32."""
        return fresh(_exact)

    @pytest.fixture
    def rounded(_rounded: VLLMGenerator) -> VLLMGenerator:
        """Qwen3, embeddings not tied, bfloat16."""
        return fresh(_rounded)
