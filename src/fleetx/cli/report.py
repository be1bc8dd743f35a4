"""`fleetx report RUN [RUN...]`: one line for each run, and a page that shows them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from fleetx.cli.flags import file, of
from fleetx.errors import ConfigError

HELP = "show runs that fleet.Monitor has written, as one page"
PAGE = "report.html"

TEXT = """\
Show one run, or compare several, on one HTML page that opens from disk and asks no network.

RUN is the folder that fleet.Monitor(dir) writes; a run that still goes on may be shown too.
"""
EXAMPLES = """\
examples:
  fleetx report runs/lars                              (writes runs/lars/report.html)
  fleetx report runs/dense runs/localsgd --out both.html --title "Local SGD against dense"
  fleetx report runs/lars --png figure.png             (a picture for a paper as well)
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = TEXT, EXAMPLES
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders")
    out_help = f"the page (default: {PAGE} in the run's folder; of several runs, in this folder)"
    parser.add_argument("--out", type=of(file(".html")), metavar=PAGE, help=out_help)
    parser.add_argument(
        "--png", type=of(file(".png")), metavar="figure.png", help="draw loss, throughput, time and bytes at 200 dpi"
    )
    parser.add_argument("--title", metavar="TEXT", help="of the page (default: the runs' names)")


def write(path: Path, text: str) -> None:
    """Whole or not at all: somebody may have the page open, and read it again."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(text, encoding="utf-8", errors="replace")
        os.replace(partial, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Name another place by --out.") from None
    finally:
        partial.unlink(missing_ok=True)


def run(options: argparse.Namespace) -> int:
    from fleetx.launch.console import escape
    from fleetx.report.facts import facts_of, one_line
    from fleetx.report.page import make_page
    from fleetx.report.read import read_run, run_names

    folders = [Path(one) for one in options.runs]
    if options.png is not None:
        from fleetx.report.figure import require_matplotlib

        require_matplotlib()
    runs = [read_run(folder, name) for folder, name in zip(folders, run_names(folders), strict=True)]
    out = Path(options.out) if options.out else (folders[0] / PAGE if len(folders) == 1 else Path(PAGE))
    for one in runs:
        for text in (one_line(one.name, facts_of(one)), *(f"  {problem}" for problem in one.problems)):
            print(escape(text))  # an error's text is whatever the run wrote
    write(out, make_page(runs, options.title))
    print(f"page: {out}")
    if options.png is not None:
        from fleetx.report.figure import draw

        draw(options.png, runs, options.title)
        print(f"figure: {options.png}")
    return 0
