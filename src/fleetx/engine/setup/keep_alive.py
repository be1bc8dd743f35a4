"""A model keeps its pairs alive, and so does each module of it: gradients are reduced for any optimizer, as under DDP.

Without this only the optimizer would hold the pair. A script that makes a new one for its second phase would then train each rank
alone, from the moment on that Python happens to collect the old one: on no rank, on one, or on all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from torch import nn

from ..modules.plain_copy import ABSENT, StandIn, keep_copies_plain

if TYPE_CHECKING:
    from ..optimizer import FleetOptimizer


@final
class KeptPairs(StandIn):
    """Lies in `module.__dict__`, where garbage collection sees it: model and pair are collected together."""

    place = "_fleetx_pairs"

    def __init__(self) -> None:
        self.optimizers: list[FleetOptimizer] = []

    def replaced(self) -> Any:
        return ABSENT

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ()  # of a class that copies its `__dict__` by itself: nothing of ours, and no name of ours in a pickle


def keep_with(model: nn.Module, optimizer: FleetOptimizer) -> None:
    """Let the pair of this optimizer live as long as any module of the model does, or until it is ended."""
    for module in model.modules():
        kept = module.__dict__.get(KeptPairs.place)
        if not isinstance(kept, KeptPairs):
            kept = module.__dict__[KeptPairs.place] = KeptPairs()
        kept.optimizers.append(optimizer)
        optimizer.kept_by.append(kept)
        keep_copies_plain(module)


def let_go(optimizer: FleetOptimizer) -> None:
    """Remove this pair from all modules that hold it."""
    for kept in optimizer.kept_by:
        kept.optimizers.remove(optimizer)
    optimizer.kept_by = []
