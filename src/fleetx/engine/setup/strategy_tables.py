"""Show a strategy: its settings as a table or on one line, and which part fills which slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ...config.text import aligned, framed
from ..slots import Part, Slot
from .conflicts import conflict_lines

# Fleet's own measures, so that logs look as its users know them.
INDENT = " " * 4
WIDTH = 78
COLUMN = 38

UNCLAIMED = {
    Slot.MODULE: "none",
    Slot.SHARD: "none",
    Slot.FORWARD: "plain",
    Slot.BACKWARD: "plain",
    Slot.MERGE: "none",
    Slot.REDUCE: "dense all-reduce",
    Slot.CLIP: "none",
    Slot.MOMENTUM: "your optimizer",
    Slot.UPDATE: "your optimizer",
    Slot.AVERAGE: "none",
}


def overview(settings: Mapping[str, Any], *, scalars: Mapping[str, Collection[str]]) -> str:
    """Format the table of `print(strategy)`, from `strategy.to_dict()` and, by title, the settings that belong to no part."""
    blocks: list[tuple[list[str], list[str]]] = [(["", "DistributedStrategy Overview", ""], [])]
    for title, block in _blocks(settings, scalars):
        blocks.append(([title], [row for key, value in block.items() for row in _setting(key, value)]))
    return "\n".join(INDENT + line for line in framed(blocks, WIDTH))


def one_line(parts: Sequence[Part], changed: Mapping[str, Any]) -> str:
    """Say what differs from the defaults: the parts that are on with their changed settings, then other changed settings."""
    named = ", ".join(described(part) for part in parts) or "plain data-parallel training"
    return "; ".join(["strategy: " + named, *(f"{name}={value!r}" for name, value in changed.items())])


def _blocks(settings: Mapping[str, Any], scalars: Mapping[str, Collection[str]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            switch = name.removesuffix("_configs")
            yield f"{switch}={settings.get(switch, False)} <-> {name}", value
        elif f"{name}_configs" not in settings and not any(name in names for names in scalars.values()):
            yield f"{name}={value}", {}
    for title, names in scalars.items():
        yield title, {name: settings[name] for name in names}


def _setting(key: str, value: Any) -> Iterator[str]:
    elements = value if isinstance(value, list) and value else [value]
    for text in (chunk for element in elements for chunk in _chunks(element)):
        yield f"{key:>{COLUMN}}  {text:^{COLUMN}}"
        key = ""


def _chunks(value: Any) -> list[str]:
    """Cut the value's text to the column: a long module name must not break the frame."""
    text = str(value)
    text = text if text.isprintable() else repr(value)
    return [text[start : start + COLUMN] for start in range(0, len(text), COLUMN)]


def slot_table(parts: Sequence[Part]) -> str:
    """Format one row per slot in the order of a step, then what stands in the way of running it."""
    rows = [
        (slot.value, ", ".join(described(part) for part in parts if slot in part.claims()) or UNCLAIMED[slot]) for slot in Slot
    ]
    rows += [("no slot", described(part)) for part in parts if not part.claims()]
    lines = aligned([("slot", "filled by"), *rows], left=(0, 1))
    notes = [f"{part.name}: {note}" for part in parts for note in part.notes()]
    return "\n".join(lines + notes + without_effect(parts) + conflict_lines(parts))


def without_effect(parts: Sequence[Part]) -> list[str]:
    """Return one sentence for each part whose settings leave training as it is without it."""
    return [said for part in parts if (said := part.no_effect()) is not None]


def described(part: Part) -> str:
    """Format the part's name with the settings that differ from its defaults."""
    default = type(part)()
    pairs = [(field.name, getattr(part, field.name), getattr(default, field.name)) for field in dataclasses.fields(part)]
    changed = [f"{name}={value!r}" for name, value, usual in pairs if value != usual]
    return f"{part.name} ({', '.join(changed)})" if changed else part.name
