"""Memory over one step: a thread that looks at it many times between two log calls, early in the run."""

from __future__ import annotations

import os
import threading
import time
from typing import Any, final

import torch

from ..dist.heartbeat import Phase

AT_UPDATE = 3
"""The update of a start that is looked at: the first ones make gradients and the optimizer's state."""
LOOKS = 400
LEAST_SECONDS = 0.0005
SHOWN = {Phase.FORWARD: "forward", Phase.BACKWARD: "backward", Phase.UPDATE: "update"}


def memory_now(device: torch.device) -> int:
    """Allocated on a GPU; resident on a CPU, where nobody counts tensors."""
    if device.type == "cuda":
        return _allocated(device, "current")
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory_peak(device: torch.device) -> int:
    """So far."""
    if device.type == "cuda":
        return _allocated(device, "peak")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _allocated(device: torch.device, which: str) -> int:
    """As torch.cuda.memory_allocated and max_memory_allocated tell, which put a hundred other numbers in order first."""
    return int(torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"][which])


@final
class MemoryCurve:
    """Of the step that begins now."""

    def __init__(self, device: torch.device, expected_seconds: float) -> None:
        self._device, self._pause = device, max(LEAST_SECONDS, expected_seconds / LOOKS)
        self._began = time.perf_counter()
        self._points: list[tuple[float, int]] = []
        self._marks: list[tuple[str, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_often, name="fleetx-memory", daemon=True)
        self._thread.start()

    def changed(self, phase: Phase) -> None:
        name = SHOWN.get(phase)
        if name is not None and (not self._marks or self._marks[-1][0] != name):
            # A host that runs ahead of its GPU may be through a phase between two looks of the thread.
            self._marks.append((name, self._look()))

    def _look(self) -> float:
        at = time.perf_counter() - self._began
        self._points.append((at, memory_now(self._device)))
        return at

    def _look_often(self) -> None:
        while not self._ended.is_set() and len(self._points) < 20 * LOOKS:
            self._look()
            self._ended.wait(self._pause)

    def take(self) -> dict[str, Any]:
        self._ended.set()
        self._thread.join()
        points = sorted(self._points)  # of two threads
        return {
            "seconds": [round(at, 6) for at, _ in points],
            "bytes": [amount for _, amount in points],
            "marks": [[name, round(at, 6)] for name, at in self._marks],
        }
