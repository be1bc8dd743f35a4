"""Sharding, stage 1: each rank has the optimizer's state of its share of every bucket, and makes that share of the update.

reduce   each bucket is sent during backward, every part of it to the rank that owns it, which adds the ranks' gradients in order
norms    each rank sums the squares of its ranges; one all-reduce of a vector with an entry per tensor tells all of them the norms
step     the optimizer trains views of the owned ranges, put in the place of the parameters for the time of its step
gather   the owners' new weights are sent to all, bucket by bucket

Together that is what an all-reduce sends. The ranks' weights are equal to the bit after each update: each element has one owner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..dist.comm import Pending
from ..engine.bucket import Bucket, in_memory_order, view_like
from ..engine.buckets import Buckets
from ..engine.dense_reduce import KeepsNothing
from ..engine.gradient_share import GradientShare, make_share
from ..engine.setup.optimizer_state import Parts
from ..engine.setup.own_optimizer import Update
from ..engine.slots import Reduce, Step
from ..errors import ConfigError
from .divided import SHARED, DividedUpdate, Groups, is_shaped, value_of
from .ranges import Piece, Range, pieces_of, ranges_of

IN_FLIGHT = 2
"""Buckets under way at once, each with a buffer of its size for what comes in: more would cost the memory that sharding saves."""


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """What is kept of a bucket after its pair has ended: enough to gather the optimizer's state."""

    params: list[nn.Parameter]
    first_place: int
    share_numel: int
    device: torch.device


@final
class Once:
    """A collective that is awaited where memory is needed, and again at the end, and finished once."""

    def __init__(self, pending: Pending, finish: Callable[[], None]) -> None:
        self._pending: Pending | None = pending
        self._finish = finish

    def wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()
            self._finish()


@final
class ScatterReduce(KeepsNothing):
    """REDUCE that leaves the mean of each share with its owner alone."""

    is_linear = False  # what another rank owns is no gradient any more: nothing may be added to it and sent again
    carries_tail = False

    def __init__(self, groups: Groups, inner: Reduce) -> None:
        self._groups, self.wire_dtype = groups, inner.wire_dtype
        self._under_way: list[Once] = []

    def start(self, bucket: Bucket, step: Step) -> Pending:
        # Every rank starts its buckets in the same order, so a wait for an earlier one ends: it needs no later one.
        while len(self._under_way) >= IN_FLIGHT:
            self._under_way.pop(0).wait()
        row, own = bucket.wire, bucket.reduced
        sent = row if self.wire_dtype is None else row.to(self.wire_dtype)

        def finish() -> None:
            self._add_across(own)
            bucket.give_back()

        once = Once(self._groups.inside.reduce_scatter(sent, own), finish)
        self._groups.count()
        self._under_way.append(once)
        return Pending(None, once.wait)

    def _add_across(self, own: Tensor) -> None:
        """Add the other sets' sums of the same share. All ranks come here bucket by bucket, in one order."""
        if self._groups.across is not None:
            narrow = own if self.wire_dtype is None else own.to(self.wire_dtype)
            self._groups.across.all_reduce(narrow).wait()
            if narrow is not own:
                own.copy_(narrow)
            self._groups.count()


@final
class ShardedUpdate(DividedUpdate):
    """SHARD by ranges of flat buckets: weights stay whole on every rank."""

    def __init__(self, groups: Groups, *, frees: bool = False, merges_shares: bool = False) -> None:
        """Divide by these groups. `frees`: each rank keeps its share of the gradients alone (stage 2); `merges_shares`: inside a
        merge window too."""
        super().__init__(groups)
        self.frees, self.scatters, self.merges_shares = frees, False, merges_shares
        self._layouts: list[Layout] = []
        self._ranges: list[list[Range]] = []
        """Of all ranks, bucket by bucket."""
        self._pieces: list[list[Piece]] = []
        """Of this rank, bucket by bucket."""
        self._range_of: dict[int, Range] = {}
        """What this rank owns of each parameter, by its id."""

    # --- set up -----------------------------------------------------------------------------------------------------

    def reduce_by(self, reduce: Reduce, *, may_miss: bool) -> Reduce:
        by_itself = self._groups.across is None and not may_miss and reduce.leave_shares()
        self.scatters = reduce.is_plain_sum or by_itself
        if self.frees and not self.scatters:
            raise ConfigError(
                "strategy.sharding of stage 2 keeps a share of the gradients on each rank, and this strategy's way to reduce "
                'leaves the whole mean on all of them. Write strategy.sharding_configs = {"stage": 1} beside it.'
            )
        if self.merges_shares and not reduce.is_plain_sum:
            raise ConfigError(
                "merge_sharded adds up shares that are reduced in every micro-step, and quantized_allreduce keeps what an update "
                "has not sent. Leave merge_sharded out beside it: the window then keeps whole buckets and is sent once."
            )
        return ScatterReduce(self._groups, reduce) if reduce.is_plain_sum else reduce

    def in_buckets(self, params: Mapping[str, nn.Parameter]) -> Mapping[str, nn.Parameter]:
        return params

    def dress(self, view: Tensor) -> Tensor:
        return make_share(view, self) if self.scatters else view

    @torch.no_grad()
    def attach(self, buckets: Buckets, update: Optimizer, *, given: Optimizer) -> None:
        place = 0
        for bucket in buckets:
            numels = [param.numel() for param in bucket.params]
            ranges = ranges_of(numels, share=bucket.share_numel, ranks=self._comm.size, first_place=place)
            own = [one for one in ranges if one.rank == self._comm.rank]
            self._buckets.append(bucket)
            self._layouts.append(Layout(bucket.params, place, bucket.share_numel, bucket.flat.device))
            self._ranges.append(ranges)
            self._pieces.append(pieces_of(bucket, own, first_place=place))
            self._names += bucket.names
            for number, (name, view) in enumerate(zip(bucket.names, bucket.views, strict=True), place):
                if isinstance(view, GradientShare):
                    view.place, view.name, view.allocate = number, name, bucket.allocate
                    owned = bucket.owned(number - place)
                    view.own = bucket.reduced[slice(*owned[0])] if owned else None
            place += len(numels)
        for bucket in buckets:
            for param in bucket.params:
                self._stand_ins[id(param)] = nn.Parameter(param.data.new_empty(0))
        self._stand_ins |= {id(piece.param): piece.share for piece in self.own()}
        self._range_of = {id(piece.param): piece.range for piece in self.own()}
        if isinstance(update, Update):
            update.shares = self
        self.connect(update, given=given)

    def let_go(self) -> None:
        """Keep what gives the optimizer its whole state back, and not the memory of gradients: the pair has ended."""
        self._buckets, nothing = [], torch.empty(0)
        self._pieces = [[dataclasses.replace(piece, grad=nothing) for piece in pieces] for pieces in self._pieces]

    def own(self) -> Iterator[Piece]:
        for pieces in self._pieces:
            yield from pieces

    def before_step(self) -> None:
        """Refuse parameters laid out otherwise than when they were divided. Every rank looks at all, also at what others own."""
        for bucket in self._buckets:
            for name, param, view in zip(bucket.names, bucket.params, bucket.views, strict=True):
                if param.stride() != view.stride() and _order(param) != _order(view):
                    raise ConfigError(
                        f"`{name}` is laid out otherwise in memory than in fleet.distribute(...), and strategy.sharding divides "
                        "memory. Write model.to(memory_format=...) before fleet.distribute(...), or call that again after it."
                    )

    def after_step(self) -> None:
        """Send what this rank has updated, and take what the others have. Every rank is here, with the buckets in one order."""
        under_way: list[Pending] = []
        for number, bucket in enumerate(self._buckets):
            while len(under_way) >= IN_FLIGHT:
                under_way.pop(0).wait()
            under_way.append(self._gather_bucket(number, bucket))
        for pending in under_way:
            pending.wait()
        self._groups.count()
        # The optimizer has changed shares, which are other tensors: a backward through an older graph must see the change.
        torch.autograd.graph.increment_version([param for bucket in self._buckets for param in bucket.params])

    def _gather_bucket(self, number: int, bucket: Bucket) -> Pending:
        first = self._comm.rank * bucket.share_numel
        own = bucket.flat.new_zeros(bucket.share_numel)
        row = bucket.flat.new_empty(bucket.share_numel * self._comm.size)
        pieces = self._pieces[number]
        if pieces:
            places = [own[piece.range.offset - first :][: piece.share.numel()] for piece in pieces]
            torch._foreach_copy_(places, [piece.share.data for piece in pieces])

        def unpack() -> None:
            first_place = self._layouts[number].first_place
            foreign = [one for one in self._ranges[number] if one.rank != self._comm.rank]
            if foreign:
                params = [bucket.params[one.place - first_place] for one in foreign]
                mine = [in_memory_order(p)[one.start : one.stop] for p, one in zip(params, foreign, strict=True)]
                torch._foreach_copy_(mine, [row[one.offset :][: one.stop - one.start] for one in foreign])

        return self._comm.all_gather_into(row, own).then(torch.no_grad()(unpack))

    # --- whole tensors, for a rule that needs them ------------------------------------------------------------------

    def gather_whole(
        self, parts: Mapping[int, Tensor], *, among: Sequence[Tensor], wanted: Collection[int], dtype: torch.dtype
    ) -> dict[int, Tensor]:
        # Every rank passes the buckets in one order, and skips the same ones: `among` is the same on all.
        ids, found, under_way = {id(param) for param in among}, dict[int, Tensor](), list[Pending]()
        wanted = ids.intersection(wanted)
        for number, bucket in enumerate(self._buckets):
            if not any(id(param) in ids for param in bucket.params):
                continue
            while len(under_way) >= IN_FLIGHT:
                under_way.pop(0).wait()
            under_way.append(self._gather_parts(number, bucket, parts, wanted=wanted, dtype=dtype, found=found))
        for pending in under_way:
            pending.wait()
        self._groups.count()
        return found

    def _gather_parts(
        self,
        number: int,
        bucket: Bucket,
        parts: Mapping[int, Tensor],
        *,
        wanted: Collection[int],
        dtype: torch.dtype,
        found: dict[int, Tensor],
    ) -> Pending:
        first = self._comm.rank * bucket.share_numel
        own = bucket.flat.new_zeros(bucket.share_numel, dtype=dtype)
        row = bucket.flat.new_empty(bucket.share_numel * self._comm.size, dtype=dtype)
        for piece in self._pieces[number]:
            if id(piece.param) in parts:
                own[piece.range.offset - first :][: piece.share.numel()].copy_(parts[id(piece.param)])

        def unpack() -> None:
            found.update({id(param): self._assembled(number, param, row) for param in bucket.params if id(param) in wanted})

        return self._comm.all_gather_into(row, own).then(unpack)

    def own_part(self, param: Tensor, whole: Tensor) -> Tensor | None:
        mine = self._range_of.get(id(param))
        if mine is None:
            return None
        laid_out = whole if whole.stride() == param.stride() else torch.empty_like(param, dtype=whole.dtype).copy_(whole)
        return in_memory_order(laid_out)[mine.start : mine.stop]

    # --- state ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def cut_state(self) -> None:
        state = self._update.state
        for param in [param for param in state if id(param) in self._stand_ins]:
            if id(param) in self._range_of:
                state[param] = _cut(state[param], param, self._range_of[id(param)])
            else:
                del state[param]

    def give_state_back(self) -> None:
        """Give the optimizer its whole state back, on the parameters' devices. Every rank is here."""
        whole = self.whole_state()
        for param, held in whole.items():
            self._update.state[param] = {k: v.to(param.device) if is_shaped(k, v, param) else v for k, v in held.items()}

    def whole_state(self) -> dict[Tensor, dict[str, Any]]:
        known = self._known()
        found: dict[Tensor, dict[str, Any]] = {}
        for number, layout in enumerate(self._layouts):
            held_by = {param: known[i] for i, param in enumerate(layout.params, layout.first_place) if i in known}
            for param, held in held_by.items():
                found[param] = {key: value_of(said, param.device) for key, said in held.items() if said[0] != SHARED}
            kinds = dict.fromkeys((k, said[1]) for held in held_by.values() for k, said in held.items() if said[0] == SHARED)
            for key, dtype in kinds:  # in one order: all ranks have the same descriptions
                row = self._gather_key(number, layout, key, getattr(torch, dtype))
                for param, held in held_by.items():
                    if held.get(key) == [SHARED, dtype]:
                        found[param][key] = self._assembled(number, param, row).cpu().contiguous()
        return {param: found[param] for layout in self._layouts for param in layout.params if param in found}

    def state_in_parts(self) -> dict[Tensor, dict[str, Any]]:
        known = self._known()
        mine = {(piece.place, piece.range.start): piece for piece in self.own()} if self._writes else {}
        found: dict[Tensor, dict[str, Any]] = {}
        for layout, ranges in zip(self._layouts, self._ranges, strict=True):
            for place, param in enumerate(layout.params, layout.first_place):
                pieces = [(one.start, one.stop, mine.get((place, one.start))) for one in ranges if one.place == place]
                if place in known:
                    found[param] = {key: self._in_parts(key, said, param, pieces) for key, said in known[place].items()}
        return found

    def _in_parts(self, key: str, said: Sequence[Any], param: Tensor, pieces: Sequence[tuple[int, int, Piece | None]]) -> Any:
        if said[0] != SHARED:
            return value_of(said, param.device)
        state = self._update.state
        held = [(start, stop, None if piece is None else state[piece.param][key]) for start, stop, piece in pieces]
        return Parts(tuple(param.shape), param.stride(), tuple(held))

    def _gather_key(self, number: int, layout: Layout, key: str, dtype: torch.dtype) -> Tensor:
        first = self._comm.rank * layout.share_numel
        own = torch.zeros(layout.share_numel, dtype=dtype, device=layout.device)
        for piece in self._pieces[number]:
            value = self._update.state.get(piece.param, {}).get(key)
            if isinstance(value, Tensor) and value.dtype == dtype and value.numel() == piece.share.numel():
                own[piece.range.offset - first :][: value.numel()].copy_(value)
        row = own.new_empty(layout.share_numel * self._comm.size)
        self._comm.all_gather_into(row, own).wait()
        return row

    def _assembled(self, number: int, param: Tensor, row: Tensor) -> Tensor:
        layout = self._layouts[number]
        place = layout.first_place + next(i for i, p in enumerate(layout.params) if p is param)
        flat = torch.cat([row[one.offset :][: one.stop - one.start] for one in self._ranges[number] if one.place == place])
        return view_like(flat, param.data)


def _order(tensor: Tensor) -> list[int]:
    """Return the strides that matter: those of dimensions with several elements."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _cut(held: Mapping[str, Any], param: Tensor, own: Range) -> dict[str, Any]:
    """Return this rank's share of one parameter's state; what has not its shape is needed whole."""
    cut: dict[str, Any] = {}
    for key, value in held.items():
        if is_shaped(key, value, param):
            laid_out = value if value.stride() == param.stride() else torch.empty_like(param, dtype=value.dtype).copy_(value)
            value = in_memory_order(laid_out)[own.start : own.stop].clone()
        cut[key] = value
    return cut
