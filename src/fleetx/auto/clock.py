"""Time pieces of work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import torch

from ..engine.dry_run import Rehearsal


def typical(seconds: Sequence[float]) -> float:
    """Return the mean of the faster half: other load on a machine can only make a step slower."""
    return fmean(sorted(seconds)[: (len(seconds) + 1) // 2])


def clocked(rehearsal: Rehearsal, work: Callable[[], Any]) -> float:
    """Return the seconds that work takes on this rank; all ranks begin together."""
    rehearsal.comm.barrier()
    begun = time.perf_counter()
    work()
    wait_for(rehearsal.device)
    return time.perf_counter() - begun


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
