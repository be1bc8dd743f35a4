"""Record memory over one early step: a thread samples it many times between two log calls."""

from __future__ import annotations

import os
import threading
import time
from typing import Any, final

import torch

from ..dist.heartbeat import Phase

AT_UPDATE = 3
"""Update that is recorded in each start: the first ones allocate gradients and optimizer state."""
SAMPLES = 400
MIN_PAUSE_SECONDS = 0.0005
PHASE_NAMES = {Phase.FORWARD: "forward", Phase.BACKWARD: "backward", Phase.UPDATE: "update"}


def memory_now(device: torch.device) -> int:
    """Return allocated bytes of a GPU, or resident bytes of the process on a CPU, where torch does not count tensors."""
    if device.type == "cuda":
        return _allocated(device, "current")
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory_peak(device: torch.device) -> int:
    """Return the peak so far, in bytes."""
    if device.type == "cuda":
        return _allocated(device, "peak")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _allocated(device: torch.device, which: str) -> int:
    """Read one counter directly: torch.cuda.memory_allocated first sorts a hundred others."""
    return int(torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"][which])


@final
class MemoryCurve:
    """Samples memory over the step that begins now."""

    def __init__(self, device: torch.device, expected_seconds: float) -> None:
        self._device, self._pause = device, max(MIN_PAUSE_SECONDS, expected_seconds / SAMPLES)
        self._began = time.perf_counter()
        self._points: list[tuple[float, int]] = []
        self._marks: list[tuple[str, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleetx-memory", daemon=True)
        self._thread.start()

    def changed(self, phase: Phase) -> None:
        name = PHASE_NAMES.get(phase)
        if name is not None and (not self._marks or self._marks[-1][0] != name):
            # Sample here too: a host that runs ahead of its GPU may pass a phase between two samples of the thread.
            self._marks.append((name, self._sample()))

    def _sample(self) -> float:
        at = time.perf_counter() - self._began
        self._points.append((at, memory_now(self._device)))
        return at

    def _run(self) -> None:
        while not self._ended.is_set() and len(self._points) < 20 * SAMPLES:
            self._sample()
            self._ended.wait(self._pause)

    def take(self) -> dict[str, Any]:
        self._ended.set()
        self._thread.join()
        points = sorted(self._points)  # appended by two threads
        return {
            "seconds": [round(at, 6) for at, _ in points],
            "bytes": [amount for _, amount in points],
            "marks": [[name, round(at, 6)] for name, at in self._marks],
        }
