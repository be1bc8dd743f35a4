"""Tell whether Triton kernels can run here."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch


def runs_here(device: torch.device) -> bool:
    """Triton can interpret kernels on a CPU, very slowly: for tests."""
    return device.type == "cuda" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
