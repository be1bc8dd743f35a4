"""The trainings of bench/localsgd_table and bench/compression_table: gloo ranks that share one device, run after run.

Rank 0 decides whether another run ends in time, and appends a line to the file of runs as soon as one is done.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from bench.large_batch.jobs import in_time, read_records
from bench.large_batch.run import coloured_noise, on_device
from bench.lib import cifar10
from bench.lib.results import surroundings
from bench.localsgd_table.training import Settings, Training, planned, train
from fleetx import fleet
from fleetx.errors import ConfigError

TUNING_SEED = 0
SMOKE_IMAGES = 128
TRAIN_IMAGES = {"tune": 45_000, "final": 50_000}
PARTS = ("throughput", "accuracy")


@dataclass(frozen=True)
class Job:
    phase: str
    method: str
    seed: int
    lr: float

    def identity(self, training: Training, settings: Settings, images: int) -> dict[str, Any]:
        """What a run that was made before must share with this one to stand for it."""
        chosen, _ = planned(self.method, training, settings, images)
        own = {"phase": self.phase, "method": self.method, "seed": self.seed, "lr": self.lr}
        return {"part": "accuracy", **own, "strategy": chosen, "training": asdict(training)}


@dataclass(frozen=True)
class Plan:
    """What a rank must know."""

    jobs: tuple[Job, ...]
    training: Training
    settings: Settings
    device: str
    archive: Path | None  # None: made-up images
    cache: Path
    out: Path
    deadline: float  # of time.monotonic(), which all processes of a machine share
    port: int
    known_seconds: tuple[float, ...] = ()
    """What runs like these took before."""

    def images(self, phase: str) -> int:
        if self.archive is not None:
            return TRAIN_IMAGES[phase]
        return SMOKE_IMAGES * 9 // 10 if phase == "tune" else SMOKE_IMAGES


def plan_of(flags: argparse.Namespace, training: Training, settings: Settings, deadline: float) -> Plan:
    """Without jobs yet."""
    archive, out = None if flags.smoke else flags.data, flags.out / "accuracy.jsonl"
    return Plan((), training, settings, flags.device, archive, flags.cache, out, deadline, free_port())


def lines(flags: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """All that is known, by part."""
    found: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
    for file in [*flags.earlier, *sorted(flags.out.glob("*.jsonl"))]:
        for record in read_records(file):
            if record.get("part") not in found:
                raise ConfigError(f"{file} holds a line that is of no part of this bench: {json.dumps(record)[:200]}")
            if record not in found[record["part"]]:
                found[record["part"]].append(record)
    return found


def is_done(job: Job, plan: Plan, records: Sequence[Mapping[str, Any]]) -> bool:
    wanted = job.identity(plan.training, plan.settings, plan.images(job.phase))
    return any(all(record.get(name) == value for name, value in wanted.items()) for record in records)


def tuning_jobs(methods: Sequence[str], training: Training, settings: Settings, factors: Sequence[float]) -> list[Job]:
    """In turns over the methods, so that a tuning cut short has seen all of them."""
    rates = [(method, training.method_lr(method, settings)) for method in methods]
    return [Job("tune", method, TUNING_SEED, round(lr * factor, 9)) for factor in factors for method, lr in rates]


def final_jobs(methods: Sequence[str], plan: Plan, records: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[Job]:
    """In turns by seed, each method at its best learning rate on held-out images, or at the given one if it was not tuned."""
    best = {method: best_lr(method, plan, records) for method in methods}
    return [Job("final", method, seed, best[method]) for seed in seeds for method in methods]


def best_lr(method: str, plan: Plan, records: Sequence[Mapping[str, Any]]) -> float:
    default = plan.training.method_lr(method, plan.settings)
    wanted = Job("tune", method, TUNING_SEED, 0.0).identity(plan.training, plan.settings, plan.images("tune"))
    del wanted["lr"]
    tuned = [record for record in records if all(record.get(name) == value for name, value in wanted.items())]
    return float(max(tuned, key=lambda record: record["accuracy"])["lr"]) if tuned else default


def splits(plan: Plan, phase: str, device: torch.device) -> tuple[Any, Any]:
    """What to train on and what to count on. Tuning never sees a test image."""
    if plan.archive is None:
        train_images = test_images = coloured_noise(SMOKE_IMAGES)
    else:
        both = cifar10.load(plan.archive, plan.cache)
        train_images, test_images = both["train"], both["test"]
    if phase == "tune":
        train_images, test_images = cifar10.held_out(train_images)
    return on_device(train_images, device), on_device(test_images, device)


def rank(index: int, plan: Plan) -> None:
    """One of the processes."""
    join(index, plan)
    make_runs(plan)


def make_runs(plan: Plan) -> None:
    """On every rank: all jobs that fit in the time."""
    device, loaded = fleet.device(), dict[str, Any]()
    facts = {key: surroundings()[key] for key in ("device", "torch", "commit")}
    seconds = list(plan.known_seconds)
    for job in plan.jobs:
        # By the longest so far, since methods differ.
        go = in_time(time.monotonic(), plan.deadline, sorted(seconds)[-1:], 0)
        if not fleet.util.all_gather(go)[0]:
            break
        loaded = {job.phase: loaded.get(job.phase) or splits(plan, job.phase, device)}
        figures = train(job.method, job.seed, job.lr, plan.training, plan.settings, *loaded[job.phase])
        gc.collect()  # a model is in cycles with its hooks
        seconds.append(figures["seconds"])
        if fleet.is_first_worker():
            identity = job.identity(plan.training, plan.settings, plan.images(job.phase))
            record = {**identity, **figures, "label": plan.settings.label_of(job.method), **facts}
            with plan.out.open("a") as lines:
                lines.write(json.dumps(record, allow_nan=False) + "\n")
            print(told(record), flush=True)
    fleet.util.barrier()


def join(index: int, plan: Plan) -> None:
    if plan.device == "cpu":
        torch.set_num_threads(1)  # several processes share the cores
        os.environ |= {"FLEETX_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    else:
        torch.backends.cudnn.benchmark = True
    local_rank(index, plan.training.ranks, plan.port)
    fleet.init(backend="gloo")


def local_rank(index: int, size: int, port: int) -> None:
    """This process is one of `size` on this machine."""
    os.environ |= {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make(plan: Plan) -> None:
    """All jobs of a plan. The images are decoded here, once, and not by each rank."""
    if not plan.jobs:
        return
    if plan.archive is not None:
        cifar10.load(plan.archive, plan.cache, os.cpu_count() or 1)
    mp.spawn(rank, args=(plan,), nprocs=plan.training.ranks)


def make_missing(jobs: Sequence[Job], plan: Plan, known: Sequence[Mapping[str, Any]]) -> None:
    """The jobs that no known line stands for, until the deadline."""
    here = surroundings()["device"]
    alike = tuple(r["seconds"] for r in known if r["training"] == asdict(plan.training) and r["device"] == here)
    left = tuple(job for job in jobs if not is_done(job, plan, known))
    if time.monotonic() < plan.deadline:
        make(replace(plan, jobs=left, known_seconds=alike))


def told(record: Mapping[str, Any]) -> str:
    period = "" if record["mean_period"] is None else f", {record['rounds']} averagings, mean period {record['mean_period']:.2f}"
    ended = f", stopped: {record['stopped']}" if record["stopped"] else ""
    return (
        f"{record['phase']:5} {record['method']:12} seed {record['seed']} lr {record['lr']:g}  {record['accuracy']:5.2f} % in "
        f"{record['updates']} updates, {record['dense_updates']} synchronous{period}, {record['bytes_sent'] / 1e6:.0f} MB sent a "
        f"rank, {record['seconds']:.1f} s{ended}"
    )
