"""How long an update takes, and what it sends, for any choice of merging, recompute and reducer: pure functions of measures.

    update = k (forward + backward + computing again) + what of the reducer is not hidden + the optimizer's step

A dense reducer runs beside the last backward of a merge window, and only what is longer than that shows. Compressors begin when
all gradients are there. Local SGD sends weights, every few updates. How well a batch teaches is told beside it, never mixed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

from .. import wire_cost
from ..errors import ConfigError
from ..wire_cost import Cost, Link


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
class Measures:
    """Of one rank."""

    samples: int
    """In one micro-step."""
    forward_s: float
    backward_s: float
    update_s: float
    gradients: Gradients
    hidden_share: float = 1.0
    """Of backward's time, how much a dense reducer can hide behind: 1 if it begins with the first gradient."""


@final
@dataclass(frozen=True, slots=True)
class Reducer:
    """How ranks come together. `setting` is the sparsity of DGC, the rank of PowerSGD, the period of Local SGD."""

    kind: str = "dense"
    setting: float = 0.0
    work_s: float = 0.0
    """On the device, in each update: choosing what to send, and putting together what came."""

    def __post_init__(self) -> None:
        if self.kind not in COSTS:
            raise ConfigError(f"reducer {self.kind!r} is not known; there are {', '.join(COSTS)}.")

    @property
    def is_hidden(self) -> bool:
        return self.kind in HIDDEN


def _sparse(reducer: Reducer, gradients: Gradients, link: Link) -> Cost:
    rest = gradients.numel - gradients.large
    return wire_cost.sparse(gradients.large, link, sparsity=reducer.setting, dense_numel=rest)


def _low_rank(reducer: Reducer, gradients: Gradients, link: Link) -> Cost:
    rest = gradients.numel - sum(rows * columns for rows, columns in gradients.matrices)
    return wire_cost.low_rank(gradients.matrices, link, rank=int(reducer.setting), dense_numel=rest)


COSTS: Mapping[str, Callable[[Reducer, Gradients, Link], Cost]] = {
    "dense": lambda reducer, gradients, link: wire_cost.dense(gradients.numel, link),
    "16 bits": lambda reducer, gradients, link: wire_cost.dense(gradients.numel, link, item_bytes=2),
    "dgc": _sparse,
    "powersgd": _low_rank,
    "localsgd": lambda reducer, gradients, link: wire_cost.averaging(gradients.numel, link, period=int(reducer.setting)),
}
HIDDEN = ("dense", "16 bits")


@final
@dataclass(frozen=True, slots=True)
class UpdateCost:
    """Of one update of all ranks."""

    seconds: float
    samples: int
    """Of all ranks: the global batch."""
    bytes_sent: float
    """By one rank."""
    wire_s: float
    shown_s: float
    """Of it, what nothing hides."""

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds


def update_cost(
    measures: Measures, link: Link, reducer: Reducer | None = None, *, merge_steps: int = 1, again_s: float = 0.0
) -> UpdateCost:
    """`again_s`: of computing again, in each micro-step."""
    reducer = reducer or Reducer()
    wire = COSTS[reducer.kind](reducer, measures.gradients, link)
    hidden = measures.hidden_share * (measures.backward_s + again_s) if reducer.is_hidden else 0.0
    shown = max(0.0, wire.seconds - hidden)
    compute = merge_steps * (measures.forward_s + measures.backward_s + again_s)
    seconds = compute + shown + reducer.work_s + measures.update_s
    return UpdateCost(seconds, measures.samples * merge_steps * link.ranks, wire.bytes_sent, wire.seconds, shown)


def statistical_efficiency(global_batch: float, noise_scale: float) -> float:
    """How much one sample of so large a batch still teaches, of what it does in a small one (McCandlish et al. 2018)."""
    return 1.0 / (1.0 + global_batch / noise_scale)


def compared(measures: Measures, link: Link, reducer: Reducer) -> str:
    """A sentence: what it saves of a dense reducer's time, and what it costs."""
    dense, other = update_cost(measures, link), update_cost(measures, link, reducer)
    saved = 1e3 * (dense.shown_s - other.shown_s)
    wire = f"saves {saved:.1f} ms of waiting for the wire" if saved >= 0 else f"waits {-saved:.1f} ms longer for the wire"
    verdict = "it pays" if other.seconds < dense.seconds else "it does not pay"
    return f"{reducer.kind}: {wire}, costs {1e3 * reducer.work_s:.1f} ms of its own; {verdict} here."
