"""The command line of bench/localsgd_table.py: what each flag means, with its default, and the settings that they make."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

import cifar10
from fleetx.errors import ConfigError
from localsgd_methods import Settings
from localsgd_throughput import TURNS
from localsgd_training import Training

PAGE = Path(__file__).parents[1] / "docs" / "localsgd.md"
MODELS = ("mlp", "resnet9")
SMOKE_TRAINING = Training(epochs=1, ranks=2, local_batch=8, width=2)
SMOKE_SETTINGS = Settings(init_k=2, post_local_k=2, diloco_k=2)
SWITCHES = {
    "throughput": "measure steps between hosts at the given rates (needs root)",
    "accuracy": "full trainings on the device",
    "tune": "of --accuracy, the runs that choose each method's learning rate, and no final ones",
    "smoke": "both in seconds, on made-up images and tiny networks; nothing is kept",
}
Made = TypeVar("Made", Training, Settings)


def flags_of(arguments: Sequence[str] | None, about: str | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)

    def value(flag: str, default: Any, meaning: str, *, shown: str | None = None, **kind: Any) -> None:
        parser.add_argument(flag, default=default, help=f"{meaning} (default: {default if shown is None else shown})", **kind)

    def several(flag: str, default: Sequence[Any], meaning: str, kind: type, metavar: str) -> None:
        shown = " ".join(map(str, default)) or "none"
        value(flag, list(default), meaning, shown=shown, type=kind, nargs="*", metavar=metavar)

    for name, meaning in SWITCHES.items():
        value(f"--{name}", False, meaning, shown="off", action="store_true")
    value("--methods", None, "rows to measure, such as synchronous,k4,adacomm", shown="all")
    several("--models", MODELS, "networks of --throughput", str, "MODEL")
    several("--rates", (1000.0, 100.0), "of the links, in Mbit/s", float, "MBIT")
    value("--hosts", 2, "between which --throughput trains, one rank on each", type=int)
    value("--turns", TURNS, "of --throughput; in each, every method makes one block of whole periods", type=int)
    several("--seeds", (1, 2, 3), "of the final runs", int, "SEED")
    several("--lrs", (1.0, 0.5, 2.0), "of --tune, in each method's given learning rate", float, "FACTOR")
    value("--seconds", math.inf, "no run of --accuracy begins that would end later", shown="no limit", type=float)
    value("--device", "cuda" if torch.cuda.is_available() else "cpu", "of --accuracy")
    value("--data", cifar10.ARCHIVE, "archive of the images", type=Path, metavar="FILE")
    value("--cache", cifar10.CACHE, "folder for the decoded images", type=Path, metavar="FOLDER")
    value("--out", Path("log") / "localsgd_table", "folder of the measured lines", type=Path, metavar="FOLDER")
    several("--earlier", (), "files of lines measured before", Path, "FILE")
    value("--table", None, "makes the page of these published figures, and measures nothing", shown="none", type=Path)
    value("--page", PAGE, "where --table writes the page", type=Path, metavar="FILE")
    value("--note", None, "a sentence for the page", shown="none")
    for usual, small in ((Training(), SMOKE_TRAINING), (Settings(), SMOKE_SETTINGS)):
        for field in fields(usual):
            default, tiny = getattr(usual, field.name), getattr(small, field.name)
            shown = str(default) + (f"; with --smoke {tiny}" if tiny != default else "")
            value("--" + field.name.replace("_", "-"), None, field.metadata["doc"], shown=shown, type=type(default))
    return checked(parser.parse_args(arguments))


def checked(flags: argparse.Namespace) -> argparse.Namespace:
    if not flags.seconds >= 0:
        raise ConfigError(f"--seconds is {flags.seconds}; it must be a number of at least 0.")
    if flags.turns < 2:
        raise ConfigError(f"--turns is {flags.turns}; post-local SGD has two parts: write at least 2.")
    if flags.hosts < 2:
        raise ConfigError(f"--hosts is {flags.hosts}; one alone has nobody to talk to: write at least 2.")
    for model in flags.models:
        if model not in MODELS:
            raise ConfigError(f"--models names {model!r}; there are {' and '.join(MODELS)}.")
    if any(not 0 < factor < math.inf for factor in flags.lrs):
        raise ConfigError(f"--lrs is {flags.lrs}; each is a number above 0.")
    if flags.tune and not flags.accuracy:
        raise ConfigError("--tune is a part of --accuracy; write both.")
    return flags


def made(flags: argparse.Namespace, usual: Made) -> Made:
    """The defaults, with what the flags say instead."""
    given = {field.name: getattr(flags, field.name) for field in fields(usual) if getattr(flags, field.name) is not None}
    return replace(usual, **given)
