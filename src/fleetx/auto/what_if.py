"""What `auto` would choose over another link, on more ranks or with other memory: forecasts from a plan's measures alone.

Nothing runs here. Passes, work of reducers and what backward hides stay as measured; the wire is that of the link asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from ..errors import ConfigError
from ..memory.plan import shown
from ..wire_cost import Link
from .candidate import DENSE, MERGES, REDUCERS, RISK_OF, RISKS, Candidate, allows, every
from .choose import ALIKE
from .cost import Reducer, wire
from .measured import Forecast, Measured, Reduced, forecast
from .plan import Plan

WORLDS = tuple(2**power for power in range(13))
"""Of a chart: 1 to 4096 ranks."""


@final
@dataclass(frozen=True, slots=True)
class Question:
    """None: as measured, and no limit of memory."""

    risk: str = "rounding"
    memory: int | None = None
    global_batch: int | None = None
    bytes_per_s: float | None = None
    """That one rank can send."""
    latency_s: float | None = None
    world: int | None = None


@final
@dataclass(frozen=True, slots=True)
class Outlook:
    question: Question
    link: Link
    forecasts: tuple[Forecast, ...]
    """The fastest for a sample first."""
    chosen: Forecast
    refused: Mapping[str, str]
    """By candidate: why it is none."""
    unmeasured: frozenset[str]
    """Kinds of reducer whose own work nobody measured: forecasts have none beyond that of a dense one."""

    def is_measured(self, one: Forecast) -> bool:
        return one.candidate.reducer.kind not in self.unmeasured

    @property
    def spare_work_s(self) -> float | None:
        """So long may the chosen reducer's unmeasured work take in one exchange before a plan that is known whole is as good;
        None where the chosen one is known whole, or no other is, or is slower."""
        known = [one for one in self.forecasts if self.is_measured(one)]
        if self.is_measured(self.chosen) or not known:
            return None
        saved = known[0].seconds_per_sample - self.chosen.seconds_per_sample
        return saved * self.chosen.samples * self.chosen.candidate.reducer.period if saved > 0 else None


def what_if(measured: Measured, question: Question) -> Outlook:
    link = link_for(measured.link.link(), question)
    whole, unmeasured = filled(measured, _reducers(question, link))
    found: list[Forecast] = []
    refused: dict[str, str] = {}
    for candidate in _candidates(whole, question, link):
        told = forecast(whole, candidate, memory=question.memory, link=_if_other(link, measured))
        if isinstance(told, str):
            refused[candidate.name] = told
        else:
            found.append(told)
    if not found:
        raise ConfigError(_nothing(question, refused))
    found.sort(key=lambda one: (one.seconds_per_sample, one.candidate.name))
    return Outlook(question, link, tuple(found), _choice(found), refused, unmeasured)


def candidate_of(plan: Plan) -> Candidate:
    """The plan's choice, by its strategy: it may have been edited."""
    settings = plan.strategy.to_dict()
    precision = str(settings["amp_configs"]["dtype"]) if settings.get("amp") else "float32"
    kind = next((kind for kind in RISK_OF if settings.get(kind)), "dense")
    configs = settings.get(f"{kind}_configs", {})
    setting = {"dgc": configs.get("sparsity", [0])[-1], "powersgd": configs.get("rank"), "localsgd": configs.get("k_steps")}
    batch = plan.micro_batch or next((one.batch for one in plan.measured.passes), 0)
    grows = plan.merge_steps > 1 and not plan.micro_batch
    return Candidate(precision, batch, plan.merge_steps, Reducer(kind, setting.get(kind) or 0.0), grows_batch=grows)


def same_plan(outlook: Outlook, candidate: Candidate) -> Forecast | str:
    """What the question makes of a plan: with a global batch, of one with as many micro-steps as that takes."""
    merges = outlook.question.global_batch is None

    def is_same(other: Candidate) -> bool:
        alike = (other.precision, other.batch, other.reducer) == (candidate.precision, candidate.batch, candidate.reducer)
        return alike and (other.merge_steps == candidate.merge_steps or not merges)

    found = next((one for one in outlook.forecasts if is_same(one.candidate)), None)
    if found is None and not allows(outlook.question.risk, candidate.risk):
        return f'has risk "{candidate.risk.value}", which is not allowed'
    return found or outlook.refused.get(replace(candidate, recomputes=False).name, "is not among the plans asked for")


# --- the link ---------------------------------------------------------------------------------------------------------------


def link_for(here: Link, question: Question) -> Link:
    """The one that was measured, with what the question changes in it."""
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
    """Where the link is the measured one, so is what went over it."""
    return None if link == measured.link.link() else link


# --- candidates -------------------------------------------------------------------------------------------------------------


def _reducers(question: Question, link: Link) -> list[Reducer]:
    return [one for one in REDUCERS if allows(question.risk, RISK_OF[one.kind])] if link.ranks > 1 else [DENSE]


def filled(measured: Measured, reducers: Sequence[Reducer]) -> tuple[Measured, frozenset[str]]:
    """With their wire for those that were not measured, and their kinds. One that was refused stays out.

    What a dense one does beside sending, as looking at all gradients, the others do too: without it they would look better."""
    dense = measured.reduced_of(DENSE) or Reduced(DENSE, measured.update_s, 0.0)
    dense_wire = wire(DENSE, measured.gradients, measured.link.link())
    common_s = max(0.0, dense.seconds - measured.update_s - dense_wire.seconds)
    added: dict[Reducer, Reduced] = {}
    for reducer in reducers:
        if measured.reduced_of(reducer) is not None or measured.missing.get(reducer.kind, "").startswith("refused"):
            continue
        own = Reducer("localsgd", 1) if reducer.kind == "localsgd" else reducer
        cost = wire(own, measured.gradients, measured.link.link())
        seconds = measured.update_s + common_s + cost.seconds
        added[own] = Reduced(own, seconds, cost.bytes_sent, peak_bytes=dense.peak_bytes)
    whole = replace(measured, reduced=(*measured.reduced, *added.values()))
    return whole, frozenset(reducer.kind for reducer in added)


def _candidates(measured: Measured, question: Question, link: Link) -> list[Candidate]:
    precisions = list(dict.fromkeys(one.precision for one in measured.passes))
    batches = _batches(sorted({one.batch for one in measured.passes}, reverse=True), question, link.ranks)
    own = question.global_batch is None
    return list(every(precisions, batches, _reducers(question, link), own_batch=own, risk=question.risk))


def _batches(measured: Sequence[int], question: Question, ranks: int) -> list[tuple[int, int]]:
    """Micro-batches that were measured, and how many of them make an update."""
    whole = question.global_batch
    if whole is None:
        return [(batch, steps) for batch in measured for steps in (MERGES if allows(question.risk, RISKS[-1]) else (1,))]
    if whole % ranks:
        raise ConfigError(f"a global batch of {whole} cannot be shared equally by {ranks} ranks.")
    share = whole // ranks
    found = [(batch, share // batch) for batch in measured if batch and share % batch == 0]
    if not found:
        raise ConfigError(
            f"a global batch of {whole} on {ranks} ranks gives each {share} rows, and no micro-batch that was measured makes "
            f"that up ({', '.join(map(str, sorted(measured)))} rows). Measure with another sample, or ask for another batch."
        )
    return found


def _choice(found: Sequence[Forecast]) -> Forecast:
    """As `auto` chooses, by the forecasts alone: of those about as fast the least risky."""
    limit = min(one.seconds_per_sample for one in found) * (1 + ALIKE)
    good = [one for one in found if one.seconds_per_sample <= limit]
    return min(good, key=lambda one: (*one.candidate.daring, one.seconds_per_sample))


def _nothing(question: Question, refused: Mapping[str, str]) -> str:
    told = "; ".join(f"{name}: {why}" for name, why in list(refused.items())[-3:])
    limit = "" if question.memory is None else f" that keeps to {shown(question.memory)}"
    return f'there is no plan of risk "{question.risk}" or less{limit} ({told or "nothing was measured"}).'


# --- by the number of ranks -------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Curve:
    """Of one reducer, all else being as in one plan."""

    name: str
    risk: str
    """Of the reducer alone."""
    seconds: Mapping[int, float]
    """Of an update, by the number of ranks."""
    is_measured: bool
    """Else it has no work beyond that of a dense one."""


def curves(measured: Measured, base: Candidate, question: Question, worlds: Sequence[int] = WORLDS) -> list[Curve]:
    """One for each kind of reducer, at its strongest or as the plan has it. Risk is told, and leaves none out."""
    kinds = {one.kind: one for one in sorted(REDUCERS, key=lambda one: one.setting)} | {base.reducer.kind: base.reducer}
    whole, unmeasured = filled(measured, list(kinds.values()))
    found = []
    why = ""
    for kind in sorted(kinds, key=list(RISK_OF).index):
        candidate = replace(base, reducer=kinds[kind])
        seconds = {}
        for world in worlds:
            told = forecast(whole, candidate, memory=question.memory, link=_link_of(measured, question, world))
            if isinstance(told, str):
                why = told
            else:
                seconds[world] = told.cost.seconds
        if seconds:
            name = replace(candidate, precision="float32", merge_steps=1, recomputes=False).name.removeprefix("fp32, ")
            found.append(Curve("dense" if kind == "dense" else name, RISK_OF[kind].value, seconds, kind not in unmeasured))
    if not found:
        raise ConfigError(f"nothing can be foretold of {base.name} with any number of ranks: {why}.")
    return found


def _link_of(measured: Measured, question: Question, world: int) -> Link:
    several = link_for(measured.link.link(), replace(question, world=max(2, world)))
    return replace(several, ranks=world)
