"""Do large batches converge? CIFAR-10 on a GPU, 30 epochs at batch 512, 2048 and 8192 with SGD, LARS and LAMB.

    python -m bench.large_batch.run                      tunes every cell, then trains the best settings from three seeds
    python -m bench.large_batch.run --tune               the tuning alone: one seed, judged on 5,000 held-out training images
    python -m bench.large_batch.run --final              the final runs alone, with the best settings found in --out and --earlier
    python -m bench.large_batch.run --seconds 0          no run: publishes what --out and --earlier hold
    python -m bench.large_batch.run --table FILE.json    makes docs/large_batch.md of published figures
    python -m bench.large_batch.run --smoke              made-up images and a tiny network on any machine; nothing is kept

`--cells sgd@512,lars@8192` chooses cells, `--trials FILE` other settings (a JSON list; fields in bench/large_batch/recipe.py).
Runs go in turns over the cells. Each appends a line to --out at once, and one that is there already is not repeated. With
--seconds no run begins that would not end in time, and the tuning leaves time for the final runs. The last line is one JSON
object with all runs and the verdicts, kept when there are final runs; the explanation is in docs/large_batch.md.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.large_batch.flags import flags_of, recipe_of
from bench.large_batch.jobs import Job, final_jobs, in_time, is_done, read_records, told, tuning_jobs
from bench.large_batch.page import page
from bench.large_batch.recipe import GRID, Recipe, Trial, choose_cells, read_trials
from bench.large_batch.summary import shown, summarise, verdicts
from bench.large_batch.summary import told as verdict_told
from bench.large_batch.train import Split, Trainer, whole_micro_steps
from bench.lib import cifar10
from bench.lib.results import FOLDER, publish, published, surroundings, write_page
from fleetx.errors import ConfigError, FleetError

NAME = "large_batch"
SMOKE_IMAGES = 256
SMOKE_TRIALS = (
    Trial("sgd", 64, 0.1, 5e-4),
    Trial("lars", 64, 0.4, 5e-4, lars_coeff=0.02),
    Trial("lamb", 64, 0.01, 0.02, beta2=0.99),
)


@dataclass(frozen=True)
class Place:
    """Where and how runs are made; what a process that makes them must know."""

    recipe: Recipe
    device: str
    archive: Path | None  # None: made-up images
    cache: Path
    compiled: bool
    deadline: float  # of time.monotonic(), which all processes of a machine share


class Worker:
    """One process's data and captured network, made when the first job comes."""

    def __init__(self, place: Place) -> None:
        self.place = place
        device = torch.device(place.device)
        if device.type == "cuda":
            torch.backends.cudnn.benchmark = True
        if place.archive is None:
            torch.set_num_threads(1)  # tensors this small take longer in several
        self.trainer = Trainer(place.recipe, device, compiled=place.compiled)
        train, test = loaded(place)
        kept, held_out = cifar10.held_out(train)
        self.splits = {
            "tune": (on_device(kept, device), on_device(held_out, device)),
            "final": (on_device(train, device), on_device(test, device)),
        }
        self.facts = {key: surroundings()[key] for key in ("device", "torch", "commit")}

    def run(self, job: Job) -> dict[str, Any]:
        figures = self.trainer.run(job.trial, job.seed, *self.splits[job.phase])
        settings = {"phase": job.phase, "trial": job.trial.settings(), "seed": job.seed}
        return {**settings, **figures, "recipe": asdict(self.place.recipe), **self.facts}


def loaded(place: Place) -> tuple[cifar10.Images, cifar10.Images]:
    if place.archive is not None:
        splits = cifar10.load(place.archive, place.cache)
        return splits["train"], splits["test"]
    images = coloured_noise(SMOKE_IMAGES)
    return images, images


def coloured_noise(count: int) -> cifar10.Images:
    """Random pixels under a colour that tells the class, so that a network can learn them in seconds."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, count, dtype=np.uint8)
    colours = random.integers(0, 192, (10, 1, 1, 3), dtype=np.uint8)
    return cifar10.Images(colours[labels] + random.integers(0, 64, (count, 32, 32, 3), dtype=np.uint8), labels)


def on_device(images: cifar10.Images, device: torch.device) -> Split:
    return Split(torch.from_numpy(images.images).to(device), torch.from_numpy(images.labels).to(device).long())


def work(place: Place, jobs: Sequence[Job], file: Path, reserved: int, worker: Worker | None = None) -> None:
    """Make the runs that fit in the time, one line in `file` for each as soon as it is done."""
    seconds: list[float] = []
    for job in jobs:
        if not in_time(time.monotonic(), place.deadline, seconds, reserved):
            return
        worker = worker or Worker(place)
        record = worker.run(job)
        seconds.append(record["seconds"])
        with file.open("a") as lines:
            lines.write(json.dumps(record, allow_nan=False) + "\n")
        print(told(record, job.trial), flush=True)


class Bench:
    """The runs known so far, and how more of them are made."""

    def __init__(self, place: Place, out: Path, earlier: Sequence[Path], processes: int) -> None:
        self.place, self.out, self.earlier, self.processes = place, out, earlier, processes
        self._worker: Worker | None = None
        out.mkdir(parents=True, exist_ok=True)

    def records(self) -> list[dict[str, Any]]:
        """Of this recipe alone, each run once."""
        found: list[dict[str, Any]] = []
        for record in self._lines():
            job = Job(record["phase"], Trial(**record["trial"]), record["seed"])
            if record["recipe"] == asdict(self.place.recipe) and not is_done(job, found):
                found.append(record)
        return found

    def of_other_recipes(self) -> int:
        return sum(record["recipe"] != asdict(self.place.recipe) for record in self._lines())

    def _lines(self) -> list[dict[str, Any]]:
        files = [*self.earlier, *sorted(self.out.glob("runs*.jsonl"))]
        return [record for file in files for record in read_records(file)]

    def make(self, jobs: Sequence[Job], *, reserved: int = 0) -> None:
        known = self.records()
        jobs = [job for job in jobs if not is_done(job, known)]
        if not jobs or time.monotonic() >= self.place.deadline:
            return
        if self.processes == 1:
            self._worker = self._worker or Worker(self.place)
            return work(self.place, jobs, self.out / "runs.jsonl", reserved, self._worker)
        spawn = multiprocessing.get_context("spawn")
        share = math.ceil(reserved / self.processes)
        workers = []
        for number in range(self.processes):
            arguments = (self.place, jobs[number :: self.processes], self.out / f"runs-{number}.jsonl", share)
            workers.append(spawn.Process(target=work, args=arguments))
            workers[-1].start()
        for process in workers:
            process.join()
        if any(process.exitcode for process in workers):
            raise ConfigError(f"a process ended with {[p.exitcode for p in workers]}; its error is above. Other runs are kept.")


def summary(bench: Bench, note: str | None) -> dict[str, Any]:
    records = bench.records()
    cells = summarise(records)
    facts = {key: ", ".join(sorted({record[key] for record in records})) for key in ("device", "torch", "commit")}
    figures = {**facts, "recipe": asdict(bench.place.recipe), "cells": cells, "verdicts": verdicts(cells), "runs": records}
    return {**figures, "note": note} if note else figures


def show(figures: dict[str, Any]) -> None:
    for cell, one in figures["cells"].items():
        tests = " ".join(f"{accuracy:.2f}" for accuracy in one["test"]) or shown(None)
        mean = f"; mean {one['mean']}, spread {one['spread']}" if one["test"] else ""
        print(f"{cell:9} {one['trials']} trials, held-out {shown(one['held_out'])}; test {tests}{mean}")
    for one in figures["verdicts"].values():
        print(verdict_told(one))


def main(arguments: Sequence[str] | None = None) -> None:
    start = time.monotonic()
    flags = flags_of(arguments, __doc__)
    if flags.table:
        return write_page(flags.page, page(published(flags.table, NAME)))
    if flags.processes < 1 or not flags.seconds >= 0:
        raise ConfigError(f"--processes {flags.processes} --seconds {flags.seconds}: at least 1 process, and no negative time.")
    recipe = recipe_of(flags)
    trials = read_trials(flags.trials) if flags.trials else SMOKE_TRIALS if flags.smoke else GRID
    cells = choose_cells(trials, flags.cells)
    for trial in trials:
        whole_micro_steps(trial.batch, recipe.micro_batch)
    archive = None if flags.smoke else flags.data
    place = Place(recipe, flags.device, archive, flags.cache, flags.compile, start + flags.seconds)
    bench = Bench(place, flags.out, flags.earlier, flags.processes)
    if flags.tune or not flags.final:
        bench.make(tuning_jobs(cells), reserved=0 if flags.tune else len(cells) * len(flags.seeds))
    if flags.final or not flags.tune:
        if time.monotonic() < place.deadline:
            bench.make(final_jobs(cells, bench.records(), flags.seeds))
    figures = summary(bench, flags.note)
    show(figures)
    if bench.of_other_recipes():
        print(f"{bench.of_other_recipes()} runs of other recipes are in the same files, and not among these.")
    if flags.smoke or not any(record["phase"] == "final" for record in figures["runs"]):
        return
    publish(NAME, figures)
    shutil.copy(FOLDER / f"{NAME}.json", flags.out)


if __name__ == "__main__":
    try:
        main()
    except FleetError as error:
        sys.exit(f"{type(error).__name__}: {error}")
