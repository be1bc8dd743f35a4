"""Measure and try what plans rest on: find units by running a step, measure one piece by piece, run steps by a plan.

Every number is the largest of all ranks, so all of them come to the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from statistics import median
from typing import Any, final

from torch import nn

from ..engine.dry_run import Rehearsal, Sample
from ..engine.modules.compiling import inside_of_compiled
from ..engine.modules.patching import patch_forward, patched
from ..errors import ConfigError, RecomputeError
from .budget_solver import Solution
from .host_memory import Mover
from .measure import TIMED_STEPS, measured, profile_of, seconds_of, timed
from .memory_probe import MemoryProbe, memory_probe_for
from .offload import Offload
from .offloadable import offload_places, with_offload
from .profile import Profile, from_plain, joined, to_plain
from .replay import Replay
from .rows import good_units, lingering, outlasting, pieces
from .slices import cut_sequentials
from .trace import MODEL, record
from .units import chosen_units, repeated_blocks


@final
class Planner:
    """Plans for one model, batch and strategy. Its methods are called inside `rehearsal.leaving_no_trace()`, on every rank."""

    def __init__(
        self,
        rehearsal: Rehearsal,
        wanted: Sequence[str] = (),
        *,
        units: Mapping[str, nn.Module] | None = None,
        mover: Mover | None = None,
    ) -> None:
        """Plan with the user's names or patterns in `wanted`, or with the `units` that a planner for another batch found; with a
        `mover`, plans may keep inputs in host memory."""
        self.rehearsal, self._wanted, self._mover = rehearsal, wanted, mover
        self._memory_probe: MemoryProbe = memory_probe_for(rehearsal.device, rehearsal.lasting)
        self.units: dict[str, nn.Module] = dict(units or {})
        self._are_found = units is not None
        self._left_out: set[str] = set()
        self._storages: dict[str, Any] = {}
        self._places: dict[str, frozenset[int]] = {}

    def for_sample(self, sample: Sample, units: Mapping[str, nn.Module] | None) -> Planner:
        return Planner(replace(self.rehearsal, sample=sample), self._wanted, units=units, mover=self._mover)

    def profile(self) -> Profile:
        """Measure on this rank and join with the other ranks. A unit whose second run differs from its first is left out."""
        while True:
            try:
                return self._profile()
            except RecomputeError as error:
                if error.unit in self._left_out or error.unit not in self.units:
                    raise
                self._left_out.add(error.unit)

    def _profile(self) -> Profile:
        rehearsal = self.rehearsal
        row = rehearsal.everywhere(self._find_units)
        by_rank = rehearsal.comm.gather_json(list(self.units))
        if any(names != by_rank[0] for names in by_rank):
            other = next(names for names in by_rank if names != by_rank[0])
            raise ConfigError(
                "recompute: the ranks' samples call different modules, so no plan can hold for all of them. One finds "
                f"{', '.join(by_rank[0])}; another {', '.join(other)}. Give samples of one kind, or name modules in "
                'recompute_configs["checkpoints"] instead of a "budget".'
            )
        with patched((module, self._again(name, module)) for name, module in self.units.items()):
            with self._memory_probe.watching():
                rehearsal.gather_gradients()
                self._memory_probe.peak()
                rehearsal.update()  # from now on the optimizer has its state
                update_peak = self._memory_probe.peak()
        readings = rehearsal.everywhere(
            lambda: measured(
                row,
                {MODEL: rehearsal.model, **self.units},
                self._again,
                self._memory_probe,
                forward=rehearsal.forward,
                backward=rehearsal.backward,
            )
        )
        seconds = rehearsal.everywhere(lambda: timed(self.units, self._again, rehearsal.device, rehearsal.step))
        mine = profile_of(row, readings, seconds, update_peak=update_peak, **self._storages)
        if self._mover is not None:
            mine = with_offload(mine, row, self._places, rehearsal.everywhere(self._mover.bytes_per_second))
        return joined([from_plain(plain) for plain in rehearsal.comm.gather_json(to_plain(mine))])

    def _find_units(self) -> Any:
        model, run = self.rehearsal.model, self.rehearsal.forward
        hidden = inside_of_compiled(model)  # a patch there would be in the graph, and change what is measured
        named = {**{name: module for name, module in model.named_modules() if module not in hidden}, **self.units}
        trace = record(model, named, run)
        if self._are_found:
            names = good_units(trace, (), only=list(self.units))
        elif self._wanted:
            wanted = chosen_units(model, self._wanted)
            _refuse_hidden(wanted, hidden)
            names = good_units(trace, (), only=list(wanted))
        else:
            slices = cut_sequentials(model, trace, but=hidden)
            if slices:
                named |= slices
                trace = record(model, named, run)
            names = good_units(trace, repeated_blocks(model))
        self.units = {name: named[name] for name in names if name not in self._left_out}
        self._are_found = True
        self._storages = {"sizes": trace.sizes, "lingering": lingering(trace), "outlasting": outlasting(trace)}
        row = pieces(trace, self.units)
        self._places = offload_places(trace, row)
        return row

    def _again(self, name: str, module: nn.Module) -> Callable[..., Any]:
        return Replay(name, module, self.rehearsal.device)

    def real(self, profile: Profile, solution: Solution) -> tuple[int, int]:
        """Run one step by this plan and return the bytes in use and held: the most of all ranks. Collective."""

        def step() -> tuple[int, int]:
            with self.by(profile, solution), self._memory_probe.watching():
                self.rehearsal.step()
                in_use = self._memory_probe.peak()
                return in_use, self._memory_probe.reserved()

        mine = self.rehearsal.everywhere(step)
        ranks = self.rehearsal.comm.gather_json(list(mine))
        return max(rank[0] for rank in ranks), max(rank[1] for rank in ranks)

    def seconds(self, profile: Profile, solution: Solution) -> float:
        """Time forward and backward by this plan: the median of some, on the slowest rank. Collective."""

        def steps() -> float:
            with self.by(profile, solution):
                return median(seconds_of(self.rehearsal.step, self.rehearsal.device) for _ in range(1 + TIMED_STEPS))

        return float(max(self.rehearsal.comm.gather_json(self.rehearsal.everywhere(steps))))

    def by(self, profile: Profile, solution: Solution) -> AbstractContextManager[None]:
        """Run the steps inside by this plan."""
        return patched(self._replays(profile, solution))

    def _replays(self, profile: Profile, solution: Solution) -> list[tuple[nn.Module, Replay]]:
        made: dict[int, Replay] = {}
        offload = Offload(self._mover) if self._mover is not None and solution.offloads else None
        for unit in sorted(solution.again):
            name = profile.units[unit]
            joins = made[unit - 1] if unit in solution.joins else None
            places = profile.places[unit] if unit in solution.offloads else ()
            made[unit] = Replay(
                name, self.units[name], self.rehearsal.device, joins=joins, offload=offload, offload_places=places
            )
        return [(self.units[profile.units[unit]], replay) for unit, replay in made.items()]

    def keep(self, profile: Profile, solution: Solution) -> None:
        """Patch the model for good, so that it runs by this plan."""
        for module, replay in self._replays(profile, solution):
            patch_forward(module, replay)


def _refuse_hidden(wanted: Mapping[str, nn.Module], hidden: Collection[nn.Module]) -> None:
    """Refuse names inside of compiled modules. All ranks have the same strategy and model, and raise alike."""
    inside = next((name for name, module in wanted.items() if module in hidden), None)
    if inside is not None:
        raise ConfigError(
            f'recompute_configs["checkpoints"] names `{inside}`, and a "budget" decides about modules one by one; '
            "strategy.compile compiles the block around it as one piece. Name that block, or leave one of the two out."
        )
