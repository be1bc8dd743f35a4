"""Group single layers of an nn.Sequential into slices: computing one layer again would save nothing.

A slice runs its layers as the Sequential would, and is a unit like any module; the model's own modules and names stay.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any, final

from torch import nn

from ..engine.modules.compiling import compiled_by
from ..engine.modules.patching import patch_innermost
from .rows import PARTS_FREE, SPLIT_ABOVE, Weights, saved_storages, total, weights
from .trace import Called, Trace

SLICES = 16
"""Slices at most, of a Sequential that saves everything."""
FREED_PER_KEPT = 1.5
"""Bytes that a slice should free, at least, for each byte of input that the next one keeps."""


@final
class InSlices:
    """Runs a Sequential slice by slice; installed around its forward by patch_innermost."""

    def __init__(self, module: nn.Sequential, slices: list[nn.Sequential]) -> None:
        self._layers, self._slices = list(module), slices
        self._module = weakref.ref(module)

    def __call__(self, forward: Callable[..., Any], value: Any) -> Any:
        module = self._module()
        if module is None or [id(layer) for layer in module] != [id(layer) for layer in self._layers]:
            return forward(value)  # layers were replaced since the plan was made: run them, stored
        for part in self._slices:
            value = part(value)
        return value


def cut_sequentials(model: nn.Module, trace: Trace, *, but: Collection[nn.Module] = ()) -> dict[str, nn.Sequential]:
    """Cut Sequentials that save much and whose layers free little one by one; return slices by name, such as `features[4:7]`.

    `but`: modules that stay whole, as those do that are compiled."""
    weigh = weights(trace)
    slices_by_name: dict[str, nn.Sequential] = {}
    for name, module in model.named_modules():
        if module in but or compiled_by(module) == "strategy":
            continue
        if type(module).forward is nn.Sequential.forward and isinstance(module, nn.Sequential):
            ranges = cuts(name, [child for child, _ in module.named_children()], trace, weigh)
            slices = {f"{name}[{first}:{end}]": nn.Sequential(*list(module)[first:end]) for first, end in ranges}
            if len(slices) > 1:
                patch_innermost(module, InSlices(module, list(slices.values())))
                slices_by_name |= slices
    return slices_by_name


def cuts(name: str, children: list[str], trace: Trace, weigh: Weights) -> list[tuple[int, int]]:
    """Return begin and end of a Sequential's slices; none where it is better left whole, or taken layer by layer."""
    full = [f"{name}.{child}" if name else child for child in children]
    saved = sum(weigh.saved.get(child, 0) for child in full)
    freed = sum(weigh.freed.get(child, 0) for child in full)
    if saved <= SPLIT_ABOVE * weigh.total or freed >= PARTS_FREE * saved or not _run_once_in_a_row(full, trace):
        return []
    calls = {call.name: call for call in trace.calls()}
    saves = saved_storages(trace)
    ends: list[int] = []
    gathered: set[int] = set()
    for i, child in enumerate(full):
        inputs = set(calls[child].inputs)
        worth = max(weigh.total / SLICES, FREED_PER_KEPT * total(trace.sizes, inputs))
        # A layer that changes its input in place stays in the slice that made the input.
        if calls[child].can_run_again and total(trace.sizes, gathered - inputs) >= worth:
            ends.append(i)
            gathered = set()
        gathered |= saves[child]
    return list(zip([0, *ends], [*ends, len(full)], strict=True))


def _run_once_in_a_row(names: list[str], trace: Trace) -> bool:
    """Return whether the modules are called once each, in this order."""
    calls = [event.name for event in trace.events if isinstance(event, Called) and event.name in names]
    return calls == names
