"""Build the stages of a step from the settings that localsgd and adaptive_localsgd share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, final

import torch

from ..dist.codec import Codec
from ..dist.comm import Comm, Pending
from ..dist.predicted_cost import FLOAT32_BYTES, Cost, Link, Shape, averaging, numel
from ..engine.bucket import Bucket
from ..engine.dense_reduce import DenseAllReduce, KeepsNothing
from ..engine.slots import Site, Slot, Step
from ..errors import ConfigError
from .engine import Averaging
from .outer import OuterRule
from .period import Period
from .sparse_codec import SparseCodec
from .wire import Wire, WireCodec

INTEGER_BITS = {"int8": 8, "int4": 4}
"""Values of wire_dtype that are integers with a scale for each block, and their bits."""
BLOCK = 256
"""Integers that share a scale: 16 bits more for so many."""
MANY_TIMES = 5.0
"""Steady changes go outer_lr / (1 - outer_momentum) times as far as the average. In bench/outer_optimizer 10 times failed where
the ranks' own learning rate was a good one; 1 time came nearest to the average, and only too small a rate gained from 4 and 7."""


@final
class DenseAtFirst(KeepsNothing):
    """REDUCE under Local SGD: dense until the averaging begins; afterwards each rank keeps its own gradients."""

    carries_tail = True

    def __init__(self, comm: Comm, averaging: Averaging) -> None:
        self._dense, self._averaging = DenseAllReduce(comm), averaging

    def is_local(self) -> bool:
        return self._averaging.begun

    def start(self, bucket: Bucket, step: Step) -> Pending:
        return Pending(None) if self.is_local() else self._dense.start(bucket, step)


class Settings(Protocol):
    """The settings that both strategies have, read only."""

    @property
    def name(self) -> str: ...
    @property
    def begin_step(self) -> int: ...
    @property
    def outer_lr(self) -> float: ...
    @property
    def outer_momentum(self) -> float: ...
    @property
    def outer_nesterov(self) -> bool: ...
    @property
    def average_state(self) -> bool: ...
    @property
    def wire_dtype(self) -> str: ...
    @property
    def overlap_steps(self) -> int: ...
    @property
    def across_nodes_every(self) -> int: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def chunk(self) -> int: ...
    @property
    def value_bits(self) -> int: ...
    @property
    def error_decay(self) -> float: ...


def codec_of(part: Settings) -> WireCodec | None:
    """Return what makes bytes of deltas; None where they travel as floats."""
    if part.top_k is not None:
        return SparseCodec(part.top_k, part.chunk, part.value_bits)
    return Codec(INTEGER_BITS[part.wire_dtype], BLOCK) if part.wire_dtype in INTEGER_BITS else None


def round_cost(part: Settings, shapes: Sequence[Shape], link: Link) -> Cost:
    """Predict the bytes and seconds of one averaging among all ranks."""
    return averaging(numel(shapes), link, period=1, item_bytes=item_bytes(part, link.ranks))


def item_bytes(part: Settings, ranks: int) -> float:
    """Return the bytes of a parameter, such that an all-reduce of so many is what one rank sends in a round."""
    codec, long = codec_of(part), 2**20
    if codec is None:
        return FLOAT32_BYTES if part.wire_dtype == "float32" else FLOAT32_BYTES / 2
    of_entry = codec.nbytes(long) / long
    return of_entry * ranks / 2 if part.top_k is not None else of_entry  # all-gathered: (N - 1) in place of 2 (N - 1) / N


def form_of(part: Settings) -> str:
    """Name what travels in the place of floats, as the labels of plans have it; empty for floats."""
    if part.top_k is not None:
        return f" top {part.top_k}/{part.chunk} in {part.value_bits} bits"
    return f" {part.wire_dtype}" if part.wire_dtype in INTEGER_BITS else ""


def notes_of(part: Settings) -> list[str]:
    """Return what `explain()` says of these settings: how many bits travel, and how far the outer optimizer goes."""
    notes = []
    if codec_of(part) is not None:
        bits = 8 * item_bytes(part, 2)
        lost = "" if part.error_decay == 1 else f", less {1 - part.error_decay:.0%} a round"
        notes.append(
            f"on two ranks a round sends {bits:.2f} bits of each parameter, {32 / bits:.0f} times fewer than float32; what it "
            f"misses is kept and sent later{lost}."
        )
    if part.outer_momentum:
        times = part.outer_lr / (1 - part.outer_momentum)
        advice = (
            " Try a smaller outer_lr first, such as 0.4 with outer_nesterov, or no outer momentum." if times > MANY_TIMES else ""
        )
        notes.append(
            f"outer_lr {part.outer_lr:g} with outer_momentum {part.outer_momentum:g} goes up to {times:.3g} times as far as the "
            f"average of the ranks.{advice}"
        )
    return notes


def require_compression_fits(part: Settings) -> None:
    """Refuse settings of compression that contradict each other."""
    configs = f"{part.name}_configs"
    if part.top_k is not None and part.wire_dtype != "float32":
        raise ConfigError(
            f'{configs}["wire_dtype"] is "{part.wire_dtype}" and top_k is {part.top_k}: what is sparse travels as values of '
            f"value_bits. Write value_bits = {INTEGER_BITS.get(part.wire_dtype, 8)} in place of wire_dtype, or leave top_k out."
        )
    if part.top_k is not None and part.top_k > part.chunk:
        raise ConfigError(
            f'{configs}["top_k"] is {part.top_k}, and a chunk has {part.chunk} entries. Write at most {part.chunk}; 64 of 4096 '
            "is usual."
        )
    for key, usual in (("chunk", 4096), ("value_bits", 32)):
        if part.top_k is None and getattr(part, key) != usual:
            raise ConfigError(
                f'{configs}["{key}"] is {getattr(part, key)}, a setting of top_k, which is None. Write a top_k, such as 64, or '
                f"leave {key} out."
            )
    if part.error_decay != 1.0 and codec_of(part) is None:
        raise ConfigError(
            f'{configs}["error_decay"] is {part.error_decay:g}, and nothing is kept back: wire_dtype is "{part.wire_dtype}" and '
            'top_k None. Write wire_dtype "int8" or "int4", or a top_k, or leave error_decay out.'
        )


def require_fragments_fit(part: Settings, site: Site, *, fragments: int, period: int) -> None:
    """Refuse fragments that cannot take turns."""
    where = f'{part.name}_configs["fragments"] is {fragments}'
    if fragments > period:
        raise ConfigError(
            f"{where}, and a period has {period} updates (k_steps), of which each takes one turn. Write at most {period}."
        )
    if fragments > len(site.params):
        raise ConfigError(
            f"{where}, and this model trains {len(site.params)} tensors, which are not cut. Write at most {len(site.params)}."
        )
    if fragments > 1 and part.overlap_steps > period // fragments:
        raise ConfigError(
            f"{where}, so that a turn begins after {period // fragments} updates, and overlap_steps is {part.overlap_steps}. "
            f"Write an overlap_steps of at most {period // fragments}."
        )
    if fragments > 1 and part.average_state:
        raise ConfigError(
            f"{where}: average_state averages the optimizer's state as a whole. Write average_state=False, or fragments=1."
        )
    if fragments > 1 and part.across_nodes_every > 1:
        raise ConfigError(
            f"{where}, and across_nodes_every {part.across_nodes_every}: inside a node the whole model is averaged. Write "
            "across_nodes_every=1, or fragments=1."
        )


def require_fit(part: Settings, *, longest_period: int, key: str) -> None:
    """Refuse settings that contradict each other."""
    require_compression_fits(part)
    if part.overlap_steps > longest_period:
        raise ConfigError(
            f'{part.name}_configs["overlap_steps"] is {part.overlap_steps}, and a new averaging begins after at most '
            f"{longest_period} updates ({key}). Write at most {longest_period}."
        )
    if part.outer_nesterov and part.outer_momentum == 0:
        raise ConfigError(
            f"{part.name}: outer_nesterov is a form of outer_momentum, which is 0. Write an outer_momentum, such as 0.9."
        )
    if part.average_state and part.overlap_steps:
        raise ConfigError(
            f"{part.name}: average_state with overlap_steps {part.overlap_steps} would put moments of earlier weights on top of "
            "later updates, and a second moment may then fall below 0. Write average_state=False, or overlap_steps=0."
        )


def nothing_saved(part: Settings, *, longest_period: int, key: str, write: int) -> str | None:
    """Return a sentence if every update is averaged over all ranks and no other setting is used; else None."""
    is_plain = (part.outer_lr, part.outer_momentum, part.wire_dtype, part.top_k) == (1.0, 0.0, "float32", None)
    if longest_period > 1 or not is_plain or part.across_nodes_every > 1 or part.overlap_steps:
        return None
    # Not "no effect": with Adam each rank keeps its own moments, so the weights differ from synchronous training.
    return (
        f"{part.name} saves nothing with {key} = 1: weights are averaged after every update. "
        f'Write strategy.{part.name}_configs = {{"{key}": {write}}}.'
    )


def averaging_stages(part: Settings, site: Site, period: Period, *, fragments: int = 1) -> Mapping[Slot, Any]:
    """Build the stages for REDUCE and AVERAGE."""
    codec = codec_of(part)
    averaging = Averaging(
        site,
        begin_step=part.begin_step,
        period=period,
        rule=OuterRule(part.outer_lr, part.outer_momentum, part.outer_nesterov),
        wire=Wire(
            dtype=torch.float32 if codec is not None else getattr(torch, part.wire_dtype),
            codec=codec,
            sums_grow=part.top_k is not None,
            error_decay=part.error_decay,
            overlap_steps=part.overlap_steps,
            across_nodes_every=part.across_nodes_every,
            fragments=fragments,
        ),
        average_state=part.average_state,
    )
    return {Slot.REDUCE: DenseAtFirst(site.comm, averaging), Slot.AVERAGE: averaging}
