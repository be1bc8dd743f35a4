"""Compare ranks: every so many updates a fingerprint of the model; a difference names rank and tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...config.text import listed
from ...dist.comm import Comm
from ...dist.fingerprint import fingerprint
from ...errors import FleetError
from ..sidecar import Alarms, Tail
from ..user_loop import model_pairs
from .checks import EARLY_LOOKS, looks_after


@final
class RankCheck:
    """Do all ranks still hold the same model? A weight changed by hand on one rank, or a flipped bit, is found here."""

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        tail: Tail | None,
        *,
        every: int,
        own: Iterable[nn.Parameter],
        optimizer: Optimizer,
        weights: bool = True,
    ) -> None:
        """Prepare to compare. `weights`: whether ranks hold the same; else their buffers alone are compared."""
        self._comm, self.every = comm, every
        self._model, self._weights = model, weights
        self._own = {id(param) for param in own}
        self._optimizer = optimizer
        self._tail = tail
        self.tables_are_settled = True
        """Alarms of the last update were read: a table that was changed in it has been made equal."""
        self.tables_change = False
        """Some rank has changed one in this run, as all of them know."""
        self.taken: tuple[str, Tensor] | None = None
        """The place after which a fingerprint was taken, and the fingerprint; None: none waits to be compared."""
        self.pending: tuple[str, Tensor, Any] | None = None
        self._unapplied = 0
        """Reduces so far that came without a step() between them and the one before."""
        self._last_round = 0
        self._params_only = False
        """Whether buffers are left out of a comparison."""
        self._left_some_out = False
        """Whether this rank left out buffers, when the last comparison began, that others may not have left out."""

    def forget(self) -> None:
        """Drop what was under way: a checkpoint was loaded, and it is of the weights before."""
        self.pending = self.taken = None

    def _looks_until(self, index: int) -> int:
        """Count the looks that are due up to this update."""
        return sum(index >= early for early in EARLY_LOOKS) + index // self.every

    def read_alarms(self, alarms: Alarms) -> None:
        """Act on the summed marks. Every rank has the same sums, and does the same."""
        if self._tail is not None:
            self.tables_are_settled = True
            self.tables_change = self.tables_change or bool(alarms.changed_tables > 0)
            self._tail.read_alarms(alarms, self._comm)

    def hears_later(self) -> None:
        """Note that the alarms of this update are read with the next one."""
        self.tables_are_settled = False

    def after_update(self, index: int) -> None:
        """Take the fingerprint; it is compared in the next reduce (`exchange`).

        Not here: a rank that has skipped this step() would leave the others waiting, with no word of why."""
        if self._comm.size == 1 or self.every == 0:
            return
        if self.pending is not None:
            self._finish()
        if looks_after(index, self.every):
            self.taken = (f"update {index}", self._mark())

    def after_unapplied(self, place: object) -> None:
        """Look at the weights after a reduce that no step() has followed: they may be changed by hand.

        Of those of a run the first, the tenth and every so many: compared in the next reduce, as after an update."""
        if self._comm.size == 1 or self.every == 0:
            return
        if self.pending is not None:
            self._finish()
        self._unapplied += 1
        if self.taken is None and looks_after(self._unapplied, self.every):
            self.taken = (str(place), self._mark())

    def before_sharded(self, index: int) -> None:
        """Compare the parameters before this update, on every rank at once; buffers may be of a forward since the reduce."""
        if self._comm.size == 1:
            return
        if self.pending is not None:
            self._finish()
        self._params_only = True
        try:
            self._compare(f"update {index - 1}" if index > 1 else "fleet.distribute(...)", self._mark())
            if self.pending is not None:
                self._finish()
        finally:
            self._params_only = False

    def exchange(self) -> None:
        """Compare fingerprints. Every rank is here, at the same update: the reduce just done has shown it."""
        if self.taken is not None:
            (after, mark), self.taken = self.taken, None
            self._compare(after, mark)

    def after_round(self, index: int) -> None:
        """Look at the weights when ranks that train alone have become equal: in the first such moment after each `every`
        updates."""
        if self._comm.size == 1 or self.every == 0:
            return
        if self.pending is not None:
            self._finish()
        if self._looks_until(index) > self._looks_until(self._last_round):
            self._compare(f"update {index}", self._mark())
        self._last_round = index

    def _tensors(self) -> dict[str, Tensor]:
        """Collect what is compared. Ranks may leave out different buffers: where that makes their marks differ, they are compared
        name by name."""
        left_out: set[str] = set() if self._tail is None else self._tail.local | self._tail.tables.let_go | self._tail.written()
        if self._tail is not None and not self.tables_are_settled:
            left_out |= self._tail.tables.names()
        # Another optimizer's parameters are looked at by its own pair, which may let ranks train alone.
        others = model_pairs.trained_by_others(self._own)
        params = {name: param for name, param in self._model.named_parameters() if self._weights and id(param) not in others}
        named: dict[str, Tensor] = {**params, **({} if self._params_only else dict(self._model.named_buffers()))}
        return {name: t.detach() for name, t in named.items() if name not in left_out and t.numel()}

    def _mark(self) -> Tensor:
        # A pair that was discarded may be collected on some ranks only: they compare what all of them look at.
        others = bool(model_pairs.trained_by_others(self._own))
        self._left_some_out = others or (self._tail is not None and bool(self._tail.written()))
        return fingerprint(list(self._tensors().values()))

    def _compare(self, after: str, mark: Tensor) -> None:
        extremes = torch.stack([mark, ~mark])  # one collective: the largest, and of the complement the largest: the smallest
        self._comm.all_reduce(extremes, "max").wait()
        if extremes.device.type == "cpu":
            self.pending = (after, extremes, None)
            return self._finish()
        # Read one update later: by then it has long arrived, and the host has not waited for the device.
        host = torch.empty(2, dtype=torch.int64, device="cpu", pin_memory=True)
        host.copy_(extremes, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self.pending = (after, host, arrived)

    def _finish(self) -> None:
        assert self.pending is not None
        (after, extremes, arrived), self.pending = self.pending, None
        if arrived is not None:
            arrived.synchronize()
        largest, complement = extremes.tolist()
        if largest != ~complement:
            self._compare_by_name(after)

    def _compare_by_name(self, after: str) -> None:
        """Compare tensor by tensor. Every rank is here: the extremes are the same for all, and ranks that are equal after all
        return together."""
        marks = {name: f"{int(fingerprint([t])):x}" for name, t in self._tensors().items()}
        rates = [float(group.get("lr", 0.0)) for group in self._optimizer.param_groups]
        ranks = self._comm.gather_json([marks, self._left_some_out, rates])
        common = {name: mark for theirs, _, _ in reversed(ranks) for name, mark in theirs.items()}
        told = []
        for rank, (theirs, _, _) in enumerate(ranks):
            names = [name for name, mark in theirs.items() if mark != common[name]]
            if names:
                told.append(f"rank {rank} in {listed(names, 3)}")
        if not told and any(left_some_out for _, left_some_out, _ in ranks):
            return
        raise FleetError(
            f"after {after} the ranks no longer hold the same model. Unlike rank 0: {'; '.join(told) or 'none by now'}. "
            f"{_unlike_rates([theirs for _, _, theirs in ranks])}"
            "Something changed weights or buffers on some ranks only: load the last checkpoint, name buffers that belong to "
            "each rank in strategy.local_buffers, or set strategy.desync_check_steps = 0 if this is meant."
        )


def _unlike_rates(ranks: Sequence[Sequence[float]]) -> str:
    """Say so where learning rates differ between ranks, which explains weights that do; empty where they are equal."""
    rank = next((rank for rank, rates in enumerate(ranks) if rates != ranks[0]), None)
    if rank is None:
        return ""
    mine, theirs = next((a, b) for a, b in zip(ranks[0], ranks[rank], strict=True) if a != b)
    return (
        f"Their learning rates differ: {mine:g} on rank 0, {theirs:g} on rank {rank}. A scheduler that looks at the loss "
        '(ReduceLROnPlateau) needs the same one on all ranks: scheduler.step(fleet.util.all_reduce(loss.item(), "mean")). '
    )
