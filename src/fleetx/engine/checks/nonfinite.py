"""Stop or skip an update whose loss or gradients are not finite: one decision on all ranks, before anything was updated."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping
from typing import Literal, NoReturn, TypeAlias, final

import torch
from torch import Tensor, nn

from ...config.text import listed
from ...dist.comm import Comm
from ...errors import FleetError, warn_user
from ..buckets import Buckets
from ..buffers.buffer_kinds import buffer_of, sort_buffers

NOT_MADE = "is not made, since its loss or gradients are not finite"
"""What the note of a rank says of an update."""

OnNanInf: TypeAlias = Literal["stop", "skip", "off"]


@final
class NonFiniteGuard:
    """What happens when a loss or the reduced gradients hold a NaN or an infinity. Every rank has seen the same sums."""

    def __init__(
        self, mode: OnNanInf, model: nn.Module, buckets: Buckets, comm: Comm, *, may_skip: bool, local: Collection[str] = ()
    ) -> None:
        """Prepare the guard. `local`: names or patterns of buffers that belong to each rank, and are left to it."""
        self.mode, self._buckets, self._comm = mode, buckets, comm
        self._warned = False
        self.owners = sort_buffers(model, local).floats if may_skip else {}
        self._good = [buffer.clone() for buffer in self._present()]
        """Floating buffers after the last update: a NaN that passed a BatchNorm is in its statistics, update or not."""
        self._finite_on: list[bool] = []
        """Whether each rank's gradients are finite after the user has edited them; empty where no ranks disagree."""

    def agree(self, finite: bool, *, step: int, stops: bool) -> bool:
        """Agree whether the gradients, which were not finite when they were reduced, are finite now on every rank.

        The user may have made them so on some ranks only, by a loss that the others do not see. `stops`: an update that is not
        finite is an error, which a rank that has left step() out finds as its reason."""
        if self._comm.size == 1:
            return finite
        with self._word(step) if stops and not finite else contextlib.nullcontext():
            ranks = self._comm.gather_json(finite)
        self._finite_on = [] if all(ranks) else ranks
        return all(ranks)

    def _word(self, step: int) -> contextlib.AbstractContextManager[None]:
        return self._comm.error_during(
            f"rank {self._comm.rank}: update {step} {NOT_MADE}: {self.bad_gradients()}. If a rank has left this "
            "update out by itself: skip a batch on all ranks or on none, which fleet.util.all_reduce can ask."
        )

    @property
    def may_be_left_out(self) -> bool:
        """Whether a rank may have left an update out by itself that another waits in."""
        return self.mode == "stop" and self._comm.size > 1

    def refuse_left_out(self) -> None:
        """Raise where this rank has made no update of gradients that were not finite, and another is in it: it would wait for
        ever. Where all ranks left it out no error is posted; nor is there one yet where the other rank comes later."""
        error = self._comm.posted_error() if self.may_be_left_out else None
        if error is not None and NOT_MADE in error:
            raise FleetError(error)

    def _edited_on_some(self) -> str:
        ranks, self._finite_on = self._finite_on, []
        edited = [rank for rank, finite in enumerate(ranks) if finite]
        if not edited:
            return ""
        return (
            f" The script has made them finite on ranks {edited} only: they are the same on all ranks after backward, so decide "
            "by the gradients and not by this rank's loss, or ask all ranks: fleet.util.all_reduce(value)."
        )

    def _present(self) -> list[Tensor]:
        return [buffer_of(owner) for owner in self.owners.values()]

    def refuse(self, step: int, losses: list[Tensor]) -> NoReturn:
        """Raise. Every rank is here: the answer came from what all of them reduced."""
        with self._word(step):
            by_rank = self._comm.gather_json([repr(float(loss)) for loss in losses])
        bad = [f"{loss} on rank {rank}" for rank, told in enumerate(by_rank) for loss in told if "nan" in loss or "inf" in loss]
        seen = "all finite" if any(by_rank) else "not seen after a bare loss.backward(); optimizer.backward(loss) names the rank"
        raise FleetError(
            f"update {step} was not made: its loss or gradients are not finite. Losses: {', '.join(bad[:8]) or seen}. "
            f"Gradients: {self.bad_gradients()}.{self._edited_on_some()} The weights are as before, "
            "statistics of norm layers may not be. "
            'Look at the data and the learning rate; strategy.on_nan_inf = "skip" leaves such updates out, "off" lets them pass.'
        )

    def bad_gradients(self) -> str:
        """Whose gradients are not finite."""
        names = self._buckets.not_finite()
        return listed(names, 3) if names else "all finite"

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
        """Keep or put back the buffers at an update boundary. They are equal on all ranks by now, or this rank's own, and so is
        what is put back."""
        if not self.owners:
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
    def settle_buffers_on_device(self, found: Tensor, *, alone: bool) -> None:
        """Keep or put back the buffers where the host does not know yet; `found`: 1.0 where the update is not made, else 0.0."""
        tail = self._buckets.tail
        pairs = [(b, g) for b, g in zip(self._present(), self._good, strict=True) if b.shape == g.shape and b.numel()]
        if not pairs:
            return self.remember()
        written = set() if tail is None else tail.written()
        largest = torch.stack([norm.double() for norm in torch._foreach_norm([buffer for buffer, _ in pairs], math.inf)])
        goes_back = ~largest.isfinite() & (found != 0.0)
        for (buffer, good), flag in zip(pairs, goes_back.unbind(), strict=True):
            torch.where(flag, good, buffer, out=buffer)
        if tail is not None and not alone:
            tail.renew_where(found, but=written)
        self.remember()

    @torch.no_grad()
    def remember(self) -> None:
        """Take what the buffers hold now as good."""
        if not self.owners:
            return
        buffers = self._present()
        try:
            torch._foreach_copy_(self._good, buffers)
        except RuntimeError:  # a module put a buffer of another shape in place
            self._good = [buffer.clone() for buffer in buffers]

    def good(self) -> dict[str, Tensor] | None:
        """Return the floating buffers after the last update; None where no update is ever skipped."""
        return dict(zip(self.owners, self._good, strict=True)) if self.owners else None

    def resume(self, good: Mapping[str, Tensor] | None) -> None:
        """Continue from these; None: from what the buffers hold now."""
        named = zip(self.owners, self._present(), strict=True)
        self._good = [(good or {}).get(name, buffer).to(buffer).clone() for name, buffer in named]
