"""Sum a run up: its state, totals and rates, and which rank the others waited for. A fact that was not logged is None.

In a collective all ranks wait for the last one, so the last to come spends least time in communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .axis import duration, memory_size, plain, share, short_time, size
from .metrics import RankTimes, Update, number, numbers, rank_times, whole
from .read import Run

SAMPLES, STEPS = "samples/s", "steps/s"
LESS_IS_BETTER = ("loss", "err", "ppl", "perplexity", "mse", "mae", "wer", "seconds")
NOTICED = 0.02
"""Least share of an update's time that is reported as waiting."""


@dataclass(frozen=True)
class Facts:
    """The numbers at the head of the page and in the terminal's line."""

    state: str
    error: str | None
    steps: int | None
    total_steps: int | None
    skipped: int
    seconds: float | None
    loss: float | None
    """Last finite loss; None if there was none."""
    is_loss_finite: bool
    """Whether `loss` is that of the last update."""
    values: dict[str, float]
    rate: float | None
    rate_unit: str
    flops_per_second: float | None
    """Floating-point operations of the model, on all ranks, in the last start."""
    peak_share: float | None
    """Share of what the devices can compute at most; None where that is not known."""
    memory_bytes: float | None
    sent: float | None
    dense: float | None
    """Bytes a dense float32 all-reduce of each update would have sent; `sent` and `dense` are None for one rank."""
    best: dict[str, tuple[float, int]]
    """Best finite value of the loss and of each value, with its step: the least where the name says so, else the most."""


def last_of(updates: Sequence[Update], name: str) -> float | None:
    return next((value for update in reversed(updates) if (value := getattr(update, name)) is not None), None)


def state_of(run: Run) -> str:
    if run.summary is not None:
        return str(run.summary.get("state") or "ended")
    return "running" if run.is_live else "no end written"


def has_samples(updates: Sequence[Update]) -> bool:
    return any(update.samples is not None for update in updates)


def rate_of(updates: Sequence[Update], unit: str) -> float | None:
    """Return samples or steps per second, from the time between updates of one start, pauses between them included."""
    steps, seconds = 0, 0.0
    for earlier, later in pairwise(updates):
        if earlier.start == later.start and earlier.seconds is not None and later.seconds is not None:
            steps += later.step - earlier.step
            seconds += later.seconds - earlier.seconds
    if seconds <= 0 or steps <= 0:
        return None
    samples = [update.samples for update in updates if update.samples is not None] if unit == SAMPLES else [1.0]
    return sum(samples) / len(samples) * steps / seconds if samples else None


def last_values(updates: Sequence[Update]) -> dict[str, float]:
    last: dict[str, float] = {}
    for update in updates:
        last |= {name: value for name, value in update.values.items() if value is not None}
    return last


def is_less_better(name: str) -> bool:
    """Judge by the name: a loss, an error or a perplexity is to be small, an accuracy large."""
    return any(part in name.lower() for part in LESS_IS_BETTER)


def best_values(updates: Sequence[Update]) -> dict[str, tuple[float, int]]:
    """Return the best value under each name, with the step at which it was first reached."""
    found: dict[str, list[tuple[float, int]]] = {}
    for update in updates:
        for name, value in {"loss": update.loss, **update.values}.items():
            if value is not None:
                found.setdefault(name, []).append((value, update.step))
    signs = {name: 1 if is_less_better(name) else -1 for name in found}
    return {name: min(pairs, key=lambda pair: (signs[name] * pair[0], pair[1])) for name, pairs in found.items()}


def facts_of(run: Run) -> Facts:
    summary = run.summary or {}
    every = run.all_updates
    first = next(iter(run.updates.values()), [])
    unit = SAMPLES if has_samples(first) else STEPS
    rate = rate_of(first, unit)  # over all starts: the summary has the rate of the last
    if rate is None:
        rate = number(summary.get("samples_per_second" if unit == SAMPLES else "steps_per_second"))
    totals = [(updates[-1].total_sent, updates[-1].total_dense) for updates in run.updates.values() if updates]
    sent, dense = (number(summary.get(name)) for name in ("bytes_sent", "bytes_dense"))
    if totals:  # over all starts: the summary has the bytes of the last
        sent, dense = sum(total for total, _ in totals), sum(total for _, total in totals)
    seconds = [update.total_seconds for update in every if update.total_seconds is not None]
    memory = [update.memory_bytes for update in every if update.memory_bytes is not None]
    memory += [peak] if (peak := number(summary.get("memory_bytes"))) is not None else []
    steps = whole(summary.get("steps"))
    loss, whole_time = number(summary.get("loss")), number(summary.get("seconds"))
    return Facts(
        state=state_of(run),
        error=str(summary["error"]) if summary.get("error") else None,
        steps=steps if steps is not None else max((update.step for update in every), default=None),
        total_steps=whole(run.starts[-1].get("total_steps")) if run.starts else None,
        skipped=sum(update.skipped for update in every) if every else whole(summary.get("skipped")) or 0,
        seconds=whole_time if whole_time is not None else max(seconds, default=None),
        loss=loss if loss is not None else last_of(first, "loss"),
        is_loss_finite=not first or first[-1].loss is not None,
        values=last_values(every) | numbers(summary.get("values")),
        rate=rate,
        rate_unit=unit,
        flops_per_second=number(summary.get("flops_per_second")),
        peak_share=number(summary.get("peak_share")),
        memory_bytes=max(memory, default=None),
        sent=sent if dense else None,
        dense=dense or None,
        best=best_values(first),
    )


def wire_words(sent: float, dense: float) -> str:
    """Describe bytes sent against dense ones: the share that was saved, or the share sent if it is more."""
    if sent > dense * 1.0005:
        return f"{share(sent, dense)} of what dense would send"
    return "as much as dense" if sent > dense * 0.9995 else f"{share(dense - sent, dense)} less than dense"


def steps_words(facts: Facts) -> str:
    if facts.steps is None:
        return "no update yet"
    of = f" of {facts.total_steps:,}" if facts.total_steps is not None and facts.total_steps != facts.steps else ""
    return f"{facts.steps:,}{of} steps"


def flops_words(facts: Facts) -> tuple[str, str] | None:
    """Describe the speed of computing: number and unit; None where it is not known, or too small to say something."""
    if facts.flops_per_second is None or facts.flops_per_second < 1e9:
        return None
    unit, scale = ("TFLOP/s", 1e12) if facts.flops_per_second >= 1e12 else ("GFLOP/s", 1e9)
    part = "" if facts.peak_share is None else f", {share(facts.peak_share, 1.0)} of peak"
    return plain(facts.flops_per_second / scale), unit + part


def one_line(name: str, facts: Facts) -> str:
    """Describe a run in one line for the terminal."""
    took = f" in {duration(facts.seconds)}" if facts.seconds is not None else ""
    pieces = [facts.state, steps_words(facts) + took]
    pieces += [f"{facts.skipped:,} skipped"] if facts.skipped else []
    pieces += [f"loss {plain(facts.loss)}"] if facts.loss is not None else []
    pieces += [f"{key} {plain(value)}" for key, value in list(facts.values.items())[:4]]
    pieces += [f"{plain(facts.rate)} {facts.rate_unit}"] if facts.rate is not None else []
    pieces += [" ".join(computing)] if (computing := flops_words(facts)) is not None else []
    pieces += [f"peak {memory_size(facts.memory_bytes)}"] if facts.memory_bytes is not None else []
    if facts.sent is not None and facts.dense is not None:
        pieces.append(f"{size(facts.sent)} sent, {wire_words(facts.sent, facts.dense)}")
    pieces += [facts.error] if facts.error else []
    return f"{name}: {', '.join(pieces)}"


# --- the rank that the others waited for ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Waiting:
    """The rank that the others waited for."""

    rank: int
    seconds: float
    """Seconds of a step that the longest waiting rank waited longer than this one."""
    step_seconds: float
    cause: str
    """"compute" or "data": where this rank spent more time than the others."""


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def scaled_to_step(total: Mapping[int, RankTimes], step_seconds: float) -> dict[int, RankTimes]:
    """Scale the times of each rank to an update of `step_seconds`: ranks log at different updates, so sums cannot be compared."""
    scales = {rank: step_seconds / one.seconds for rank, one in total.items() if one.seconds > 0}
    return {
        rank: RankTimes(step_seconds, *(scales[rank] * part for part in (one.compute, one.communication, one.data)))
        for rank, one in sorted(total.items())
        if rank in scales
    }


def added(one: RankTimes | None, other: RankTimes) -> RankTimes:
    if one is None:
        return other
    return RankTimes(
        one.seconds + other.seconds, one.compute + other.compute, one.communication + other.communication, one.data + other.data
    )


def mean_step(updates: Sequence[Update]) -> float:
    """Return the mean seconds of an update on rank 0."""
    wholes = [sum(update.split.values()) for update in updates if update.split]
    return mean(wholes) if wholes else 0.0


def times_by_rank(run: Run) -> dict[int, RankTimes]:
    """Return each rank's times of an update, from the updates, or from the summary if they hold none."""
    total: dict[int, RankTimes] = {}
    for update in run.all_updates:
        for rank, times in (update.ranks or {}).items():
            total[rank] = added(total.get(rank), times)
    if not total and run.summary is not None:
        total = rank_times(run.summary.get("ranks")) or {}
    return scaled_to_step(total, mean_step(run.all_updates))


def waited_for(times: Mapping[int, RankTimes]) -> Waiting | None:
    """Find the rank that the others waited for; None for fewer than two ranks."""
    if len(times) < 2:
        return None
    rank = min(times, key=lambda one: times[one].communication)
    own, others = times[rank], [one for place, one in times.items() if place != rank]
    more_data = own.data - mean([one.data for one in others])
    more_compute = own.compute - mean([one.compute for one in others])
    return Waiting(
        rank,
        max(one.communication for one in others) - own.communication,
        own.seconds,
        "data" if more_data > more_compute else "compute",
    )


def waiting_words(times: Mapping[int, RankTimes]) -> str | None:
    waiting = waited_for(times)
    if waiting is None:
        return None
    if waiting.seconds < NOTICED * waiting.step_seconds:
        return f"No worker kept the others waiting for more than {NOTICED:.0%} of a step."
    why = "it took longer over data and script" if waiting.cause == "data" else "it computed longer"
    return (
        f"Worker {waiting.rank} kept the others waiting {short_time(waiting.seconds)} a step "
        f"({share(waiting.seconds, waiting.step_seconds)} of it): {why}."
    )


def waits_over_steps(run: Run) -> dict[int, list[tuple[int, float]]]:
    """Return for each rank how much less it waited than the longest waiting one, in seconds, at each step with times of ranks."""
    waits: dict[int, list[tuple[int, float]]] = {}
    for updates in run.updates.values():
        begin = 0
        for place, update in enumerate(updates):
            if not update.ranks:
                continue
            times = scaled_to_step(update.ranks, mean_step(updates[begin : place + 1]))
            begin = place + 1
            for rank, one in times.items():
                most = max(other.communication for other in times.values())
                waits.setdefault(rank, []).append((update.step, most - one.communication))
    return dict(sorted(waits.items()))
