"""Predict how long an update takes, what it sends and what memory it needs, for any plan: pure functions of measurements.

    update = k (forward + backward + computing again) + wire + work + the optimizer's step - what backward hides of the wire

Plain training reduces beside the last backward of a merge window. Compressors begin when all gradients are there. Local SGD sends
weights, every few updates. What a strategy sends is asked of its part (`Part.wire_cost`). How well a batch teaches is reported
beside the prediction, never mixed in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, final

from ..dist import predicted_cost
from ..dist.predicted_cost import Cost, Link
from ..engine.slots import Part, Risk, Slot
from ..errors import ConfigError
from ..strategies import catalogue

MEETING_SLOTS = frozenset({Slot.REDUCE, Slot.SHARD})
"""What a part claims that says how ranks come together."""
DENSE_NAME = "dense"
"""Name of plain training's reducer, in plans and their files."""


@final
@dataclass(frozen=True, slots=True)
class Gradients:
    """Shapes of a model's gradients."""

    shapes: tuple[tuple[int, ...], ...]
    """Lengths of the dimensions of each tensor, the one that is outermost in memory first."""

    @property
    def numel(self) -> int:
        return predicted_cost.numel(self.shapes)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Reducer:
    """How ranks come together in a plan: plain all-reduce, or one part of the catalogue, with its settings.

    Two reducers are equal if they have one label: it is what names them in a plan."""

    part: Part | None = None
    """The part and its settings; None: plain all-reduce."""

    @classmethod
    def named(cls, kind: str, setting: float | None = None) -> Self:
        """Make a reducer by its part's name and, where the part has one, the setting of its label."""
        if kind == DENSE_NAME:
            return cls()
        part = _part_named(kind)
        if setting is None or not part.label_key:
            return cls(part())
        default = getattr(part(), part.label_key)
        value = [setting] if isinstance(default, list) else type(default)(setting)
        return cls(part(**{part.label_key: value}))

    @property
    def kind(self) -> str:
        """Name of the part."""
        return DENSE_NAME if self.part is None else self.part.name

    @property
    def label(self) -> str:
        """Name of the part with its main setting, as plans have it."""
        return DENSE_NAME if self.part is None else self.part.label()

    @property
    def risk(self) -> Risk:
        return Risk.EXACT if self.part is None else self.part.risk_class

    @property
    def is_hidden(self) -> bool:
        """Whether its messages travel beside backward."""
        return self.part is None or self.part.overlaps_backward

    @property
    def hidden_part(self) -> float:
        """Share of its messages that backward can hide."""
        return 0.0 if not self.is_hidden else 1.0 if self.part is None else self.part.hidden_part

    @property
    def saves_memory(self) -> bool:
        """Whether it divides what plain training keeps, and reduces as that does."""
        return self.part is not None and Slot.REDUCE not in self.part.claims()

    def kept_bytes(self, *, state_bytes: int, ranks: int) -> int:
        """Predict the bytes that last from update to update, beyond those of plain training."""
        return 0 if self.part is None else self.part.kept_bytes(state_bytes=state_bytes, ranks=ranks)

    @property
    def period(self) -> int:
        """Updates from one exchange to the next."""
        return 1 if self.part is None else self.part.updates_per_exchange()

    def steady(self, *, longest_period: int | None = None) -> Reducer:
        """Leave out what is different at the start of a training; periods are cut to `longest_period` updates."""
        if self.part is None:
            return self
        return Reducer(self.part.steady(min(self.period, longest_period or self.period)))

    def every_update(self) -> Reducer:
        """Exchange in every update, as it is measured: a period only says how many updates share one exchange."""
        return self.steady(longest_period=1)

    def settings(self) -> dict[str, Any]:
        """Settings of a DistributedStrategy that switch it on."""
        return {} if self.part is None else settings_of([self.part])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reducer) and self.label == other.label

    def __hash__(self) -> int:
        return hash(self.label)


def _part_named(kind: str) -> type[Part]:
    found = catalogue().get(kind)
    if found is None or not found().claims() & MEETING_SLOTS:
        known = [DENSE_NAME, *(name for name, part in catalogue().items() if part().claims() & MEETING_SLOTS)]
        raise ConfigError(f"reducer {kind!r} is not known; there are {', '.join(known)}.")
    return found


def settings_of(parts: Iterable[Part]) -> dict[str, Any]:
    """Settings of a DistributedStrategy that switch these parts on."""
    settings: dict[str, Any] = {}
    for part in parts:
        settings[part.name] = True
        if dataclasses.fields(part):
            settings[f"{part.name}_configs"] = dataclasses.asdict(part)
    return settings


def wire(reducer: Reducer, gradients: Gradients, link: Link) -> Cost:
    """Return bytes and seconds of one exchange over a link."""
    if reducer.part is None:
        return predicted_cost.dense(gradients.numel, link)
    return reducer.part.wire_cost(gradients.shapes, link)


# --- one update -------------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Micro:
    """Hold the seconds of one forward and backward."""

    forward_s: float
    backward_s: float
    again_s: float = 0.0
    """Seconds of computing again, in backward."""

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s + self.again_s


@final
@dataclass(frozen=True, slots=True)
class Exchange:
    """Hold the cost of one exchange with nothing beside it."""

    reducer: Reducer
    wire_s: float
    work_s: float
    """Seconds of work on the device: choosing what to send, and putting together what came."""
    bytes_sent: float

    @property
    def seconds(self) -> float:
        return self.wire_s + self.work_s


@final
@dataclass(frozen=True, slots=True)
class UpdateCost:
    """Hold the cost of one update, on the mean of a period."""

    seconds: float
    bytes_sent: float
    """Bytes that one rank sends."""
    shown_s: float
    """Seconds of the exchange that nothing hides."""


def update_cost(
    micro: Micro, exchange: Exchange, *, update_s: float, merge_steps: int = 1, hidden_share: float = 1.0
) -> UpdateCost:
    """Predict one update. `hidden_share`: the share that is hidden of what one backward could hide."""
    reducer = exchange.reducer
    beside = hidden_share * min(reducer.hidden_part * exchange.wire_s, micro.backward_s + micro.again_s)
    shown = (exchange.seconds - beside) / reducer.period
    return UpdateCost(merge_steps * micro.seconds + shown + update_s, exchange.bytes_sent / reducer.period, shown)


def hidden_share(micro: Micro, exchange: Exchange, *, update_s: float, seconds: float) -> float:
    """Work out the share that backward hides from a real update without merging, `seconds` long: the inverse of `update_cost`.

    It is below 0 where the two slow each other down, as on a CPU that has no core to spare."""
    possible = min(exchange.reducer.hidden_part * exchange.wire_s, micro.backward_s + micro.again_s)
    saved = micro.seconds + exchange.seconds + update_s - seconds
    return min(1.0, max(-1.0, saved / possible)) if possible > 0 else 1.0


# --- memory -----------------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Rung:
    """Hold one plan of recompute."""

    peak_bytes: int
    again_s: float
    units: int
    """Number of units that are computed again."""
    names: tuple[str, ...] = ()
    """Names of these units, where each is a module of the model; else empty."""


def rung_for(ladder: Sequence[Rung], limit: float) -> Rung | None:
    """Return the cheapest rung within the limit; None if there is none."""
    return min((rung for rung in ladder if rung.peak_bytes <= limit), key=lambda rung: rung.again_s, default=None)


# --- how well a batch teaches -----------------------------------------------------------------------------------------------


def statistical_efficiency(global_batch: float, noise_scale: float) -> float:
    """Return how much one sample of so large a batch teaches, relative to a small one (McCandlish et al. 2018)."""
    return 1.0 / (1.0 + global_batch / noise_scale)
