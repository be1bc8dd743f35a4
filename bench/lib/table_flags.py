"""Flags that the tables of trainings share (bench/localsgd_table, bench/compression_table): every help names the default."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from bench.lib import cifar10
from fleetx.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Made = TypeVar("Made", bound="DataclassInstance")


class Parser(argparse.ArgumentParser):
    def __init__(self, about: str | None) -> None:
        super().__init__(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)

    def value(self, flag: str, default: Any, meaning: str, *, shown: str | None = None, **kind: Any) -> None:
        self.add_argument(flag, default=default, help=f"{meaning} (default: {default if shown is None else shown})", **kind)

    def several(self, flag: str, default: Sequence[Any], meaning: str, kind: type, metavar: str) -> None:
        shown = " ".join(map(str, default)) or "none"
        self.value(flag, list(default), meaning, shown=shown, type=kind, nargs="*", metavar=metavar)

    def switch(self, name: str, meaning: str) -> None:
        self.value(f"--{name}", False, meaning, shown="off", action="store_true")

    def trainings(self, out: Path, page: Path, *, table: Path | None = None) -> None:
        """Which runs are made, where, until when, and what becomes of their lines. `table` is what --table alone means."""
        self.several("--seeds", (1, 2, 3), "of the final runs", int, "SEED")
        self.value("--seconds", math.inf, "no training begins that would end later", shown="no limit", type=float)
        self.value("--device", "cuda" if torch.cuda.is_available() else "cpu", "of the trainings")
        self.value("--data", cifar10.ARCHIVE, "archive of the images", type=Path, metavar="FILE")
        self.value("--cache", cifar10.CACHE, "folder for the decoded images", type=Path, metavar="FOLDER")
        self.value("--out", out, "folder of the measured lines", type=Path, metavar="FOLDER")
        self.several("--earlier", (), "files of lines measured before", Path, "FILE")
        bare: dict[str, Any] = {} if table is None else {"nargs": "?", "const": table}
        meaning = "makes the page of these published figures, and measures nothing"
        self.value("--table", None, meaning, shown="none", type=Path, metavar="FILE", **bare)
        self.value("--page", page, "where --table writes the page", type=Path, metavar="FILE")
        self.value("--note", None, "a sentence for the page", shown="none")

    def settings(self, usual: Any, small: Any) -> None:
        """A flag for each field; `small` is what --smoke takes instead."""
        for field in fields(usual):
            default, tiny = getattr(usual, field.name), getattr(small, field.name)
            shown = str(default) + (f"; with --smoke {tiny}" if tiny != default else "")
            self.value("--" + field.name.replace("_", "-"), None, field.metadata["doc"], shown=shown, type=type(default))


def refuse_seconds(seconds: float) -> None:
    if not seconds >= 0:
        raise ConfigError(f"--seconds is {seconds}; it must be a number of at least 0.")


def made(flags: argparse.Namespace, usual: Made) -> Made:
    """The defaults, with what the flags say instead."""
    given = {field.name: getattr(flags, field.name) for field in fields(usual) if getattr(flags, field.name) is not None}
    return replace(usual, **given)
