"""Find the largest micro-batch that a budget allows, and the fastest one, with the recompute plan of each.

Two small batches are measured; from them the needs of any other are predicted, and then tried. Every decision rests on numbers
that all ranks share, so they try the same batches in the same order. A rank that runs out of memory reports it before the next
collective, and that batch does not fit. Afterwards the model and the optimizer are as they were, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from ..config.text import binary
from ..engine.dry_run import OutOfMemory, Rehearsal, Sample
from ..engine.modules.compiling import for_any_size
from ..engine.modules.large_head import advice_on_head
from ..errors import ConfigError
from .batches import Units, largest_that, measured_growth, merged, rows_in, sizes_to_try
from .budget_solver import ANY_WAY, Solution, cheapest_that_fits, least_peak, smallest_budget
from .host_memory import mover_for, warn_of_no_offload
from .memory_probe import require_countable
from .plan import ALLOWANCE
from .planner import Planner
from .profile import peak_bytes

if TYPE_CHECKING:
    from ..strategy import DistributedStrategy

MOST = 1 << 20
"""Rows of a micro-batch at most."""

Resize = Callable[[Any, int], Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch whose speed was measured, with its plan."""

    size: int
    """Rows of one rank and one micro-step."""
    samples_per_second: float
    """Samples per second of all ranks together, by forward and backward alone."""
    peak_bytes: int
    """Bytes held at the peak of a step, the most of all ranks."""
    recomputed: tuple[str, ...]
    """Names of the modules computed again in backward."""
    merge_steps: int
    """Micro-steps per update that make up the requested global batch; 1 where none was requested."""
    strategy: DistributedStrategy
    """The user's strategy with recompute and gradient_merge set for this batch: for fleet.distribute(..., sample=sample)."""
    sample: Any
    """A batch of this size."""


@dataclass(frozen=True, slots=True)
class FoundBatches:
    """The result of `fleet.find_batch`."""

    budget: int
    """Bytes that a step may hold."""
    most: int
    """The largest micro-batch that fits."""
    stored: int
    """The largest that is predicted to fit with nothing computed again; 0 if none."""
    largest: Batch
    """The batch of `most` rows; with a global batch, the largest that divides it."""
    fastest: Batch
    """The batch of the most samples per second."""
    tried: tuple[Batch, ...]
    """All batches whose speed was measured, by size."""

    def __str__(self) -> str:
        rows = [
            f"  {batch.size:>6}  {batch.samples_per_second:>10.1f}  {binary(batch.peak_bytes):>10}  {len(batch.recomputed):>10}"
            f"  {batch.merge_steps:>5}"
            + ("  largest" if batch is self.largest else "")
            + ("  fastest" if batch is self.fastest else "")
            for batch in self.tried
        ]
        head = f"   batch   samples/s        peak  recomputed  merge   (budget {binary(self.budget)})"
        most = f"  {self.most} fit at most, {self.stored or 'none'} with nothing computed again"
        return "\n".join([head, *rows, most])


def size_of(sample: Any) -> int:
    """Return the batch size of a sample, if all its tensors have one length."""
    sizes = rows_in(sample)
    if len(sizes) != 1 or not min(sizes):
        raise ConfigError(
            f"find_batch cannot tell the batch size of the sample: {_describe(sizes)}. Give tensors of one "
            "length, or resize=lambda sample, size: ... and size=..., which say how a batch of another size is made."
        )
    return sizes.pop()


def _describe(sizes: set[int]) -> str:
    return f"its tensors have {', '.join(map(str, sorted(sizes)))} rows" if sizes else "there is no tensor in it"


@final
class Finder:
    """Try batches of one model; used inside `rehearsal.leaving_no_trace()`, on every rank."""

    def __init__(
        self, rehearsal: Rehearsal, budget: int, resize: Resize, size: int, wanted: Sequence[str], *, offload: bool
    ) -> None:
        self._rehearsal, self._budget, self._resize, self._wanted = rehearsal, budget, resize, wanted
        self._mover = mover_for(rehearsal.device) if offload else None
        if offload and self._mover is None and rehearsal.comm.rank == 0:
            warn_of_no_offload(rehearsal.device)
        self._sample = rehearsal.sample.source
        self._ran_out = ""
        self._aim = int(budget * (1 - ALLOWANCE))
        self._growth, measured = measured_growth(self.planner, size, who="find_batch")
        self._units = measured.units

    def planner(self, size: int, units: Units | None = None) -> Planner:
        device = self._rehearsal.device
        sample = self._rehearsal.everywhere(lambda: Sample(self._resize(self._sample, size), device))
        rehearsal = replace(self._rehearsal, sample=sample)
        return Planner(rehearsal, self._wanted, units=units, mover=self._mover)

    def stored(self) -> int:
        """Predict the largest batch that fits with nothing computed again; 0 if none."""
        return largest_that(lambda size: peak_bytes(self._growth.at(size), ()) <= self._aim, at_most=MOST)

    def largest(self) -> int:
        """Find, by trying, the largest batch that keeps to the budget with the plan of least peak."""
        predicted = largest_that(lambda size: smallest_budget(self._growth.at(size), **ANY_WAY) <= self._aim, at_most=MOST)
        if not predicted:
            least = smallest_budget(self._growth.at(1), **ANY_WAY)
            raise ConfigError(
                f"budget is {self._budget} bytes ({binary(self._budget)}); a batch of 1 needs {binary(least)}, with everything "
                f"computed again that can be.{advice_on_head(self._rehearsal.model)}"
            )
        return self._by_trying(predicted)

    def _by_trying(self, predicted: int) -> int:
        """Find the largest batch that fits, to a sixty-fourth: downwards in growing steps until one fits, then by bisection."""
        fits, too_large, size, stride = 0, predicted + max(2, predicted // 16), predicted, max(1, predicted // 16)
        while size:
            peak = self.peak(size, self._least(size))
            if peak is not None and peak <= self._budget:
                fits = size
            else:
                too_large = size
            if too_large - fits <= max(1, fits // 64):
                break
            if fits:
                size = (fits + too_large) // 2
            else:
                size, stride = (size - stride if size > 2 * stride else size // 2), 2 * stride
        if not fits:
            raise ConfigError(
                f"find_batch: a batch of {predicted} was predicted to fit into {binary(self._budget)}, and not even one of "
                f"{too_large} did. Is there less memory free than the budget?{self._ran_out}"
            )
        return fits

    def _least(self, size: int) -> Solution:
        return least_peak(self._growth.at(size))

    def solution(self, size: int) -> Solution:
        """Return the cheapest plan for this size."""
        return cheapest_that_fits(self._growth.at(size), self._aim) or self._least(size)

    def peak(self, size: int, solution: Solution) -> int | None:
        """Run one step and return the bytes held; None where memory ran out."""
        profile = self._growth.at(size)
        try:
            return max(profile.floor, self.planner(size, self._units).real(profile, solution)[1])
        except OutOfMemory as error:
            self._ran_out = f" ({error})"
            return None

    def try_size(self, size: int) -> tuple[float, int, tuple[str, ...]] | None:
        """Return samples per second of this rank, bytes held and what is computed again; None if over the budget."""
        profile, solution = self._growth.at(size), self.solution(size)
        peak = self.peak(size, solution)
        if peak is None or peak > self._budget:
            solution = self._least(size)
            peak = self.peak(size, solution)
        if peak is None or peak > self._budget:
            return None
        try:
            seconds = self.planner(size, self._units).seconds(profile, solution)
        except OutOfMemory:  # at the edge one step may fit and several in a row not
            return None
        return size / seconds, peak, tuple(profile.units[unit] for unit in sorted(solution.again))


def found_batches(
    rehearsal: Rehearsal,
    strategy: DistributedStrategy,
    *,
    budget: int,
    resize: Resize,
    size: int,
    global_batch: int | None,
) -> FoundBatches:
    """Find the batches for a budget. Collective."""
    ranks = rehearsal.comm.size
    requests = rehearsal.comm.gather_json([budget, global_batch, size])
    if len({(request[0], request[1]) for request in requests}) > 1:
        raise ConfigError(
            f"find_batch was called with different arguments on the ranks: [budget, global_batch, size] are {requests}."
        )
    require_countable(rehearsal.model, rehearsal.device)
    size = min(request[2] for request in requests)
    with for_any_size(rehearsal.model), rehearsal.leaving_no_trace():
        recompute = strategy.recompute_configs
        finder = Finder(rehearsal, budget, resize, size, recompute["checkpoints"], offload=recompute["offload"])
        most = finder.largest()
        stored = min(finder.stored(), most)
        sizes = sizes_to_try(stored, most)
        if global_batch is not None:
            sizes = sorted({merged(global_batch, ranks=ranks, largest=limit)[1] for limit in sizes})
        speeds = {rows: finder.try_size(rows) for rows in sizes}
    batches: list[Batch] = []
    for rows, tried in speeds.items():
        if tried is not None:
            steps = 1 if global_batch is None else global_batch // ranks // rows
            chosen = settings_for(
                strategy, budget=budget if tried[2] else None, merge_steps=None if global_batch is None else steps
            )
            sample = resize(rehearsal.sample.source, rows)
            batches.append(Batch(rows, tried[0] * ranks, tried[1], tried[2], steps, chosen, sample))
    if not batches:
        raise ConfigError(f"find_batch: no batch kept to {binary(budget)} when it was run.")
    by_speed = max(batches, key=lambda batch: batch.samples_per_second)
    return FoundBatches(budget, most, stored, batches[-1], by_speed, tuple(batches))


def without_memory_parts(strategy: DistributedStrategy) -> DistributedStrategy:
    """Return the strategy without recompute and gradient_merge, which the finder chooses itself."""
    left_out = {f"{name}{end}" for name in ("recompute", "gradient_merge") for end in ("", "_configs")}
    return type(strategy).from_dict({name: value for name, value in strategy.to_dict().items() if name not in left_out})


def settings_for(strategy: DistributedStrategy, *, budget: int | None, merge_steps: int | None) -> DistributedStrategy:
    """Return the strategy with this recompute budget (None: no recompute) and merge steps (None: those that it has)."""
    chosen, recompute, merge = without_memory_parts(strategy), strategy.recompute_configs, strategy.gradient_merge_configs
    if budget is not None:
        chosen.recompute = True
        chosen.recompute_configs = {
            "budget": budget,
            "checkpoints": list(recompute["checkpoints"]),
            "offload": recompute["offload"],
        }
    steps = merge["k_steps"] if merge_steps is None else merge_steps
    if steps > 1:
        chosen.gradient_merge = True
        chosen.gradient_merge_configs = {"k_steps": steps, "avg": merge["avg"]}
    return chosen
