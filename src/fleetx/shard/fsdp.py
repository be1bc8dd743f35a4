"""Sharding, stage 3: torch's fully_shard (FSDP2) divides the weights by rows; the update is made on this rank's rows.

forward   FSDP gathers the weights of a block right before its forward, and frees them after it
backward  FSDP gathers them again, and sends each rank the mean of its rows' gradients, in every micro-step
reduce    nothing is left to do: rows of gradients are in the buckets, and the tail (buffers, alarms) is sent by itself
norms     each rank sums the squares of its rows; one all-reduce of a vector with an entry per tensor tells all of them the norms
step      the optimizer trains the rows, put in the place of the parameters for the time of its step; nothing is to be sent

FSDP's messages are of all ranks, in the order of the model's blocks, and they are over when backward ends, where ours begin.
What FSDP sends is counted by the usual formulas, in the parameters' own type.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..dist.comm import Comm
from ..dist.fully_sharded import cut, division_of, gathered, is_divided, local_of, ranges_of_rows, shard_by_blocks, shown_as
from ..engine.buckets import Buckets
from ..engine.dense_reduce import ReducedInBackward
from ..engine.local_shard import LocalShard
from ..engine.modules.plain_copy import left_out
from ..engine.setup.optimizer_state import SHAPED_AS_THE_PARAMETER, Parts
from ..engine.slots import Reduce
from ..errors import ConfigError
from .divided import SHARED, DividedUpdate, Groups, is_shaped, value_of

# --- a model that is to be divided, or is already -----------------------------------------------------------------------


def refuse_unfit(params: Mapping[str, nn.Parameter]) -> None:
    """Name what fully_shard would refuse half-way, and what it would divide otherwise than is expected here."""
    dtypes = {param.dtype for param in params.values()}
    for name, param in params.items():
        if param.dim() == 0:
            raise ConfigError(f"`{name}` has no dimension that fully_shard could divide. Give it the shape (1,).")
        if not param.is_contiguous():
            raise ConfigError(f"`{name}` is not contiguous, which fully_shard needs: param.data = param.data.contiguous().")
        if len(dtypes) > 1:
            raise ConfigError(
                f"trainable parameters are of several types ({', '.join(sorted(map(str, dtypes)))}), and fully_shard reduces "
                "those of a block together. Give them one type."
            )


def refuse_other_division(params: Mapping[str, nn.Parameter], comm: Comm, device: torch.device, *, degree: int | None) -> None:
    """Refuse what the user's own fully_shard has made of the parameters, where the pipeline cannot go on from it."""
    for name, param in params.items():
        if not is_divided(param):
            raise ConfigError(
                f"`{name}` is trained, and fully_shard has left it out: each rank would train its own. Call fully_shard(...) on "
                "the whole model, after its blocks and before the optimizer is built."
            )
        if param.device != device:
            raise ConfigError(
                f"fully_shard holds `{name}` on {param.device}; this rank trains on {device}. Give it a mesh of "
                "fleet.device().type, and no offload_policy."
            )
        found = division_of(param)
        if not found.by_rows or found.shards * found.replicas != comm.size:
            raise ConfigError(
                f"`{name}` is divided in another way than by rows between neighbours of all {comm.size} ranks. Write "
                f"fully_shard(model) without shard_placement_fn, with a mesh of all ranks, in their order."
            )
        if degree is not None and degree != found.shards:
            raise ConfigError(
                f'sharding_configs["sharding_degree"] is {degree}, and the model\'s mesh divides between {found.shards} ranks. '
                "Leave sharding_degree out."
            )


def divide(
    model: nn.Module, optimizer: Optimizer, blocks: Sequence[nn.Module], comm: Comm, *, degree: int | None, device: torch.device
) -> None:
    """Call fully_shard on the blocks and the model, and put what it makes of the parameters into the optimizer's groups."""
    before = dict(model.named_parameters(remove_duplicate=False))
    shard_by_blocks(model, _unshared(model, blocks), comm, degree=degree, device=device)
    after = dict(model.named_parameters(remove_duplicate=False))
    new = {id(param): after[name] for name, param in before.items()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) in new and param in optimizer.state:
                optimizer.state[new[id(param)]] = optimizer.state.pop(param)
        group["params"] = [new.get(id(param), param) for param in group["params"]]


def _unshared(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks that share no parameter with the rest of the model: divided by themselves, others would come apart."""
    found = []
    for block in blocks:
        inside = {id(module) for module in block.modules()}
        outside = {id(p) for module in model.modules() if id(module) not in inside for p in module.parameters(recurse=False)}
        if block is not model and outside.isdisjoint(id(param) for param in block.parameters()):
            found.append(block)
    return found


def groups_of(model: nn.Module, comm: Comm) -> Groups:
    """Return the ranks that divide the model between them, as its parameters say. Every rank calls it."""
    return Groups.of(comm, next(division_of(param).shards for param in model.parameters() if is_divided(param)))


# ------------------------------------------------------------------------------------------------------------------------


@final
class ReducedByFSDP(ReducedInBackward):
    """REDUCE, where FSDP does it: starts nothing, and takes what it has left."""

    allows_unused = False

    def __init__(self, model: nn.Module, comm: Comm, *, degree: int) -> None:
        self._comm = comm
        divided = {id(param): param for param in model.parameters() if is_divided(param)}
        in_root = {id(param) for param in _root_parameters(model)}
        part = (degree - 1) / degree
        gathers = sum(param.nbytes * (1 if key in in_root else 2) for key, param in divided.items())
        reduces = sum(param.nbytes for param in divided.values() if param.requires_grad)
        replicas = comm.size // degree
        self._bytes = part * (gathers + reduces) + 2 * (replicas - 1) / replicas * reduces / degree
        """Of a micro-step: weights are gathered for the forward, those of blocks for the backward too, and gradients reduced."""
        self._buckets: Buckets | None = None
        self._handle = model.register_forward_pre_hook(_showing_hook(weakref.ref(self), weakref.ref(model)))

    def attach(self, buckets: Buckets) -> None:
        self._buckets = buckets

    def note_forward(self) -> None:
        if torch.is_grad_enabled() and self._buckets is not None:
            self._buckets.show_window()  # FSDP adds to what the window has; model.zero_grad() in between loses nothing

    def after_backward(self) -> None:
        self._comm.bytes_sent += self._bytes

    def require_done(self, missing: Sequence[str]) -> None:
        """Leave it to the alarms, which travel when backward is over: FSDP then waits for no rank."""

    def compare(self, buckets: Buckets) -> None:
        """Compare nothing: no two ranks have the same rows."""

    def give_up(self) -> None:
        self._handle.remove()


def _root_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Iterate over the parameters that the model's own call of fully_shard has left in no block."""
    yield from model.parameters(recurse=False)
    for child in model.children():
        if not _is_own_unit(child):
            yield from _root_parameters(child)


def _is_own_unit(module: nn.Module) -> bool:
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def _showing_hook(stage: Callable[[], ReducedByFSDP | None], model: Callable[[], nn.Module | None]) -> Callable[..., None]:
    """Weak: the hook outlives a discarded optimizer."""

    @left_out
    def hook(module: nn.Module, args: Any) -> None:
        found = stage()
        if found is not None and module is model():
            found.note_forward()

    return hook


@final
@dataclass(frozen=True, slots=True)
class Rows:
    """This rank's rows of one parameter, and what the optimizer trains in the parameter's place."""

    place: int
    held: LocalShard
    share: nn.Parameter
    grad: Tensor

    @property
    def param(self) -> nn.Parameter:
        return self.held.stands_for

    def follow(self) -> None:
        """Point at the parameter's memory again, where FSDP or `param.data = ...` has replaced it."""
        mine = local_of(self.param)
        if mine.data_ptr() != self.share.data_ptr():
            self.share.data = mine
            self.held.data = mine
        self.share.grad = self.grad if self.held.grad is not None else None


@final
class FullyShardedUpdate(DividedUpdate):
    """SHARD by rows of parameters: this rank has its rows of the weights alone, between two forwards."""

    holds_weights = True
    frees = False
    scatters = True

    def __init__(self, groups: Groups, model: nn.Module) -> None:
        super().__init__(groups)
        self._model = weakref.ref(model)
        self._params: list[nn.Parameter] = []
        """All of them, in the order of the buckets."""
        self._rows: list[Rows] = []
        """Those of which this rank has any."""

    # --- set up -----------------------------------------------------------------------------------------------------

    def in_buckets(self, params: Mapping[str, nn.Parameter]) -> Mapping[str, nn.Parameter]:
        return {name: LocalShard.of(param) for name, param in params.items()}

    def reduce_by(self, reduce: Reduce, *, may_miss: bool) -> Reduce:
        model = self._model()
        assert model is not None
        return ReducedByFSDP(model, self._groups.all, degree=self.shares)

    def dress(self, view: Tensor) -> Tensor:
        return view

    @torch.no_grad()
    def attach(self, buckets: Buckets, update: Optimizer, *, given: Optimizer) -> None:
        for bucket in buckets:
            self._buckets.append(bucket)
            for name, held, view in zip(bucket.names, bucket.params, bucket.views, strict=True):
                assert isinstance(held, LocalShard)
                share = nn.Parameter(held.data, requires_grad=held.requires_grad)
                self._stand_ins[id(held.stands_for)] = share
                if held.numel():
                    self._rows.append(Rows(len(self._names), held, share, view))
                self._names.append(name)
                self._params.append(held.stands_for)
        self.connect(update, given=given)

    def let_go(self) -> None:
        """Keep what gives the optimizer its state back, and not the memory of gradients: the pair has ended."""
        self._buckets, nothing = [], torch.empty(0)
        self._rows = [dataclasses.replace(rows, grad=nothing) for rows in self._rows]

    def own(self) -> Iterator[Rows]:
        yield from self._rows

    def current_norm(self) -> Tensor:
        """Measure again: a script clips and scales these gradients as whole tensors, on all ranks alike, which leaves no word."""
        return self.measure_norms()

    # --- state ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def cut_state(self) -> None:
        state, own = self._update.state, {id(rows.param) for rows in self._rows}
        for param in [param for param in state if id(param) in self._stand_ins]:
            if id(param) in own:
                state[param] = {key: _cut(key, value, param) for key, value in state[param].items()}
            else:
                del state[param]

    def give_state_back(self) -> None:
        """Show the state as divided as the parameters are, which torch's own optimizers go on with."""
        for rows in self._rows:
            held = self._update.state.get(rows.param, {})
            for key, value in held.items():
                if key in SHAPED_AS_THE_PARAMETER and isinstance(value, Tensor) and value.shape == rows.share.shape:
                    held[key] = shown_as(rows.param, value)

    @torch.no_grad()
    def whole_state(self) -> dict[Tensor, dict[str, Any]]:
        state, known = self._update.state, self._known()
        own = {rows.place for rows in self._rows}
        found: dict[Tensor, dict[str, Any]] = {}
        for place, held in sorted(known.items()):  # in one order: all ranks have the same descriptions
            param = self._params[place]
            found[param] = {key: value_of(said, param.device) for key, said in held.items() if said[0] != SHARED}
            for key, said in sorted(held.items()):
                if said[0] == SHARED:
                    value = state[param][key] if place in own else local_of(param)
                    local = value.to(dtype=getattr(torch, said[1]))
                    found[param][key] = gathered(local, param, self._comm).cpu()
        self._groups.count()
        return found

    def state_in_parts(self) -> dict[Tensor, dict[str, Any]]:
        state = self._update.state
        found: dict[Tensor, dict[str, Any]] = {}
        for place, held in self._known().items():
            param = self._params[place]
            found[param] = {
                key: parts_of(param, state[param].get(key) if param in state else None)
                if said[0] == SHARED
                else value_of(said, param.device)
                for key, said in held.items()
            }
        return found


def parts_of(param: Tensor, rows: Tensor | None) -> Parts:
    """Describe a tensor that is divided as `param` is, of which this rank has these rows; None: it has none."""
    ranges, mine = ranges_of_rows(param)
    pieces = tuple((start, stop, rows if number == mine else None) for number, (start, stop) in enumerate(ranges))
    return Parts(tuple(param.shape), param.stride(), tuple(piece for piece in pieces if piece[1] > piece[0]))


def _cut(key: str, value: Any, param: Tensor) -> Any:
    """Return this rank's rows of one value of a parameter's state; what has not its shape is needed whole."""
    if is_divided(value):
        return local_of(value)
    return cut(value, param).clone() if is_shaped(key, value, param) else value
