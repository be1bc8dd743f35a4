"""Guards against what plain training never notices: numbers that are not finite, and ranks that have drifted apart.

NonFiniteGuard   one decision on all ranks, before anything was updated: stop with an error, or skip this update
RankCheck        every so many updates a fingerprint of the model is compared; a difference names rank and tensor
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, NoReturn, TypeAlias, final

import torch
from torch import Tensor, nn

from ...dist.comm import Comm
from ...dist.fingerprint import fingerprint
from ...errors import FleetError, warn_user
from .. import pairs
from ..buckets import Buckets
from ..buffer_kinds import buffer_of, sort_buffers
from ..sidecar import Alarms, Tail

OnNanInf: TypeAlias = Literal["stop", "skip", "off"]


@final
class NonFiniteGuard:
    """What happens when a loss or the reduced gradients hold a NaN or an infinity. Every rank has seen the same sums."""

    def __init__(
        self, mode: OnNanInf, model: nn.Module, buckets: Buckets, comm: Comm, *, may_skip: bool, local: Collection[str] = ()
    ) -> None:
        """`local`: names or patterns of buffers that belong to each rank, and are left to it."""
        self.mode, self._buckets, self._comm = mode, buckets, comm
        self._warned = False
        self._owners = sort_buffers(model, local).floats if may_skip else {}
        self._good = [buffer.clone() for buffer in self._present()]
        """Floating buffers after the last update: a NaN that passed a BatchNorm is in its statistics, update or not."""

    def _present(self) -> list[Tensor]:
        return [buffer_of(owner) for owner in self._owners.values()]

    def refuse(self, step: int, losses: list[Tensor]) -> NoReturn:
        """Every rank is here: the answer came from what all of them reduced."""
        by_rank = self._comm.gather_json([repr(float(loss)) for loss in losses])
        bad = [f"{loss} on rank {rank}" for rank, told in enumerate(by_rank) for loss in told if "nan" in loss or "inf" in loss]
        seen = "all finite" if any(by_rank) else "not seen, after a bare loss.backward()"
        raise FleetError(
            f"update {step} was not made: its loss or gradients are not finite. Losses: {', '.join(bad[:8]) or seen}. "
            f"Gradients: {self.bad_gradients()}. The weights are as before, statistics of norm layers may not be. "
            'Look at the data and the learning rate; strategy.on_nan_inf = "skip" leaves such updates out, "off" lets them pass.'
        )

    def bad_gradients(self) -> str:
        """Whose gradients are not finite."""
        names = [
            name
            for bucket in self._buckets
            for name, view in zip(bucket.names, bucket.views, strict=True)
            if not bool(view.isfinite().all())
        ]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{', '.join(names[:3])}{more}" if names else "all finite"

    def note_skip(self, step: int, *, alone: bool) -> None:
        if self.mode == "skip" and not self._warned and (alone or self._comm.rank == 0):
            self._warned = True
            here = f" on rank {self._comm.rank}" if alone else ""
            warn_user(
                f"update {step} was skipped{here}: its loss or gradients are not finite. "
                "Later ones are counted in optimizer.skipped.",
            )

    @torch.no_grad()
    def settle_buffers(self, *, finite: bool, alone: bool) -> None:
        """At an update boundary. Buffers are equal on all ranks by now, or this rank's own, and so is what is put back."""
        if not self._owners:
            return
        buffers = self._present()
        if not finite:
            for buffer, good in zip(buffers, self._good, strict=True):
                if buffer.shape == good.shape and not bool(buffer.isfinite().all()):
                    buffer.copy_(good)
            if self._buckets.tail is not None and not alone:
                self._buckets.tail.renew()
        self.remember()

    @torch.no_grad()
    def remember(self) -> None:
        """What the buffers hold now is good."""
        if not self._owners:
            return
        buffers = self._present()
        try:
            torch._foreach_copy_(self._good, buffers)
        except RuntimeError:  # a module put a buffer of another shape in place
            self._good = [buffer.clone() for buffer in buffers]

    def good(self) -> dict[str, Tensor] | None:
        """The floating buffers after the last update; None where no update is ever skipped."""
        return dict(zip(self._owners, self._good, strict=True)) if self._owners else None

    def resume(self, good: Mapping[str, Tensor] | None) -> None:
        """Continue from these; None: from what the buffers hold now."""
        named = zip(self._owners, self._present(), strict=True)
        self._good = [(good or {}).get(name, buffer).to(buffer).clone() for name, buffer in named]


EARLY_LOOKS = (1, 10)
"""Updates after which ranks are compared, besides every `desync_check_steps`-th."""


@final
class RankCheck:
    """Do all ranks still hold the same model? A weight changed by hand on one rank, or a flipped bit, is found here."""

    def __init__(self, model: nn.Module, comm: Comm, tail: Tail | None, *, every: int, own: Iterable[nn.Parameter]) -> None:
        self._comm, self._every = comm, every
        self._model = model
        self._own = {id(param) for param in own}
        self._tail = tail
        self._tables_are_settled = True
        """Alarms of the last update were read: a table that was changed in it has been made equal."""
        self.tables_change = False
        """Some rank has changed one in this run, as all of them know."""
        self._taken: tuple[str, Tensor] | None = None
        """After what a fingerprint was taken, and the fingerprint; None: none waits to be compared."""
        self._pending: tuple[str, Tensor, Any] | None = None
        self._unapplied = 0
        """Reduces so far that came without a step() between them and the one before."""
        self._last_round = 0
        self._left_some_out = False
        """When the last comparison began, this rank left out buffers that others may not have."""

    def forget(self) -> None:
        """A checkpoint was loaded: what was under way is of the weights before."""
        self._pending = self._taken = None

    def _looks_until(self, index: int) -> int:
        """How many looks are due up to this update: early ones, since what drives ranks apart mostly does so from the start."""
        return sum(index >= early for early in EARLY_LOOKS) + index // self._every

    def heed(self, alarms: Alarms) -> None:
        """Every rank has the same sums, and does the same."""
        if self._tail is not None:
            self._tables_are_settled = True
            self.tables_change = self.tables_change or bool(alarms.changed_tables > 0)
            self._tail.heed(alarms, self._comm)

    def hears_later(self) -> None:
        """The alarms of this update are read with the next one."""
        self._tables_are_settled = False

    def after_update(self, index: int) -> None:
        """Take the fingerprint; it is compared in the next reduce (`exchange`).

        Not here: a rank that has skipped this step() would leave the others waiting, with no word of why."""
        if self._comm.size == 1 or self._every == 0:
            return
        if self._pending is not None:
            self._finish()
        if self.looks_after(index):
            self._taken = (f"update {index}", self._mark())

    def looks_after(self, index: int) -> bool:
        """Whether ranks are compared after this update."""
        return self._every > 0 and self._looks_until(index) > self._looks_until(index - 1)

    def after_unapplied(self, place: object) -> None:
        """A reduce is over, and no step() has followed the one before: weights may be changed by hand, and are looked at here.

        Of those of a run the first, the tenth and every so many: compared in the next reduce, as after an update."""
        if self._comm.size == 1 or self._every == 0:
            return
        if self._pending is not None:
            self._finish()
        self._unapplied += 1
        if self._taken is None and self.looks_after(self._unapplied):
            self._taken = (str(place), self._mark())

    def exchange(self) -> None:
        """Compare fingerprints. Every rank is here, at the same update: the reduce just done has shown it."""
        if self._taken is not None:
            (after, mark), self._taken = self._taken, None
            self._compare(after, mark)

    def after_round(self, index: int) -> None:
        """Ranks that train alone are equal now and then: looked at in the first such moment after each `every` updates."""
        if self._comm.size == 1 or self._every == 0:
            return
        if self._pending is not None:
            self._finish()
        if self._looks_until(index) > self._looks_until(self._last_round):
            self._compare(f"update {index}", self._mark())
        self._last_round = index

    def _tensors(self) -> dict[str, Tensor]:
        """Ranks may leave out different buffers: where that makes their marks differ, they are compared name by name."""
        left_out: set[str] = set() if self._tail is None else self._tail.local | self._tail.tables.let_go | self._tail.written()
        if self._tail is not None and not self._tables_are_settled:
            left_out |= self._tail.tables.names()
        # Another optimizer's parameters are looked at by its own pair, which may let ranks train alone.
        others = pairs.trained_by_others(self._own)
        params = {name: param for name, param in self._model.named_parameters() if id(param) not in others}
        named: dict[str, Tensor] = {**params, **dict(self._model.named_buffers())}
        return {name: t.detach() for name, t in named.items() if name not in left_out and t.numel()}

    def _mark(self) -> Tensor:
        # A pair that was discarded may be collected on some ranks only: they compare what all of them look at.
        others = bool(pairs.trained_by_others(self._own))
        self._left_some_out = others or (self._tail is not None and bool(self._tail.written()))
        return fingerprint(list(self._tensors().values()))

    def _compare(self, after: str, mark: Tensor) -> None:
        extremes = torch.stack([mark, ~mark])  # one collective: the largest, and of the complement the largest: the smallest
        self._comm.all_reduce(extremes, "max").wait()
        if extremes.device.type == "cpu":
            self._pending = (after, extremes, None)
            return self._finish()
        # Read one update later: by then it has long arrived, and nobody has waited for the device.
        host = torch.empty(2, dtype=torch.int64, device="cpu", pin_memory=True)
        host.copy_(extremes, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._pending = (after, host, arrived)

    def _finish(self) -> None:
        assert self._pending is not None
        (after, extremes, arrived), self._pending = self._pending, None
        if arrived is not None:
            arrived.synchronize()
        largest, complement = extremes.tolist()
        if largest != ~complement:
            self._compare_by_name(after)

    def _compare_by_name(self, after: str) -> None:
        """Every rank is here: the extremes are the same for all. Ranks that hold the same after all leave in peace, together."""
        marks = {name: f"{int(fingerprint([t])):x}" for name, t in self._tensors().items()}
        ranks = self._comm.gather_json([marks, self._left_some_out])
        common = {name: mark for theirs, _ in reversed(ranks) for name, mark in theirs.items()}
        told = []
        for rank, (theirs, _) in enumerate(ranks):
            names = [name for name, mark in theirs.items() if mark != common[name]]
            if names:
                told.append(f"rank {rank} in {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else ""))
        if not told and any(left_some_out for _, left_some_out in ranks):
            return
        raise FleetError(
            f"after {after} the ranks no longer hold the same model. Unlike rank 0: {'; '.join(told) or 'none by now'}. "
            "Something changed weights or buffers on some ranks only: load the last checkpoint, name buffers that belong to "
            "each rank in strategy.local_buffers, or set strategy.desync_check_steps = 0 if this is meant."
        )
