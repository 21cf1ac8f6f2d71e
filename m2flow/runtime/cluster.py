"""What this machine has, as a `Cluster`."""

from __future__ import annotations

import os
import shutil
import subprocess

from m2flow.flow.cluster import Cluster, Device
from m2flow.observe.runinfo import machine


def detect() -> Cluster:
    """CPU cores this process may use, and NVIDIA GPUs if the driver's own tool lists them. Imports no torch."""
    cores, memory = _cores(), machine()["memory_bytes"]
    each = None if memory is None else memory // len(cores)
    devices = [Device(id=f"cpu:{i}", kind="cpu", memory=each) for i, _ in enumerate(cores)]
    devices += [Device(id=f"gpu:{i}", kind="gpu", memory=size) for i, size in enumerate(_gpu_memory())]
    return Cluster(devices=tuple(devices))


def core_of(device: str) -> int:
    """The operating system's number of a "cpu:i" device: the i-th core this process may use."""
    return _cores()[int(device.partition(":")[2])]


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def _gpu_memory() -> list[int]:
    """Memory in bytes of each NVIDIA GPU, by the driver's tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    return [int(line) * 2**20 for line in answer.stdout.split() if line.isdigit()] if answer.returncode == 0 else []
