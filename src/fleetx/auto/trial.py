"""Run a candidate for some real updates: time them, measure their memory, undo them.

A real update talks to the other ranks in the middle of backward, where a rank that runs out of memory would leave them waiting.
So each rank first runs a forward and backward without messages, with as much memory taken away as the update will keep; only if
all have room for that, all go on.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import final

import torch

from ..engine import dry_steps
from ..engine.dry_run import OutOfMemory, Rehearsal, Snapshot
from ..engine.dry_steps import rehearsing
from ..engine.report import Report
from ..errors import FleetError, first_line
from ..recompute.memory_probe import memory_probe_for
from .candidate import Candidate
from .clock import typical, wait_for
from .cost import Rung
from .subject import Subject, agreed, raise_if_alone

MOST_ROUNDS, FEWEST_ROUNDS = 10, 2
"""Rounds that are timed. A round is one update; of Local SGD, one period."""
SHORT_PERIOD = 2
"""Period of Local SGD while it is timed: one update alone, one with an averaging."""
SECONDS = 3.0
"""Seconds of the timed updates of one trial, about."""


@final
@dataclass(frozen=True, slots=True)
class Trial:
    """Hold the measurements of one update on the slowest rank."""

    seconds: float = 0.0
    peak_bytes: int = 0
    held_bytes: int = 0
    """Bytes that the allocator holds: on a GPU more than what is in use at the peak."""
    bytes_sent: float = 0.0
    spread_s: tuple[float, float] = (0.0, 0.0)
    """Seconds of a fast and of a slow one among the timed steps that ended an update: the lower and the upper quartile."""
    settled: Rung | None = None
    """Plan of recompute that a budget came to, with the memory predicted for it; None where units were named."""
    failed: str = ""
    """Why it was not measured; empty where it was."""
    lacked_memory: bool = False
    """Whether it failed for want of memory."""


def tried(
    subject: Subject,
    candidate: Candidate,
    *,
    memory: int | None,
    expected_s: float,
    kept_bytes: int = 0,
) -> Trial:
    """Time a candidate. Collective: it succeeds on all ranks or fails on all, with nothing changed. `kept_bytes`: bytes that
    optimizer and reducer keep from the first update on."""
    # Of many micro-steps that take long, all but the last are alike: some of them show what the others take.
    micro_s = expected_s / candidate.merge_steps
    merges = min(candidate.merge_steps, max(2, int(SECONDS / max(micro_s, 1e-9) / FEWEST_ROUNDS)))
    short = replace(candidate, merge_steps=merges, reducer=candidate.reducer.steady(longest_period=SHORT_PERIOD))
    settings = short.settings(memory)
    try:
        with subject.bound(settings, rows=candidate.batch or None, settles=True) as rehearsal:
            # The inner optimizer's state is what was there before: a pair that is given up must leave it so.
            saved = Snapshot(rehearsal.model, rehearsal.optimizer, rehearsal.device)
            rehearsal.random[:] = saved.random
            try:
                if not rehearsal.model.training:  # modules that are not, in a model that is, are the user's choice
                    rehearsal.model.train()
                with rehearsing():
                    agreed(rehearsal, lambda: _with_less_memory(rehearsal, kept_bytes))
                return replace(_timed(rehearsal, candidate, expected_s), settled=_settled(rehearsal))
            finally:
                saved.put_back()
    except OutOfMemory as error:
        return Trial(failed=f"ran out of memory ({first_line(error)})", lacked_memory=True)
    except FleetError as error:
        raise_if_alone(error)
        return Trial(failed=first_line(error))
    finally:
        if subject.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def _settled(rehearsal: Rehearsal) -> Rung | None:
    plan = rehearsal.optimizer.memory_plan
    return None if plan is None else Rung(plan.predicted_bytes, plan.seconds_added, len(plan.recomputed))


def _with_less_memory(rehearsal: Rehearsal, count: int) -> None:
    ballast = torch.empty(count, dtype=torch.uint8, device=rehearsal.device) if rehearsal.device.type == "cuda" else None
    rehearsal.step()
    del ballast


def _timed(rehearsal: Rehearsal, candidate: Candidate, expected_s: float) -> Trial:
    """Time updates. All ranks make the same number of them: it follows from numbers they share."""
    pipeline = rehearsal.optimizer.pipeline
    dry_steps.look_at_no_data(pipeline)
    merges, period = pipeline.stages.merge.micro_steps, min(candidate.reducer.period, SHORT_PERIOD)
    times = Times(rehearsal, merges)
    of_round = expected_s * period * merges / candidate.merge_steps
    rounds = min(MOST_ROUNDS, max(FEWEST_ROUNDS, int(SECONDS / max(of_round, 1e-9))))
    probe, is_gpu = memory_probe_for(rehearsal.device, rehearsal.lasting), rehearsal.device.type == "cuda"
    with probe.watching() if is_gpu else contextlib.nullcontext():
        times.run_update()  # Local SGD's first is dense
        times.forget()
        for _ in range(rounds * period):
            times.run_update()
        memory = [probe.peak(), probe.reserved()] if is_gpu else []
    if not memory:  # counting on a CPU takes time: not of updates that are timed
        with probe.watching():
            for _ in range(period):
                times.run_update(is_timed=False)
            memory = [probe.peak(), probe.reserved()]
    low, high = quartiles(times.last or times.averaged)
    ranks = rehearsal.comm.gather_json([times.of_update(candidate), *memory, times.bytes_of_update(candidate), low, high])
    seconds, peak, held, sent, low, high = (max(rank[i] for rank in ranks) for i in range(6))
    return Trial(float(seconds), int(peak), int(held), float(sent), (float(low), float(high)))


def quartiles(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the times below and above which a quarter of them lie; of two or three the least and the most."""
    ordered = sorted(seconds)
    cut = len(ordered) // 4
    return ordered[cut], ordered[-1 - cut]


@final
class Times:
    """Collect times of micro-steps inside a window, of those that close one, and of those after which weights were averaged.

    All of a kind are alike: so a few of each show what an update of many micro-steps takes, on the mean of a long period."""

    def __init__(self, rehearsal: Rehearsal, merges: int) -> None:
        self._rehearsal, self._merges = rehearsal, merges
        self.forget()

    def forget(self) -> None:
        self.inner: list[float] = []
        self.last: list[float] = []
        self.averaged: list[float] = []
        self._sent: list[tuple[float, bool]] = []

    def run_update(self, *, is_timed: bool = True) -> None:
        for step in range(self._merges):
            seconds, report = self._micro_step()
            if not is_timed:
                continue
            kind = self.inner if step < self._merges - 1 else self.averaged if report.averaged else self.last
            kind.append(seconds)
            if report.due:
                self._sent.append((report.bytes_sent, report.averaged))

    def _micro_step(self) -> tuple[float, Report]:
        one = self._rehearsal
        begun = time.perf_counter()
        report = one.optimizer.minimize(one.loss_fn(one.model, one.sample.renewed()))
        wait_for(one.device)
        return time.perf_counter() - begun, report

    def of_update(self, candidate: Candidate) -> float:
        inner = (candidate.merge_steps - 1) * typical(self.inner) if self.inner else 0.0
        return inner + _mean_of_period(
            candidate.reducer.period, typical(self.last or self.averaged), typical(self.averaged or self.last)
        )

    def bytes_of_update(self, candidate: Candidate) -> float:
        alone, met = ([sent for sent, averaged in self._sent if averaged is kind] for kind in (False, True))
        return _mean_of_period(candidate.reducer.period, fmean(alone or met), fmean(met or alone))


def _mean_of_period(period: int, alone: float, met: float) -> float:
    return ((period - 1) * alone + met) / period
