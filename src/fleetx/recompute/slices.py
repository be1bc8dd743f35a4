"""Rows of single layers in an nn.Sequential, taken together: of one layer computed again, nothing would be won.

A slice runs its layers as the Sequential would, and is a unit like any module; the model's own modules and names stay.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, final

from torch import nn

from ..engine.patching import patch_innermost
from .rows import PARTS_FREE, SPLIT_ABOVE, Weights, saved_storages, total, weights
from .trace import Called, Tape

SLICES = 16
"""At most as many a Sequential that saves everything is cut into."""
FREED_PER_KEPT = 1.5
"""Bytes that a slice should free, at least, for each byte of input that the next one keeps."""


@final
class InSlices:
    """Around the forward of a Sequential (patch_innermost)."""

    def __init__(self, module: nn.Sequential, slices: list[nn.Sequential]) -> None:
        self._layers, self._slices = list(module), slices
        self._module = weakref.ref(module)

    def __call__(self, forward: Callable[..., Any], value: Any) -> Any:
        module = self._module()
        if module is None or [id(layer) for layer in module] != [id(layer) for layer in self._layers]:
            return forward(value)  # layers were put in place of those that the plan was made for: they run, and are stored
        for part in self._slices:
            value = part(value)
        return value


def cut_sequentials(model: nn.Module, tape: Tape) -> dict[str, nn.Sequential]:
    """Cut those that save much, and whose layers would free little one by one. The slices by name: `features[4:7]`."""
    weigh = weights(tape)
    found: dict[str, nn.Sequential] = {}
    for name, module in model.named_modules():
        if type(module).forward is nn.Sequential.forward and isinstance(module, nn.Sequential):
            ranges = cuts(name, [child for child, _ in module.named_children()], tape, weigh)
            slices = {f"{name}[{first}:{end}]": nn.Sequential(*list(module)[first:end]) for first, end in ranges}
            if len(slices) > 1:
                patch_innermost(module, InSlices(module, list(slices.values())))
                found |= slices
    return found


def cuts(name: str, children: list[str], tape: Tape, weigh: Weights) -> list[tuple[int, int]]:
    """Where slices of a Sequential begin and end; none where it is better taken as it is, or layer by layer."""
    full = [f"{name}.{child}" if name else child for child in children]
    saved = sum(weigh.saved.get(child, 0) for child in full)
    freed = sum(weigh.freed.get(child, 0) for child in full)
    if saved <= SPLIT_ABOVE * weigh.total or freed >= PARTS_FREE * saved or not _run_once_in_a_row(full, tape):
        return []
    calls = {call.name: call for call in tape.calls()}
    saves = saved_storages(tape)
    ends: list[int] = []
    gathered: set[int] = set()
    for i, child in enumerate(full):
        handed_over = set(calls[child].inputs)
        worth = max(weigh.total / SLICES, FREED_PER_KEPT * total(tape.sizes, handed_over))
        # A layer that changes its input in place stays with the one that made it.
        if calls[child].can_run_again and total(tape.sizes, gathered - handed_over) >= worth:
            ends.append(i)
            gathered = set()
        gathered |= saves[child]
    return list(zip([0, *ends], [*ends, len(full)], strict=True))


def _run_once_in_a_row(names: list[str], tape: Tape) -> bool:
    calls = [event.name for event in tape.events if isinstance(event, Called) and event.name in names]
    return calls == names
