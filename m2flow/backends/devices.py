"""Devices as torch names them: what may stand in a recipe, and whether it is on this machine."""

from __future__ import annotations

import re


def check_name(device: str, *, mps: bool = True) -> None:
    """Raise ValueError, under the key `device`, where this names no device. `mps`: whether that is one."""
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?" if mps else r"cpu|cuda(:\d+)?", device):
        known = "cpu, cuda, cuda:<number> or mps" if mps else "cpu, cuda or cuda:<number>"
        raise ValueError(f"device: {device!r}; expected {known}")


def check_there(device: str) -> None:
    """Raise ValueError, under the key `device`, where torch does not find it on this machine."""
    import torch

    kind, _, number = device.partition(":")
    there = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}[kind]
    if int(number or 0) >= there:
        raise ValueError(f"device: {device!r}, but torch finds {there} {kind} device(s) here; use cpu, or fix torch")
