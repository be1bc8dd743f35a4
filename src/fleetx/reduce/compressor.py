"""REDUCE by a compressor: at the update boundary, on true gradients, with what is not sent kept for later.

    dense updates   as without a compressor, bit for bit
    afterwards      1  one all-reduce: was a gradient or a loss not finite anywhere? and small tensors, buffers, alarms
                    2  not finite: all ranks hand on NaN where it was, and nothing that is kept has changed
                    3  finite: each tensor is compressed, exchanged, and put back; what was not sent is kept

With two levels the ranks of a node first sum their gradients, dense; nodes then take the place of ranks.
All that is kept is in units of this rank's share of the mean, so that shares add up over ranks.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor, nn

from ..dist.comm import Comm, Pending
from ..dist.nodes import between_nodes
from ..engine.bucket import Bucket, in_memory_order
from ..engine.dense import DenseAllReduce
from ..engine.norms import joined, norms_of
from ..engine.slots import Kept, Site, Step
from ..errors import CheckpointError

if TYPE_CHECKING:
    from ..engine.buckets import Buckets


# One parameter's gradient as a row of memory: what compressors keep, and what they read of weights, is in its order.


@final
@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One parameter's gradient, as a row of its bucket's memory."""

    name: str
    param: nn.Parameter
    view: Tensor
    """The gradient as `param.grad` shows it. Its strides are those that the parameter had at the start, whatever came later."""
    grad: Tensor
    bucket: Bucket
    offset: int
    """Where the row begins in the bucket."""

    def shaped(self, row: Tensor) -> Tensor:
        """A row in the same order of memory, shaped as the gradient is."""
        return torch.as_strided(row, self.view.shape, self.view.stride(), int(row.storage_offset()))

    def weights(self) -> Tensor:
        """The parameter as a row in the order of the gradient's; a copy where it lies otherwise in memory."""
        param = self.param.detach()
        if param.stride() == self.view.stride():
            return in_memory_order(param)
        row = torch.empty(param.numel(), dtype=param.dtype, device=param.device)
        self.shaped(row).copy_(param)
        return row


def pieces_of(bucket: Bucket) -> list[Piece]:
    rows = bucket.flat.split([p.numel() for p in bucket.params])
    offsets = [int(row.storage_offset()) for row in rows]
    parts = zip(bucket.names, bucket.params, bucket.views, rows, offsets, strict=True)
    return [Piece(name, param, view, row, bucket, offset) for name, param, view, row, offset in parts]


# ----------------------------------------------------------------------------------------------------------------------


class Trouble(NamedTuple):
    """What was not finite, on some rank; the same on all."""

    gradients: bool
    losses: bool


def sum_together(tensors: Sequence[Tensor], comm: Comm) -> None:
    """Over ranks, in place, by one collective for each type: in the same order on all of them, since models are equal."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        joint = torch.cat([tensor.reshape(-1) for tensor in same])
        comm.all_reduce(joint).wait()
        parts = joint.split([tensor.numel() for tensor in same])
        torch._foreach_copy_(same, [part.view(tensor.shape) for part, tensor in zip(parts, same, strict=True)])


class Compressor(abc.ABC):
    """One final subclass for each way to compress."""

    is_linear = False
    carries_tail = True
    name: ClassVar[str]
    threshold: ClassVar[str]
    """The key that says which tensors are too small."""

    def __init__(self, site: Site, *, two_level: bool) -> None:
        self._comm = site.comm
        self._dense = DenseAllReduce(site.comm)
        levels = between_nodes(site.comm) if two_level else None
        self._inside: Comm | None = None if levels is None else levels.inside
        self._among: Comm = site.comm if levels is None else levels.across
        """Those who exchange what is compressed: ranks, or nodes."""
        own = list(range(site.comm.size))
        self._share_of_rank: list[int] = own if levels is None else site.comm.gather_json(self._among.rank)
        self._buckets: list[Bucket] = []
        self._all: Callable[[], Buckets | None] = lambda: None
        self._pieces: list[Piece] = []
        self._small: list[Tensor] = []
        """Rows that travel dense: tensors too small to be worth it, and the tail of the last bucket."""
        self._changes = 0
        """How often what is kept has changed: a report of an earlier update knows by it that its time is over."""
        self._compressed_last = self._exchanged = False
        self._unused: set[int] = set()

    # --- what a subclass gives ------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _is_dense(self, index: int) -> bool:
        """Whether an update, counted from 1, is not compressed at all."""

    @abc.abstractmethod
    def _takes(self, param: Tensor) -> bool:
        """Whether this tensor is worth compressing."""

    @abc.abstractmethod
    def _prepare(self, step: Step) -> list[Tensor]:
        """What is to be summed along with the small tensors. May change gradients; nothing that is kept."""

    @abc.abstractmethod
    def _exchange(self, step: Step, sums: Sequence[Tensor]) -> bool:
        """All is finite, and `sums` is what `_prepare` gave, summed. Every rank is here. False: it is not, after all,
        on all ranks alike, and nothing that is kept has changed."""

    @abc.abstractmethod
    def _numbers_sent(self) -> int:
        """By the last update, of tensors that are compressed."""

    @abc.abstractmethod
    def _residuals(self) -> list[Tensor]: ...

    # --- one update -----------------------------------------------------------------------------------------------

    def is_local(self) -> bool:
        return False

    def attach(self, buckets: Buckets) -> None:
        self._buckets = list(buckets)
        self._all = weakref.ref(buckets)
        everything = [piece for bucket in buckets for piece in pieces_of(bucket)]
        self._pieces = [piece for piece in everything if self._takes(piece.param)]
        self._small = [piece.grad for piece in everything if not self._takes(piece.param)]
        self._small += [bucket.tail for bucket in buckets if bucket.tail.numel()]
        if not self._pieces and self._comm.rank == 0:
            largest = max(everything, key=lambda piece: piece.grad.numel())
            shape = "x".join(map(str, largest.view.shape))
            print(
                f"strategy.{self.name} compresses nothing of this model: its largest tensor is `{largest.name}` ({shape}). "
                f'Lower {self.name}_configs["{self.threshold}"], or leave the strategy out.',
                flush=True,
            )

    def compresses(self, index: int) -> bool:
        return bool(self._pieces) and not self._is_dense(index)

    def start(self, bucket: Bucket, step: Step) -> Pending:
        self._compressed_last = self.compresses(step.index)
        if not self._compressed_last:
            return self._dense.start(bucket, step)
        pending = Pending(None) if self._inside is None else self._inside.all_reduce(bucket.wire)
        # Pendings are waited for in the order of their buckets, so with the last one all gradients are here. Not in a hook
        # of backward: what follows waits for the other ranks.
        return pending.then(lambda: self._reduce(step)) if bucket is self._buckets[-1] else pending

    def keeps_state(self) -> bool:
        return bool(self._residuals())

    def refuse_again(self) -> None:
        return None

    @torch.no_grad()
    def _reduce(self, step: Step) -> None:
        sums = self._prepare(step)
        trouble = self._sum(self._small, sums, step.bad_losses)
        if not any(trouble):
            self._note_unused()
            if not self._exchange(step, sums):
                trouble = Trouble(gradients=True, losses=False)
        self._exchanged = not any(trouble)
        if trouble.gradients:
            self._show_what_is_not_finite()
        elif trouble.losses:
            torch._foreach_zero_([bucket.flat for bucket in self._buckets])  # the alarm says what is wrong, to all ranks
        else:
            self._changes += 1
        if self._inside is not None:
            self._comm.bytes_sent += self._inside.bytes_sent + self._among.bytes_sent
            self._inside.bytes_sent = self._among.bytes_sent = 0.0

    def _sum(self, small: Sequence[Tensor], others: Sequence[Tensor], own_bad_losses: float | Tensor) -> Trouble:
        """Sum all of them over ranks in place, one collective for each type. What was not finite on some rank."""
        norm = joined(norms_of([bucket.flat for bucket in self._buckets]))
        bad_losses = (torch.as_tensor(own_bad_losses, device=norm.device) != 0).float()
        if self._inside is not None:  # one rank speaks for its node: it must know of the others' losses, as of their gradients
            self._inside.all_reduce(bad_losses).wait()
        trouble = torch.stack([(~norm.isfinite()).float(), bad_losses]).to(self._buckets[0].flat.dtype)
        sum_together([trouble, *small, *others], self._among)
        return Trouble(*(bool(found) for found in (trouble > 0).tolist()))

    def _note_unused(self) -> None:
        """Parameters that no rank has used in this update, where the strategy allows them."""
        buckets = self._all()
        if buckets is None or buckets.tail is None or not buckets.tail.flags:
            self._unused = set()
            return
        params = [param for bucket in self._buckets for param in bucket.params]
        self._unused = {id(param) for param, count in zip(params, buckets.use_counts(), strict=True) if not count}

    def _show_what_is_not_finite(self) -> None:
        """NaN in each parameter's gradient where some rank has no finite one, 0 elsewhere: equal on all ranks, which then
        skip or stop, as the strategy says, by what they see."""
        views = [view for bucket in self._buckets for view in bucket.views]
        bad = torch.stack([~norm.isfinite() for norm in norms_of(views)]).float()
        self._among.all_reduce(bad).wait()
        if not bool((bad > 0).any()):  # each is finite, and together they are beyond the range of their type
            bad += 1
        for view, mark in zip(views, bad.tolist(), strict=True):
            view.fill_(float("nan") if mark else 0.0)

    # --- what others ask ------------------------------------------------------------------------------------------

    def used(self, used: list[bool] | None) -> list[bool] | None:
        """A parameter that no rank used still gets what was kept back for it, if something was: all ranks see the same."""
        if used is None or not self._compressed_last:
            return used
        late = {id(p.param) for p in self._pieces if id(p.param) in self._unused and bool(p.grad.any())}
        params = [param for bucket in self._buckets for param in bucket.params]
        return [given or id(param) in late for given, param in zip(used, params, strict=True)]

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
        """Under `shares` what adds up over ranks; by name, so that another layout can load it."""

    @abc.abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    @abc.abstractmethod
    def forget(self) -> None:
        """Keep nothing: a state without any was loaded."""

    def _by_name(self, rows: Sequence[Tensor]) -> dict[str, Tensor]:
        return {piece.name: piece.shaped(row) for piece, row in zip(self._pieces, rows, strict=True)}

    def _put(self, rows: Sequence[Tensor], named: Mapping[str, Tensor], factor: float) -> None:
        for piece, row in zip(self._pieces, rows, strict=True):
            piece.shaped(row).copy_(named[piece.name].to(row.device))
            if factor != 1.0:
                row.mul_(factor)

    def check_state_dict(self, state: Mapping[str, Any], index: int) -> None:
        """Raise if what was kept after update `index` is not for this run. Nothing is changed."""
        if not any(state["shares"].values()):
            return
        if self._is_dense(index + 1):
            raise CheckpointError(
                f"it was saved after update {index}, when {self.name} compressed already, and this run's next update is dense: "
                "what was kept back would lie idle. Resume with settings by which compression has begun by then."
            )
        if "summed_over" not in state and state["share_of_rank"] != self._share_of_rank:
            raise CheckpointError(
                f"the checkpoint's ranks kept shares {state['share_of_rank']}, one number for each rank, and these "
                f"keep {self._share_of_rank}: two_level was switched, or ranks are on other nodes. Resume as it was saved."
            )
        mine = {piece.name for piece in self._pieces}
        for what, named in state["shares"].items():
            if named and set(named) != mine:
                odd = sorted(set(named) ^ mine)
                others = " and others" if len(odd) > 3 else ""
                raise CheckpointError(
                    f"the checkpoint keeps {what} for {len(named)} compressed tensors, and this run compresses {len(mine)}; "
                    f"they differ in {', '.join(odd[:3])}{others}. Resume with the settings that saved it."
                )

    def _share_factor(self, state: Mapping[str, Any]) -> float:
        """Saved by other ranks than load it: `shares` then are sums over all ranks that saved. Equal parts for all who are here.

        With two levels all ranks of a node have the same share, which was counted for each of them."""
        if "summed_over" not in state:
            return 1.0
        return len(set(state["share_of_rank"])) / float(state["summed_over"]) / self._among.size
