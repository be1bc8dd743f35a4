"""Say in one sentence, with numbers, why each strategy was not taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..config.text import binary
from ..engine.slots import PlanContext, Risk, Slot
from ..strategies import catalogue
from . import candidate as candidates
from .candidate import DENSE, SHORT, Candidate, allows
from .cost import Micro, Reducer, update_cost, wire
from .fixed_parts import NOTHING, Fixed
from .measurements import Forecast, Measured, forecast

NEVER = "the rule of an update is never changed by auto."


def rejected(
    measured: Measured,
    chosen: Forecast,
    *,
    risk: str,
    memory: int | None,
    asked_batch: bool,
    rules: Mapping[str, float | str],
    ran: Mapping[Candidate, float],
    fixed: Fixed = NOTHING,
) -> dict[str, str]:
    """Return the sentences by strategy. `asked_batch`: the user said how large an update is; `rules`: seconds of an update by the
    rules of other parts, or why that cannot be; `ran`: measured seconds of an update; `fixed`: parts that the user has set, which
    are no choice."""
    found: dict[str, str] = {}
    for precision in ("bfloat16", "float16") if fixed.precision is None else ():
        is_known = precision in measured.missing or _has(measured, precision)
        if chosen.candidate.precision != precision and (
            is_known or (precision == "bfloat16" and not allows(risk, Risk.ROUNDING))
        ):
            found[f"amp {SHORT[precision]}"] = _precision(measured, chosen, precision, risk, memory, ran)
    was_looked_at = "compile" in measured.missing or measured.compiled
    if was_looked_at and not chosen.candidate.compiles and "compile" not in fixed.names:
        found["compile"] = _compile(measured, chosen, risk=risk, memory=memory, ran=ran)
    if not chosen.candidate.recomputes and fixed.recompute is None:
        found["recompute"] = _recompute(measured, chosen, memory)
    if chosen.candidate.merge_steps == 1 and fixed.merge_steps is None:
        found["gradient_merge"] = _merge(measured, chosen, risk=risk, asked_batch=asked_batch)
    if measured.ranks > 1:
        found |= _reducers(measured, chosen, risk=risk, ran=ran, fixed=fixed)
        found |= {} if memory is None else _savers(measured, chosen, fixed, memory)
    for name, took in rules.items():
        found[name] = f"{NEVER} Asked for by hand, {_sentence(took)}" if isinstance(took, str) else _rule(measured, name, took)
    if measured.ranks == 1:
        kinds = list(strongest(measured))
        found["reducers"] = f"one rank sends nothing; {', '.join(kinds[:-1])} and {kinds[-1]} have nothing to save."
    return found


def strongest(measured: Measured) -> dict[str, Reducer]:
    """Return what parts offer, by kind: the strongest settings of each."""
    return {one.kind: one for one in candidates.offered(measured.context) if one != DENSE}


def _reducers(measured: Measured, chosen: Forecast, *, risk: str, ran: Mapping[Candidate, float], fixed: Fixed) -> dict[str, str]:
    found: dict[str, str] = {}
    offers = strongest(measured)
    for kind, reducer in offers.items():
        if chosen.candidate.reducer.kind != kind:
            found[kind] = fixed.refusal(kind) or _reducer(measured, chosen, reducer, risk=risk, ran=ran)
    for part in candidates.parts_in_order():
        if part.name in offers or part.name in fixed.names or Slot.REDUCE not in part().claims():
            continue
        elsewhere = f"was not tried: it offers no settings for {measured.ranks} ranks of this kind and this model."
        why = elsewhere if part.candidates(PlanContext(ranks=2)) else part.planning_note
        if why:
            found[part.name] = fixed.refusal(part.name) or why
    return found


def _savers(measured: Measured, chosen: Forecast, fixed: Fixed, memory: int) -> dict[str, str]:
    """Return a sentence for each part that is tried where memory is wanting alone, and was not."""
    lacking = replace(measured.context, lacks_memory=True)
    left_out = [
        part for part in candidates.parts_in_order() if part.candidates(lacking) and not part.candidates(measured.context)
    ]
    fits = f"not needed: a step takes {binary(chosen.peak_bytes)}, and there are {binary(memory)}."
    return {part.name: fixed.refusal(part.name) or fits for part in left_out if part.name not in fixed.names}


def _has(measured: Measured, precision: str) -> bool:
    return any(one.precision == precision for one in measured.passes)


def _sentence(text: str) -> str:
    return text.rstrip(".") + "."


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _precision(
    measured: Measured, chosen: Forecast, precision: str, risk: str, memory: int | None, ran: Mapping[Candidate, float]
) -> str:
    if not allows(risk, Risk.ROUNDING):
        return f'changes results by rounding, and auto_configs["risk"] is "{risk}".'
    if precision in measured.missing:
        return _sentence(measured.missing[precision])
    same = replace(chosen.candidate, precision=precision, recomputes=False, recomputed=(), compiles=False)
    other = forecast(measured, same, memory=memory)
    if isinstance(other, str):
        return _sentence(other)
    if other.candidate in ran and chosen.candidate in ran:
        return f"run, an update took {_ms(ran[other.candidate])}, and {_ms(ran[chosen.candidate])} as chosen."
    return f"an update would take {_ms(other.cost.seconds)} in place of {_ms(chosen.cost.seconds)}, by the forecast."


def _compile(measured: Measured, chosen: Forecast, *, risk: str, memory: int | None, ran: Mapping[Candidate, float]) -> str:
    if not allows(risk, Risk.ROUNDING):
        return f'changes results by rounding, and auto_configs["risk"] is "{risk}".'
    kinds = measured.compiled
    if not kinds:
        return _sentence(measured.missing.get("compile", "was not measured"))
    precision = chosen.candidate.precision if chosen.candidate.precision in kinds else kinds[0]
    same = replace(chosen.candidate, precision=precision, compiles=True, recomputes=False, recomputed=())
    other, one = forecast(measured, same, memory=memory), measured.pass_of(same)
    if isinstance(other, str) or one is None:
        return _sentence(other if isinstance(other, str) else "was not measured")
    once = f"; compiling took {one.compile_s:.1f} s, once."
    if other.candidate in ran and chosen.candidate in ran:
        return f"run, an update took {_ms(ran[other.candidate])}, and {_ms(ran[chosen.candidate])} as chosen{once}"
    return f"an update would take {_ms(other.cost.seconds)} in place of {_ms(chosen.cost.seconds)}, by the forecast{once}"


def compiling_pays(measured: Measured, chosen: Forecast, *, memory: int | None, total_steps: int | None) -> list[str]:
    """Say what compiling takes once, and after how many updates that is earned back, where it was chosen."""
    one = measured.pass_of(chosen.candidate) if chosen.candidate.compiles else None
    if one is None:
        return []
    plain = replace(chosen.candidate, compiles=False, recomputes=False, recomputed=())
    other = forecast(measured, plain, memory=memory)
    text = f"compiling takes {one.compile_s:.1f} s, once"
    if not isinstance(other, str):
        saved = other.cost.seconds - chosen.cost.seconds
        text += f", and saves {_ms(saved)} an update by the forecast"
        text += f": earned back after {one.compile_s / saved:,.0f} updates" if saved > 0 else ""
    return [f"{text}." if total_steps is None else f"{text}; {total_steps:,} are to be made."]


def _recompute(measured: Measured, chosen: Forecast, memory: int | None) -> str:
    one = measured.pass_of(chosen.candidate)
    rungs = [rung for rung in one.ladder if rung.units] if one is not None else []
    least = min(rungs, key=lambda rung: rung.peak_bytes, default=None)
    could = ""
    if least:
        could = f"; {least.units} units computed again would make it {binary(least.peak_bytes)}, and {_ms(least.again_s)} longer"
    room = "and no limit was given" if memory is None else f"and there are {binary(memory)}"
    return f"not needed: the step takes {binary(chosen.peak_bytes)}, {room}{could}."


def _merge(measured: Measured, chosen: Forecast, *, risk: str, asked_batch: bool) -> str:
    if asked_batch:
        return f"not needed: {chosen.candidate.batch} rows a rank make up the global batch at once."
    exchange = (
        f"{_ms(chosen.cost.shown_s)} of exchange" if measured.ranks > 1 else f"the {_ms(measured.update_s)} of an update's rule"
    )
    if not allows(risk, Risk.SCHEDULE):
        return (
            f"would share {exchange} among k times the batch of an update, which changes the algorithm: "
            f'auto_configs["risk"] is "{risk}". Say how large an update is to be by auto_configs["global_batch"].'
        )
    most = max(candidates.MERGES)
    return f"would share {exchange} among up to {most} micro-steps; no such plan was faster for a sample."


def _rule(measured: Measured, name: str, seconds: float) -> str:
    return _noted(
        f"its update takes {_ms(seconds)}, the optimizer's own {_ms(measured.update_s)}; {NEVER}", catalogue()[name].planning_note
    )


def _noted(figures: str, note: str) -> str:
    return f"{figures} {note}" if note else figures


def _reducer(measured: Measured, chosen: Forecast, reducer: Reducer, *, risk: str, ran: Mapping[Candidate, float]) -> str:
    note = "" if reducer.part is None else reducer.part.planning_note
    dense, own = (wire(one, measured.gradients, measured.link.link()) for one in (DENSE, reducer))
    if not allows(risk, reducer.risk):
        less = f"{own.bytes_sent / reducer.period / 1e6:,.2f} MB in place of {dense.bytes_sent / 1e6:,.2f} an update"
        return _noted(
            f"would send {less}, in {_ms(own.seconds / reducer.period)} in place of {_ms(dense.seconds)} if nothing hides them; "
            f'its risk is "{reducer.risk.value}", and auto_configs["risk"] is "{risk}".',
            note,
        )
    if reducer.kind in measured.missing and measured.reduced_of(reducer) is None:
        return _sentence(measured.missing[reducer.kind])
    return _noted(_compared(measured, chosen, reducer) + _run(chosen, reducer.kind, ran), note)


def _run(chosen: Forecast, kind: str, ran: Mapping[Candidate, float]) -> str:
    """Say what was measured, where the two were run."""
    others = [one for one in ran if one.reducer.kind == kind]
    if not others or chosen.candidate not in ran:
        return ""
    other = min(others, key=lambda one: ran[one] / (one.merge_steps * max(1, one.batch)))
    return f" Run, {other.name} took {_ms(ran[other])}, and {chosen.candidate.name} {_ms(ran[chosen.candidate])}."


def _compared(measured: Measured, chosen: Forecast, reducer: Reducer) -> str:
    """Compare it with plain all-reduce, all else being as in the plan that was chosen."""
    one = measured.pass_of(chosen.candidate)
    dense, other = measured.exchange(DENSE), measured.exchange(reducer)
    if one is None or dense is None or other is None:
        return "was not measured."
    micro = Micro(one.forward_s, one.backward_s, chosen.again_s)
    costs = [
        update_cost(
            micro,
            exchange,
            update_s=measured.update_s,
            merge_steps=chosen.candidate.merge_steps,
            hidden_share=measured.hidden_share,
        )
        for exchange in (dense, other)
    ]
    saved = costs[0].shown_s - (costs[1].shown_s - other.work_s / reducer.period)
    wired = f"saves {_ms(saved)} of wire" if saved >= 0 else f"waits {_ms(-saved)} longer for the wire"
    took = f"an update takes {_ms(costs[1].seconds)} with it, and {_ms(chosen.cost.seconds)} as chosen"
    return f"{wired}, costs {_ms(other.work_s / reducer.period)} of work; {took}."
