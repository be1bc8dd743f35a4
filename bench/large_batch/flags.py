"""The command line of bench/large_batch: what each flag means, with its default, and the recipe that they make."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from bench.large_batch.recipe import FINAL_SEEDS, Recipe
from bench.lib import cifar10
from bench.lib.results import ROOT

PAGE = ROOT / "docs" / "large_batch.md"
SMOKE = Recipe(epochs=2, micro_batch=32, ema_images=256, bn_images=64, width=8)
SWITCHES = {
    "tune": "the tuning alone",
    "final": "the final runs alone",
    "smoke": "made-up images and a tiny network; nothing is kept",
    "compile": "the network through torch.compile",
}


def flags_of(arguments: Sequence[str] | None, about: str | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)

    def value(flag: str, default: Any, meaning: str, *, shown: str | None = None, **kind: Any) -> None:
        parser.add_argument(flag, default=default, help=f"{meaning} (default: {default if shown is None else shown})", **kind)

    for name, meaning in SWITCHES.items():
        value(f"--{name}", False, meaning, shown="off", action="store_true")
    value("--table", None, "makes the page of these published figures, and no run", shown="none", type=Path, metavar="FILE")
    value("--page", PAGE, "where --table writes the page", type=Path, metavar="FILE")
    value("--data", cifar10.ARCHIVE, "archive of the images", type=Path, metavar="FILE")
    value("--cache", cifar10.CACHE, "folder for the decoded images", type=Path, metavar="FOLDER")
    value("--out", Path("log") / "large_batch", "folder of the runs, one line each", type=Path, metavar="FOLDER")
    value("--earlier", [], "files of runs made before", shown="none", type=Path, nargs="*", metavar="FILE")
    value(
        "--trials",
        None,
        "JSON list of the settings to try",
        shown="GRID in bench/large_batch/recipe.py",
        type=Path,
        metavar="FILE",
    )
    value("--cells", None, "the cells to run, such as sgd@512,lars@8192", shown="all that have trials")
    value(
        "--seeds",
        list(FINAL_SEEDS),
        "of the final runs",
        shown=" ".join(map(str, FINAL_SEEDS)),
        type=int,
        nargs="+",
        metavar="SEED",
    )
    value("--seconds", math.inf, "no run begins that would end later; 0: no run", shown="no limit", type=float)
    value("--processes", 1, "processes that share the device", type=int)
    value("--device", "cuda" if torch.cuda.is_available() else "cpu", "where the runs are made")
    value("--note", None, "a sentence for the page, such as what was tried before the tuning", shown="none")
    for field in fields(Recipe):
        usual, small = getattr(Recipe(), field.name), getattr(SMOKE, field.name)
        kind: Any = {"action": argparse.BooleanOptionalAction} if isinstance(usual, bool) else {"type": type(usual)}
        shown = spelled(usual) + (f"; with --smoke {spelled(small)}" if small != usual else "")
        value("--" + field.name.replace("_", "-"), None, field.metadata["doc"], shown=shown, **kind)
    return parser.parse_args(arguments)


def spelled(default: Any) -> str:
    return {True: "on", False: "off"}[default] if isinstance(default, bool) else str(default)


def recipe_of(flags: argparse.Namespace) -> Recipe:
    given = {name: getattr(flags, name) for name in asdict(Recipe()) if getattr(flags, name) is not None}
    return replace(SMOKE if flags.smoke else Recipe(), **given)
