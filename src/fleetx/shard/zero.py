"""Sharding, stage 1: each rank has the optimizer's state of its share of every bucket, and makes that share of the update.

reduce   each bucket is sent during backward, every part of it to the rank that owns it, which adds the ranks' gradients in order
norms    each rank sums the squares of its ranges; one all-reduce of a vector with an entry per tensor tells all of them the norms
step     the optimizer trains views of the owned ranges, put in the place of the parameters for the time of its step
gather   the owners' new weights are sent to all, bucket by bucket

Together that is what an all-reduce sends. The ranks' weights are equal to the bit after each update: each element has one owner.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module

from ..dist.comm import Comm, Pending
from ..engine.bucket import Bucket, in_memory_order, view_like
from ..engine.buckets import Buckets, norms_of
from ..engine.dense_reduce import KeepsNothing
from ..engine.gradient_share import GradientShare, make_share
from ..engine.setup.optimizer_state import RESTORE, SHAPED_AS_THE_PARAMETER
from ..engine.setup.own_optimizer import Update
from ..engine.slots import Reduce, Step
from ..engine.user_loop.optimizer_hooks import may_change_gradients, refuse_before_step
from ..errors import ConfigError
from .ranges import Piece, Range, pieces_of, ranges_of

IN_FLIGHT = 2
"""Buckets under way at once, each with a buffer of its size for what comes in: more would cost the memory that sharding saves."""


@final
@dataclass(slots=True)
class Groups:
    """The ranks that divide one state between them, and those that have the same share of it."""

    all: Comm
    inside: Comm
    across: Comm | None
    """One rank of each set, where there are several; None: all ranks are one set."""

    @staticmethod
    def of(comm: Comm, degree: int | None) -> Groups:
        """Make sets of `degree` neighbours (None: one set of all ranks). Every rank calls it."""
        if degree is None or degree == comm.size:
            return Groups(comm, comm, None)
        sets = [list(range(first, first + degree)) for first in range(0, comm.size, degree)]
        across = [list(ranks) for ranks in zip(*sets, strict=True)]
        return Groups(comm, comm.subgroup(sets), comm.subgroup(across))

    def count(self) -> None:
        """Count what the sets have sent as sent by the whole group."""
        for comm in (self.inside, self.across):
            if comm is not None and comm is not self.all:
                self.all.bytes_sent += comm.bytes_sent
                comm.bytes_sent = 0.0


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
class ShardedUpdate:
    """SHARD: the ranges of this rank, and the calls that bring ranks together around them."""

    def __init__(self, groups: Groups, *, frees: bool = False) -> None:
        """Divide by these groups. `frees`: each rank keeps its share of the gradients alone (stage 2)."""
        self._groups, self._comm = groups, groups.inside
        self.rank, self.shares, self.frees = groups.inside.rank, groups.inside.size, frees
        self.scatters = False
        self.collected: dict[str, Any] | None = None
        self._shows_own_state = False
        self._buckets: list[Bucket] = []
        self._layouts: list[Layout] = []
        self._is_stepping = False
        self._ranges: list[list[Range]] = []
        """Of all ranks, bucket by bucket."""
        self._pieces: list[list[Piece]] = []
        """Of this rank, bucket by bucket."""
        self._names: list[str] = []
        self._stand_ins: dict[int, Tensor] = {}
        """What the optimizer trains in the place of each parameter, by its id: a share, or an empty tensor."""
        self._range_of: dict[int, Range] = {}
        """What this rank owns of each parameter, by its id."""
        self._squares: Tensor | None = None
        """Squared norms of the tensors just reduced, which all ranks know."""
        self._factors: Tensor | None = None
        self._unknown: set[int] = set()
        """Places of tensors that were clamped or replaced since."""

    # --- set up -----------------------------------------------------------------------------------------------------

    def reduce_by(self, reduce: Reduce, *, may_miss: bool) -> Reduce:
        by_itself = self._groups.across is None and not may_miss and reduce.leave_shares()
        self.scatters = reduce.is_plain_sum or by_itself
        if self.frees and not self.scatters:
            raise ConfigError(
                "strategy.sharding of stage 2 keeps a share of the gradients on each rank, and this strategy's way to reduce "
                'leaves the whole mean on all of them. Write strategy.sharding_configs = {"stage": 1} beside it.'
            )
        return ScatterReduce(self._groups, reduce) if reduce.is_plain_sum else reduce

    def dress(self, view: Tensor) -> Tensor:
        return make_share(view, self) if self.scatters else view

    @torch.no_grad()
    def attach(self, buckets: Buckets, update: Optimizer, *, given: Optimizer) -> None:
        self._update = update
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
        self._stand_ins |= {id(piece.param): piece.share for piece in self._own()}
        self._range_of = {id(piece.param): piece.range for piece in self._own()}
        if isinstance(update, Update):
            update.sum_over_ranks, update.shares = self._sum_over_ranks, self
        self.cut_state()
        given.__dict__[RESTORE] = self._restore_state
        refuse_before_step(given, _refuse_divided)
        self._refusal = update.register_state_dict_pre_hook(_refuse_share(weakref.ref(self)))

    def let_go(self) -> None:
        """Keep what gives the optimizer its whole state back, and not the memory of gradients: the pair has ended."""
        self._buckets, nothing = [], torch.empty(0)
        self._pieces = [[dataclasses.replace(piece, grad=nothing) for piece in pieces] for pieces in self._pieces]

    def _own(self) -> Iterator[Piece]:
        for pieces in self._pieces:
            yield from pieces

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        self._comm.all_reduce(values).wait()
        self._groups.count()
        return values

    # --- norms ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def measure_norms(self) -> Tensor:
        pieces = list(self._own())
        squares = torch.zeros(len(self._names), dtype=torch.float64, device=self._buckets[0].flat.device)
        if pieces:
            places = torch.tensor([piece.range.place for piece in pieces], device=squares.device)
            squares[places] = torch.stack([norm.double() for norm in norms_of([piece.grad for piece in pieces])]).square()
        self._squares = self._sum_over_ranks(squares)
        self._factors, self._unknown = None, set()
        return self.current_norm()

    def current_norm(self) -> Tensor:
        if self._unknown:
            raise ConfigError(
                f"the gradient of `{self._names[min(self._unknown)]}` was clamped or replaced, and strategy.clip_norm needs the "
                "norm of what it is now, of which this rank has a share alone. Keep one of them."
            )
        return self._current().sum().sqrt().to(self._buckets[0].flat.dtype)

    def _current(self) -> Tensor:
        assert self._squares is not None
        return self._squares if self._factors is None else self._squares * self._factors.square()

    def not_finite(self) -> list[str]:
        if self._squares is None:
            return []
        return [name for name, is_finite in zip(self._names, self._squares.isfinite().tolist(), strict=True) if not is_finite]

    def note_factor(self, factor: Tensor) -> None:
        self._factors = self._all_factors() * factor.double()

    def _all_factors(self) -> Tensor:
        assert self._squares is not None
        return torch.ones_like(self._squares) if self._factors is None else self._factors

    def norm_of(self, place: int) -> Tensor | None:
        return None if self._squares is None or place in self._unknown else self._current()[place].sqrt()

    def scale(self, place: int, factor: float | Tensor) -> None:
        factors = self._all_factors().clone()
        factors[place] *= factor.double() if isinstance(factor, Tensor) else factor
        self._factors = factors

    def clear(self, place: int) -> None:
        assert self._squares is not None
        self._squares = self._squares.clone()
        self._squares[place] = 0.0  # not a factor of 0: what was not finite would stay so
        self._unknown.discard(place)

    def forget(self, place: int) -> None:
        self._unknown.add(place)

    # --- the update -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None) -> None:
        if closure is not None:
            raise ConfigError(
                f"step(closure) of {type(self._update).__name__} runs the closure inside its step, where under strategy.sharding "
                "it holds shares of the parameters alone. Leave strategy.sharding out, or call step() without a closure."
            )
        self._refuse_hooks()
        self._require_same_layout()
        with _without_post_hooks(self._update) as post_hooks:
            with self._shares_in_place():
                self._is_stepping = True
                try:
                    self._update.step()
                finally:
                    self._is_stepping = False
        self._gather()
        for hook in post_hooks:  # now that the weights are whole, as a mean of the weights (EMA) needs them
            hook(self._update, (), {})

    def _require_same_layout(self) -> None:
        """Refuse parameters laid out otherwise than when they were divided. Every rank looks at all, also at what others own."""
        for bucket in self._buckets:
            for name, param, view in zip(bucket.names, bucket.params, bucket.views, strict=True):
                if param.stride() != view.stride() and _order(param) != _order(view):
                    raise ConfigError(
                        f"`{name}` is laid out otherwise in memory than in fleet.distribute(...), and strategy.sharding divides "
                        "memory. Write model.to(memory_format=...) before fleet.distribute(...), or call that again after it."
                    )

    def _refuse_hooks(self) -> None:
        """Refuse hooks of the script's own, which would find shares in the place of the parameters."""
        hooks = (self._update._optimizer_step_pre_hooks, optimizer_module._global_optimizer_pre_hooks)
        if any(map(may_change_gradients, hooks)):
            raise ConfigError(
                "a hook is registered before the optimizer's step (register_step_pre_hook), which under strategy.sharding would "
                "see this rank's share of each parameter alone. Remove it, or leave strategy.sharding out."
            )

    @contextlib.contextmanager
    def _shares_in_place(self) -> Iterator[None]:
        """Let the optimizer's groups and state hold this rank's shares; afterwards they hold the parameters again."""
        update = self._update
        whole, state = [group["params"] for group in update.param_groups], update.state
        shares: defaultdict[Tensor, Any] = defaultdict(dict)
        for piece in self._own():
            piece.follow()
            if piece.param in state:
                shares[piece.share] = state[piece.param]
        for group in update.param_groups:
            group["params"] = [self._stand_ins.get(id(param), param) for param in group["params"]]
        update.state = shares
        try:
            yield
        finally:
            for group, params in zip(update.param_groups, whole, strict=True):
                group["params"] = params
            update.state = state
            for piece in self._own():
                if piece.share in shares:
                    state[piece.param] = shares[piece.share]
                piece.share.grad = None

    def _gather(self) -> None:
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

    @contextlib.contextmanager
    def own_state(self) -> Iterator[None]:
        self._shows_own_state = True
        try:
            yield
        finally:
            self._shows_own_state = False

    @torch.no_grad()
    def whole_state_dict(self) -> dict[str, Any]:
        update, shares = self._update, self._update.state
        whole = self._whole_state()
        others = {param: held for param, held in shares.items() if id(param) not in self._stand_ins}
        update.state = defaultdict(dict, others | whole)
        try:
            with self.own_state():
                return update.state_dict()
        finally:
            update.state = shares

    def _restore_state(self) -> None:
        """Give the optimizer its whole state back, on the parameters' devices. Every rank is here."""
        whole = self._whole_state()
        self._refusal.remove()
        for param, held in whole.items():
            self._update.state[param] = {k: v.to(param.device) if _is_shaped(k, v, param) else v for k, v in held.items()}

    def _whole_state(self) -> dict[Tensor, dict[str, Any]]:
        """Gather the state of all parameters, on the CPU. Every rank is here."""
        state = self._update.state
        mine = {
            piece.range.place: {key: _described(key, value, piece) for key, value in state[piece.param].items()}
            for piece in self._own()
            if piece.param in state
        }
        known: dict[int, dict[str, list[Any]]] = {}
        for theirs in self._comm.gather_json(mine):
            known |= {int(place): held for place, held in theirs.items()}
        found: dict[Tensor, dict[str, Any]] = {}
        for number, layout in enumerate(self._layouts):
            held_by = {param: known[i] for i, param in enumerate(layout.params, layout.first_place) if i in known}
            for param, held in held_by.items():
                found[param] = {key: _value_of(said, param.device) for key, said in held.items() if said[0] != SHARED}
            kinds = dict.fromkeys((k, said[1]) for held in held_by.values() for k, said in held.items() if said[0] == SHARED)
            for key, dtype in kinds:  # in one order: all ranks have the same descriptions
                row = self._gather_key(number, layout, key, getattr(torch, dtype))
                for param, held in held_by.items():
                    if held.get(key) == [SHARED, dtype]:
                        found[param][key] = self._assembled(number, param, row).cpu().contiguous()
        return {param: found[param] for layout in self._layouts for param in layout.params if param in found}

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


SHARED = "share"


def _order(tensor: Tensor) -> list[int]:
    """Return the strides that matter: those of dimensions with several elements."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


@contextlib.contextmanager
def _without_post_hooks(optimizer: Optimizer) -> Iterator[list[Callable[..., Any]]]:
    """Let the step inside call no hook after it, and return those to be called; the global ones follow the pair's own step."""
    own, every = optimizer._optimizer_step_post_hooks, optimizer_module._global_optimizer_post_hooks
    optimizer._optimizer_step_post_hooks, optimizer_module._global_optimizer_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield list(own.values())
    finally:
        optimizer._optimizer_step_post_hooks, optimizer_module._global_optimizer_post_hooks = own, every


def _is_shaped(key: str, value: Any, param: Tensor) -> bool:
    return key in SHAPED_AS_THE_PARAMETER and isinstance(value, Tensor) and value.shape == param.shape


def _cut(held: Mapping[str, Any], param: Tensor, own: Range) -> dict[str, Any]:
    """Return this rank's share of one parameter's state; what has not its shape is needed whole."""
    cut: dict[str, Any] = {}
    for key, value in held.items():
        if _is_shaped(key, value, param):
            laid_out = value if value.stride() == param.stride() else torch.empty_like(param, dtype=value.dtype).copy_(value)
            value = in_memory_order(laid_out)[own.start : own.stop].clone()
        cut[key] = value
    return cut


def _described(key: str, value: Any, piece: Piece) -> list[Any]:
    """Return a value as it travels: a share is gathered, a number is told."""
    if isinstance(value, Tensor) and key in SHAPED_AS_THE_PARAMETER and value.numel() == piece.share.numel() and value.dim() == 1:
        return [SHARED, str(value.dtype).removeprefix("torch.")]
    if isinstance(value, Tensor) and value.numel() == 1:
        return ["tensor", value.item(), str(value.dtype).removeprefix("torch."), list(value.shape), value.device.type == "cpu"]
    if value is None or isinstance(value, bool | int | float):
        return ["number", value]
    raise ConfigError(f"the optimizer keeps `{key}` of type {type(value).__name__} for a parameter, which ranks cannot exchange.")


def _value_of(said: Sequence[Any], device: torch.device) -> Any:
    if said[0] == "number":
        return said[1]
    _, value, dtype, shape, on_cpu = said
    return torch.full(shape, value, dtype=getattr(torch, dtype), device="cpu" if on_cpu else device)


def _refuse_divided(optimizer: Optimizer, *_: Any) -> None:
    """Refuse a step by this rank's share of the state, outside of the pair that has divided it."""
    restore = optimizer.__dict__.get(RESTORE)
    if restore is not None and not restore.__self__._is_stepping:
        raise ConfigError(
            f"this {type(optimizer).__name__} has this rank's share of its state alone, since strategy.sharding has divided it. "
            "Call fleet.distribute(model, optimizer) with it again on every rank, which gives it the whole, or make a new one."
        )


def _refuse_share(owner: Callable[[], ShardedUpdate | None]) -> Callable[[Optimizer], None]:
    def refuse(_: Optimizer) -> None:
        found = owner()
        if found is not None and not found._shows_own_state:
            raise ConfigError(
                "state_dict() of the optimizer that was given to fleet.distribute(...) would be this rank's share alone, under "
                "strategy.sharding. Call state_dict() of the optimizer that it returned, on every rank."
            )

    return refuse
