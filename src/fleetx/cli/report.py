"""`fleetx report RUN [RUN...]`: print one line per run and write a page that shows them."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..dist.own_files import replace_file
from ..errors import ConfigError
from .flags import arg_type, file

HELP = "show runs recorded by fleet.Monitor on one HTML page"
PAGE = "report.html"

TEXT = """\
Show one run, or compare several, on one HTML page that opens from disk without a network.

RUN is a folder written by fleet.Monitor(dir); the run may still be in progress.
"""
EXAMPLES = """\
examples:
  fleetx report runs/lars                              (writes runs/lars/report.html)
  fleetx report runs/dense runs/localsgd --out both.html --title "Local SGD against dense"
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
    from ..report.page import make_page
    from ..report.read import read_run, run_names

    folders = [Path(one) for one in options.runs]
    if options.png is not None:
        from ..report.figure import require_matplotlib

        require_matplotlib()
    runs = [read_run(folder, name) for folder, name in zip(folders, run_names(folders), strict=True)]
    out = Path(options.out) if options.out else (folders[0] / PAGE if len(folders) == 1 else Path(PAGE))
    for one in runs:
        for text in (one_line(one.name, facts_of(one)), *(f"  {problem}" for problem in one.problems)):
            print(escape(text))  # the text of an error may contain control characters
    write(out, make_page(runs, options.title))
    print(f"page: {out}")
    if options.png is not None:
        from ..report.figure import draw

        draw(options.png, runs, options.title)
        print(f"figure: {options.png}")
    return 0
