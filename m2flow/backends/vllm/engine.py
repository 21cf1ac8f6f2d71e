"""An engine of vLLM in this process, and what it must leave alone there."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",  # nothing is sent anywhere
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",  # the model is a folder
}

_RUNNING: list[Any] = []  # engines of this process
_ENDED: list[Any] = []  # those that nobody uses any more, but whose end would take others along


def start(folder: str, *, kv_cache_bytes: int | None, sleep: bool, **settings: Any) -> Any:
    """An `LLMEngine` that serves the model in `folder`, its scheduler in this process: weights then go over as they
    are, and `step` is one step. `settings` are arguments of its `EngineArgs`.

    `folder` is not read again. vLLM's process group is the default one of torch.distributed in this process.

    Raises:
        ValueError: vLLM is not installed, cannot sleep here, or refuses the model or a setting.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import EngineArgs, LLMEngine
        from vllm.platforms import current_platform
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ValueError(
            "generator: vLLM is not installed in this environment: pip install 'm2flow[vllm]' on a machine with a GPU, "
            "docs/vllm.md for one without; or leave `generator` out for m2flow's own decoder"
        ) from error

    if sleep and not current_platform.is_sleep_mode_available():
        raise ValueError(
            f"sleep: vLLM cannot leave a {current_platform.device_type}; set sleep: false, and give the generator a "
            "device of its own in the plan"
        )
    if current_platform.is_cpu():
        kv_cache_bytes = kv_cache_bytes or 2**30  # vLLM's own default is most of the machine
        # A prompt that does not fit into a step is computed in the next one, not in two: between the parts vLLM turns
        # the request's random generator back, which fails on a CPU ("CPU Generator does not use offset").
        settings = {"enable_chunked_prefill": False, **settings}
    arguments = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        generation_config="vllm",  # sampling defaults that a model's folder brings are not read
        logprobs_mode="processed_logprobs",  # of what is drawn from: the temperature is in them
        enable_prefix_caching=True,
        async_scheduling=False,  # no token in the making while weights change
        enable_sleep_mode=sleep,
        disable_log_stats=True,
        kv_cache_memory_bytes=kv_cache_bytes,
        **settings,
    )
    with undisturbed():
        made = LLMEngine.from_engine_args(arguments)
    _RUNNING.append(made)
    return made


def stop(engine: Any) -> None:
    """Free an engine, as soon as no other one of this process is in use: to end one takes the process group of all."""
    if engine in _RUNNING:
        _RUNNING.remove(engine)
        _ENDED.append(engine)
    if not _RUNNING:
        while _ENDED:
            _ENDED.pop().engine_core.shutdown()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """vLLM seeds the process's random generators, draws from them, and on a CPU takes torch.set_num_threads away;
    whoever shares the process must not notice."""
    state, legacy, threads = random.getstate(), np.random.get_state(), torch.set_num_threads  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(legacy)  # noqa: NPY002
            torch.set_num_threads = threads
