"""Hold and write what `auto` chose: the strategy, a table of what was predicted and measured, and why the rest was not taken.

The file is JSON. It is used again where model, sample, device, ranks, versions, fixed parts and wishes are the same; "strategy"
may be edited by hand, and is then taken as it stands.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from ..config.kinds import integer
from ..config.text import MIB, aligned
from ..dist.own_files import replace_file
from ..errors import ConfigError
from ..strategy import DistributedStrategy
from .fixed_parts import Fixed
from .measurements import Measured, from_plain, to_plain

FORMAT = 2


@final
@dataclass(frozen=True, slots=True)
class Row:
    """Hold one line of the table: a candidate that was run, or would have been next."""

    name: str
    risk: str
    predicted_s: float
    """Predicted seconds of one update."""
    measured_s: float | None
    samples: int
    """Samples of one update of all ranks; 0: not counted."""
    predicted_bytes: int
    measured_bytes: int | None
    sent_bytes: float
    note: str = ""

    @property
    def seconds(self) -> float:
        return self.predicted_s if self.measured_s is None else self.measured_s


@final
@dataclass(frozen=True, slots=True)
class Plan:
    strategy: DistributedStrategy
    chosen: str
    """Name of the row that was chosen."""
    rows: tuple[Row, ...]
    rejected: Mapping[str, str]
    """Why each strategy was not taken: a sentence by its name."""
    key: Mapping[str, Any]
    """Facts for which the plan was made: model, sample, device, ranks, versions, fixed parts and wishes."""
    micro_batch: int
    """Rows that a rank gives to each micro-step; 0: as in the sample."""
    merge_steps: int
    measured: Measured
    memory: int | None = None
    """Most bytes that a rank may use: those asked for, or what the device had; None: no limit."""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    """Seconds that planning took."""
    reused_from: str = field(default="", compare=False)
    is_edited: bool = field(default=False, compare=False)
    """Whether the strategy in the file differs from the one that was chosen."""

    @property
    def fixed(self) -> Fixed:
        """Return the parts that the user had set, and that were kept."""
        return Fixed.from_settings(self.key.get("fixed", {}))

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def __str__(self) -> str:
        return as_text(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan; a file that was there before, of another plan, is kept beside it as `.previous`."""
        file, text = Path(path), to_json(self).encode()
        before = file.read_bytes() if file.exists() else text
        if before != text:
            replace_file(file.with_name(file.name + ".previous"), before, mode=0o666)
        replace_file(file, text, mode=0o666)


# --- in words -----------------------------------------------------------------------------------------------------------


def as_text(plan: Plan) -> str:
    """Write out the table and the sentences; of a plan from a file one line."""
    kept = plan.fixed.described()
    if plan.reused_from:
        edited = " Its strategy was edited, and is taken as it stands." if plan.is_edited else ""
        also = f" Kept: {', '.join(kept)}." if kept else ""
        return f"auto: {plan.chosen}, by the plan in {plan.reused_from}.{also}{edited}"
    head = f"auto: {plan.chosen} (planned in {plan.seconds:.0f} s on {plan.measured.device}, {_ranks(plan.measured.ranks)})"
    columns = ["", "plan", "predicted ms", "measured", "samples/s", "predicted MiB", "measured", "MB sent", "risk"]
    lines = aligned([columns, *(_cells(row, is_chosen=row.name == plan.chosen) for row in plan.rows)], left=(1, 8))
    sentences = [f"  {name}: {why}" for name, why in plan.rejected.items()]
    sentences = [*([f"  kept: {', '.join(kept)}"] if kept else []), *sentences]
    return "\n".join([head, *lines, *sentences, *(f"  {note}" for note in plan.notes)])


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _cells(row: Row, *, is_chosen: bool) -> list[str]:
    return [
        "*" if is_chosen else " ",
        row.name,
        f"{1e3 * row.predicted_s:.1f}",
        row.note or "-" if row.measured_s is None else f"{1e3 * row.measured_s:.1f}",
        f"{row.samples / row.seconds:,.1f}" if row.samples else "-",
        f"{row.predicted_bytes / MIB:,.1f}" if row.predicted_bytes else "-",
        "-" if row.measured_bytes is None else f"{row.measured_bytes / MIB:,.1f}",
        f"{row.sent_bytes / 1e6:,.2f}",
        row.risk,
    ]


# --- as a file ----------------------------------------------------------------------------------------------------------


def to_json(plan: Plan) -> str:
    plain = {
        "fleetx_plan": FORMAT,
        "key": dict(plan.key),
        "chosen": plan.chosen,
        "strategy": plan.strategy.to_dict(),
        "strategy_chosen": _fingerprint(plan.strategy),
        "micro_batch": plan.micro_batch,
        "memory": plan.memory,
        "table": [asdict(row) for row in plan.rows],
        "rejected": dict(plan.rejected),
        "notes": list(plan.notes),
        "seconds": plan.seconds,
        "measured": to_plain(plan.measured),
    }
    return json.dumps(plain, indent=1, allow_nan=False) + "\n"


def _fingerprint(strategy: DistributedStrategy) -> str:
    return hashlib.sha256(strategy.to_json().encode()).hexdigest()[:16]


def from_json(text: str, *, source: str) -> Plan:
    try:
        plain = json.loads(text)
        if plain["fleetx_plan"] != FORMAT:
            raise ConfigError(
                f"this is a plan of format {plain['fleetx_plan']!r}; this version reads format {FORMAT}. "
                "Delete it; a new plan will be created."
            )
        strategy = DistributedStrategy.from_dict(plain["strategy"])
        Fixed.from_settings(plain["key"].get("fixed", {}))  # read again where it is wanted: what is wrong is reported now
        return Plan(
            strategy=strategy,
            chosen=plain["chosen"],
            rows=tuple(Row(**row) for row in plain["table"]),
            rejected=dict(plain["rejected"]),
            key=dict(plain["key"]),
            micro_batch=integer(0).check("micro_batch", plain["micro_batch"]),
            merge_steps=int(strategy.gradient_merge_configs["k_steps"]) if strategy.gradient_merge else 1,
            measured=from_plain(plain["measured"]),
            memory=None if plain["memory"] is None else int(plain["memory"]),
            notes=tuple(plain["notes"]),
            seconds=float(plain["seconds"]),
            reused_from=source,
            is_edited=_fingerprint(strategy) != plain["strategy_chosen"],
        )
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{source} is not a plan of fleetx ({type(error).__name__}: {error}). Delete it; a new plan will be created."
        ) from None


def load(path: str | os.PathLike[str]) -> Plan:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the plan {path} cannot be read: {error}.") from None
    return from_json(text, source=str(path))


def differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Say in what a plan's key differs from the one wanted."""
    return [
        f"{name} is {wanted.get(name)!r}, and was {found.get(name)!r}" for name in wanted if wanted.get(name) != found.get(name)
    ]
