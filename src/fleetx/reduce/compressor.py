"""Fill REDUCE by a compressor: it works at the update boundary, on true gradients, and keeps what it does not send (residuals).

    dense updates   as without a compressor, bit for bit
    afterwards      1  one all-reduce: was a gradient or a loss not finite anywhere? and small tensors, buffers, alarms
                    2  not finite: all ranks put NaN where it was, and no residual has changed
                    3  finite: each tensor is compressed, exchanged and put back; what was not sent becomes the residual

On a GPU the host need not know which of 2 and 3 it is, where the compressor can tell them apart on the device.
With two levels the ranks of a node first sum their gradients, dense; nodes then take the place of ranks.
Residuals are in units of this rank's share of the mean, so that shares add up over ranks.
"""

from __future__ import annotations

import abc
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor, nn

from ..config import log
from ..dist.comm import Comm, Pending
from ..dist.nodes import between_nodes
from ..engine.bucket import Bucket, in_memory_order
from ..engine.buckets import joined, norms_of
from ..engine.dense_reduce import DenseAllReduce
from ..engine.sidecar import reads_late
from ..engine.slots import Kept, Site, Step
from ..errors import CheckpointError

if TYPE_CHECKING:
    from ..engine.buckets import Buckets


@final
@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One parameter's gradient, as a row of its bucket's memory. Residuals and weights are read in the same order."""

    name: str
    param: nn.Parameter
    view: Tensor
    """The gradient as `param.grad` shows it, with the strides that the parameter had at the start."""
    grad: Tensor
    """The gradient as a flat row of the bucket."""
    bucket: Bucket
    offset: int
    """First entry of the row in the bucket."""

    def shaped(self, row: Tensor) -> Tensor:
        """View a row in the same order of memory in the gradient's shape."""
        return torch.as_strided(row, self.view.shape, self.view.stride(), int(row.storage_offset()))

    def weights(self) -> Tensor:
        """Return the parameter as a row in the gradient's order of memory: a view, or a copy where their strides differ."""
        param = self.param.detach()
        if param.stride() == self.view.stride():
            return in_memory_order(param)
        row = torch.empty(param.numel(), dtype=param.dtype, device=param.device)
        self.shaped(row).copy_(param)
        return row


def pieces_of(bucket: Bucket) -> list[Piece]:
    """Split a bucket into one `Piece` per parameter."""
    rows = bucket.flat.split([p.numel() for p in bucket.params])
    offsets = [int(row.storage_offset()) for row in rows]
    parts = zip(bucket.names, bucket.params, bucket.views, rows, offsets, strict=True)
    return [Piece(name, param, view, row, bucket, offset) for name, param, view, row, offset in parts]


class NonFinite(NamedTuple):
    """What was not finite on some rank. All ranks have the same answer."""

    gradients: bool
    losses: bool


def sum_together(tensors: Sequence[Tensor], comm: Comm) -> None:
    """Sum tensors over ranks, in place, by one collective per type; models are equal, so all ranks use the same order."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        joint = torch.cat([tensor.reshape(-1) for tensor in same])
        comm.all_reduce(joint).wait()
        parts = joint.split([tensor.numel() for tensor in same])
        torch._foreach_copy_(same, [part.view(tensor.shape) for part, tensor in zip(parts, same, strict=True)])


class Compressor(abc.ABC):
    """Abstract REDUCE stage; one final subclass per way to compress."""

    is_linear = False
    is_plain_sum = False
    wire_dtype = None
    carries_tail = True
    name: ClassVar[str]
    threshold: ClassVar[str | None]
    """The key of `<name>_configs` that decides which tensors are too small to compress; None: that is fixed."""

    def __init__(self, site: Site, *, two_level: bool) -> None:
        self._comm = site.comm
        self._dense = DenseAllReduce(site.comm)
        levels = between_nodes(site.comm) if two_level else None
        self._inside: Comm | None = None if levels is None else levels.inside
        self._among: Comm = site.comm if levels is None else levels.across
        """The group that exchanges compressed data: all ranks, or one rank per node."""
        own = list(range(site.comm.size))
        self._share_of_rank: list[int] = own if levels is None else site.comm.gather_json(self._among.rank)
        self._buckets: list[Bucket] = []
        self._all: Callable[[], Buckets | None] = lambda: None
        self._pieces: list[Piece] = []
        self._small: list[Tensor] = []
        """Rows that are sent dense: tensors too small to compress, and the tail of the last bucket."""
        self._changes = 0
        """How often the residuals have changed: by it the report of an earlier update knows that its norm is out of date."""
        self._compressed_last = self._exchanged = False
        self._nonfinite: Tensor | None = None
        self._unused: set[int] = set()

    # --- what a subclass supplies ---------------------------------------------------------------------------------

    @abc.abstractmethod
    def _is_dense(self, index: int) -> bool:
        """Return whether update `index` (from 1) is not compressed at all."""

    @abc.abstractmethod
    def _takes(self, param: Tensor) -> bool:
        """Return whether this tensor is worth compressing."""

    @abc.abstractmethod
    def _prepare(self, step: Step) -> list[Tensor]:
        """Return tensors to sum along with the small ones. May change gradients, but no residual."""

    @abc.abstractmethod
    def _exchange(self, step: Step, sums: Sequence[Tensor]) -> bool:
        """Compress, exchange and put back; `sums` is what `_prepare` returned, summed over ranks. Collective.

        Called when all gradients and losses are finite. Returns False, on all ranks alike and with residuals unchanged, if
        an intermediate result is not finite after all."""

    def _exchange_undecided(self, step: Step, sums: Sequence[Tensor], nonfinite: Tensor) -> Tensor | None:
        """Do the same where it is known on the device alone whether something is not finite: residuals must then not change.
        Returns whether anything is, or None, before anything was sent, where the compressor must know first."""
        return None

    @abc.abstractmethod
    def _numbers_sent(self) -> int:
        """Count the numbers that the last update sent for compressed tensors."""

    @abc.abstractmethod
    def _residuals(self) -> list[Tensor]:
        """Return what has not been sent yet, one row per compressed tensor."""

    # --- one update -----------------------------------------------------------------------------------------------

    def is_local(self) -> bool:
        return False

    def leave_shares(self) -> bool:
        return False

    def attach(self, buckets: Buckets) -> None:
        self._buckets = list(buckets)
        self._all = weakref.ref(buckets)
        pieces = [piece for bucket in buckets for piece in pieces_of(bucket)]
        self._pieces = [piece for piece in pieces if self._takes(piece.param)]
        self._small = [piece.grad for piece in pieces if not self._takes(piece.param)]
        self._small += [bucket.tail for bucket in buckets if bucket.tail.numel()]
        if not self._pieces and self._comm.rank == 0:
            largest = max(pieces, key=lambda piece: piece.grad.numel())
            shape = "x".join(map(str, largest.view.shape))
            lower = "Leave" if self.threshold is None else f'Lower {self.name}_configs["{self.threshold}"], or leave'
            log.say(
                f"strategy.{self.name} compresses nothing of this model: its largest tensor is `{largest.name}` ({shape}). "
                f"{lower} the strategy out.",
                logging.WARNING,
            )

    def compresses(self, index: int) -> bool:
        return bool(self._pieces) and not self._is_dense(index)

    def start(self, bucket: Bucket, step: Step) -> Pending:
        self._compressed_last = self.compresses(step.index)
        if not self._compressed_last:
            self._nonfinite = None
            return self._dense.start(bucket, step)
        pending = Pending(None) if self._inside is None else self._inside.all_reduce(bucket.wire)
        # Pendings are awaited in the order of their buckets, so with the last one all gradients are here. The work is not done
        # in a hook of backward, since it waits for the other ranks.
        return pending.then(lambda: self._reduce(step)) if bucket is self._buckets[-1] else pending

    def keeps_state(self) -> bool:
        return bool(self._residuals())

    def refuse_again(self) -> None:
        return None

    @torch.no_grad()
    def _reduce(self, step: Step) -> None:
        sums = self._prepare(step)
        flags = self._sum(self._small, sums, step.bad_losses)
        self._nonfinite = None
        if reads_late(flags.device):
            self._nonfinite = self._exchange_undecided(step, sums, (flags > 0).any())
        if self._nonfinite is None:
            self._reduce_decided(step, sums, NonFinite(*(bool(flag) for flag in (flags > 0).tolist())))
        else:
            self._note_unused()
            self._exchanged = True
            self._changes += 1
        if self._inside is not None:
            self._comm.bytes_sent += self._inside.bytes_sent + self._among.bytes_sent
            self._inside.bytes_sent = self._among.bytes_sent = 0.0

    def _reduce_decided(self, step: Step, sums: Sequence[Tensor], nonfinite: NonFinite) -> None:
        # An update with a bad loss on some rank is not made: what was sent for it would be lost.
        if not any(nonfinite):
            self._note_unused()
            if not self._exchange(step, sums):
                nonfinite = NonFinite(gradients=True, losses=False)
        self._exchanged = not any(nonfinite)
        if nonfinite.gradients:
            self._mark_nonfinite()
        elif nonfinite.losses:
            torch._foreach_zero_([bucket.flat for bucket in self._buckets])  # the alarm reports the reason to all ranks
        else:
            self._changes += 1

    def _sum(self, small: Sequence[Tensor], others: Sequence[Tensor], own_bad_losses: float | Tensor) -> Tensor:
        """Sum all tensors over ranks in place, by one collective per type; return on how many ranks the gradients were not
        finite, and on how many a loss."""
        are_finite = self._are_finite()
        own = own_bad_losses if isinstance(own_bad_losses, Tensor) else torch.full((), own_bad_losses)
        bad_losses = (own.to(are_finite.device) != 0).float()
        if self._inside is not None:  # one rank stands for its node: it needs the other ranks' losses, as their gradients
            self._inside.all_reduce(bad_losses).wait()
        nonfinite = torch.stack([(~are_finite).float(), bad_losses]).to(self._buckets[0].flat.dtype)
        sum_together([nonfinite, *small, *others], self._among)
        return nonfinite

    def _are_finite(self) -> Tensor:
        """Return whether this rank's gradients, and what was made of them so far, are finite."""
        return joined(norms_of([bucket.flat for bucket in self._buckets])).isfinite()

    def _note_unused(self) -> None:
        """Note the parameters that no rank used in this update, where the strategy allows them."""
        buckets = self._all()
        if buckets is None or buckets.tail is None or not buckets.tail.flags:
            self._unused = set()
            return
        params = [param for bucket in self._buckets for param in bucket.params]
        self._unused = {id(param) for param, count in zip(params, buckets.use_counts(), strict=True) if not count}

    def _mark_nonfinite(self) -> None:
        """Fill each parameter's gradient with NaN if some rank's is not finite, else with 0.

        Gradients are then equal on all ranks, which skip or stop alike, as the strategy says."""
        views = [view for bucket in self._buckets for view in bucket.views]
        bad = torch.stack([~norm.isfinite() for norm in norms_of(views)]).float()
        self._among.all_reduce(bad).wait()
        if not bool((bad > 0).any()):  # each is finite, but the norm of all is beyond the range of their type
            bad += 1
        for view, mark in zip(views, bad.tolist(), strict=True):
            view.fill_(float("nan") if mark else 0.0)

    # --- what the step and its report read ------------------------------------------------------------------------

    def used(self, used: list[bool] | None) -> list[bool] | None:
        """Add parameters that no rank used but that received part of their residual; the answer is equal on all ranks."""
        if used is None or not self._compressed_last:
            return used
        late = {id(p.param) for p in self._pieces if id(p.param) in self._unused and bool(p.grad.any())}
        params = [param for bucket in self._buckets for param in bucket.params]
        return [is_used or id(param) in late for is_used, param in zip(used, params, strict=True)]

    def nonfinite(self) -> Tensor | None:
        return self._nonfinite

    def kept(self) -> Kept:
        at = self._changes
        return Kept(self._density(), lambda: self._residual_norm() if self._changes == at else None)

    def _density(self) -> float:
        if not self._compressed_last:
            return 1.0
        numbers = sum(row.numel() for row in self._small) + (self._numbers_sent() if self._exchanged else 0)
        return numbers / sum(bucket.wire.numel() for bucket in self._buckets)

    def _residual_norm(self) -> float:
        rows = self._residuals()
        return float(joined(norms_of(rows))) if rows else 0.0

    # --- resume ---------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state; `shares` holds what adds up over ranks, by parameter name, so that another layout can load it."""

    @abc.abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    @abc.abstractmethod
    def forget(self) -> None:
        """Drop all residuals: a checkpoint without any was loaded."""

    def _by_name(self, rows: Sequence[Tensor]) -> dict[str, Tensor]:
        return {piece.name: piece.shaped(row) for piece, row in zip(self._pieces, rows, strict=True)}

    def _put(self, rows: Sequence[Tensor], named: Mapping[str, Tensor], factor: float) -> None:
        for piece, row in zip(self._pieces, rows, strict=True):
            piece.shaped(row).copy_(named[piece.name].to(row.device))
            if factor != 1.0:
                row.mul_(factor)

    def check_state_dict(self, state: Mapping[str, Any], index: int) -> None:
        """Raise if residuals saved after update `index` do not fit this run. Nothing is changed."""
        if not any(state["shares"].values()):
            return
        if self._is_dense(index + 1):
            raise CheckpointError(
                f"it was saved after update {index}, when {self.name} compressed already, and this run's next update is dense: "
                "its residuals would never be sent. Resume with settings by which compression has begun by then."
            )
        if "summed_over" not in state and state["share_of_rank"] != self._share_of_rank:
            raise CheckpointError(
                f"the checkpoint's ranks kept shares {state['share_of_rank']}, one number for each rank, and these "
                f"keep {self._share_of_rank}: two_level was switched, or ranks are on other nodes. Resume as it was saved."
            )
        mine = {piece.name for piece in self._pieces}
        for key, named in state["shares"].items():
            if named and set(named) != mine:
                odd = sorted(set(named) ^ mine)
                others = " and others" if len(odd) > 3 else ""
                raise CheckpointError(
                    f"the checkpoint keeps {key} for {len(named)} compressed tensors, and this run compresses {len(mine)}; "
                    f"they differ in {', '.join(odd[:3])}{others}. Resume with the settings that saved it."
                )

    def _share_factor(self, state: Mapping[str, Any]) -> float:
        """Return the factor that turns saved shares into this rank's: 1.0 where the same ranks saved them.

        Otherwise `shares` are sums over all ranks that saved, and each rank takes an equal part. With two levels all ranks of a
        node have the same share, which the sum counted once for each of them."""
        if "summed_over" not in state:
            return 1.0
        return len(set(state["share_of_rank"])) / float(state["summed_over"]) / self._among.size
