"""Deep gradient compression: the few largest entries travel, the rest is kept (Lin et al. 2018, arXiv 1712.01887).

u = momentum * u + g        momentum is applied before sending, on each rank: a late entry arrives with all of it
v = v + u                   what has not been sent
the k largest |v| of each tensor are sent; there u = v = 0
parameter -= lr * (sum over ranks of what was sent)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from ..bucket import in_memory_order, wide_type
from ..errors import ConfigError
from ..norms import joined, norms_of
from ..slots import Site, Step
from .handover import SGDHandedOver
from .select import STRETCH, largest
from .stage import Compressor, Piece

LARGEST_ROW = 2**31 - 1
"""Places travel as 32-bit integers."""
ALMOST = 1e-6
"""0.9 is not a tenth short of 1 in binary: 1,000 entries at a sparsity of 0.9 are to be 100, and not 99."""


@dataclass(frozen=True, slots=True)
class Ramp:
    """How sparse each update is: a list of shares, walked through in `updates`, after `dense_updates`."""

    dense_updates: int
    updates: int
    sparsity: tuple[float, ...]

    def at(self, index: int) -> float:
        """Of an update, counted from 1; 0: nothing is kept back."""
        done = index - 1 - self.dense_updates
        if done < 0:
            return 0.0
        return self.sparsity[min(done * len(self.sparsity) // self.updates, len(self.sparsity) - 1)]


def entries_sent(numel: int, sparsity: float) -> int:
    return max(1, int(numel * (1.0 - sparsity) + ALMOST))


@dataclass(frozen=True, slots=True)
class Momentum:
    """As a group of the optimizer has it now, for one rank's share."""

    momentum: float
    nesterov: bool
    decay: float


def accumulate(grad: Tensor, u: Tensor, v: Tensor, weights: Tensor | None, rule: Momentum) -> None:
    """`u` and `v` after this gradient, in place. Rows of equal length; `weights` where there is decay."""
    if grad.dtype != u.dtype or weights is not None:
        grad = grad.to(u.dtype, copy=True)
        if weights is not None:
            grad.add_(weights.to(u.dtype), alpha=rule.decay)
    u.mul_(rule.momentum).add_(grad)
    if rule.nesterov:
        v.add_(grad).add_(u, alpha=rule.momentum)
    else:
        v.add_(u)


def stretches(rows: Sequence[Tensor | None]) -> Sequence[list[Tensor | None]]:
    """On a CPU rows are gone through piece by piece, so that what is done to one finds it in the cache."""
    first = rows[0]
    assert first is not None
    if first.device.type != "cpu" or first.numel() <= STRETCH:
        return [list(rows)]
    cuts = [slice(start, start + STRETCH) for start in range(0, first.numel(), STRETCH)]
    return [[None if row is None else row[cut] for row in rows] for cut in cuts]


@final
class SparseReduce(Compressor):
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
        self._groups = {id(p): group for group in update.param_groups for p in group["params"]}
        self._begun = False
        self._momenta: list[Tensor] = []
        """u of each tensor."""
        self._unsent: list[Tensor] = []
        """v."""
        self._sent = 0

    def _is_dense(self, index: int) -> bool:
        # A list may begin with 0. Entries that were all sent would leave no momentum; dense updates keep it.
        return self._ramp.at(index) == 0.0

    def _takes(self, param: Tensor) -> bool:
        return param.numel() >= self._min_numel

    def _laid_out(self) -> None:
        for bucket in self._buckets:
            if bucket.flat.numel() > LARGEST_ROW:
                raise ConfigError(
                    f"strategy.dgc sends places as 32-bit numbers, and `{bucket.names[0]}` is in a bucket of "
                    f"{bucket.flat.numel():,} entries. Split that tensor, or write a smaller fuse_grad_size_in_MB."
                )

    def _density(self) -> float:
        small = sum(row.numel() for row in self._small)
        return (self._sent + small) / sum(bucket.wire.numel() for bucket in self._buckets)

    def _residuals(self) -> list[Tensor]:
        return self._unsent

    # --- one update -----------------------------------------------------------------------------------------------

    def _prepare(self, step: Step) -> list[Tensor]:
        """Clip this rank's gradient before anything is kept of it. N gradients of one norm, at random angles, have a mean of
        N**-0.5 of it: clipped there, they together are where the user wants the mean to be."""
        if self._clip_norm is not None:
            flats = [bucket.flat for bucket in self._buckets]
            share = 1 / self._among.size
            norm = joined(norms_of(flats))
            most = self._clip_norm * self._among.size**-0.5 * share
            factor = torch.where(norm.isfinite(), (most / norm).clamp(max=1.0), 1.0)
            for flat in flats:
                flat.mul_(factor.to(flat.dtype))
        return []

    def _exchange(self, step: Step, sums: Sequence[Tensor]) -> bool:
        if not self._begun:
            self._begin()
        sparsity = self._ramp.at(step.index)
        chosen = [
            self._choose(piece, u, v, sparsity) for piece, u, v in zip(self._pieces, self._momenta, self._unsent, strict=True)
        ]
        self._sent = sum(len(places) for places, _ in chosen)
        torch._foreach_zero_([piece.grad for piece in self._pieces])
        for wide in dict.fromkeys(row.dtype for row in self._unsent):
            mine = [(piece, *sent) for piece, v, sent in zip(self._pieces, self._unsent, chosen, strict=True) if v.dtype == wide]
            self._swap(mine)
        return True

    def _choose(self, piece: Piece, u: Tensor, v: Tensor, sparsity: float) -> tuple[Tensor, Tensor]:
        """Where the largest entries are in their bucket, and what they are; they are no longer kept."""
        rule = self._rule(piece)
        weights = self._weights(piece) if rule.decay else None
        for grad, u_part, v_part, weights_part in stretches([piece.grad, u, v, weights]):
            assert grad is not None and u_part is not None and v_part is not None
            accumulate(grad, u_part, v_part, weights_part, rule)
        places = largest(v, entries_sent(v.numel(), sparsity))
        values = v[places]
        v[places] = 0.0
        u[places] = 0.0
        return places + piece.offset, values

    def _swap(self, mine: Sequence[tuple[Piece, Tensor, Tensor]]) -> None:
        """One all-gather of what every rank sends; all add it up in the order of ranks, and so get the same bits."""
        values = torch.cat([values for _, _, values in mine])
        places = torch.cat([places for _, places, _ in mine]).int()
        wire, pending = self._among.all_gather(torch.cat([values.view(torch.int32), places]))
        pending.wait()
        words = len(wire[0]) - len(places)
        for bucket, part in self._parts_of_buckets(mine):
            out = bucket.flat if bucket.flat.dtype == values.dtype else bucket.flat.to(values.dtype)
            for row in wire:
                out.index_add_(0, row[words:][part].long(), row[:words].view(values.dtype)[part])
            if out is not bucket.flat:
                bucket.flat.copy_(out)

    def _parts_of_buckets(self, mine: Sequence[tuple[Piece, Tensor, Tensor]]) -> list[tuple[Any, slice]]:
        """Which part of the entries sent belongs to which bucket: pieces are in the order of buckets."""
        lengths: dict[int, int] = {}
        for piece, places, _ in mine:
            lengths[piece.bucket.index] = lengths.get(piece.bucket.index, 0) + len(places)
        parts, start = [], 0
        for index, length in lengths.items():
            parts.append((self._buckets[index], slice(start, start + length)))
            start += length
        return parts

    def _rule(self, piece: Piece) -> Momentum:
        group = self._groups[id(piece.param)]
        decay = float(group["weight_decay"]) / self._among.size
        return Momentum(float(group["momentum"]), bool(group["nesterov"]), decay)

    def _weights(self, piece: Piece) -> Tensor:
        param = piece.param.detach()
        if torch.ops.aten.is_non_overlapping_and_dense(param):
            return in_memory_order(param)
        return param.reshape(-1)

    # --- where the dense updates end ------------------------------------------------------------------------------

    def _begin(self) -> None:
        """The optimizer's momentum, which all ranks have alike, becomes each rank's share of it."""
        self._make_room()
        for piece, u in zip(self._pieces, self._momenta, strict=True):
            momentum = self._update.hand_over(piece.param)
            if momentum is not None:
                piece.shaped(u).copy_(momentum).mul_(1 / self._among.size)
        self._begun = True

    def _make_room(self) -> None:
        def zeros(piece: Piece) -> Tensor:
            return torch.zeros(piece.grad.numel(), dtype=wide_type(piece.grad.dtype), device=piece.grad.device)

        self._momenta = [zeros(piece) for piece in self._pieces]
        self._unsent = [zeros(piece) for piece in self._pieces]
        self._update.handed_over = {id(piece.param) for piece in self._pieces}

    # --- resume ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        momenta, unsent = (self._by_name(rows) if self._begun else {} for rows in (self._momenta, self._unsent))
        return {"begun": self._begun, "among": self._among.size, "shares": {"momentum": momenta, "unsent": unsent}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._changes += 1
        self._begun = bool(state["begun"])
        if not self._begun:
            self._momenta, self._unsent, self._update.handed_over = [], [], set()
            return
        self._make_room()
        factor = self._share_factor(state)
        self._put(self._momenta, state["shares"]["momentum"], factor)
        self._put(self._unsent, state["shares"]["unsent"], factor)
