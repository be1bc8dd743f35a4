"""Average buffers in a round: floating ones (BatchNorm statistics) become the mean, integers (its counter) rank 0's values.

Buffers are sent in full precision and never pass the outer optimizer: a statistic is not a weight. Large tables follow after the
round, if a rank has changed one; buffers that belong to each rank are left out (engine/buffers/buffer_kinds.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from ..dist.comm import Comm, Pending
from ..engine.buffers.buffer_kinds import apply_change, average_of_change, buffer_of, reshaped, sort_buffers
from ..engine.buffers.large_buffers import Tables
from ..engine.buffers.unequal_buffers import UnequalBuffers, is_unequal, warn_of_unequal
from ..engine.rank_status import Row


@final
class Buffers:
    """Average the buffers of one model."""

    def __init__(self, model: nn.Module, device: torch.device, local: Collection[str] = ()) -> None:
        """Sort the model's buffers; `local` holds names or patterns of buffers that belong to each rank."""
        sorted_buffers = sort_buffers(model, local)
        self._floats, self._integers = sorted_buffers.floats, list(sorted_buffers.integers.values())
        self._integer_names = list(sorted_buffers.integers)
        self.tables = Tables(sorted_buffers, device)
        self._unequal = UnequalBuffers(sorted_buffers)
        present = [buffer_of(owner) for owner in self._floats.values()]
        self._shapes = [buffer.shape for buffer in present]
        wide = any(buffer.dtype == torch.float64 for buffer in present)
        dtype = torch.float64 if wide else torch.float32
        self.common = torch.zeros(sum(buffer.numel() for buffer in present), dtype=dtype, device=device)
        """The floating buffers after the last average of all ranks, flat."""
        self._change = torch.zeros_like(self.common)
        self._sent: Tensor | None = None
        """This rank's floating buffers when they were sent; None where it does not train on meanwhile."""
        self._sent_integers: Tensor | None = None
        self._of_first: Tensor | None = None
        """Bytes of rank 0's integer buffers. `_sent_integers` holds this rank's own, sent while it trains on; else None."""

    @torch.no_grad()
    def begin(self) -> None:
        """Take the current buffers, equal on all ranks, as the common ones."""
        self._read(self.common)
        self._unequal.renew_marks()
        self.tables.resume(())

    def _present(self) -> list[Tensor]:
        return [buffer_of(owner) for owner in self._floats.values()]

    def _views(self, flat: Tensor) -> list[Tensor]:
        present = self._present()
        parts = flat.split([buffer.numel() for buffer in present]) if present else []
        return [part.view(buffer.shape) for part, buffer in zip(parts, present, strict=True)]

    def _read(self, flat: Tensor) -> None:
        if not self._floats:
            return
        for name, buffer, shape in zip(self._floats, self._present(), self._shapes, strict=True):
            if buffer.shape != shape:
                raise reshaped(name, buffer.shape, shape)
        torch._foreach_copy_(self._views(flat), self._present())

    def _write(self, flat: Tensor) -> None:
        if self._floats:
            torch._foreach_copy_(self._present(), self._views(flat))

    # --- one round ----------------------------------------------------------------------------------------------

    def launch(self, comm: Comm, *, trains_on: bool, with_integers: bool = True) -> list[Pending]:
        """Send the changes of this rank's buffers; `trains_on`: training goes on until they are settled."""
        pending: list[Pending] = []
        if self._floats:
            self._read(self._change)
            self._sent = self._change.clone() if trains_on else None
            self._change.copy_(average_of_change(self._change, self.common, comm.size))
            pending.append(comm.all_reduce(self._change))
        if with_integers and self._integers:
            self._of_first = torch.cat([_as_bytes(buffer_of(owner)) for owner in self._integers])
            self._sent_integers = self._of_first.clone() if trains_on else None
            pending.append(comm.broadcast(self._of_first))
        return pending

    def settle(self, *, size: int = 1, inside: bool = False) -> None:
        """Write the mean of `size` ranks; `inside`: of this node's ranks alone, so that the common buffers stay."""
        average = apply_change(self.common, self._change)
        written = set() if inside else self._unequal.candidates()
        if not inside:
            self._note_unequal_floats(average, written, size)
            self.common.copy_(average)
        if self._sent is not None:
            now, change = torch.empty_like(average), average - self._sent
            self._read(now)
            average = torch.where(change.isfinite(), now + change, average)  # an infinite value has no finite change to add
        self._write(average)
        self._settle_integers(written)
        self._sent = None
        if not inside:
            self._unequal.renew_marks()

    def _note_unequal_floats(self, average: Tensor, written: set[str], size: int) -> None:
        if not written.intersection(self._floats):
            return
        now = torch.empty_like(average) if self._sent is None else self._sent
        if self._sent is None:
            self._read(now)
        for name, mine, last, mean in zip(
            self._floats, self._views(now), self._views(self.common), self._views(average), strict=True
        ):
            if name in written:
                self._unequal.note(name, is_unequal(mine, last, mean, size))

    def _settle_integers(self, written: Collection[str]) -> None:
        if self._of_first is None:
            return
        buffers = [buffer_of(owner) for owner in self._integers]
        first = _from_bytes(self._of_first, buffers)
        mine = first if self._sent_integers is None else _from_bytes(self._sent_integers, buffers)
        for name, buffer, theirs, own in zip(self._integer_names, buffers, first, mine, strict=True):
            if name in written:
                self._unequal.note(name, ((buffer if self._sent_integers is None else own) != theirs).any())
            if self._sent_integers is None or buffer.dtype == torch.bool:
                buffer.copy_(theirs)
            else:
                buffer.add_(theirs - own)  # keep what was counted since it was sent
        self._of_first = self._sent_integers = None

    # --- what the ranks report ----------------------------------------------------------------------------------

    def news(self) -> dict[str, float]:
        """Return the buffers' fields of this rank's row."""
        return {"changed_tables": float(len(self.tables.changed())), "unequal_buffers": float(self._unequal.count())}

    def apply_reports(self, rows: Sequence[Row], comm: Comm) -> None:
        """Equalise changed tables and warn of unequal buffers, after a round of all ranks. Collective."""
        unequal = self.tables.make_equal(comm) if any(row.changed_tables for row in rows) else set()
        unequal |= self._unequal.gather(comm) if any(row.unequal_buffers for row in rows) else set()
        if comm.rank == 0:  # after the last collective: warnings may be turned into errors
            warn_of_unequal(unequal)
            self.tables.warn_of_let_go()

    # --- averaged() ---------------------------------------------------------------------------------------------

    def own(self, rows: Sequence[Row]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Copy all buffers, to put them back to the bit: a forward in training mode changes them too."""
        changed = any(row.changed_tables for row in rows)
        return [buffer.clone() for buffer in self._all()], self.tables.own() if changed else {}

    def put_back(self, own: tuple[list[Tensor], dict[str, Tensor]]) -> None:
        if own[0]:
            torch._foreach_copy_(self._all(), own[0])
        self.tables.put_back(own[1])

    def _all(self) -> list[Tensor]:
        return [*self._present(), *(buffer_of(owner) for owner in self._integers)]

    def show_mean(self, rows: Sequence[Row], comm: Comm) -> None:
        """Write the mean of all ranks' buffers. Collective."""
        if self._floats:
            now = torch.empty_like(self.common)
            self._read(now)
            change = average_of_change(now, self.common, comm.size)
            comm.all_reduce(change).wait()
            self._write(apply_change(self.common, change))
        if any(row.changed_tables for row in rows):
            self.tables.make_equal(comm, reports=False)

    # --- resume -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state; a round under way must have arrived."""
        return {
            "common": self.common,
            "change": self._change,
            "sent": self._sent,
            "sent_integers": self._sent_integers,
            "of_first": self._of_first,
            "changed_tables": self.tables.changed(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.common.copy_(state["common"])
        self._change.copy_(state["change"])
        held = {name: state[name] for name in ("sent", "sent_integers", "of_first")}
        moved = {name: None if value is None else value.to(self.common.device) for name, value in held.items()}
        self._sent, self._sent_integers, self._of_first = moved["sent"], moved["sent_integers"], moved["of_first"]
        self.tables.resume(state.get("changed_tables", []))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _from_bytes(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.nbytes for tensor in like])
    # Cloned, since a part may begin at an address that its type is not aligned to.
    return [part.clone().view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
