"""Deep gradient compression: send the few largest entries, keep the rest (Lin et al. 2018, arXiv 1712.01887).

u = momentum * u + g        momentum is applied before sending, on each rank: a late entry arrives with all of its momentum
v = v + u                   what has not been sent
the k largest |v| of each tensor are sent; there u = v = 0
parameter -= lr * (sum over ranks of what was sent)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from ..dist.triton_support import has_triton, runs_here
from ..engine.bucket import Bucket, wide_type
from ..engine.buckets import joined, norms_of
from ..engine.setup.own_optimizer import Update, load_in_place
from ..engine.slots import Site, Step
from ..errors import ConfigError
from .compressor import Compressor, Piece
from .top_k import STRETCH, largest

if TYPE_CHECKING:
    from ..engine.buckets import Buckets
    from .dgc_fused import FusedRows


# --- Apply what DGC received without momentum, which DGC has applied already; update all other parameters by the user's SGD ---


_sgd_step = torch.optim.SGD.step.__wrapped__  # type: ignore[attr-defined]
"""SGD's step without its hooks, which torch runs around the step below."""


@final
class SGDHandedOver(Update, torch.optim.SGD):
    """torch.optim.SGD, to the bit, for all parameters but those in `handed_over`, which get `p -= lr * grad`."""

    def __init__(self, inner: torch.optim.SGD) -> None:
        groups = [{**group, "params": list(group["params"])} for group in inner.param_groups]
        super().__init__(groups, **inner.defaults)
        self.handed_over: set[int] = set()
        """ids of parameters whose gradients include momentum and decay already."""

    def adopt_groups(self, groups: list[dict[str, Any]], settings: Mapping[str, Any]) -> None:
        self.param_groups = groups

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_in_place(self, super().load_state_dict, state_dict)

    def pop_momentum(self, param: Tensor) -> Tensor | None:
        """Remove and return the parameter's momentum; None if it has none yet."""
        momentum: Tensor | None = self.state[param].pop("momentum_buffer", None) if param in self.state else None
        return momentum

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        hidden: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            handed = [(p, p.grad) for p in group["params"] if id(p) in self.handed_over and p.grad is not None]
            if handed:
                hidden += handed
                params, grads = [p for p, _ in handed], [grad for _, grad in handed]
                lr = group["lr"]
                if isinstance(lr, Tensor):
                    torch._foreach_sub_(params, torch._foreach_mul(grads, lr))
                else:
                    torch._foreach_add_(params, grads, alpha=-lr)
        for param, _ in hidden:
            param.grad = None  # SGD skips parameters without a gradient
        try:
            return _sgd_step(self, closure)
        finally:
            for param, grad in hidden:
                param.grad = grad


SGDHandedOver.__name__ = "SGD"  # the name that the user gave, and that a checkpoint without DGC has


# --------------------------------------------------------------------------------------------------------------------


# --- Run DGC's arithmetic as operations on whole rows: any device, any type -----------------------------------------


@dataclass(frozen=True, slots=True)
class Rule:
    """The settings of an optimizer group at this update; `decay` is one rank's share of it."""

    momentum: float
    nesterov: bool
    decay: float


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One tensor's gradient, with the momentum and the residual that this rank keeps for it."""

    piece: Piece
    u: Tensor
    """Momentum."""
    v: Tensor
    """Sum of what has not been sent."""


def accumulate(grad: Tensor, u: Tensor, v: Tensor, weights: Tensor | None, rule: Rule) -> None:
    """Update `u` and `v` by this gradient, in place. Rows of equal length; `weights` is None where there is no decay."""
    if grad.dtype != u.dtype or weights is not None:
        grad = grad.to(u.dtype, copy=True)
        if weights is not None:
            grad.add_(weights.to(u.dtype), alpha=rule.decay)
    torch.add(grad, u, alpha=rule.momentum, out=u)
    if rule.nesterov:
        v.add_(grad).add_(u, alpha=rule.momentum)
    else:
        v.add_(u)


def take_largest(u: Tensor, v: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return places and values of the `count` largest entries of `v`, and zero them in `u` and `v`."""
    places = largest(v, count)
    values = v[places]
    v[places] = 0.0
    u[places] = 0.0
    return places, values


@final
class ListedRows:
    """Compress all rows of one type."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = list(rows)

    def compress(self, rules: Sequence[Rule], counts: Sequence[int]) -> Tensor:
        """Return what this rank sends, as 32-bit words: first all values, then their places in their buckets."""
        chosen = []
        for row, rule, count in zip(self._rows, rules, counts, strict=True):
            self._accumulate(row, rule)
            places, values = take_largest(row.u, row.v, count)
            chosen.append((places + row.piece.offset, values))
        values = torch.cat([values for _, values in chosen])
        return torch.cat([values.view(torch.int32), torch.cat([places for places, _ in chosen]).int()])

    def _accumulate(self, row: Row, rule: Rule) -> None:
        grad, weights = row.piece.grad, row.piece.weights() if rule.decay else None
        # On a CPU in stretches, so that each operation finds the stretch in the cache.
        stretch = STRETCH if grad.device.type == "cpu" else max(len(grad), 1)
        for start in range(0, len(grad), stretch):
            at = slice(start, start + stretch)
            accumulate(grad[at], row.u[at], row.v[at], None if weights is None else weights[at], rule)
            grad[at].zero_()  # received entries are added here; zeroed now, while it is in the cache

    def spread(self, wires: Tensor, counts: Sequence[int]) -> None:
        """Add every rank's entries into the gradients, in the order of ranks, so that all ranks get the same bits."""
        wide = self._rows[0].v.dtype
        words = sum(counts) * (wide.itemsize // 4)
        sent = [(wire[:words].clone().view(wide), wire[words:].long()) for wire in wires]  # cloned: float64 must be aligned
        for bucket, part in self._parts(counts):
            out = bucket.flat if bucket.flat.dtype == wide else bucket.flat.to(wide)
            for values, places in sent:
                out.index_add_(0, places[part], values[part])
            if out is not bucket.flat:
                bucket.flat.copy_(out)

    def _parts(self, counts: Sequence[int]) -> list[tuple[Bucket, slice]]:
        """Split the entries by bucket; rows are in the order of buckets."""
        parts: list[tuple[Bucket, slice]] = []
        end = 0
        for row, count in zip(self._rows, counts, strict=True):
            begin, end = end, end + count
            if parts and parts[-1][0] is row.piece.bucket:
                parts[-1] = (row.piece.bucket, slice(parts[-1][1].start, end))
            else:
                parts.append((row.piece.bucket, slice(begin, end)))
        return parts


# --------------------------------------------------------------------------------------------------------------------


LARGEST_ROW = 2**31 - 1
"""Entries of a bucket at most: places are sent as 32-bit integers."""
ALMOST = 1e-6
"""Added before rounding down: 1 - 0.9 is a little less than 0.1 in binary, and 1,000 entries at sparsity 0.9 must give 100."""


@dataclass(frozen=True, slots=True)
class Ramp:
    """The sparsity of each update: `dense_updates` first, then the list in equal parts of `updates`, then its last value."""

    dense_updates: int
    """Updates at the start that are not compressed."""
    updates: int
    """Updates over which the list is walked through."""
    sparsity: tuple[float, ...]
    """Share of entries that are not sent, from 0 to below 1."""

    def at(self, index: int) -> float:
        """Return the sparsity of update `index` (from 1); 0.0 sends everything."""
        done = index - 1 - self.dense_updates
        if done < 0:
            return 0.0
        return self.sparsity[min(done * len(self.sparsity) // self.updates, len(self.sparsity) - 1)]


def entries_sent(numel: int, sparsity: float) -> int:
    """Return how many of `numel` entries are sent: at least 1."""
    return max(1, int(numel * (1.0 - sparsity) + ALMOST))


@final
class SparseReduce(Compressor):
    """Send the largest entries of each tensor; keep momentum and residuals per rank."""

    name, threshold = "dgc", "min_numel"

    def __init__(
        self,
        site: Site,
        update: SGDHandedOver,
        *,
        ramp: Ramp,
        min_numel: int,
        clip_norm: float | None,
        two_level: bool,
    ) -> None:
        super().__init__(site, two_level=two_level)
        self._update, self._ramp = update, ramp
        self._min_numel, self._clip_norm = min_numel, clip_norm
        self._begun = False
        self._rows: list[Row] = []
        self._backends: list[tuple[ListedRows | FusedRows, list[Row]]] = []
        self._sent = 0

    def _is_dense(self, index: int) -> bool:
        # A list may begin with 0. Entries that were all sent would leave no momentum; dense updates keep it.
        return self._ramp.at(index) == 0.0

    def _takes(self, param: Tensor) -> bool:
        return param.numel() >= self._min_numel

    def attach(self, buckets: Buckets) -> None:
        for bucket in buckets:
            if bucket.flat.numel() > LARGEST_ROW:
                raise ConfigError(
                    f"strategy.dgc sends places as 32-bit numbers, and `{bucket.names[0]}` is in a bucket of "
                    f"{bucket.flat.numel():,} entries. Split that tensor, or write a smaller fuse_grad_size_in_MB."
                )
        super().attach(buckets)

    def _numbers_sent(self) -> int:
        return self._sent

    def refuse_again(self) -> None:
        """Refuse a second backward from the first update on, not only once compression begins: a run should not stop midway."""
        if self._pieces:
            raise ConfigError(
                "a second backward before optimizer.step() under strategy.dgc, which applies momentum to each gradient that it "
                "sends. Write `with fleet.no_sync():` around all backwards of an update but the last, or add the losses."
            )

    def _residuals(self) -> list[Tensor]:
        return [row.v for row in self._rows]

    # --- one update -----------------------------------------------------------------------------------------------

    def _prepare(self, step: Step) -> list[Tensor]:
        """Clip this rank's gradient to N**-0.5 of the limit, before any of it enters the residual.

        The mean of N gradients of equal norm at random angles has N**-0.5 of that norm, so the limit holds for the mean."""
        if self._clip_norm is not None:
            flats = [bucket.flat for bucket in self._buckets]
            norm = joined(norms_of(flats))
            max_norm = self._clip_norm * self._among.size**-0.5 * self._share(step)
            factor = torch.where(norm.isfinite() & (norm > max_norm), max_norm / norm, 1.0)
            for flat in flats:
                flat.mul_(factor.to(flat.dtype))
        return []

    def _share(self, step: Step) -> float:
        """Return the factor on this rank's own gradient in the mean; with two levels, the sum over the node's ranks."""
        if self._inside is None:
            return step.share
        share = torch.tensor([step.share], dtype=torch.float64, device=self._inside.control_device)
        self._inside.all_reduce(share).wait()
        return float(share)

    def _exchange(self, step: Step, sums: Sequence[Tensor]) -> bool:
        if not self._begun:
            self._begin()
        sparsity, rules = self._ramp.at(step.index), self._rules()
        self._sent = 0
        for backend, rows in self._backends:
            counts = [entries_sent(len(row.v), sparsity) for row in rows]
            wires, pending = self._among.all_gather(backend.compress([rules[id(row.piece.param)] for row in rows], counts))
            pending.wait()
            backend.spread(wires, counts)
            self._sent += sum(counts)
        return True

    def _rules(self) -> dict[int, Rule]:
        """Read each parameter's rule from its group now: schedulers change groups, and loading a state replaces them."""
        return {
            id(param): Rule(
                momentum=float(group["momentum"]),
                nesterov=bool(group["nesterov"]),
                decay=0.0 if id(param) in self._unused else float(group["weight_decay"]) / self._among.size,
            )
            for group in self._update.param_groups
            for param in group["params"]
        }

    # --- the first compressed update ------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Take over the optimizer's momentum, which is equal on all ranks: each keeps an equal share of it."""
        self._make_room()
        for row in self._rows:
            momentum = self._update.pop_momentum(row.piece.param)
            if momentum is not None:
                row.piece.shaped(row.u).copy_(momentum).mul_(1 / self._among.size)
        self._begun = True

    def _make_room(self) -> None:
        def zeros(piece: Piece) -> Tensor:
            return torch.zeros(piece.grad.numel(), dtype=wide_type(piece.grad.dtype), device=piece.grad.device)

        self._rows = [Row(piece, zeros(piece), zeros(piece)) for piece in self._pieces]
        self._backends = backends_for(self._rows)
        self._update.handed_over = {id(piece.param) for piece in self._pieces}

    # --- resume ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        shares = {"momentum": [row.u for row in self._rows], "unsent": self._residuals()}
        named = {key: self._by_name(rows) if self._begun else {} for key, rows in shares.items()}
        return {"kind": self.name, "begun": self._begun, "share_of_rank": self._share_of_rank, "shares": named}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.forget()
        self._begun = bool(state["begun"])
        if not self._begun:
            return
        self._make_room()
        factor = self._share_factor(state)
        self._put([row.u for row in self._rows], state["shares"]["momentum"], factor)
        self._put(self._residuals(), state["shares"]["unsent"], factor)

    def forget(self) -> None:
        self._changes += 1
        self._begun = False
        self._rows, self._backends, self._update.handed_over = [], [], set()


def backends_for(rows: Sequence[Row]) -> list[tuple[ListedRows | FusedRows, list[Row]]]:
    """Group rows by type and choose a backend for each: Triton kernels where they can run, list operations elsewhere."""
    backends: list[tuple[ListedRows | FusedRows, list[Row]]] = []
    for wide in dict.fromkeys(row.v.dtype for row in rows):
        same = [row for row in rows if row.v.dtype == wide]
        backends.append((backend_for(same), same))
    return backends


def backend_for(rows: Sequence[Row]) -> ListedRows | FusedRows:
    """Choose the backend for rows of one type."""
    if has_triton() and runs_here(rows[0].v.device):
        from .dgc_fused import FusedRows, fits  # Triton is imported only where it is used

        if all(fits(row) for row in rows):
            return FusedRows(rows)
    return ListedRows(rows)
