"""The command line of bench/localsgd_table: what each flag means, with its default."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from bench.lib.results import ROOT
from bench.lib.table_flags import Parser, refuse_seconds
from bench.localsgd_table.methods import Settings
from bench.localsgd_table.training import Training
from bench.localsgd_table.worker import TURNS
from fleetx.errors import ConfigError

PAGE = ROOT / "docs" / "localsgd.md"
MODELS = ("mlp", "resnet9")
SMOKE_TRAINING = Training(epochs=1, ranks=2, local_batch=8, width=2)
SMOKE_SETTINGS = Settings(init_k=2, post_local_k=2, diloco_k=2)
SWITCHES = {
    "throughput": "measure steps between hosts at the given rates (needs root)",
    "accuracy": "full trainings on the device",
    "tune": "of --accuracy, the runs that choose each method's learning rate, and no final ones",
    "smoke": "both in seconds, on made-up images and tiny networks; nothing is kept",
}


def flags_of(arguments: Sequence[str] | None, about: str | None = None) -> argparse.Namespace:
    parser = Parser(about)
    for name, meaning in SWITCHES.items():
        parser.switch(name, meaning)
    parser.value("--methods", None, "rows to measure, such as synchronous,k4,adacomm", shown="all")
    parser.several("--models", MODELS, "networks of --throughput", str, "MODEL")
    parser.several("--rates", (1000.0, 100.0), "of the links, in Mbit/s", float, "MBIT")
    parser.value("--hosts", 2, "between which --throughput trains, one rank on each", type=int)
    parser.value("--turns", TURNS, "of --throughput; in each, every method makes one block of whole periods", type=int)
    parser.several("--lrs", (1.0, 0.5, 2.0), "of --tune, in each method's given learning rate", float, "FACTOR")
    parser.trainings(Path("log") / "localsgd_table", PAGE)
    parser.settings(Training(), SMOKE_TRAINING)
    parser.settings(Settings(), SMOKE_SETTINGS)
    return checked(parser.parse_args(arguments))


def checked(flags: argparse.Namespace) -> argparse.Namespace:
    refuse_seconds(flags.seconds)
    if flags.turns < 2:
        raise ConfigError(f"--turns is {flags.turns}; post-local SGD has two parts: write at least 2.")
    if flags.hosts < 2:
        raise ConfigError(f"--hosts is {flags.hosts}; one alone has no other to talk to: write at least 2.")
    for model in flags.models:
        if model not in MODELS:
            raise ConfigError(f"--models names {model!r}; there are {' and '.join(MODELS)}.")
    if any(not 0 < factor < math.inf for factor in flags.lrs):
        raise ConfigError(f"--lrs is {flags.lrs}; each is a number above 0.")
    if flags.tune and not flags.accuracy:
        raise ConfigError("--tune is a part of --accuracy; write both.")
    return flags
