"""Refuse a strategy in which two parts claim one slot: all conflicts at once, each with its reason."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import StrategyConflict
from ..slots import Part, Slot, conflicts
from ..user_loop.ddp import reduce_conflicts


def check_parts(parts: Sequence[Part], *, by_ddp: bool = False) -> None:
    """Raise all conflicts at once: nothing asked for is ever dropped. `by_ddp`: `reduce` is claimed."""
    lines = conflict_lines(parts) + (reduce_conflicts(parts) if by_ddp else [])
    if lines:
        raise StrategyConflict("\n".join(line.removeprefix("Conflict: ") for line in lines))


def conflict_lines(parts: Sequence[Part]) -> list[str]:
    """Return one line per set of parts that claim the same slots, with each claimant's reason."""
    why = {part.name: part.why for part in parts}
    shared: dict[tuple[str, ...], list[Slot]] = {}
    for slot, names in conflicts((part.name, part.claims()) for part in parts).items():
        shared.setdefault(tuple(names), []).append(slot)
    lines = []
    for claimants, slots in shared.items():
        claims = _listed([f"{'both' if len(claimants) == 2 else 'all'} claim `{slot.value}`" for slot in slots])
        reasons = dict.fromkeys(why[name] for name in claimants if why[name])
        lines.append(" ".join([f"Conflict: {_listed(claimants)} {claims}.", *reasons, "Keep one of them."]))
    return lines


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
