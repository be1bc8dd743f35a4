"""Which runs bench/large_batch makes, in which order and until when, and the lines in which they are kept."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.large_batch.recipe import TUNING_SEED, Trial
from bench.large_batch.summary import best_trial
from fleetx.errors import ConfigError

MARGIN = 1.15  # a final run has more images than a trial, and clocks sink with heat


@dataclass(frozen=True)
class Job:
    phase: str
    trial: Trial
    seed: int


def tuning_jobs(cells: dict[str, list[Trial]]) -> list[Job]:
    """In turns: the first trial of every cell, then the second of every cell."""
    longest = max(map(len, cells.values()))
    return [Job("tune", trials[turn], TUNING_SEED) for turn in range(longest) for trials in cells.values() if turn < len(trials)]


def final_jobs(cells: dict[str, list[Trial]], records: Sequence[dict[str, Any]], seeds: Sequence[int]) -> list[Job]:
    """In turns by seed. A cell with one trial needs no tuning; one with more needs a result."""
    best: list[Trial] = []
    for cell, trials in cells.items():
        found = best_trial(records, cell) or (trials[0] if len(trials) == 1 else None)
        if found is None:
            raise ConfigError(f"no tuning result of {cell} is known. Run --tune first, or give one trial for it with --trials.")
        best.append(found)
    return [Job("final", trial, seed) for seed in seeds for trial in best]


def is_done(job: Job, records: Sequence[dict[str, Any]]) -> bool:
    return any((r["phase"], r["trial"], r["seed"]) == (job.phase, job.trial.settings(), job.seed) for r in records)


def in_time(now: float, deadline: float, seconds: Sequence[float], reserved: int) -> bool:
    """Whether one more run ends before the deadline, with time left for `reserved` others; the first is always tried."""
    if not seconds:
        return now < deadline
    return now + (1 + reserved) * MARGIN * statistics.fmean(seconds) <= deadline


def read_records(file: Path) -> list[dict[str, Any]]:
    """Runs of a file; a last line without an end is of a process that was killed while it wrote, and is left out."""
    try:
        lines = file.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as lines of JSON: {error}") from error


def told(record: dict[str, Any], trial: Trial) -> str:
    loss = "NaN" if record["train_loss"] is None else f"{record['train_loss']:.3f}"
    ended = f", stopped: {record['stopped']}" if record["stopped"] else ""
    return (
        f"{record['phase']:5} {trial.cell:9} seed {record['seed']}  {record['accuracy']:5.2f} % (last weights "
        f"{record['accuracy_last']:5.2f}) loss {loss} {record['seconds']:5.1f} s  {trial.describe()}{ended}"
    )
