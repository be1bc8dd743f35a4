"""What does gradient compression cost in accuracy? DGC, PowerSGD and 16 bits beside the synchronous training.

    python -m bench.compression_table.run --accuracy        full trainings of ResNet-9 on CIFAR-10, gloo ranks sharing a GPU
    python -m bench.compression_table.run --accuracy --tune         one run of each method, judged on held-out images
    python -m bench.compression_table.run --earlier A.jsonl         publishes what these files and --out hold; measures nothing
    python -m bench.compression_table.run --table           makes docs/compression.md of what this and compression_speed published
    python -m bench.compression_table.run --smoke           in seconds, on any machine; nothing is kept

The trainings are those of bench/localsgd_table, with the same images in the same order and one learning rate for all: its
lines may be given as --earlier, and their synchronous runs are not repeated. Each run appends a line to a file in --out at once,
`--seconds` limits them. The methods are in bench/compression_table/methods.py. The last line is one JSON object, kept in
bench/results/compression_table.json.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.compression_table.methods import METHODS, Settings
from bench.compression_table.page import page
from bench.compression_table.verdicts import accuracy_verdicts
from bench.lib.results import FOLDER, ROOT, publish, published, write_page
from bench.lib.table_flags import Parser, made, refuse_seconds
from bench.localsgd_table.accuracy import Plan, final_jobs, lines, make_missing, plan_of, tuning_jobs
from bench.localsgd_table.methods import SYNCHRONOUS, choose
from bench.localsgd_table.summary import accuracy, told
from bench.localsgd_table.training import Training
from fleetx.errors import ConfigError, FleetError

NAME, SPEED = "compression_table", "compression_speed"
PAGE = ROOT / "docs" / "compression.md"
SMOKE_TRAINING = Training(epochs=1, ranks=2, local_batch=8, width=2, warmup_share=0.2)
SMOKE_SETTINGS = Settings(sparsity=0.99, ramp_share=0.2, min_numel=16, rank=1)
SMOKE_SECONDS = 600.0
FACTS = ("device", "torch", "commit")
SWITCHES = {
    "accuracy": "full trainings on the device",
    "tune": "of --accuracy, one run of each method on 45,000 images, judged on the 5,000 held out, and no final ones",
    "smoke": "the trainings in seconds, on made-up images and a tiny network; nothing is kept",
}


def flags_of(arguments: Sequence[str] | None, about: str | None = None) -> argparse.Namespace:
    parser = Parser(about)
    for name, meaning in SWITCHES.items():
        parser.switch(name, meaning)
    parser.value("--methods", None, "rows to measure, such as synchronous,dgc", shown="all")
    parser.trainings(Path("log") / NAME, PAGE, table=FOLDER / f"{NAME}.json")
    parser.value(
        "--speed", None, "published figures of bench/compression_speed for the page", shown=f"results/{SPEED}.json", type=Path
    )
    parser.settings(Training(), SMOKE_TRAINING)
    parser.settings(Settings(), SMOKE_SETTINGS)
    flags = parser.parse_args(arguments)
    refuse_seconds(flags.seconds)
    if flags.tune and not flags.accuracy:
        raise ConfigError("--tune is a part of --accuracy; write both.")
    if flags.speed and not flags.table:
        raise ConfigError("--speed is for the page; write --table too.")
    return flags


def measure(flags: argparse.Namespace, plan: Plan) -> None:
    """Without the lines known: a learning rate that was tuned for one method would not be that of all."""
    methods = choose(flags.methods, METHODS)
    if flags.tune:
        jobs = tuning_jobs(methods, plan.training, plan.settings, [1.0])
    else:
        jobs = final_jobs(methods, plan, (), flags.seeds)
    make_missing(jobs, plan, lines(flags)["accuracy"])


def runs_of(records: Sequence[Mapping[str, Any]], training: Training) -> list[Mapping[str, Any]]:
    """Of this table's methods, with this training, at its learning rate: earlier lines hold others too."""
    wanted = asdict(training)
    return [r for r in records if r["method"] in METHODS and r["training"] == wanted and r["lr"] == training.lr]


def summary(flags: argparse.Namespace, training: Training, settings: Settings) -> dict[str, Any]:
    """Of this training alone; where none was asked for, of the one that the last line of a compressed run is of."""
    known = lines(flags)["accuracy"]
    compressed = [r for r in known if r["method"] in METHODS and r["method"] != SYNCHRONOUS]
    if compressed and not flags.accuracy and not flags.smoke:
        training = Training(**compressed[-1]["training"])
    runs = runs_of(known, training)
    rows = accuracy(runs, METHODS)
    return {
        **{"settings": asdict(settings), "training": asdict(training)},
        "facts": {key: ", ".join(sorted({r[key] for r in runs})) for key in FACTS},
        **{"accuracy": rows, "verdicts": accuracy_verdicts(rows), "runs": runs},
        **({"note": flags.note} if flags.note else {}),
    }


def show(figures: Mapping[str, Any]) -> None:
    for method, row in figures["accuracy"].items():
        tests = " ".join(f"{found:.2f}" for found in row["test"])
        sent = f"{row['bytes_sent'] / 1e9:.2f} GB sent a rank"
        print(f"{method:12} {row['mean']:.2f} % (spread {row['spread']:.2f}; {tests}), lr {row['lr']:g}, {sent}")
    for one in figures["verdicts"].values():
        print(told(one))


def smoke(flags: argparse.Namespace, training: Training, settings: Settings) -> None:
    """On the CPU, into a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        flags.out, flags.device, flags.seeds = Path(folder), "cpu", flags.seeds[:1]
        measure(flags, plan_of(flags, training, settings, time.monotonic() + SMOKE_SECONDS))
        figures = summary(flags, training, settings)
        show(figures)
        page(figures, None)


def make_page(flags: argparse.Namespace) -> None:
    """A file that was named must be there; of the two usual ones either may be missing, and the page says so."""
    found = []
    for named, usual, name in ((flags.table, FOLDER / f"{NAME}.json", NAME), (flags.speed, FOLDER / f"{SPEED}.json", SPEED)):
        file = named or usual
        missing = file == usual and not file.exists()
        found.append(None if missing else published(file, name))
    if found == [None, None]:
        raise ConfigError(f"neither {NAME}.json nor {SPEED}.json is in {FOLDER}; run one of the two benches first.")
    write_page(flags.page, page(*found))


def main(arguments: Sequence[str] | None = None) -> None:
    start = time.monotonic()
    flags = flags_of(arguments, __doc__)
    if flags.table:
        return make_page(flags)
    training = made(flags, SMOKE_TRAINING if flags.smoke else Training())
    settings = made(flags, SMOKE_SETTINGS if flags.smoke else Settings())
    if flags.smoke:
        return smoke(flags, training, settings)
    flags.out.mkdir(parents=True, exist_ok=True)
    if flags.accuracy:
        measure(flags, plan_of(flags, training, settings, start + flags.seconds))
    figures = summary(flags, training, settings)
    show(figures)
    if figures["accuracy"]:
        publish(NAME, figures)
        shutil.copy(FOLDER / f"{NAME}.json", flags.out)


if __name__ == "__main__":
    try:
        main()
    except FleetError as error:
        sys.exit(f"{type(error).__name__}: {error}")
