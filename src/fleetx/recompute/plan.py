"""Make a plan for a budget: measure a step, solve, run the plan once and compare, correct it at most twice."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..config.text import MIB, binary, listed
from ..engine.dry_run import OutOfMemory
from ..engine.modules.large_head import advice_on_head
from ..errors import ConfigError
from .batches import profile_from_smaller
from .budget_solver import ANY_WAY, Solution, cheapest_that_fits, least_peak, smallest_budget
from .planner import Planner
from .profile import Profile, host_bytes, passings, peak_bytes

CORRECTIONS = 2
"""Plans tried after the first."""
AFTER_RUNNING_OUT = 0.9
"""Factor on the predicted bytes of a plan that ran out of memory: the aim of the next one."""
ALLOWANCE = 0.005
"""Share of the budget that the first plan leaves free: predictions are about this exact."""
TOO_CAREFUL = 0.03
"""Share of the budget: a plan that leaves more than this unused, and still recomputes, is followed by one that may use more."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The plan for `recompute_configs["budget"]`, as predicted and as measured."""

    budget: int
    """Bytes that a step may hold."""
    units: tuple[str, ...]
    """Modules that can be recomputed in backward."""
    recomputed: tuple[str, ...]
    """Modules recomputed in backward."""
    segments: tuple[tuple[str, ...], ...]
    """Rows of recomputed modules that keep one input among them, and run twice more."""
    parked: tuple[str, ...]
    """Recomputed modules whose inputs are in host memory from forward to backward."""
    host_bytes: int
    """Bytes of inputs in host memory (max over ranks)."""
    predicted_bytes: int
    """Predicted peak of bytes in use during a step (max over ranks)."""
    real_bytes: int
    """Measured peak of bytes in use (max over ranks)."""
    reserved_bytes: int
    """Measured peak of bytes held by the allocator (max over ranks); equal to `real_bytes` on a CPU."""
    seconds_added: float
    """Seconds added to each step, as measured unit by unit."""
    moments: tuple[Moment, ...]
    """Predicted memory over one step, piece by piece."""

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw the memory of a step into a PNG, SVG or PDF file."""
        draw(path, self.moments, self.budget)

    def __str__(self) -> str:
        names = f" ({listed(self.recomputed, 4)})" if self.recomputed else ""
        text = f"{len(self.recomputed)} of {len(self.units)} units are computed again{names}"
        if self.segments:
            text += f", {sum(map(len, self.segments))} of them in {len(self.segments)} segments"
        if self.parked:
            text += f", {len(self.parked)} of them with inputs in host memory ({binary(self.host_bytes)})"
        held = "" if self.reserved_bytes == self.real_bytes else f", {binary(self.reserved_bytes)} reserved"
        return (
            f"recompute: {text}, about {self.seconds_added * 1e3:.1f} ms more a step. Peak: {binary(self.predicted_bytes)} "
            f"predicted, {binary(self.real_bytes)} real{held}; the budget is {binary(self.budget)}."
        )


class Settled(NamedTuple):
    """A plan that was run, with its profile and solution."""

    plan: MemoryPlan
    profile: Profile
    solution: Solution
    ran_out: str | None = None
    """The error of running out of memory; None where there was enough."""


def plan_for(budget: int, planner: Planner) -> Settled:
    """Return the cheapest plan found whose step, run once, kept to the budget. Collective."""
    profile = _profiled(planner, budget)
    aim = int(budget * (1 - ALLOWANCE))
    fitting: Settled | None = None
    tried: list[Settled] = []
    for attempt in range(1 + CORRECTIONS):
        is_last = attempt == CORRECTIONS and fitting is None
        solution = _solved(profile, min(aim, smallest_budget(profile, **ANY_WAY)) if is_last else aim, budget)
        if solution is None or any(solution == settled.solution for settled in tried):
            break
        settled = _run(planner, profile, solution, budget)
        tried.append(settled)
        if settled.ran_out is not None:
            aim = int(AFTER_RUNNING_OUT * min(aim, solution.peak_bytes))
            continue
        held = settled.plan.reserved_bytes
        if held <= budget and (fitting is None or solution.seconds < fitting.solution.seconds):
            fitting = settled
        spare = budget - held
        if spare >= 0 and (not solution.again or spare <= TOO_CAREFUL * budget):
            break
        # Aim lower by as much as this plan was over, or higher by half of what it left free.
        predicted = min(aim, solution.peak_bytes)
        aim = min(predicted + spare // 2, budget) if spare > 0 else predicted + spare - int(ALLOWANCE * budget)
    if fitting is None:
        if not tried:  # run one plan: what the allocator holds beyond its tensors is part of what is needed
            tried.append(_run(planner, profile, least_peak(profile), budget))
        raise ConfigError(_too_small(budget, profile, tried) + advice_on_head(planner.rehearsal.model))
    return fitting


def _profiled(planner: Planner, budget: int) -> Profile:
    """Measure the profile; predict it from smaller batches where a step with every unit computed again does not fit."""
    try:
        return planner.profile()
    except OutOfMemory as error:
        profile = profile_from_smaller(planner)
        if profile is None:
            raise ConfigError(
                f'recompute_configs["budget"] is {budget} bytes ({binary(budget)}), and a step of this sample does not fit into '
                "this device's memory even with every unit computed again. It cannot be predicted from smaller batches: the "
                "sample's tensors have fewer than 4 rows or different lengths. Use a smaller batch in sample=, or amp. "
                f"({error}){advice_on_head(planner.rehearsal.model)}"
            ) from None
        return profile


def _solved(profile: Profile, aim: int, budget: int) -> Solution | None:
    """Return the cheapest plan for `aim`; if there is none, but one for `budget`, that of least peak; else None."""
    cheapest = cheapest_that_fits(profile, aim)
    return cheapest if cheapest is not None or smallest_budget(profile, **ANY_WAY) > budget else least_peak(profile)


def _run(planner: Planner, profile: Profile, solution: Solution, budget: int) -> Settled:
    """Run one step by the solution and describe the plan with predicted and measured numbers."""
    try:
        in_use, held = (max(profile.floor, count) for count in planner.real(profile, solution))
        ran_out = None
    except OutOfMemory as error:
        in_use = held = solution.peak_bytes
        ran_out = str(error)
    plan = MemoryPlan(
        budget=budget,
        units=profile.units,
        recomputed=tuple(profile.units[unit] for unit in sorted(solution.again)),
        segments=_segments(profile, solution),
        parked=tuple(profile.units[unit] for unit in sorted(solution.offloads)),
        host_bytes=host_bytes(profile, solution.offloads),
        predicted_bytes=solution.peak_bytes,
        real_bytes=in_use,
        reserved_bytes=held,
        seconds_added=solution.seconds,
        moments=moments(profile, solution),
    )
    return Settled(plan, profile, solution, ran_out)


def _segments(profile: Profile, solution: Solution) -> tuple[tuple[str, ...], ...]:
    """List the segments of more than one unit, by name."""
    rows: list[list[int]] = []
    for unit in sorted(solution.again):
        if unit in solution.joins:
            rows[-1].append(unit)
        else:
            rows.append([unit])
    return tuple(tuple(profile.units[unit] for unit in row) for row in rows if len(row) > 1)


def _too_small(budget: int, profile: Profile, settled: Sequence[Settled]) -> str:
    """Write the error for a budget that no plan kept to."""
    if settled[-1].ran_out is not None:
        return (
            f'recompute_configs["budget"] is {budget} bytes ({binary(budget)}), and a plan that is predicted to need '
            f"{binary(settled[-1].solution.peak_bytes)} found less memory than that on this device ({settled[-1].ran_out}). "
            "Use a smaller batch in sample=, or amp; or end other programs that use this memory."
        )
    tried = [attempt.plan for attempt in settled if attempt.ran_out is None]
    beyond = max((plan.reserved_bytes - plan.predicted_bytes for plan in tried), default=0)
    needed = int((smallest_budget(profile, **ANY_WAY) + max(0, beyond)) * (1 + 2 * ALLOWANCE))
    plain = peak_bytes(profile, ())
    loose = [plan for plan in tried if plan.real_bytes <= budget < plan.reserved_bytes]
    holds = min(loose, key=lambda plan: plan.reserved_bytes) if loose else None
    allocator = (
        f" (A plan was found whose tensors need {binary(holds.real_bytes)}; torch's allocator held "
        f"{binary(holds.reserved_bytes)} for them, in parts that it cannot join. With "
        "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment it can.)"
        if holds
        else ""
    )
    return (
        f'recompute_configs["budget"] is {budget} bytes ({binary(budget)}), and no plan keeps to it: a step of this sample '
        f'needs {binary(plain)} as it is and at least {binary(needed)} with recompute. Write "budget": {needed}, or use a '
        "smaller batch." + allocator
    )


# --- the memory of one step, piece by piece ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moment:
    """A call of a unit, or the glue between calls, in forward or in backward."""

    unit: str
    """The unit's name; empty for glue."""
    is_backward: bool
    is_again: bool
    """Whether the unit is computed again."""
    kept_bytes: int
    """Bytes that it and all before it keep for their backward."""
    peak_bytes: int
    """The most bytes in use while it runs."""
    parks: bool = False
    """Whether it has inputs in host memory from its forward to its backward."""


def moments(profile: Profile, solution: Solution) -> tuple[Moment, ...]:
    """Predict the memory of a step from its profile, through forward and then backward."""
    forward: list[Moment] = []
    backward: list[Moment] = []
    for passing in passings(profile, solution.again, solution.joins, solution.offloads):
        unit, kept = passing.element.unit, passing.kept.all
        name = "" if unit is None else profile.units[unit]
        again, offloaded = unit in solution.again, unit in solution.offloads
        forward.append(Moment(name, False, again, kept, passing.forward, offloaded))
        backward.append(Moment(name, True, again, kept, passing.backward, offloaded))
    return (*forward, *reversed(backward))


def draw(path: str | os.PathLike[str], steps: Sequence[Moment], budget: int) -> None:
    """Draw moments under the budget; the path's ending says whether as PNG, SVG or PDF."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError('a picture needs matplotlib: pip install "fleetx[demo]".') from None
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    turning = len(steps) // 2  # the last glue of forward and the first of backward: the loss
    shown = [step for place, step in enumerate(steps) if step.unit or place in (turning - 1, turning)]
    places = range(len(shown))
    axes.bar(places, [step.peak_bytes / MIB for step in shown], 1.0, color="#c9d7e8", label="in use, at the most")
    axes.bar(places, [step.kept_bytes / MIB for step in shown], 1.0, color="#4878a8", label="kept for backward")
    for place, step in enumerate(shown):
        if step.is_again:
            axes.axvspan(place - 0.5, place + 0.5, ymax=0.02, color="#d1495b")
    axes.axhline(budget / MIB, color="#d1495b", linestyle="--", label="budget")
    turn = next((place for place, step in enumerate(shown) if step.is_backward), len(shown))
    axes.axvline(turn - 0.5, color="#555555", linewidth=1)
    named = [place for place, step in enumerate(shown) if step.unit]
    axes.set_xticks(named, [shown[place].unit for place in named], rotation=90, fontsize=6)
    axes.set(ylabel="MiB", title="One step: forward, then backward (red marks: computed again)")
    axes.legend(loc="upper left", fontsize=8)
    figure.savefig(path)
