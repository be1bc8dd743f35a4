"""Say what would fit, after an error for want of memory: in the numbers of this process, and only what is not switched on yet.

The advice is a note on the exception, so that it stands below the traceback. Under fleetrun the worker's first code asks for it;
elsewhere a hook that `fleet.distribute` sets once. Nothing here waits for another rank or asks the device to finish.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, final

import torch
from torch import Tensor

from ..config.text import binary
from ..dist import world
from ..dist.control_groups import host_memory
from .dry_run import is_out_of_memory
from .setup import registry

USED_SHARE = 0.9
"""Share of the memory that the advised budget of recompute is."""
GIB = 2**30
UNDER_FLEETRUN = "FLEETX_FAILURE_FILE"
"""Variable that is set where the worker's first code handles what a script raises."""
ESTIMATE = "fleetx plan --estimate MODEL shows what each of them takes, in seconds, without running."


@final
@dataclass(frozen=True, slots=True)
class Held:
    """Hold the bytes that training keeps from step to step."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def all(self) -> int:
        return self.weights + self.gradients + self.optimizer


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error says that there was not enough memory, on a GPU or on the host."""
    told = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return told or isinstance(error, MemoryError) or (isinstance(error, Exception) and is_out_of_memory(error))


def budget_within(total_bytes: int) -> str:
    """Write a budget that leaves room for what is not counted: "28GiB", "900MiB"."""
    usable = USED_SHARE * total_bytes
    return f"{int(usable // GIB)}GiB" if usable >= 4 * GIB else f"{int(usable // 2**20)}MiB"


def ways_out(*, on: Iterable[str], total_bytes: int, held: Held) -> list[str]:
    """List what makes room. `on`: names of strategies that are on; `total_bytes`: memory of the device, 0 where unknown."""
    if 0 < total_bytes <= held.all:
        return ["no batch is small enough: a smaller model, or a device with more memory"]
    budget, used = budget_within(total_bytes) if total_bytes else "20GiB", set(on)
    ways = [] if "amp" in used else ["strategy.amp = True: activations in 16 bits"]
    ways.append(
        'strategy.recompute_configs["offload"] = True: inputs of the blocks wait in host memory'
        if "recompute" in used
        else f'strategy.recompute = True, strategy.recompute_configs = {{"budget": "{budget}"}} and fleet.distribute(..., '
        "sample=batch): as many blocks are computed again in backward as that takes"
    )
    merge = "" if "gradient_merge" in used else ", and strategy.gradient_merge makes one update of several"
    found = f'fleet.find_batch(model, optimizer, strategy, sample=batch, budget="{budget}")'
    return [*ways, f"a smaller micro-batch: {found} finds the largest that fits{merge}"]


def advice(*, on: Iterable[str], device: str, total_bytes: int, held: Held) -> list[str]:
    """Return the lines of the advice, the one that says what takes how much first."""
    where = f"{device} has {binary(total_bytes)}" if total_bytes else device
    first = f"fleetx: out of memory: {where}"
    if held.all:
        first += (
            f"; weights take {binary(held.weights)}, gradients {binary(held.gradients)}, the optimizer's state "
            f"{binary(held.optimizer)}, and a batch comes on top"
        )
    ways = ways_out(on=on, total_bytes=total_bytes, held=held)
    return [f"{first}. What makes room:", *(f"  - {way}" for way in ways), f"  {ESTIMATE}"]


# --- the numbers of this process --------------------------------------------------------------------------------------------


def held_here() -> Held:
    """Add up what the pairs of this process keep."""
    weights, gradients, state = dict[int, int](), dict[int, int](), dict[int, int]()
    for pair in registry.pairs():
        model, face = pair.model(), pair.face()
        for tensor in () if model is None else (*model.parameters(), *model.buffers()):
            _count(weights, tensor)
            _count(gradients, tensor if tensor.requires_grad else None)  # zeroed now or not, backward needs as much again
        for kept in () if face is None else face.update.state.values():
            for tensor in kept.values() if isinstance(kept, dict) else ():
                _count(state, tensor)
    return Held(*(sum(one.values()) for one in (weights, gradients, state)))


def _count(sizes: dict[int, int], tensor: Any) -> None:
    if isinstance(tensor, Tensor):
        sizes[id(tensor)] = tensor.numel() * tensor.element_size()


def memory_of(device: torch.device) -> int:
    """Return the bytes of a device; of a host those that its control group allows."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory()


def advise(error: BaseException) -> list[str]:
    """Return the advice for an error, empty where it is about something else, and note it on the error, once."""
    if not lacks_memory(error):
        return []
    notes = getattr(error, "__notes__", [])
    known = [note for note in notes if note.startswith("fleetx: out of memory")]
    if known:
        return str(known[0]).splitlines()
    device = world.current().device if world.is_open() else torch.device("cpu")
    on = {part.name for pair in registry.pairs() for part in pair.strategy.parts()}
    name = f"{device.type}:{device.index}" if device.index is not None else "the host" if device.type == "cpu" else device.type
    lines = advice(on=on, device=name, total_bytes=memory_of(device), held=held_here())
    error.add_note("\n".join(lines))
    return lines


_is_hooked = False


def advise_at_exit() -> None:
    """Note advice on an error that ends the process, before it is printed. Whatever printed it before still does."""
    global _is_hooked
    if _is_hooked or UNDER_FLEETRUN in os.environ:
        return
    _is_hooked, before = True, sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        advise(error)
        before(kind, error, trace)

    sys.excepthook = hook
