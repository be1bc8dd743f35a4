"""Hold all that `auto` has measured, as plain numbers: every prediction follows from them, here or for another link or card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, final

from ..config.text import binary
from ..dist.predicted_cost import Link
from ..engine.slots import PlanContext
from ..strategies import catalogue
from .candidate import Candidate
from .cost import Exchange, Gradients, Micro, Reducer, Rung, UpdateCost, rung_for, update_cost, wire
from .link import LinkProfile


@final
@dataclass(frozen=True, slots=True)
class Pass:
    """Hold the measurements of a forward and backward of one precision and batch."""

    precision: str
    batch: int
    forward_s: float
    backward_s: float
    ladder: tuple[Rung, ...] = ()
    """Plans of recompute, from none on. Empty where memory was not measured."""
    is_predicted: bool = False
    """Whether its seconds follow from those of other batches."""
    is_compiled: bool = False
    """Whether `auto` compiled the blocks."""
    compile_s: float = 0.0
    """Seconds of compiling, once, in the first step."""


@final
@dataclass(frozen=True, slots=True)
class Reduced:
    """Hold the measurements of one reducer's exchange and the optimizer's step, run after backward."""

    reducer: Reducer
    seconds: float
    bytes_sent: float
    lasting_bytes: int = 0
    """Bytes that it keeps from update to update, beyond those of plain training."""
    peak_bytes: int = 0
    """All bytes in use while it exchanges and updates."""


@final
@dataclass(frozen=True, slots=True)
class Measured:
    device: str
    link: LinkProfile
    gradients: Gradients
    update_s: float
    """Seconds of the optimizer's step alone."""
    passes: tuple[Pass, ...]
    reduced: tuple[Reduced, ...]
    hidden_share: float = 1.0
    noise_scale: float | None = None
    """Gradient noise scale in samples of all ranks, rough, from few updates; None: not measured."""
    seconds: float = 0.0
    """Seconds that measuring took."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Why a precision or a reducer could not be measured, by its name."""
    state_bytes: int = 0
    """Bytes that the optimizer keeps; 0: none, or not measured."""
    lacks_memory: bool = False
    """Whether no step of plain training kept to the memory with nothing computed again."""

    @property
    def ranks(self) -> int:
        return self.link.ranks

    @property
    def context(self) -> PlanContext:
        """Return what parts are asked for candidates with."""
        return PlanContext(
            max(2, self.ranks), "cpu" if self.device == "CPU" else "cuda", self.gradients.shapes, self.lacks_memory
        )

    def pass_of(self, candidate: Candidate) -> Pass | None:
        """Return the forward and backward of a candidate; None where it was not measured."""
        wanted = (candidate.precision, candidate.batch, candidate.compiles)
        return next((one for one in self.passes if (one.precision, one.batch, one.is_compiled) == wanted), None)

    @property
    def precisions(self) -> list[str]:
        return list(dict.fromkeys(one.precision for one in self.passes if not one.is_compiled))

    @property
    def compiled(self) -> list[str]:
        """Return the precisions that were measured compiled as well."""
        return list(dict.fromkeys(one.precision for one in self.passes if one.is_compiled))

    def reduced_of(self, reducer: Reducer) -> Reduced | None:
        wanted = reducer.every_update()
        return next((one for one in self.reduced if one.reducer == wanted), None)

    def kept_beyond(self, reducer: Reducer, ranks: int) -> int:
        """Predict the bytes that a reducer keeps on so many ranks, beyond what it keeps on those that were measured."""
        here, there = (reducer.kept_bytes(state_bytes=self.state_bytes, ranks=count) for count in (self.ranks, ranks))
        return there - here

    def exchange(self, reducer: Reducer, link: Link | None = None) -> Exchange | None:
        """Return an exchange as measured; or, over another link, that link's wire with the work measured here."""
        found = self.reduced_of(reducer)
        if found is None:
            return None
        here = wire(reducer, self.gradients, self.link.link())
        whole = max(0.0, found.seconds - self.update_s)
        if link is None:
            # One rank sends nothing: what it takes beyond the optimizer's step is looking at gradients, after all of them came.
            wire_s = (whole if reducer.is_hidden else min(whole, here.seconds)) if self.ranks > 1 else 0.0
            return Exchange(reducer, wire_s, whole - wire_s, found.bytes_sent)
        there = wire(reducer, self.gradients, link)
        return Exchange(reducer, there.seconds, max(0.0, whole - here.seconds), there.bytes_sent)


@final
@dataclass(frozen=True, slots=True)
class Forecast:
    candidate: Candidate
    cost: UpdateCost
    samples: int
    """Samples of one update of all ranks."""
    peak_bytes: int
    again_s: float
    once_s: float = 0.0
    """This update's share in the seconds of compiling."""

    @property
    def seconds_per_sample(self) -> float:
        return (self.cost.seconds + self.once_s) / max(1, self.samples)


def forecast(
    measured: Measured,
    candidate: Candidate,
    *,
    memory: float | None = None,
    link: Link | None = None,
    settled: Rung | None = None,
    total_steps: int | None = None,
) -> Forecast | str:
    """Predict an update of a candidate; or say in a sentence why that cannot be. `settled`: the plan of recompute that is used,
    in place of the cheapest that keeps to the memory. `total_steps`: updates that share the seconds of compiling; None: so many
    that these do not count."""
    one, found = measured.pass_of(candidate), measured.reduced_of(candidate.reducer)
    exchange = measured.exchange(candidate.reducer, link)
    if one is None or found is None or exchange is None:
        missing = candidate.precision if one is None else candidate.reducer.kind
        return measured.missing.get(missing, f"{missing} was not measured")
    limit = float("inf") if memory is None else memory
    ranks = measured.ranks if link is None else link.ranks
    more = measured.kept_beyond(candidate.reducer, ranks)
    lasting, own_peak = found.lasting_bytes + more, found.peak_bytes + more
    if own_peak > limit:
        return f"its update alone needs {binary(own_peak)}"
    rung = settled or rung_for(one.ladder, limit - lasting)
    if rung is None:
        if one.ladder or limit != float("inf"):
            least = min((rung.peak_bytes for rung in one.ladder), default=0) + lasting
            return f"needs at least {binary(least)}" if one.ladder else "its memory was not measured"
        rung = Rung(0, 0.0, 0)
    micro = Micro(one.forward_s, one.backward_s, rung.again_s)
    cost = update_cost(
        micro, exchange, update_s=measured.update_s, merge_steps=candidate.merge_steps, hidden_share=measured.hidden_share
    )
    samples = max(1, candidate.batch) * candidate.merge_steps * ranks
    chosen = replace(candidate, recomputes=rung.units > 0, recomputed=rung.names)
    peak = max(rung.peak_bytes + lasting, own_peak)
    return Forecast(chosen, cost, samples, peak, rung.again_s, one.compile_s / total_steps if total_steps else 0.0)


# --- as JSON ----------------------------------------------------------------------------------------------------------------


def to_plain(measured: Measured) -> dict[str, Any]:
    reduced = [{**asdict(one), "reducer": _plain_reducer(one.reducer)} for one in measured.reduced]
    return asdict(replace(measured, reduced=())) | {"reduced": reduced}


def from_plain(plain: Mapping[str, Any]) -> Measured:
    """Read what `to_plain` gave, back from JSON: tuples have become lists."""
    link = plain["link"]
    points = {
        name: tuple((float(count), float(seconds)) for count, seconds in link[name]) for name in ("all_reduce", "all_gather")
    }
    values = {
        **plain,
        "link": LinkProfile(int(link["ranks"]), **points),
        "gradients": Gradients(tuple(tuple(shape) for shape in plain["gradients"]["shapes"])),
        "passes": tuple(Pass(**{**one, "ladder": tuple(_rung(rung) for rung in one["ladder"])}) for one in plain["passes"]),
        "reduced": tuple(Reduced(**{**one, "reducer": _reducer(one["reducer"])}) for one in plain["reduced"]),
    }
    return Measured(**values)


def _rung(plain: Mapping[str, Any]) -> Rung:
    return Rung(**{**plain, "names": tuple(plain["names"])})


def _plain_reducer(reducer: Reducer) -> dict[str, Any]:
    return {"kind": reducer.kind, "configs": {} if reducer.part is None else asdict(reducer.part)}


def _reducer(plain: Mapping[str, Any]) -> Reducer:
    part = catalogue().get(plain["kind"])
    return Reducer.named(plain["kind"]) if part is None else Reducer(part(**plain["configs"]))
