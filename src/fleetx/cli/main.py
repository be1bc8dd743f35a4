"""`fleetx SUBCOMMAND ...`: from the command line to the exit code. Torch is imported only when a subcommand runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from .. import __version__
from ..errors import FleetError
from . import doctor, plan, report
from .flags import Parser

EXIT_USAGE, EXIT_CTRL_C, EXIT_BROKEN_PIPE = 2, 130, 141
PARTS = {"doctor": doctor, "plan": plan, "report": report}
"""Subcommands: each module has `HELP`, adds its flags to a parser (`add`) and runs them (`run`)."""


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="fleetx",
        description="FleetX on the command line: check a machine, plan a training, show its runs.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parts = parser.add_subparsers(dest="part", metavar="SUBCOMMAND")
    for name, part in PARTS.items():
        part.add(parts.add_parser(name, help=part.HELP, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 2 for unusable input, with a message of one line."""
    try:
        parser = make_parser()
        options = parser.parse_args(argv)
        if options.part is None:
            parser.print_help()
            return 0
        code: int = PARTS[options.part].run(options)
        return code
    except FleetError as error:
        print(f"fleetx: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_CTRL_C
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout at exit and would print an error
        return EXIT_BROKEN_PIPE


def command() -> NoReturn:
    sys.exit(main())
