"""The batch finder: the largest micro-batch that a budget allows, and the fastest one, with the recompute plan of each.

Two small batches are measured; what a step of any other needs follows, and is then tried. Every decision rests on numbers that
all ranks share, so they try the same batches in the same order. A rank that runs out of memory tells the others before the next
collective, and that batch does not fit. Afterwards the model and the optimizer are as they were, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from ..config.text import binary
from ..engine.dry_run import OutOfMemory, Rehearsal, Sample
from ..errors import ConfigError
from .batches import Units, largest_that, measured_growth, merged, rows_in, sizes_to_try
from .host_memory import mover_for, warn_of_no_offload
from .plan import ALLOWANCE
from .planner import Planner
from .profile import peak_bytes
from .solve import ANY_WAY, Solution, cheapest_that_fits, least_peak, smallest_budget

if TYPE_CHECKING:
    from ..strategy import DistributedStrategy

MOST = 1 << 20

Resize = Callable[[Any, int], Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch that was tried, with the plan it takes."""

    size: int
    """Of one rank and one micro-step."""
    samples_per_second: float
    """Of all ranks, forward and backward alone."""
    peak_bytes: int
    recomputed: tuple[str, ...]
    merge_steps: int
    """Micro-steps to one update: as many as make up the global batch that was asked for."""
    strategy: DistributedStrategy
    """The one given, with recompute and gradient_merge as this batch wants them: for fleet.distribute(..., sample=sample)."""
    sample: Any


@dataclass(frozen=True, slots=True)
class FoundBatches:
    budget: int
    most: int
    """The largest micro-batch that fits."""
    stored: int
    """The largest with nothing computed again, as foretold; 0 if none."""
    largest: Batch
    """As `most`; or, for a global batch, the largest that makes it up without a rest."""
    fastest: Batch
    tried: tuple[Batch, ...]
    """All whose speed was measured, by size."""

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
    sizes = rows_in(sample)
    if len(sizes) != 1 or not min(sizes):
        raise ConfigError(
            f"find_batch cannot tell the batch size of the sample: {_told(sizes)}. Give tensors of one "
            "length, or resize=lambda sample, size: ... and size=..., which say how a batch of another size is made."
        )
    return sizes.pop()


def _told(sizes: set[int]) -> str:
    return f"its tensors have {', '.join(map(str, sorted(sizes)))} rows" if sizes else "there is no tensor in it"


@final
class Finder:
    """Inside `rehearsal.leaving_no_trace()`, on every rank."""

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
        return largest_that(lambda size: peak_bytes(self._growth.at(size), ()) <= self._aim, at_most=MOST)

    def largest(self) -> int:
        """Tried: by the plan of least peak it keeps to the budget, and the next one tried did not."""
        foretold = largest_that(lambda size: smallest_budget(self._growth.at(size), **ANY_WAY) <= self._aim, at_most=MOST)
        if not foretold:
            least = smallest_budget(self._growth.at(1), **ANY_WAY)
            raise ConfigError(
                f"budget is {self._budget} bytes ({binary(self._budget)}); a batch of 1 needs {binary(least)}, with everything "
                "computed again that can be."
            )
        return self._by_trying(foretold)

    def _by_trying(self, foretold: int) -> int:
        """The largest that fits, to a sixty-fourth: downwards in ever larger steps, until one does, then between the two."""
        fits, too_large, size, stride = 0, foretold + max(2, foretold // 16), foretold, max(1, foretold // 16)
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
                f"find_batch: a batch of {foretold} was foretold to fit into {binary(self._budget)}, and not even one of "
                f"{too_large} did. Is there less memory free than the budget?{self._ran_out}"
            )
        return fits

    def _least(self, size: int) -> Solution:
        return least_peak(self._growth.at(size))

    def solution(self, size: int) -> Solution:
        """The cheapest plan for this size."""
        return cheapest_that_fits(self._growth.at(size), self._aim) or self._least(size)

    def peak(self, size: int, solution: Solution) -> int | None:
        """Bytes held, by trying; None where memory ran out."""
        profile = self._growth.at(size)
        try:
            return max(profile.floor, self.planner(size, self._units).real(profile, solution)[1])
        except OutOfMemory as error:
            self._ran_out = f" ({error})"
            return None

    def try_size(self, size: int) -> tuple[float, int, tuple[str, ...]] | None:
        """Samples per second of this rank, bytes held, and what is computed again; None if it does not keep to the budget."""
        profile, solution = self._growth.at(size), self.solution(size)
        peak = self.peak(size, solution)
        if peak is None or peak > self._budget:
            solution = self._least(size)
            peak = self.peak(size, solution)
        if peak is None or peak > self._budget:
            return None
        try:
            seconds = self.planner(size, self._units).seconds(profile, solution)
        except OutOfMemory:  # it is at the edge: one step fitted, some in a row did not
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
    ranks = rehearsal.comm.size
    asked = rehearsal.comm.gather_json([budget, global_batch, size])
    if len({(one[0], one[1]) for one in asked}) > 1:
        raise ConfigError(f"find_batch was asked for other things by the ranks: [budget, global_batch, size] are {asked}.")
    size = min(one[2] for one in asked)
    with rehearsal.leaving_no_trace():
        recompute = strategy.recompute_configs
        finder = Finder(rehearsal, budget, resize, size, recompute["checkpoints"], offload=recompute["offload"])
        most = finder.largest()
        stored = min(finder.stored(), most)
        sizes = sizes_to_try(stored, most)
        if global_batch is not None:
            sizes = sorted({merged(global_batch, ranks=ranks, largest=one)[1] for one in sizes})
        speeds = {one: finder.try_size(one) for one in sizes}
    batches: list[Batch] = []
    for one, tried in speeds.items():
        if tried is not None:
            steps = 1 if global_batch is None else global_batch // ranks // one
            chosen = settings_for(
                strategy, budget=budget if tried[2] else None, merge_steps=None if global_batch is None else steps
            )
            batches.append(Batch(one, tried[0] * ranks, tried[1], tried[2], steps, chosen, resize(rehearsal.sample.source, one)))
    if not batches:
        raise ConfigError(f"find_batch: no batch kept to {binary(budget)} when it was run.")
    by_speed = max(batches, key=lambda batch: batch.samples_per_second)
    return FoundBatches(budget, most, stored, batches[-1], by_speed, tuple(batches))


def without_memory_parts(strategy: DistributedStrategy) -> DistributedStrategy:
    """The strategy as it is measured: what the finder chooses itself is left out."""
    left_out = {f"{name}{end}" for name in ("recompute", "gradient_merge") for end in ("", "_configs")}
    return type(strategy).from_dict({name: value for name, value in strategy.to_dict().items() if name not in left_out})


def settings_for(strategy: DistributedStrategy, *, budget: int | None, merge_steps: int | None) -> DistributedStrategy:
    """With the plan's budget, or no recompute; and these merge steps, or those that the strategy has."""
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
