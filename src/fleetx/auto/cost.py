"""How long an update takes, what it sends and what memory it needs, for any strategy: pure functions of what was measured.

    update = k (forward + backward + computing again) + wire + work + the optimizer's step - what backward hides of the wire

A dense reducer runs beside the last backward of a merge window. Compressors begin when all gradients are there. Local SGD sends
weights, every few updates. How well a batch teaches is told beside it, never mixed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from ..dist import wire_cost
from ..dist.wire_cost import Cost, Link
from ..errors import ConfigError


@final
@dataclass(frozen=True, slots=True)
class Gradients:
    """Of a model, as compressors see them."""

    numel: int
    """Of all tensors."""
    large: int = 0
    """Of those that DGC makes sparse."""
    matrices: tuple[tuple[int, int], ...] = ()
    """Those that PowerSGD factors."""


@final
@dataclass(frozen=True, slots=True)
class Reducer:
    """How ranks come together. `setting` is the sparsity of DGC, the rank of PowerSGD, the (first) period of Local SGD."""

    kind: str = "dense"
    setting: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in COSTS:
            raise ConfigError(f"reducer {self.kind!r} is not known; there are {', '.join(COSTS)}.")

    @property
    def is_hidden(self) -> bool:
        """Whether it works beside backward."""
        return self.kind in HIDDEN

    @property
    def period(self) -> int:
        """Updates from one exchange to the next."""
        return int(self.setting) if self.averages else 1

    @property
    def averages(self) -> bool:
        """Whether weights are averaged every few updates, and gradients not reduced."""
        return self.kind in AVERAGES

    def every_update(self) -> Reducer:
        """Local SGD with an averaging in every update, as it is measured: its period only says how many share one."""
        return Reducer(self.kind, 1) if self.averages else self


def _sparse(reducer: Reducer, gradients: Gradients, link: Link) -> Cost:
    rest = gradients.numel - gradients.large
    return wire_cost.sparse(gradients.large, link, sparsity=reducer.setting, dense_numel=rest)


def _low_rank(reducer: Reducer, gradients: Gradients, link: Link) -> Cost:
    rest = gradients.numel - sum(rows * columns for rows, columns in gradients.matrices)
    return wire_cost.low_rank(gradients.matrices, link, rank=int(reducer.setting), dense_numel=rest)


def _16_bits(reducer: Reducer, gradients: Gradients, link: Link) -> Cost:
    return wire_cost.dense(gradients.numel, link, item_bytes=2)


COSTS: Mapping[str, Callable[[Reducer, Gradients, Link], Cost]] = {
    "dense": lambda reducer, gradients, link: wire_cost.dense(gradients.numel, link),
    "bf16_allreduce": _16_bits,
    "fp16_allreduce": _16_bits,
    "dgc": _sparse,
    "powersgd": _low_rank,
    "localsgd": lambda reducer, gradients, link: wire_cost.dense(gradients.numel, link),
    "adaptive_localsgd": lambda reducer, gradients, link: wire_cost.dense(gradients.numel, link),
}
"""Of one exchange."""
AVERAGES = ("localsgd", "adaptive_localsgd")
HIDDEN = ("dense", "bf16_allreduce", "fp16_allreduce")


def wire(reducer: Reducer, gradients: Gradients, link: Link) -> Cost:
    """Of one exchange, over any link."""
    return COSTS[reducer.kind](reducer, gradients, link)


# --- one update -------------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Micro:
    """One forward and backward."""

    forward_s: float
    backward_s: float
    again_s: float = 0.0
    """Of computing again, in backward."""

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s + self.again_s


@final
@dataclass(frozen=True, slots=True)
class Exchange:
    """Of one reducer, with nothing beside it."""

    reducer: Reducer
    wire_s: float
    work_s: float
    """On the device: choosing what to send, and putting together what came."""
    bytes_sent: float

    @property
    def seconds(self) -> float:
        return self.wire_s + self.work_s


@final
@dataclass(frozen=True, slots=True)
class UpdateCost:
    """Of one update, on the mean of a period."""

    seconds: float
    bytes_sent: float
    """By one rank."""
    shown_s: float
    """What of the exchange nothing hides."""


def update_cost(
    micro: Micro, exchange: Exchange, *, update_s: float, merge_steps: int = 1, hidden_share: float = 1.0
) -> UpdateCost:
    """`hidden_share`: of what could be hidden behind one backward, what is."""
    reducer = exchange.reducer
    beside = hidden_share * min(exchange.wire_s, micro.backward_s + micro.again_s) if reducer.is_hidden else 0.0
    shown = (exchange.seconds - beside) / reducer.period
    return UpdateCost(merge_steps * micro.seconds + shown + update_s, exchange.bytes_sent / reducer.period, shown)


def hidden_share(micro: Micro, exchange: Exchange, *, update_s: float, seconds: float) -> float:
    """From a real update of a dense reducer without merging, `seconds` long: the inverse of `update_cost`.

    Below 0 where the two get in each other's way, as on a CPU that has no core to spare."""
    possible = min(exchange.wire_s, micro.backward_s + micro.again_s)
    saved = micro.seconds + exchange.seconds + update_s - seconds
    return min(1.0, max(-1.0, saved / possible)) if possible > 0 else 1.0


# --- memory -----------------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Rung:
    """One plan of recompute."""

    peak_bytes: int
    again_s: float
    units: int
    """That are computed again."""
    names: tuple[str, ...] = ()
    """Of them, where that says it all: modules of the model, each for itself."""


def rung_for(ladder: Sequence[Rung], limit: float) -> Rung | None:
    """The cheapest that keeps to the limit; None if none does."""
    return min((rung for rung in ladder if rung.peak_bytes <= limit), key=lambda rung: rung.again_s, default=None)


# --- how well a batch teaches -----------------------------------------------------------------------------------------------


def statistical_efficiency(global_batch: float, noise_scale: float) -> float:
    """How much one sample of so large a batch still teaches, of what it does in a small one (McCandlish et al. 2018)."""
    return 1.0 / (1.0 + global_batch / noise_scale)
