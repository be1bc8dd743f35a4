"""How long a step takes, three ways, the contestants in turns so that a clock that sinks with heat falls on all alike.

    wall      a block of steps, ended by one synchronize, over their number: launches and Python are in it
    single    one step on an idle device until it is done; host: until the call returned, with room in the launch queue
    events    the block between two events on the device; gaps in which the device waits for the host are in it

What has to happen between steps and belongs to no optimizer (new gradients) is `prepare`: in wall, where it hides behind
the device's work if it can, and given beside it as `prepare`; not in single and host.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

MOST_STEPS = 200
SINGLES = 5


def nothing() -> None: ...


@dataclass
class Contestant:
    """One row: what is timed, what happens before it, and the bytes it cannot do without."""

    label: str
    step: Callable[[], object]
    prepare: Callable[[], None] | None = None
    ready: Callable[[], None] = nothing
    """Before each turn: its own gradients are put in place."""
    floor_bytes: int = 0
    ours: bool = False
    keeps: object = None
    """What must live as long as this: a graph knows addresses, and holds nothing."""
    samples: dict[str, list[float]] = field(default_factory=dict)
    steps: int = 1

    def note(self, name: str, seconds: float) -> None:
        self.samples.setdefault(name, []).append(seconds)

    def median(self, name: str) -> float:
        return statistics.median(self.samples[name])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def single(contestant: Contestant, device: torch.device) -> tuple[float, float]:
    """Seconds until the call returned, and until the device had done it."""
    if contestant.prepare:
        contestant.prepare()
    synchronize(device)
    start = time.perf_counter()
    contestant.step()
    returned = time.perf_counter() - start
    synchronize(device)
    return returned, time.perf_counter() - start


def block(contestant: Contestant, device: torch.device) -> None:
    preparing, events = 0.0, []
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    synchronize(device)
    start = time.perf_counter()
    for event in events[:1]:
        event.record()
    for _ in range(contestant.steps):
        if contestant.prepare:
            before = time.perf_counter()
            contestant.prepare()
            preparing += time.perf_counter() - before
        contestant.step()
    for event in events[1:]:
        event.record()
    synchronize(device)
    contestant.note("wall", (time.perf_counter() - start) / contestant.steps)
    if contestant.prepare:
        contestant.note("prepare", preparing / contestant.steps)
    if events:
        contestant.note("events", events[0].elapsed_time(events[1]) / 1e3 / contestant.steps)


def turn(contestant: Contestant, device: torch.device) -> None:
    """Some single steps, by which caches and tables are its own again, then a block. On a CPU a block says it all."""
    contestant.ready()
    if device.type == "cuda":
        for _ in range(SINGLES if contestant.steps > 1 else 1):
            returned, done = single(contestant, device)
            contestant.note("host", returned)
            contestant.note("single", done)
    block(contestant, device)


def warm_up(contestant: Contestant, device: torch.device, block_seconds: float) -> None:
    contestant.ready()
    single(contestant, device)
    seconds = min(single(contestant, device)[1] for _ in range(2))
    contestant.steps = max(1, min(MOST_STEPS, round(block_seconds / seconds)))


def compete(contestants: Sequence[Contestant], device: torch.device, *, most_rounds: int, until: float) -> int:
    """Rounds in which each has its turn, until that time, but one at least. Returns how many there were."""
    gc.collect()
    gc.disable()
    try:
        done = 0
        while done == 0 or (done < most_rounds and time.perf_counter() < until):
            first = done % len(contestants)
            for contestant in (*contestants[first:], *contestants[:first]):
                turn(contestant, device)
            done += 1
        return done
    finally:
        gc.enable()


def launches(contestant: Contestant, device: torch.device) -> dict[str, Any]:
    """Of one step: kernels, copies and memsets on the device, and the time in them. Empty on a CPU."""
    if device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    contestant.ready()
    single(contestant, device)
    if contestant.prepare:
        contestant.prepare()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        contestant.step()
        synchronize(device)
    on_device = [
        event
        for event in profiler.events() or []
        if event.device_type.name == "CUDA"
        and not getattr(event, "is_user_annotation", False)
        and not event.name.startswith(("Optimizer.", "ProfilerStep"))
    ]
    moves = [event for event in on_device if event.name.startswith(("Memcpy", "Memset"))]
    microseconds = sum(event.time_range.elapsed_us() for event in on_device)
    return {"kernels": len(on_device) - len(moves), "moves": len(moves), "kernel_ms": round(microseconds / 1e3, 4)}


def synchronisations(contestant: Contestant, device: torch.device) -> int | None:
    """How often one step makes the host wait for the device, as torch knows it."""
    if device.type != "cuda":
        return None
    contestant.ready()
    single(contestant, device)
    if contestant.prepare:
        contestant.prepare()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            contestant.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught)
