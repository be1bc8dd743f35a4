"""What does Local SGD gain on slow links, and what does it cost in accuracy? All its forms beside DDP and two peers.

    python -m bench.localsgd_table.run --throughput     steps between hosts at 1000 and 100 Mbit/s, on the CPU; needs root
    python -m bench.localsgd_table.run --accuracy       full trainings of ResNet-9 on CIFAR-10, gloo ranks on one GPU, three seeds
    python -m bench.localsgd_table.run --accuracy --tune        runs that choose learning rates, judged on held-out images
    python -m bench.localsgd_table.run --earlier A.jsonl B.jsonl      publishes what these files and --out hold; measures nothing
    python -m bench.localsgd_table.run --table FILE.json        makes docs/localsgd.md of published figures
    python -m bench.localsgd_table.run --smoke          both in seconds, on any machine; nothing is kept

Each row or run appends a line to a file in --out at once. A training that is there already, or in --earlier, is not repeated;
of rows the last counts. `--seconds` limits the trainings. The methods are in bench/localsgd_table/methods.py. The last
line is one JSON object with everything, kept in bench/results/localsgd_table.json; the explanation is in docs/localsgd.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from bench.lib.cluster import run_on_hosts
from bench.lib.netns import cluster, why_not
from bench.lib.results import FOLDER, publish, published, surroundings, write_page
from bench.lib.table_flags import made
from bench.localsgd_table import accuracy as trainings
from bench.localsgd_table import worker as localsgd_throughput
from bench.localsgd_table.accuracy import lines, plan_of
from bench.localsgd_table.flags import SMOKE_SETTINGS, SMOKE_TRAINING, flags_of
from bench.localsgd_table.methods import METHODS, TRAINED, Settings, choose
from bench.localsgd_table.page import page
from bench.localsgd_table.summary import accuracy, throughput, told, verdicts, whole_trainings
from bench.localsgd_table.training import Training
from fleetx.errors import FleetError, LaunchError

NAME = "localsgd_table"
WORKER = Path(__file__).with_name("worker.py")
RUN_SECONDS = 3600.0
FACTS = ("device", "torch", "commit")


def measure_throughput(flags: argparse.Namespace, settings: Settings, width: int) -> None:
    """One cluster for each rate, and in it one run of all methods for each network."""
    reason = why_not()
    if reason is not None:
        raise LaunchError(reason)
    facts = {key: surroundings()[key] for key in FACTS} | {"hosts": flags.hosts, "run": int(time.time())}
    common = {
        "methods": choose(flags.methods, METHODS),
        "settings": asdict(settings),
        "width": width,
        "turns": flags.turns,
        "out": str(throughput_file(flags.out).resolve()),
    }
    for rate in flags.rates:
        with cluster(hosts=flags.hosts, rate_mbit=rate) as hosts:
            for model in flags.models:
                print(f"{model}, {flags.hosts} hosts, {rate:g} Mbit/s", flush=True)
                plan = dict(common, model=model, facts={**facts, "rate_mbit": rate})
                ended = run_on_hosts(hosts, WORKER, [json.dumps(plan)], timeout=RUN_SECONDS, shows=True)
                if ended.worst:
                    raise LaunchError(
                        f"a host ended with {ended.worst}; rows measured before are kept.\n{ended.consoles[0][-3000:]}"
                    )


def throughput_file(out: Path) -> Path:
    return out / "throughput.jsonl"


def measure_accuracy(flags: argparse.Namespace, plan: trainings.Plan) -> None:
    methods, known = choose(flags.methods, TRAINED), lines(flags)["accuracy"]
    if flags.tune:
        jobs = trainings.tuning_jobs(methods, plan.training, plan.settings, flags.lrs)
    else:
        jobs = trainings.final_jobs(methods, plan, known, flags.seeds)
    trainings.make_missing(jobs, plan, known)


def summary(flags: argparse.Namespace, training: Training, settings: Settings) -> dict[str, Any]:
    """Of this training alone; where none was asked for, of the one that the last line is of."""
    known = lines(flags)
    if known["accuracy"] and not flags.accuracy and not flags.smoke:
        training = Training(**known["accuracy"][-1]["training"])
    runs = [record for record in known["accuracy"] if record["training"] == asdict(training)]
    tables, rows = throughput(known["throughput"]), accuracy(runs)
    facts = {part: {key: ", ".join(sorted({r[key] for r in known[part]})) for key in FACTS} for part in known}
    return {
        **{"settings": asdict(settings), "training": asdict(training), "facts": facts},
        **{"throughput": tables, "accuracy": rows, "whole_trainings": whole_trainings(rows, tables)},
        **{"verdicts": verdicts(rows, tables), "runs": runs},
        **({"note": flags.note} if flags.note else {}),
    }


def show(figures: dict[str, Any], others: int = 0) -> None:
    for link, one in figures["throughput"].items():
        print(f"{link}: {one['alone_ms']} ms a step without communication, fit t, r = {one['fit_ms']} ms")
    for method, row in figures["accuracy"].items():
        tests = " ".join(f"{found:.2f}" for found in row["test"])
        lr_and_period = f"lr {row['lr']:g}, mean period {row['mean_period']}"
        print(f"{method:12} {row['mean']:.2f} % (spread {row['spread']:.2f}; {tests}), {lr_and_period}")
    if others:
        print(f"{others} trainings with other settings are in the same files, and not among these.")
    for one in figures["verdicts"].values():
        print(told(one))


def smoke_rank(index: int, plan: trainings.Plan, rows: dict[str, Any]) -> None:
    trainings.join(index, plan)
    localsgd_throughput.measure(rows)
    trainings.make_runs(plan)


def smoke(flags: argparse.Namespace, training: Training, settings: Settings) -> None:
    """Both parts in the same local processes, into a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        flags.out, flags.device = Path(folder), "cpu"
        plan = plan_of(flags, training, settings, time.monotonic() + RUN_SECONDS)
        jobs = trainings.final_jobs(choose(flags.methods, TRAINED), plan, (), flags.seeds[:1])
        facts = {key: surroundings()[key] for key in FACTS} | {"hosts": training.ranks, "run": 0, "rate_mbit": 0.0}
        rows = {
            "model": "tiny",
            "settings": asdict(settings),
            "turns": 2,
            "out": str(throughput_file(flags.out)),
            "facts": facts,
        }
        mp.spawn(smoke_rank, args=(replace(plan, jobs=tuple(jobs)), rows), nprocs=training.ranks)
        figures = summary(flags, training, settings)
        show(figures)
        page(figures)


def main(arguments: Sequence[str] | None = None) -> None:
    start = time.monotonic()
    flags = flags_of(arguments, __doc__)
    if flags.table:
        return write_page(flags.page, page(published(flags.table, NAME)))
    training = made(flags, SMOKE_TRAINING if flags.smoke else Training())
    settings = made(flags, SMOKE_SETTINGS if flags.smoke else Settings())
    if flags.smoke:
        return smoke(flags, training, settings)
    flags.out.mkdir(parents=True, exist_ok=True)
    if flags.throughput:
        measure_throughput(flags, settings, training.width)
    if flags.accuracy:
        measure_accuracy(flags, plan_of(flags, training, settings, start + flags.seconds))
    figures = summary(flags, training, settings)
    show(figures, others=len(lines(flags)["accuracy"]) - len(figures["runs"]))
    if figures["accuracy"] or (figures["throughput"] and not flags.tune):
        publish(NAME, figures)
        shutil.copy(FOLDER / f"{NAME}.json", flags.out)


if __name__ == "__main__":
    try:
        main()
    except FleetError as error:
        sys.exit(f"{type(error).__name__}: {error}")
