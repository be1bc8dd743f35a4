"""`fleetx report RUN [RUN...]`: print one line per run and write a page that shows them."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..dist.own_files import replace_file
from ..errors import ConfigError
from .flags import arg_type, file

if TYPE_CHECKING:
    from ..report.read import Run

HELP = "show runs recorded by fleet.Monitor on one HTML page"
PAGE = "report.html"
LIVE_SECONDS = 10

TEXT = """\
Show one run, or compare several, on one HTML page that opens from disk without a network.

RUN is a folder written by fleet.Monitor(dir); the run may still be in progress.
"""
EXAMPLES = """\
examples:
  fleetx report runs/lars                              (writes runs/lars/report.html)
  fleetx report runs/dense runs/localsgd --out both.html --title "Local SGD against dense"
  fleetx report runs/lars --live                       (follows a run under way)
  fleetx report runs/lars --png figure.png             (also a picture for a paper)
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = TEXT, EXAMPLES
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders")
    out_help = f"file to write (default: {PAGE} in the run's folder; for several runs, in the working folder)"
    parser.add_argument("--out", type=arg_type(file(".html")), metavar=PAGE, help=out_help)
    parser.add_argument(
        "--png", type=arg_type(file(".png")), metavar="figure.png", help="also draw loss, throughput, time and bytes at 200 dpi"
    )
    parser.add_argument("--csv", type=arg_type(file(".csv")), metavar="runs.csv", help="also write every update as a table")
    live_help = f"write the page again every {LIVE_SECONDS} s until no run is under way; browsers load it again by themselves"
    parser.add_argument("--live", action="store_true", help=live_help)
    parser.add_argument("--title", metavar="TEXT", help="title of the page (default: the runs' names)")


def write(path: Path, text: str) -> None:
    """Write the page and rename it into place: a browser that reloads it must not see half of it."""
    try:
        replace_file(path, text.encode("utf-8", errors="replace"), mode=0o666)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Choose another place with --out.") from None


def run(options: argparse.Namespace) -> int:
    from ..launch.console import escape
    from ..report.facts import facts_of, one_line

    folders = [Path(one) for one in options.runs]
    if options.png is not None:
        from ..report.figure import require_matplotlib

        require_matplotlib()
    runs = read_runs(folders)
    out = Path(options.out) if options.out else (folders[0] / PAGE if len(folders) == 1 else Path(PAGE))
    for one in runs:
        for text in (one_line(one.name, facts_of(one)), *(f"  {problem}" for problem in one.problems)):
            print(escape(text))  # the text of an error may contain control characters
    is_live = options.live and any(one.is_live and one.summary is None for one in runs)
    write_page(out, runs, options.title, is_live=is_live)
    print(f"page: {out}", flush=True)
    if options.png is not None:
        from ..report.figure import draw

        draw(options.png, runs, options.title)
        print(f"figure: {options.png}")
    if options.csv is not None:
        from ..report.table_file import csv_text

        write(Path(options.csv), csv_text(runs))
        print(f"table: {options.csv}")
    if is_live:
        follow(folders, out, options.title)
    return 0


def read_runs(folders: Sequence[Path]) -> list[Run]:
    from ..report.read import read_run, run_names

    return [read_run(folder, name) for folder, name in zip(folders, run_names(folders), strict=True)]


def write_page(out: Path, runs: Sequence[Run], title: str | None, *, is_live: bool) -> None:
    from ..report.page import make_page

    write(out, make_page(runs, title, refresh_seconds=LIVE_SECONDS if is_live else None))


def follow(folders: Sequence[Path], out: Path, title: str | None, wait: Callable[[float], object] = time.sleep) -> None:
    """Write the page again until no run is under way; the last one does not load itself again. Ctrl-C ends it."""
    is_live = True
    with contextlib.suppress(KeyboardInterrupt):
        while is_live:
            wait(LIVE_SECONDS)
            runs = read_runs(folders)
            is_live = any(one.is_live and one.summary is None for one in runs)
            write_page(out, runs, title, is_live=is_live)
