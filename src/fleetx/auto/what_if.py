"""Predict what `auto` would choose over another link, on more ranks or with other memory, from a plan's measurements alone.

Nothing runs here. Passes, work of reducers and what backward hides stay as measured; the wire is that of the link asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from ..config.text import binary
from ..dist.predicted_cost import Link
from ..engine.slots import Slot
from ..errors import ConfigError
from . import candidate as candidates
from .candidate import DENSE, MERGES, RISKS, Candidate, allows, every
from .cost import Reducer, wire
from .fixed_parts import NOTHING, Fixed
from .measurements import Forecast, Measured, Reduced, forecast
from .plan import Plan
from .search import ALIKE

WORLDS = tuple(2**power for power in range(13))
"""Numbers of ranks of a chart."""


@final
@dataclass(frozen=True, slots=True)
class Question:
    """Hold what is asked for; None: as measured, and no limit of memory."""

    risk: str = "rounding"
    memory: int | None = None
    global_batch: int | None = None
    bytes_per_s: float | None = None
    """Bytes that one rank can send in a second."""
    latency_s: float | None = None
    world: int | None = None


@final
@dataclass(frozen=True, slots=True)
class Outlook:
    question: Question
    link: Link
    forecasts: tuple[Forecast, ...]
    """Predictions, the fastest for a sample first."""
    chosen: Forecast
    refused: Mapping[str, str]
    """Why a candidate has no prediction, by its name."""
    unmeasured: frozenset[str]
    """Kinds of reducer whose own work was not measured: it is predicted to be that of plain training."""

    def is_measured(self, one: Forecast) -> bool:
        return one.candidate.reducer.kind not in self.unmeasured

    @property
    def spare_work_s(self) -> float | None:
        """Seconds that the chosen reducer's unmeasured work may take in one exchange before a plan measured in full is as good;
        None where the chosen one was measured in full, or no faster than such a plan."""
        known = [one for one in self.forecasts if self.is_measured(one)]
        if self.is_measured(self.chosen) or not known:
            return None
        saved = known[0].seconds_per_sample - self.chosen.seconds_per_sample
        return saved * self.chosen.samples * self.chosen.candidate.reducer.period if saved > 0 else None


def what_if(measured: Measured, question: Question, fixed: Fixed = NOTHING) -> Outlook:
    """Answer a question. `fixed`: parts that the user has set, which all candidates keep."""
    link = link_for(measured.link.link(), question)
    whole, unmeasured = filled(measured, _reducers(measured, question, link, fixed))
    found: list[Forecast] = []
    refused: dict[str, str] = {}
    for candidate in _candidates(whole, question, link, fixed):
        predicted = forecast(whole, candidate, memory=question.memory, link=_if_other(link, measured))
        if isinstance(predicted, str):
            refused[candidate.name] = predicted
        else:
            found.append(predicted)
    if not found:
        raise ConfigError(_nothing(question, refused))
    found.sort(key=lambda one: (one.seconds_per_sample, one.candidate.name))
    return Outlook(question, link, tuple(found), _choice(found), refused, unmeasured)


def candidate_of(plan: Plan) -> Candidate:
    """Read the plan's choice off its strategy, which may have been edited."""
    parts, kept = Fixed.of(plan.strategy.parts()), plan.fixed.names
    first = next(iter(plan.measured.passes), None)
    precision = "float32"
    if plan.strategy.amp:  # without a type it was that of the device where it was measured
        precision = plan.strategy.amp_configs["dtype"] or (first.precision if first is not None else "bfloat16")
    batch = plan.micro_batch or (first.batch if first is not None else 0)
    grows = plan.merge_steps > 1 and not plan.micro_batch and "gradient_merge" not in kept
    compiles = plan.strategy.compile and "compile" not in kept
    divided = (part for part in parts.parts if Slot.SHARD in part.claims() and part.name not in kept)
    reducer = parts.reducer or next(map(Reducer, divided), DENSE)
    return Candidate(precision, batch, plan.merge_steps, reducer, grows_batch=grows, kept=kept, compiles=compiles)


def same_plan(outlook: Outlook, candidate: Candidate) -> Forecast | str:
    """Return the prediction of a plan; with a global batch, of one with as many micro-steps as that takes. Else say why none."""
    merges = outlook.question.global_batch is None

    def is_same(other: Candidate) -> bool:
        kinds = [(one.precision, one.compiles, one.batch, one.reducer) for one in (other, candidate)]
        return kinds[0] == kinds[1] and (other.merge_steps == candidate.merge_steps or not merges)

    found = next((one for one in outlook.forecasts if is_same(one.candidate)), None)
    if found is None and not allows(outlook.question.risk, candidate.risk):
        return f'has risk "{candidate.risk.value}", which is not allowed'
    return found or outlook.refused.get(replace(candidate, recomputes=False).name, "is not among the plans asked for")


# --- the link ---------------------------------------------------------------------------------------------------------------


def link_for(here: Link, question: Question) -> Link:
    """Return the link that was measured, with what the question changes in it."""
    world = question.world or here.ranks
    rate = question.bytes_per_s or here.bytes_per_s
    if world == 1 and (question.bytes_per_s is not None or question.latency_s is not None):
        raise ConfigError("one rank sends nothing, whatever the link: say how many ranks there are to be, as world=64.")
    if world > 1 and math.isinf(rate):
        raise ConfigError(
            "one rank alone has no link that could be measured: say how fast it is to be, as bandwidth=10Gbit, or measure on "
            "several ranks, by fleetrun."
        )
    return Link(world, rate, here.latency_s if question.latency_s is None else question.latency_s)


def _if_other(link: Link, measured: Measured) -> Link | None:
    """Return None for the measured link: what went over it was measured too."""
    return None if link == measured.link.link() else link


# --- candidates -------------------------------------------------------------------------------------------------------------


def _reducers(measured: Measured, question: Question, link: Link, fixed: Fixed) -> list[Reducer]:
    if fixed.reducer is not None:
        return [fixed.reducer]
    if link.ranks == 1:
        return [DENSE]
    offered = candidates.offered(replace(measured.context, ranks=link.ranks, lacks_memory=_lacks_memory(measured, question)))
    return [one for one in _beside(fixed, offered) if allows(question.risk, one.risk)]


def _lacks_memory(measured: Measured, question: Question) -> bool:
    """Return whether no step of plain training that was measured keeps to the memory asked for with nothing computed again."""
    plain = [rung.peak_bytes for one in measured.passes for rung in one.ladder if not rung.units]
    return question.memory is not None and bool(plain) and min(plain) > question.memory


def _beside(fixed: Fixed, reducers: Sequence[Reducer]) -> list[Reducer]:
    return [one for one in reducers if one == DENSE or fixed.refusal(one.kind) is None]


def filled(measured: Measured, reducers: Sequence[Reducer]) -> tuple[Measured, frozenset[str]]:
    """Add predictions for reducers that were not measured, and return the kinds of these. One that was refused stays out.

    What plain training does beside sending, such as reading all gradients, the others do too: without it they would look
    better."""
    dense = measured.reduced_of(DENSE) or Reduced(DENSE, measured.update_s, 0.0)
    dense_wire = wire(DENSE, measured.gradients, measured.link.link())
    common_s = max(0.0, dense.seconds - measured.update_s - dense_wire.seconds)
    added: dict[Reducer, Reduced] = {}
    for reducer in reducers:
        if measured.reduced_of(reducer) is not None or measured.missing.get(reducer.kind, "").startswith("refused"):
            continue
        own = reducer.every_update()
        cost = wire(own, measured.gradients, measured.link.link())
        seconds = measured.update_s + common_s + cost.seconds
        kept = own.kept_bytes(state_bytes=measured.state_bytes, ranks=measured.ranks)
        added[own] = Reduced(own, seconds, cost.bytes_sent, kept, dense.peak_bytes + min(0, kept))
    whole = replace(measured, reduced=(*measured.reduced, *added.values()))
    return whole, frozenset(reducer.kind for reducer in added)


def _candidates(measured: Measured, question: Question, link: Link, fixed: Fixed) -> list[Candidate]:
    batches = _batches(sorted({one.batch for one in measured.passes}, reverse=True), question, link.ranks, fixed.merge_steps)
    own, reducers = question.global_batch is None, _reducers(measured, question, link, fixed)
    return list(
        every(
            measured.precisions,
            batches,
            reducers,
            own_batch=own,
            risk=question.risk,
            kept=fixed.names,
            compiled=measured.compiled,
        )
    )


def _batches(measured: Sequence[int], question: Question, ranks: int, own_steps: int | None) -> list[tuple[int, int]]:
    """List micro-batches that were measured, and how many of them make an update; `own_steps`: the number the user has set."""
    whole = question.global_batch
    if whole is None and own_steps is not None:
        return [(batch, own_steps) for batch in measured]
    if whole is None:
        return [(batch, steps) for batch in measured for steps in (MERGES if allows(question.risk, RISKS[-1]) else (1,))]
    if whole % ranks:
        raise ConfigError(f"a global batch of {whole} cannot be shared equally by {ranks} ranks.")
    share = whole // ranks
    found = [(batch, share // batch) for batch in measured if batch and share % batch == 0]
    found = [one for one in found if own_steps in (None, one[1])]
    if not found:
        merged = "" if own_steps is None else f" by {own_steps} micro-steps, as gradient_merge is set to"
        raise ConfigError(
            f"a global batch of {whole} on {ranks} ranks gives each {share} rows, and no micro-batch that was measured makes "
            f"that up{merged} ({', '.join(map(str, sorted(measured)))} rows). Measure with another sample, or ask for another "
            "batch."
        )
    return found


def _choice(found: Sequence[Forecast]) -> Forecast:
    """Choose by the predictions alone, as `auto` does: of those about as fast the least risky."""
    limit = min(one.seconds_per_sample for one in found) * (1 + ALIKE)
    good = [one for one in found if one.seconds_per_sample <= limit]
    return min(good, key=lambda one: (*one.candidate.risk_order, one.seconds_per_sample))


def _nothing(question: Question, refused: Mapping[str, str]) -> str:
    reasons = "; ".join(f"{name}: {why}" for name, why in list(refused.items())[-3:])
    limit = "" if question.memory is None else f" that keeps to {binary(question.memory)}"
    return f'there is no plan of risk "{question.risk}" or less{limit} ({reasons or "nothing was measured"}).'


# --- by the number of ranks -------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Curve:
    """Hold the times of one reducer, all else being as in one plan."""

    name: str
    risk: str
    """Class of risk of the reducer alone."""
    seconds: Mapping[int, float]
    """Seconds of an update, by the number of ranks."""
    is_measured: bool
    """False: its work was not measured, and is taken to be that of plain training."""


def curves(
    measured: Measured, base: Candidate, question: Question, worlds: Sequence[int] = WORLDS, fixed: Fixed = NOTHING
) -> list[Curve]:
    """Predict each kind of reducer that can stand beside the parts that are set, at its strongest or as the plan has it. Risk is
    reported, and leaves none out."""
    others = _beside(fixed, candidates.offered(measured.context)) if fixed.reducer is None else []
    kinds = {one.kind: one for one in others} | {base.reducer.kind: base.reducer}
    whole, unmeasured = filled(measured, list(kinds.values()))
    found = []
    why = ""
    order = [DENSE.kind, *(part.name for part in candidates.parts_in_order())]
    for kind in sorted(kinds, key=order.index):
        candidate = replace(base, reducer=kinds[kind])
        seconds = {}
        for world in worlds:
            predicted = forecast(whole, candidate, memory=question.memory, link=_link_of(measured, question, world))
            if isinstance(predicted, str):
                why = predicted
            else:
                seconds[world] = predicted.cost.seconds
        if seconds:
            reducer = candidate.reducer
            found.append(Curve(reducer.label, reducer.risk.value, seconds, kind not in unmeasured))
    if not found:
        raise ConfigError(f"nothing can be predicted of {base.name} with any number of ranks: {why}.")
    return found


def _link_of(measured: Measured, question: Question, world: int) -> Link:
    several = link_for(measured.link.link(), replace(question, world=max(2, world)))
    return replace(several, ranks=world)
