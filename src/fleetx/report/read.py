"""Read a run folder of `fleet.Monitor`, finished, killed or growing, into a Run; damage is listed in its `problems`."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError
from .metrics import DECODER, METRICS, Update, add_totals, number, parse_lines, superseded, whole

ENVIRONMENT, SUMMARY, MEMORY = "environment.json", "summary.json", "memory.json"
MARKS_OF_A_RUN = (METRICS, ENVIRONMENT, SUMMARY)
LIVE_SECONDS = 120.0
"""Seconds since the last change of metrics.jsonl within which a run without a summary counts as running."""
TAIL_BYTES, TAIL_LINES, MOST_LOGS = 24 << 10, 40, 6
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class MemoryCurve:
    """Memory over one step, with named moments."""

    step: int | None
    seconds: Sequence[float]
    bytes: Sequence[float]
    marks: Sequence[tuple[str, float]]


@dataclass
class Run:
    """A run folder as read."""

    name: str
    folder: Path
    updates: dict[int, list[Update]] = field(default_factory=dict)
    """Updates by pair of model and optimizer, in order of steps."""
    starts: list[dict[str, Any]] = field(default_factory=list)
    strategies: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Settings by pair, flat: `lars_configs.lars_coeff` is a key."""
    summary: dict[str, Any] | None = None
    memory_kind: str = ""
    memory_curves: list[MemoryCurve] = field(default_factory=list)
    again: int = 0
    """Number of updates that a later start did again."""
    is_live: bool = False
    problems: list[str] = field(default_factory=list)

    @property
    def all_updates(self) -> list[Update]:
        return [update for updates in self.updates.values() for update in updates]


# --- other files ------------------------------------------------------------------------------------------------------------


class _NoAliases(yaml.SafeLoader):
    """Refuses aliases, with which a short file could stand for gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("aliases are not allowed")
        return super().compose_node(parent, index)


def flat(settings: Mapping[Any, Any], under: str = "") -> dict[str, Any]:
    """Flatten nested settings: {"lars_configs": {"epsilon": 0}} becomes {"lars_configs.epsilon": 0}."""
    paths: dict[str, Any] = {}
    for name, value in settings.items():
        paths |= flat(value, f"{under}{name}.") if isinstance(value, dict) and value else {f"{under}{name}": value}
    return paths


def read_strategies(folder: Path, problems: list[str]) -> dict[int, dict[str, Any]]:
    strategies = {}
    for path in [folder / "strategy.yaml", *sorted(folder.glob("strategy.[0-9]*.yaml"))]:
        pair = path.name.split(".")[1]
        try:
            settings = yaml.load(path.read_text(encoding="utf-8"), Loader=_NoAliases)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            problems.append(f"{path.name} cannot be read: {type(error).__name__}")
            continue
        if isinstance(settings, dict):
            strategies[int(pair) if pair.isdecimal() else 1] = flat(settings)
        elif settings is not None:
            problems.append(f"{path.name} holds no settings")
    return dict(sorted(strategies.items()))


def read_json(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """Read a JSON object; None if the file is missing, or damaged, which is added to `problems`."""
    try:
        content = DECODER.decode(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {type(error).__name__}")
        return None
    if isinstance(content, dict):
        return content
    problems.append(f"{path.name} holds no object")
    return None


def memory_curve(value: object) -> MemoryCurve | None:
    if not isinstance(value, dict) or not isinstance(value.get("seconds"), list) or not isinstance(value.get("bytes"), list):
        return None
    pairs = [(number(at), number(held)) for at, held in zip(value["seconds"], value["bytes"], strict=False)]
    known = [(at, held) for at, held in pairs if at is not None and held is not None]
    given = value.get("marks")
    named = [mark for mark in given if isinstance(mark, list) and len(mark) == 2] if isinstance(given, list) else []
    marks = [(str(name), number(at)) for name, at in named]
    if not known:
        return None
    return MemoryCurve(
        whole(value.get("step")),
        [at for at, _ in known],
        [held for _, held in known],
        [(name, at) for name, at in marks if at is not None],
    )


def is_of_an_earlier_start(summary: Mapping[str, Any], run: Run) -> bool:
    """Return whether the summary is of an earlier start: a resumed run keeps it in its folder until it ends."""
    start = whole(summary.get("start"))
    return start is not None and start < len(run.starts)


# --- a folder ---------------------------------------------------------------------------------------------------------------


def require_run_folder(folder: Path) -> None:
    if folder.is_dir() and any((folder / name).is_file() for name in MARKS_OF_A_RUN):
        return
    looked = f"a run folder, as fleet.Monitor(dir) writes it, holds {METRICS}, {ENVIRONMENT} or {SUMMARY}"
    if not folder.exists():
        raise ConfigError(f"{folder} is not there: {looked}.")
    if not folder.is_dir():
        inside = folder.name in MARKS_OF_A_RUN
        raise ConfigError(f"{folder} is a file: {looked}." + (f" Write {folder.parent}." if inside else ""))
    near = sorted(one for one in folder.glob("*") if any((one / name).is_file() for name in MARKS_OF_A_RUN))
    hint = f" Run folders in it: {' '.join(map(str, near[:4]))}{' ...' if len(near) > 4 else ''}" if near else ""
    raise ConfigError(f"{folder} is no run folder: {looked}.{hint}")


def read_run(folder: Path, name: str | None = None) -> Run:
    """Read a run folder; `name` is its folder's name if None. Raises ConfigError if it is no run folder."""
    require_run_folder(folder)
    run = Run(name or folder.resolve().name, folder)
    metrics = folder / METRICS
    try:
        text = metrics.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        text = ""
        run.problems.append(f"{METRICS} cannot be read: {error.strerror}")
    updates, problems = parse_lines(text)
    run.problems += problems
    add_totals(updates)
    run.updates = superseded(updates)
    run.again = len(updates) - len(run.all_updates)
    run.strategies = read_strategies(folder, run.problems)
    starts = (read_json(folder / ENVIRONMENT, run.problems) or {}).get("starts")
    run.starts = [start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []
    summary = read_json(folder / SUMMARY, run.problems)
    run.summary = None if summary is None or is_of_an_earlier_start(summary, run) else summary
    memory = read_json(folder / MEMORY, run.problems) or {}
    curves = memory.get("curves")
    run.memory_kind = str(memory.get("kind") or "")
    run.memory_curves = [one for one in map(memory_curve, curves if isinstance(curves, list) else []) if one is not None]
    run.is_live = run.summary is None and _changed_lately(metrics)
    return run


def _changed_lately(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime < LIVE_SECONDS
    except OSError:
        return False


def run_names(folders: Sequence[Path]) -> list[str]:
    """Name runs by their folders, with as many parents as make the names different."""
    parts = [folder.resolve().parts for folder in folders]
    for one in parts:
        if parts.count(one) > 1:
            raise ConfigError(f"{os.path.join(*one)} was given twice. Name each run once.")
    taken = [1] * len(parts)
    while True:
        names = ["/".join(one[-count:]) for one, count in zip(parts, taken, strict=True)]
        clashing = [place for place, name in enumerate(names) if names.count(name) > 1]
        if not clashing:
            return names
        for place in clashing:
            taken[place] = min(taken[place] + 1, len(parts[place]))


# --- worker logs ------------------------------------------------------------------------------------------------------------


def clean(text: str) -> str:
    """Clean a log for the page: no colours, and only the last state of a progress bar."""
    lines = [_ESCAPES.sub("", line).rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    return "\n".join(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", line) for line in lines)


def tail(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        text = file.read(TAIL_BYTES).decode("utf-8", errors="replace")
    lines = clean(text).rstrip().split("\n")
    return "\n".join(lines[1 if size > TAIL_BYTES and len(lines) > 1 else 0 :][-TAIL_LINES:])


def log_tails(folder: Path) -> dict[int, str]:
    """Return the last lines of worker logs by rank: those with a traceback first, at most MOST_LOGS, no empty ones."""
    tails = {}
    for path in folder.glob("workerlog.*"):
        rank = path.name.partition(".")[2]
        if not rank.isdecimal() or not path.is_file():  # a link into a log folder that is gone is no file
            continue
        try:
            text = tail(path)
        except OSError:
            continue
        if text.strip():
            tails[int(rank)] = text
    order = sorted(tails, key=lambda rank: ("Traceback (most recent call last)" not in tails[rank], rank))
    return {rank: tails[rank] for rank in order[:MOST_LOGS]}
