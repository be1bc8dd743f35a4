"""All-reduce by blockwise integers (dist/codec.py), with error feedback: each rank owns one part of every bucket.

    add          work = gradient + residual, in the bucket's own memory
    first hop    each part is sent to its owner as integers, by all-to-all; what these miss stays in `work`
    sum          the owner adds, to its own part, those of the others in rank order, in float32
    second hop   the sum is sent to all as integers, by all-gather; what these miss stays in the owner's part of `work`
    agree        were all gradients and losses finite? Small tensors, buffers and alarms are summed exactly by the same all-reduce
    finish       `work` is the new residual, and the gradients are what was received: equal bits on all ranks

One residual serves both hops: in the parts of others it is this rank's error of the first, in its own part that of the second.
Summed over ranks it is all that no update has seen yet, in units of the mean, so that another number of ranks can share it out.

Order of the collectives, on every rank: the first hop of bucket i starts when the bucket is complete, in index order. Before it
starts the second hop of bucket i - IN_FLIGHT, which waits for that bucket's first hop alone: other ranks launch that one before
they wait for anything later, so the wait ends. Once the last bucket has left, the remaining second hops start in index order, and
then the all-reduce. A backward that fails starts no second hop more: other ranks would take it for another collective.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from ..dist.codec import Codec
from ..dist.comm import Pending
from ..dist.predicted_cost import Shape
from ..engine.bucket import Bucket, wide_type
from ..engine.buckets import norms_of
from ..engine.slots import Site, Step
from ..errors import CheckpointError
from .compressor import Compressor, NonFinite, pieces_of

if TYPE_CHECKING:
    from ..engine.buckets import Buckets

EXACT_BELOW = 2**14
"""Tensors of one dimension or none with fewer elements travel whole: norms and biases, few numbers that matter much."""
IN_FLIGHT = 3
"""Buckets whose first hop is under way before the second hop of the oldest starts: with fewer backward would wait for the link
more often, with more there would be more messages in memory."""


def travels_whole(shape: Shape) -> bool:
    """Return whether a tensor of this shape travels as it is."""
    return len(shape) < 2 and math.prod(shape) < EXACT_BELOW


def part_numel(numel: int, *, ranks: int, block: int) -> int:
    """Return the elements of the part that each rank owns, whole blocks; the last parts may be shorter, or empty."""
    return -(-numel // (ranks * block)) * block


@final
@dataclass(slots=True)
class Round:
    """One bucket on its way to the owners of its parts, and back."""

    bucket: Bucket
    work: Tensor
    """Gradient and residual, later what was not sent: the bucket's own memory, or a wider copy of 16 bits."""
    squares: list[Tensor]
    """Sums of the squares of all that becomes integers: the row of this rank, and the sum that it owns."""
    received: Tensor | None = None
    """Of the own part: one row of bytes from each rank, until they are summed."""
    first: Pending | None = None
    returned: Tensor | None = None
    """The sums of all parts, as bytes; None where the owner alone needs its own."""
    second: Pending | None = None

    def wait_for_started(self) -> None:
        for hop in (self.first, self.second):
            if hop is not None:
                hop.wait()


@final
class QuantisedReduce(Compressor):
    """Send gradients as integers to the ranks that own them, and the sums back as integers."""

    name, threshold = "quantized_allreduce", None

    def __init__(self, site: Site, codec: Codec, *, error_feedback: bool) -> None:
        super().__init__(site, two_level=False)
        self._codec, self._feeds_back = codec, error_feedback
        self._errors: list[Tensor] = []
        """The residual of each bucket, laid out as its gradients; empty before the first update."""
        self._rounds: list[Round] = []
        """Of the reduce under way, in index order."""
        self._whole: list[list[Tensor]] = []
        """The rows of each bucket that travel whole."""
        self._aside: list[list[Tensor]] = []
        """Where they wait meanwhile: in the bucket they are zeros, which cost a block nothing of its precision."""
        self._leaves_shares = False
        """Under sharding the owner of a part updates it: there is no second hop."""

    def attach(self, buckets: Buckets) -> None:
        for bucket in buckets:  # views need memory to be made, which sharding frees
            bucket.allocate()
        super().attach(buckets)
        for bucket in buckets:
            self._whole.append([piece.grad for piece in pieces_of(bucket) if not self._takes(piece.param)])
        self._aside = [[torch.empty_like(row) for row in rows] for rows in self._whole]
        tails = [bucket.tail for bucket in buckets if bucket.tail.numel()]
        self._small = [row for rows in self._aside for row in rows] + tails
        for bucket in buckets:
            bucket.free()

    def leave_shares(self) -> bool:
        # The tail would lie behind memory that sharding frees.
        self._leaves_shares, self.carries_tail = True, False
        return True

    def compresses(self, index: int) -> bool:
        return self._leaves_shares or (super().compresses(index) and (self._comm.size > 1 or bool(self._errors)))

    def _is_dense(self, index: int) -> bool:
        return False

    def _takes(self, param: Tensor) -> bool:
        return not travels_whole(param.shape)

    def _numbers_sent(self) -> int:
        one_way = sum(self._comm.size * self._codec.nbytes(self._part_numel(bucket)) for bucket in self._buckets)
        return one_way // 8 if self._leaves_shares else one_way // 4

    def _residuals(self) -> list[Tensor]:
        return self._errors

    # --- one update -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def start(self, bucket: Bucket, step: Step) -> Pending:
        self._compressed_last = self.compresses(step.index)
        if not self._compressed_last:
            self._nonfinite = None
            return self._dense.start(bucket, step)
        if bucket.index == 0:
            self._rounds = []
        if bucket.index >= IN_FLIGHT:
            self._send_back(self._rounds[bucket.index - IN_FLIGHT])
        self._rounds.append(self._send(bucket))
        if bucket is self._buckets[-1]:
            return Pending(None, lambda: self._reduce(step))
        return Pending(None, lambda: self._await(bucket.index))

    def _await(self, index: int) -> None:
        """Go on with a bucket once all have left; before, a backward has failed, and what was started is waited for."""
        if len(self._rounds) == len(self._buckets):
            self._send_back(self._rounds[index])
        else:
            self._rounds[index].wait_for_started()

    def _send(self, bucket: Bucket) -> Round:
        """Start the first hop."""
        index, wide = bucket.index, wide_type(bucket.flat.dtype)
        if self._whole[index]:
            torch._foreach_copy_(self._aside[index], self._whole[index])
            torch._foreach_zero_(self._whole[index])
        if self._feeds_back and not self._errors:
            self._make_room()
        work = bucket.flat if bucket.flat.dtype == wide else bucket.flat.to(wide)
        if self._feeds_back:
            work.add_(self._errors[index])
        begun = Round(bucket, work, squares=[work.dot(work)])
        if self._comm.size > 1:
            self._start_first_hop(begun)
        return begun

    def _start_first_hop(self, begun: Round) -> None:
        parts, codec, rank = self._parts(begun.bucket, begun.work), self._codec, self._comm.rank
        each = codec.nbytes(self._part_numel(begun.bucket))
        sent = torch.empty(len(parts), each, dtype=torch.uint8, device=begun.work.device)
        for owner, part in enumerate(parts):
            if owner != rank:
                codec.encode(part, sent[owner], kept=part if self._feeds_back else None)
        begun.received = torch.empty_like(sent)
        begun.first = self._comm.all_to_all(sent, begun.received)

    def _send_back(self, begun: Round) -> None:
        """Sum what has come in, and start the second hop; once."""
        if begun.first is None or begun.received is None:
            return
        begun.first.wait()
        rows, begun.first, begun.received = begun.received, None, None
        codec, rank = self._codec, self._comm.rank
        own = self._parts(begun.bucket, begun.work)[rank]
        for sender, row in enumerate(rows):
            if sender != rank:
                codec.zero_nonfinite(row, own.numel())  # its sender tells, and names what of its gradients is not finite
                codec.add_decoded(row, own)
        begun.squares.append(own.dot(own))
        if self._leaves_shares:
            return
        result, begun.returned = torch.empty_like(rows[0]), torch.empty_like(rows).view(-1)
        codec.encode(own, result, kept=own if self._feeds_back else None)
        begun.second = self._comm.all_gather_into(begun.returned, result)

    def _part_numel(self, bucket: Bucket) -> int:
        if self._leaves_shares:
            return bucket.share_numel
        return part_numel(bucket.flat.numel(), ranks=self._comm.size, block=self._codec.block)

    def _parts(self, bucket: Bucket, row: Tensor) -> list[Tensor]:
        """Cut a row that is laid out as this bucket into the parts of all ranks, in rank order."""
        numel = self._part_numel(bucket)
        return [row[rank * numel : (rank + 1) * numel] for rank in range(self._comm.size)]

    def _prepare(self, step: Step) -> list[Tensor]:
        for begun in self._rounds:
            self._send_back(begun)
        return []

    def _are_finite(self) -> Tensor:
        # The guard against NaN looks at the norm of all that is received, which overflows before its numbers, and must not find
        # what is not found here: residuals would have changed for an update that is not made. Rounding at most doubles a number.
        received = 4 * self._comm.size * len(self._rounds)
        squares = [square for begun in self._rounds for square in begun.squares]
        known = [(square * received).isfinite() & square.sqrt().float().isfinite() for square in squares]  # float32: for scales
        whole = [row for rows in self._aside for row in rows]
        return torch.stack([*known, *(norm.isfinite() for norm in (norms_of(whole) if whole else []))]).all()

    def _reduce_decided(self, step: Step, sums: Sequence[Tensor], nonfinite: NonFinite) -> None:
        for begun in self._rounds:
            begun.wait_for_started()
            if any(nonfinite):
                self._put_back(begun.bucket.index)
        super()._reduce_decided(step, sums, nonfinite)
        self._end()

    def _put_back(self, index: int) -> None:
        if self._whole[index]:
            torch._foreach_copy_(self._whole[index], self._aside[index])

    def _exchange(self, step: Step, sums: Sequence[Tensor]) -> bool:
        self._finish(None)
        return True

    def _exchange_undecided(self, step: Step, sums: Sequence[Tensor], nonfinite: Tensor) -> Tensor:
        for begun in self._rounds:
            begun.wait_for_started()
        self._finish(nonfinite)
        self._end()
        return nonfinite

    def _finish(self, nonfinite: Tensor | None) -> None:
        """Keep what was not sent, and put what was received in place of the gradients. Where `nonfinite`, residuals stay."""
        for begun in self._rounds:
            if self._errors:
                self._keep(begun, nonfinite)
            parts, rank = self._parts(begun.bucket, begun.bucket.flat), self._comm.rank
            if begun.returned is None:
                parts[rank].copy_(self._parts(begun.bucket, begun.work)[rank])
            else:
                for row, part in zip(begun.returned.view(len(parts), -1), parts, strict=True):
                    self._codec.decode(row, part)
            self._put_back(begun.bucket.index)

    def _keep(self, begun: Round, nonfinite: Tensor | None) -> None:
        residual = self._parts(begun.bucket, self._errors[begun.bucket.index])
        for rank, (kept, missed) in enumerate(zip(residual, self._parts(begun.bucket, begun.work), strict=True)):
            if rank == self._comm.rank and begun.returned is None:
                missed = torch.zeros_like(missed)  # the owner has the sum itself
            kept.copy_(missed if nonfinite is None else torch.where(nonfinite, kept, missed))

    def _end(self) -> None:
        for begun in self._rounds:
            bucket = begun.bucket
            if bucket.frees:  # not earlier: until all have agreed, the residuals to come lie there
                own = self._parts(bucket, bucket.flat)[self._comm.rank]
                bucket.reduced[: own.numel()].copy_(own)
                bucket.give_back()
        self._rounds = []
        if self._comm.size == 1 and self._nonfinite is None and self._exchanged:
            self._errors = []  # of several ranks, which have all gone out now

    def _make_room(self) -> None:
        flats = [bucket.flat for bucket in self._buckets]
        self._errors = [torch.zeros(flat.numel(), dtype=wide_type(flat.dtype), device=flat.device) for flat in flats]

    # --- resume ---------------------------------------------------------------------------------------------------

    def _error_rows(self) -> list[Tensor]:
        """Return the residual of each tensor that travels as integers."""
        return [self._errors[p.bucket.index][p.offset : p.offset + p.grad.numel()] for p in self._pieces]

    def state_dict(self) -> dict[str, Any]:
        errors = self._by_name(self._error_rows()) if self._errors else {}
        return {"kind": self.name, "share_of_rank": self._share_of_rank, "shares": {"error": errors}}

    def check_state_dict(self, state: Mapping[str, Any], index: int) -> None:
        super().check_state_dict(state, index)
        if any(state["shares"].values()) and not self._feeds_back:
            raise CheckpointError(
                "the checkpoint holds what its ranks have not sent yet, and without error feedback it would be lost. Resume with "
                'strategy.quantized_allreduce_configs = {"error_feedback": True}.'
            )

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.forget()
        if any(state["shares"].values()):
            self._make_room()
            self._put(self._error_rows(), state["shares"]["error"], self._share_factor(state))

    def forget(self) -> None:
        self._changes += 1
        self._errors = []
