"""Measure a step of one precision piece by piece: its time and memory, and what each plan of recompute makes of them.

Every number that comes out is the same on all ranks: the slowest rank's, or the largest. Whether something is measured at all is
decided by such numbers alone, since every rank must be in every collective.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import nn

from ..engine.dry_run import OutOfMemory, Rehearsal
from ..engine.dry_steps import drop_gradients
from ..engine.modules.compiling import for_any_size
from ..errors import ConfigError
from ..recompute.batches import Growth, Units, measured_growth, profile_from_smaller
from ..recompute.budget_solver import Solution, cheapest, cheapest_that_fits, least_peak
from ..recompute.host_memory import Mover, mover_for
from ..recompute.memory_probe import storage_of
from ..recompute.plan import ALLOWANCE
from ..recompute.planner import Planner
from ..recompute.profile import Element, Profile, peak_bytes
from ..recompute.units import chosen_units
from .candidate import Candidate
from .clock import clocked, typical, wait_for
from .cost import Rung
from .measurements import Pass
from .subject import Subject

# --- The user's own recompute, set beside `auto`: which plan it leads to, by the profile of a step without it ---------


def computed_again(profile: Profile, *, offload: bool) -> Solution:
    """Compute every unit again; `offload`: with its inputs in host memory, where it has some that leave the device."""
    elements = [element for element in profile.elements if element.unit is not None and element.again is not None]
    again = frozenset(element.unit for element in elements if element.unit is not None)
    offloaded = frozenset(e.unit for e in elements if e.unit is not None and offload and e.offloads is not None)
    seconds = sum(element.way(again=True, joins=False, offloads=offload).seconds for element in elements)
    return Solution(again, seconds, peak_bytes(profile, again, offloads=offloaded), offloads=offloaded)


@final
class OwnRecompute:
    def __init__(self, subject: Subject) -> None:
        own = subject.fixed.recompute
        assert own is not None
        self.is_settled = own.budget is None
        """Whether units are named, so that nothing is left to choose. Else the cheapest within the budget is taken."""
        self.wanted: Sequence[str] = list(chosen_units(subject.model, own.checkpoints)) if self.is_settled else own.checkpoints
        self.mover: Mover | None = mover_for(subject.device) if own.offload else None

    def plan(self, profile: Profile) -> Solution:
        return computed_again(profile, offload=self.mover is not None)


# ----------------------------------------------------------------------------------------------------------------------

TIMED, FEW_TIMED, TIMED_S = 6, 2, 2.0
"""A step is timed `TIMED` times; fewer, but at least `FEW_TIMED`, if that takes more than `TIMED_S`."""
LONG_STEP_S, LATEST_S = 2.0, 40.0
"""Batches other than the sample's are timed if one of their steps is shorter than the first, before the second has passed."""
MORE_SIZES, MOST_SIZES = 2, 5
"""Other batches that are timed: those that fit without recompute, and all."""
PLAIN = Solution(frozenset(), 0.0, 0)
"""The plan that computes nothing again."""
SHARES = (0.8, 0.6, 0.45, 0.3, 0.2)
"""Shares of what a plain step needs beyond the least, for the rungs of a ladder."""


def precisions(device: torch.device) -> list[str]:
    """List the precisions that the hardware has, float32 first."""
    if device.type != "cuda":
        return ["float32", "bfloat16"]
    has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return ["float32", *(["bfloat16"] if has_bfloat16 else []), "float16"]


@final
class PrecisionProbe:
    """Measure a step in one precision: its units' memory and time, for the sample as it is or for any number of its rows."""

    def __init__(self, subject: Subject, precision: str, *, memory: int | None, grows: bool, is_compiled: bool = False) -> None:
        """Prepare a probe; `grows` says that batches other than the sample's will be asked for, `is_compiled` that blocks are
        compiled."""
        self._subject, self.precision, self._memory, self._grows = subject, precision, memory, grows
        self.is_compiled, self._compile_s = is_compiled, 0.0
        self._own = OwnRecompute(subject) if subject.fixed.recompute is not None else None
        self._growth: Growth | None = None
        self._profile: Profile | None = None
        self._times: dict[int, tuple[float, float]] = {}
        self.units: dict[str, nn.Module] = {}
        self.update_s = 0.0
        self.state_bytes = 0
        """Bytes that the optimizer keeps once it has made an update."""

    def look(self) -> float:
        """Time one step of the sample; 0 if it does not fit into memory."""
        with self._subject.bound(self._settings()) as rehearsal, rehearsal.leaving_no_trace():
            try:
                first = _step_seconds(rehearsal) if self.is_compiled else 0.0
                seconds = timed_look(rehearsal)
            except OutOfMemory:
                return 0.0
            self._compile_s = max(0.0, first - seconds)
            return seconds

    def _settings(self) -> dict[str, Any]:
        return Candidate(self.precision, compiles=self.is_compiled).settings()

    def run(self, batches: Sequence[int], *, is_first: bool) -> None:
        """Measure. `batches`: those that will be asked for, timed themselves where they can be."""
        subject = self._subject
        with contextlib.ExitStack() as inside:
            rehearsal = inside.enter_context(subject.bound(self._settings()))
            if self._grows:
                inside.enter_context(for_any_size(subject.model))
            inside.enter_context(rehearsal.leaving_no_trace())
            before = lasting_bytes(rehearsal)
            planner = self._measure_memory(rehearsal)
            self.units = dict(planner.units)
            self.state_bytes = max(0, lasting_bytes(rehearsal) - before)
            self._measure_times(rehearsal, batches)
            if is_first:
                self.update_s = timed_update(rehearsal)

    def _measure_memory(self, rehearsal: Rehearsal) -> Planner:
        if self._grows:
            subject = self._subject

            def planner_for(size: int, units: Units | None) -> Planner:
                return self._planner(subject.resized(rehearsal, size), units)

            self._growth, planner = measured_growth(planner_for, self._subject.rows, who="auto")
            return planner
        planner = self._planner(rehearsal)
        try:
            self._profile = planner.profile()
        except OutOfMemory as error:
            self._profile = profile_from_smaller(planner)
            if self._profile is None:
                raise ConfigError(
                    f"auto: a step of the sample does not fit even with every unit computed again. ({error})"
                ) from None
        return planner

    def _planner(self, rehearsal: Rehearsal, units: Units | None = None) -> Planner:
        own = self._own
        return Planner(rehearsal, units=units) if own is None else Planner(rehearsal, own.wanted, units=units, mover=own.mover)

    def _measure_times(self, rehearsal: Rehearsal, batches: Sequence[int]) -> None:
        """Time the sizes whose memory was measured; of those asked for the nearest that fit as they are, and the nearest that fit
        with recompute, if their steps are not long."""
        if self._growth is None:
            self._time(rehearsal, self._subject.rows)
            return
        growth = self._growth
        for size in (growth.small, growth.large):
            self._time(rehearsal, size)
        others = sorted((b for b in batches if b not in self._times), key=lambda b: (abs(math.log(b / growth.large)), -b))
        plain = [b for b in others if self._plan_for(b) == PLAIN]
        for size in [*plain[:MORE_SIZES], *(b for b in others if b not in plain and self._plan_for(b) is not None)][:MOST_SIZES]:
            if self.seconds(size) < LONG_STEP_S and self._subject.elapsed_s() < LATEST_S:
                self._time(rehearsal, size)

    def _plan_for(self, batch: int) -> Solution | None:
        """Return the user's own plan, or the cheapest within the memory; None if none is."""
        own = self._own_plan(batch)
        if own is not None:
            return own
        if self._memory is None or peak_bytes(self.profile(batch), ()) <= self._memory * (1 - ALLOWANCE):
            return PLAIN
        return cheapest_that_fits(self.profile(batch), int(self._memory * (1 - ALLOWANCE)))

    def _own_plan(self, batch: int) -> Solution | None:
        """Return the plan of the units that the user has named; None where there is something to choose."""
        return self._own.plan(self.profile(batch)) if self._own is not None and self._own.is_settled else None

    def _time(self, rehearsal: Rehearsal, batch: int) -> None:
        """Time forward and backward with nothing computed again; where that does not fit, from a step with recompute."""
        of_size = rehearsal if batch == self._subject.rows else self._subject.resized(rehearsal, batch)
        planner, profile, longer = self._planner(of_size, self.units), self.profile(batch), self._longer(batch)
        solutions = [one for one in (self._plan_for(batch), least_peak(profile)) if one is not None]
        for solution in dict.fromkeys(solutions):
            with contextlib.suppress(OutOfMemory), planner.by(profile, solution):
                forward_s, backward_s = timed_pass(of_size)
                self._times[batch] = forward_s, backward_s
                again_s = solution.seconds * self._longer(batch) / longer
                self._times[batch] = forward_s, max(0.0, backward_s - again_s)
                return
        if not self._times:
            raise ConfigError("auto: a step of the sample does not fit into memory, with every unit computed again.")

    def _can_name(self) -> bool:
        """Return whether all units are modules of the model; slices of a Sequential are not."""
        return self.units.keys() <= dict(self._subject.model.named_modules()).keys()

    # --- what follows ---------------------------------------------------------------------------------------------------

    def profile(self, batch: int) -> Profile:
        """Predict the profile of a batch. Bytes are on the line through the two that were measured. Seconds are not: a batch that
        does not fill a GPU takes as long as a smaller one. Units computed again take as much longer as the whole forward does."""
        if self._growth is not None:
            return with_seconds(self._growth.at(batch), self._growth.of_large, self._longer(batch))
        assert self._profile is not None
        return self._profile

    def _longer(self, batch: int) -> float:
        """Return how many times as long the forward takes as that of the larger profile; by the rows, while nothing is timed."""
        if self._growth is None:
            return 1.0
        large = self._growth.large
        return self._times_at(batch)[0] / self._times[large][0] if large in self._times else batch / large

    def fits_somehow(self, batch: int) -> bool:
        """Return whether so many rows fit into memory, by some plan of recompute."""
        own = self._own_plan(batch)
        if own is not None:
            return self._memory is None or own.peak_bytes <= self._memory
        return self._memory is None or cheapest_that_fits(self.profile(batch), self._memory) is not None

    def fits_plainly(self, batch: int) -> bool:
        """Return whether so many rows fit into memory as they are, with no more computed again than the user's own plan says."""
        own = self._own_plan(batch)
        peak = own.peak_bytes if own is not None else peak_bytes(self.profile(batch), ())
        return self._memory is None or peak <= self._memory

    def seconds(self, batch: int) -> float:
        return sum(self._times_at(batch)[:2])

    def pass_of(self, batch: int, limits: Sequence[int]) -> Pass:
        """Return the measurements for so many rows, with a plan of recompute for each limit, and some between."""
        forward_s, backward_s, is_predicted = self._times_at(batch)
        own = self._own_plan(batch)
        if own is None:
            ladder = ladder_of(self.profile(batch), limits, self._can_name())
        else:
            ladder = (Rung(own.peak_bytes, own.seconds, len(own.again)),)
        return Pass(self.precision, batch, forward_s, backward_s, ladder, is_predicted, self.is_compiled, self._compile_s)

    def _times_at(self, batch: int) -> tuple[float, float, bool]:
        if batch in self._times:
            return *self._times[batch], False
        forward_s, backward_s = (
            on_line([(size, times[i]) for size, times in sorted(self._times.items())], batch) for i in (0, 1)
        )
        return forward_s, backward_s, True


def with_seconds(profile: Profile, measured: Profile, longer: float) -> Profile:
    """Return a profile whose units take so many times the seconds of another's."""

    def element(own: Element, other: Element) -> Element:
        ways = {kind: (getattr(own, kind), getattr(other, kind)) for kind in ("stored", "again", "joins", "offloads")}
        return replace(own, **{k: replace(a, seconds=b.seconds * longer) for k, (a, b) in ways.items() if a is not None})

    pairs = zip(profile.elements, measured.elements, strict=True)
    return replace(profile, elements=tuple(element(own, other) for own, other in pairs))


def on_line(points: Sequence[tuple[int, float]], batch: int) -> float:
    """Predict the seconds of a batch from those of others: between two, on the line through them. Fewer rows than the smallest,
    and more than the largest, take no less than their share of its time: a batch that does not fill a GPU says little of one that
    does."""
    below, above = [p for p in points if p[0] <= batch], [p for p in points if p[0] >= batch]
    if not below or not above:
        size, seconds = above[0] if above else below[-1]
        (small, low), (large, high) = (points[:2] if above else points[-2:]) if len(points) > 1 else ((0, 0.0), (size, seconds))
        return max(low + (high - low) * (batch - small) / (large - small), seconds * batch / size)
    (small, low), (large, high) = below[-1], above[0]
    return low if small == large else low + (high - low) * (batch - small) / (large - small)


def ladder_of(profile: Profile, limits: Sequence[int], names: bool = False) -> tuple[Rung, ...]:
    """List plans of recompute: none; the cheapest for each limit; and some for cards that are not here. `names`: the units are
    modules, which a strategy can name."""
    plain = peak_bytes(profile, ())
    rungs = {plain: Rung(plain, 0.0, 0)}
    tight = [int(limit * (1 - ALLOWANCE)) for limit in limits if plain > limit]
    budgets = [(limit, True) for limit in tight] + [
        (int(profile.floor + share * (plain - profile.floor)), False) for share in SHARES
    ]
    for budget, is_asked in budgets:
        found = cheapest_that_fits(profile, budget) if is_asked else cheapest(profile, budget)
        if found is None:
            if is_asked:
                continue
            break
        named = names and is_asked and not found.joins and not found.offloads
        listed = tuple(profile.units[unit] for unit in sorted(found.again)) if named else ()
        rungs.setdefault(found.peak_bytes, Rung(found.peak_bytes, found.seconds, len(found.again), listed))
    return tuple(sorted(rungs.values(), key=lambda rung: rung.again_s))


def timed_pass(rehearsal: Rehearsal) -> tuple[float, float]:
    """Time forward and backward, on the slowest rank. Collective."""
    repeats = min(TIMED, max(FEW_TIMED, int(TIMED_S / timed_look(rehearsal))))
    found = [rehearsal.everywhere(lambda: _once(rehearsal)) for _ in range(repeats)]
    ranks = rehearsal.comm.gather_json([typical([one[i] for one in found]) for i in (0, 1)])
    forward_s, backward_s = max(ranks, key=sum)
    return float(forward_s), float(backward_s)


def timed_look(rehearsal: Rehearsal) -> float:
    """Time one step; on a GPU, whose first may wait for kernels to be loaded, the second. Collective."""
    if rehearsal.device.type == "cuda":
        rehearsal.everywhere(lambda: _once(rehearsal))
    return _step_seconds(rehearsal)


def _step_seconds(rehearsal: Rehearsal) -> float:
    """Time one step, on the slowest rank. Collective."""
    found = rehearsal.everywhere(lambda: _once(rehearsal))
    return float(max(rehearsal.comm.gather_json(sum(found))))


def _once(rehearsal: Rehearsal) -> tuple[float, float]:
    begun = time.perf_counter()
    loss = rehearsal.forward()
    wait_for(rehearsal.device)
    between = time.perf_counter()
    rehearsal.backward(loss)
    wait_for(rehearsal.device)
    return between - begun, time.perf_counter() - between


def timed_update(rehearsal: Rehearsal) -> float:
    """Time the optimizer's own step; its state must be there. Collective."""
    face = rehearsal.optimizer
    rehearsal.gather_gradients()
    face.pipeline.buckets.expose(None)
    shard = face.pipeline.stages.shard
    step = face.update.step if shard is None else functools.partial(shard.step, None)
    with face._steps():
        seconds = [clocked(rehearsal, step) for _ in range(1 + TIMED)][1:]
    drop_gradients(face.pipeline)
    return float(max(rehearsal.comm.gather_json(typical(seconds))))


def lasting_bytes(rehearsal: Rehearsal) -> int:
    """Count the bytes of all tensors that live from step to step, each storage once."""
    storages = {s._cdata: s.nbytes() for t in rehearsal.lasting() if (s := storage_of(t)) is not None}
    return sum(storages.values())
