"""Record the strategy in a checkpoint, and compare it with that of the run that loads: a difference is said, or refused.

refused   saved state would lose its meaning: gradients kept back by a compressor, an average, a loss scale. Each stage checks its
          own (state.py); nothing here repeats that
warned    a part of the strategy is on in one run and off in the other: training goes on by another rule
said      other settings of the same part (clip_norm's max_norm, k_steps), or a part that changes no number (recompute)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...config.text import listed
from ..slots import Part, Risk

MOST_TOLD = 6


class Difference(NamedTuple):
    """Texts of what differs; empty lists where nothing does."""

    parts: list[str]
    """Parts of only one of the runs."""
    settings: list[str]
    """Settings of parts that both have, and parts that change no number."""


def record(settings: Mapping[str, Any], parts: Sequence[Part], *, asked: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what is saved: all settings, how far each part moves the result, and what `auto` was asked, if it chose them."""
    return {
        "settings": dict(settings),
        "risks": {part.name: part.risk_class.value for part in parts},
        "auto": None if asked is None else dict(asked),
    }


def differences(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> Difference:
    """Compare two records. Settings that belong to no part are left out: they size buckets and checks."""
    before, now = saved["settings"], mine["settings"]
    risks = {**saved["risks"], **mine["risks"]}
    found = Difference([], [])
    for name in sorted(risks):
        was_on, is_on = name in saved["risks"], name in mine["risks"]
        if was_on and is_on:
            old, new = before.get(f"{name}_configs", {}), now.get(f"{name}_configs", {})
            keys = [key for key in new if key in old and old[key] != new[key]]  # a key that is not in both is of another version
            found.settings.extend(f"{name} {key} was {old[key]!r}, now {new[key]!r}" for key in keys)
        else:
            of_its_kind = found.settings if risks[name] == Risk.EXACT.value else found.parts
            of_its_kind.append(f"{name} was {'on' if was_on else 'off'}, now {'off' if was_on else 'on'}")
    return found


def told(differing: Sequence[str]) -> str:
    return listed(list(differing), MOST_TOLD, separator="; ")
