"""A divided update: norms of whole tensors from those of shares, and a step of the optimizer on this rank's shares alone.

The two that divide differ in what a share is: a range of a flat bucket (zero.py), or rows of a parameter (fsdp.py).
"""

from __future__ import annotations

import abc
import contextlib
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module

from ..dist.comm import Comm
from ..engine.bucket import Bucket
from ..engine.buckets import norms_of
from ..engine.setup.optimizer_state import RESTORE, SHAPED_AS_THE_PARAMETER
from ..engine.setup.own_optimizer import Update
from ..engine.user_loop.optimizer_hooks import may_change_gradients, refuse_before_step
from ..errors import ConfigError


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


class Owned(Protocol):
    """What this rank has of a parameter, and what the optimizer trains in its place."""

    @property
    def place(self) -> int:
        """Return that of the parameter among all, in the order of the buckets."""

    @property
    def param(self) -> nn.Parameter: ...
    @property
    def share(self) -> nn.Parameter: ...
    @property
    def grad(self) -> Tensor:
        """Return where the mean of this share's gradient lies."""

    def follow(self) -> None:
        """Point at the parameter's memory again, where it was replaced; show the gradient if there is one."""


class DividedUpdate(abc.ABC):
    """Base of SHARD: the shares of this rank, and the calls that bring ranks together around them."""

    holds_weights = False
    merges_shares = False

    def __init__(self, groups: Groups) -> None:
        self._groups, self._comm = groups, groups.inside
        self.rank, self.shares = groups.inside.rank, groups.inside.size
        self.collected: dict[str, Any] | None = None
        self._shows_own_state = False
        self._is_stepping = False
        self._buckets: list[Bucket] = []
        self._names: list[str] = []
        self._stand_ins: dict[int, Tensor] = {}
        """What the optimizer trains in the place of each parameter, by its id: a share, or an empty tensor."""
        self._squares: Tensor | None = None
        """Squared norms of the tensors just reduced, which all ranks know."""
        self._factors: Tensor | None = None
        self._unknown: set[int] = set()
        """Places of tensors that were clamped or replaced since."""

    # --- what a division supplies ---------------------------------------------------------------------------------

    @abc.abstractmethod
    def own(self) -> Iterator[Owned]:
        """Iterate over what this rank owns."""

    @abc.abstractmethod
    def cut_state(self) -> None: ...

    @abc.abstractmethod
    def whole_state(self) -> dict[Tensor, dict[str, Any]]:
        """Gather the state of all parameters, on the CPU. Every rank is here."""

    @abc.abstractmethod
    def state_in_parts(self) -> dict[Tensor, dict[str, Any]]:
        """Return the state of all parameters, with `Parts` in the place of what is divided. Every rank is here."""

    @abc.abstractmethod
    def give_state_back(self) -> None:
        """Give the optimizer state that it can train the parameters by, without this pair. Every rank is here."""

    def before_step(self) -> None:  # noqa: B027 - not every division rests on the layout of memory
        """Refuse parameters that were laid out otherwise."""

    def after_step(self) -> None:  # noqa: B027 - nothing is to be sent where the next forward gathers the weights
        """Bring the new weights to all ranks that hold them."""

    # --- set up -----------------------------------------------------------------------------------------------------

    def connect(self, update: Optimizer, *, given: Optimizer) -> None:
        """Divide the state, and let the optimizer ask for norms of whole tensors. `given`: to fleet.distribute."""
        self._update = update
        if isinstance(update, Update):
            update.sum_over_ranks = self.sum_over_ranks
        self.cut_state()
        given.__dict__[RESTORE] = self._restore_state
        refuse_before_step(given, _refuse_divided)
        self._refusal = update.register_state_dict_pre_hook(_refuse_share(weakref.ref(self)))
        self._copied = [held.__dict__ for held in (given, update)]
        for held in self._copied:
            held[COPY] = _refuse_copy

    def _restore_state(self) -> None:
        self.give_state_back()
        self._refusal.remove()
        for held in self._copied:
            held.pop(COPY, None)

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        self._comm.all_reduce(values).wait()
        self._groups.count()
        return values

    # --- norms ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def measure_norms(self) -> Tensor:
        pieces = list(self.own())
        squares = torch.zeros(len(self._names), dtype=torch.float64, device=self._buckets[0].flat.device)
        if pieces:
            places = torch.tensor([piece.place for piece in pieces], device=squares.device)
            squares[places] = torch.stack([norm.double() for norm in norms_of([piece.grad for piece in pieces])]).square()
        self._squares = self.sum_over_ranks(squares)
        self._factors, self._unknown = None, set()
        return self._global_norm()

    def current_norm(self) -> Tensor:
        if self._unknown:
            raise ConfigError(
                f"the gradient of `{self._names[min(self._unknown)]}` was clamped or replaced, and strategy.clip_norm needs the "
                "norm of what it is now, of which this rank has a share alone. Keep one of them."
            )
        return self._global_norm()

    def _global_norm(self) -> Tensor:
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
        if self._squares is None:  # buffers are zeroed before the first reduce
            return
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
        self.before_step()
        with _without_post_hooks(self._update) as post_hooks:
            with self._shares_in_place():
                self._is_stepping = True
                try:
                    self._update.step()
                finally:
                    self._is_stepping = False
        self.after_step()
        for hook in post_hooks:  # now that the weights are whole, as a mean of the weights (EMA) needs them
            hook(self._update, (), {})

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
        for piece in self.own():
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
            for piece in self.own():
                if piece.share in shares:
                    state[piece.param] = shares[piece.share]
                piece.share.grad = None

    # --- state ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def own_state(self) -> Iterator[None]:
        self._shows_own_state = True
        try:
            yield
        finally:
            self._shows_own_state = False

    @torch.no_grad()
    def whole_state_dict(self) -> dict[str, Any]:
        return self._state_dict_of(self.whole_state())

    @torch.no_grad()
    def parts_state_dict(self) -> dict[str, Any]:
        return self._state_dict_of(self.state_in_parts())

    def _known(self) -> dict[int, dict[str, list[Any]]]:
        """Return what all ranks keep of each parameter, by its place: numbers themselves, and types of shares."""
        state = self._update.state
        mine = {
            owned.place: {key: described(key, value, owned.share) for key, value in state[owned.param].items()}
            for owned in self.own()
            if owned.param in state
        }
        known: dict[int, dict[str, list[Any]]] = {}
        for theirs in self._comm.gather_json(mine):
            known |= {int(place): held for place, held in theirs.items()}
        return known

    @property
    def _writes(self) -> bool:
        """Whether this rank writes its shares: of several sets that hold the same, the first does."""
        return self._groups.across is None or self._groups.across.rank == 0

    def _state_dict_of(self, whole: Mapping[Tensor, dict[str, Any]]) -> dict[str, Any]:
        update, shares = self._update, self._update.state
        others = {param: held for param, held in shares.items() if id(param) not in self._stand_ins}
        update.state = defaultdict(dict, {**others, **whole})
        try:
            with self.own_state():
                return update.state_dict()
        finally:
            update.state = shares


@contextlib.contextmanager
def _without_post_hooks(optimizer: Optimizer) -> Iterator[list[Callable[..., Any]]]:
    """Let the step inside call no hook after it, and return those to be called; the global ones follow the pair's own step."""
    own, every = optimizer._optimizer_step_post_hooks, optimizer_module._global_optimizer_post_hooks
    optimizer._optimizer_step_post_hooks, optimizer_module._global_optimizer_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield list(own.values())
    finally:
        optimizer._optimizer_step_post_hooks, optimizer_module._global_optimizer_post_hooks = own, every


# --- the optimizer's state, as it travels between ranks ----------------------------------------------------------------

SHARED = "share"


def is_shaped(key: str, value: Any, param: Tensor) -> bool:
    return key in SHAPED_AS_THE_PARAMETER and isinstance(value, Tensor) and value.shape == param.shape


def described(key: str, value: Any, share: Tensor) -> list[Any]:
    """Return a value as it travels: a share is gathered, a number is told."""
    if isinstance(value, Tensor) and key in SHAPED_AS_THE_PARAMETER and value.shape == share.shape:
        return [SHARED, str(value.dtype).removeprefix("torch.")]
    if isinstance(value, Tensor) and value.numel() == 1:
        return ["tensor", value.item(), str(value.dtype).removeprefix("torch."), list(value.shape), value.device.type == "cpu"]
    if value is None or isinstance(value, bool | int | float):
        return ["number", value]
    raise ConfigError(f"the optimizer keeps `{key}` of type {type(value).__name__} for a parameter, which ranks cannot exchange.")


def value_of(said: Sequence[Any], device: torch.device) -> Any:
    if said[0] == "number":
        return said[1]
    _, value, dtype, shape, on_cpu = said
    return torch.full(shape, value, dtype=getattr(torch, dtype), device="cpu" if on_cpu else device)


COPY = "__getstate__"
"""What torch.save, pickle and copy ask an object for, on itself before its class."""


def _refuse_copy() -> NoReturn:
    raise ConfigError(
        "torch.save or a copy of the optimizer that was given to fleet.distribute(...) would hold this rank's share of the state "
        "alone, under strategy.sharding. Save state_dict() of the optimizer that it returned, called on every rank; or write "
        "fleet.save_checkpoint(..., optimizer=optimizer)."
    )


def _refuse_divided(optimizer: Optimizer, *_: Any) -> None:
    """Refuse a step by this rank's share of the state, outside of the pair that has divided it."""
    restore = optimizer.__dict__.get(RESTORE)
    if restore is not None and not restore.__self__._is_stepping:
        raise ConfigError(
            f"this {type(optimizer).__name__} has this rank's share of its state alone, since strategy.sharding has divided it. "
            "Call fleet.distribute(model, optimizer) with it again on every rank, which gives it the whole, or make a new one."
        )


def _refuse_share(owner: Callable[[], DividedUpdate | None]) -> Callable[[Optimizer], None]:
    def refuse(_: Optimizer) -> None:
        found = owner()
        if found is not None and not found._shows_own_state:
            raise ConfigError(
                "state_dict() of the optimizer that was given to fleet.distribute(...) would be this rank's share alone, under "
                "strategy.sharding. Call state_dict() of the optimizer that it returned, on every rank."
            )

    return refuse
