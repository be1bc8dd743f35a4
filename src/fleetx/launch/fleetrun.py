"""`fleetrun [flags] train.py [its arguments]`: the command line, and what it prints."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from fleetx.errors import ConfigError, FleetError, did_you_mean
from fleetx.launch import logs, outcome, topology

EXIT_FAILED, EXIT_USAGE, EXIT_NO_INPUT, EXIT_CTRL_C = 1, 2, 66, 130
FLAGS = ("--nproc_per_node", "--gpus", "--log_dir", "--module", "--help")
SHOWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM")
SHOWN_IF_SET = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
VALUE_WIDTH = 41


class _Parser(argparse.ArgumentParser):
    """Errors are raised, to be told in one line without the usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See `fleetrun --help`.")


def _process_count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is needed, got {text!r}")
    return int(text)


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fleetrun",
        usage="fleetrun [flags] script.py [arguments]\n       fleetrun [flags] -m module [arguments]",
        description="Start a script on several ranks of this machine: one for each GPU, or two on the CPU.",
        epilog="Every flag may be written with - or with _ between its words.",
        allow_abbrev=False,
    )
    parser.add_argument(*_spellings("--nproc_per_node"), type=_process_count, metavar="N", help="ranks to start")
    parser.add_argument("--gpus", metavar="0,1", help="GPUs to use (default: all that are visible)")
    parser.add_argument(*_spellings("--log_dir"), default="log", metavar="DIR", help="folder of workerlog.N (default: log)")
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module, as in `python -m`")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the script and its arguments")
    return parser


def _spellings(flag: str) -> tuple[str, str]:
    return flag, "--" + flag[2:].replace("_", "-")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    options, unknown = make_parser().parse_known_args(argv)
    if unknown:
        hint = did_you_mean(unknown[0].split("=")[0].replace("-", "_").replace("__", "--", 1), FLAGS)
        raise ConfigError(f"unknown flag {unknown[0]}.{hint} Flags of the script come after its name.")
    if not options.command:
        raise ConfigError("no script was given. Write `fleetrun train.py`; see `fleetrun --help`.")
    return options


def make_plan(options: argparse.Namespace, *, visible_gpus: int) -> topology.Plan:
    gpus = topology.parse_gpus(options.gpus) if options.gpus is not None else ()
    topology.check_gpus(gpus, visible_gpus=visible_gpus, visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"))
    count = topology.count_processes(options.nproc_per_node, gpus=gpus, visible_gpus=visible_gpus)
    return topology.Plan(
        target=options.command[0],
        is_module=options.module,
        arguments=tuple(options.command[1:]),
        process_count=count,
        gpus=gpus,
        devices=topology.assign_devices(count, gpus=gpus, visible_gpus=visible_gpus),
        log_dir=Path(options.log_dir),
    )


def configuration_table(plan: topology.Plan) -> str:
    kind = "module" if plan.is_module else "script"
    rows = {
        "devices": ",".join(plan.devices),
        "log_dir": plan.log_dir,
        "nproc_per_node": plan.process_count,
        kind: shlex.join((plan.target, *plan.arguments)),
    }
    body = [f"{key}: {value}" for key, value in rows.items()]
    return "\n".join(["-----------  Configuration Arguments -----------", *body, "-" * 48])


def environment_table(environment: dict[str, str]) -> str:
    """Rank 0's variables, framed as fleetrun's users know it; of a long value the end is shown."""
    names = [*SHOWN, *(name for name in SHOWN_IF_SET if name in environment)]
    values = {name: environment[name] for name in names}
    cut = {name: value if len(value) <= VALUE_WIDTH else "... " + value[4 - VALUE_WIDTH :] for name, value in values.items()}
    wide = max(20, *(len(value) for value in cut.values()))
    rows = [f"|{'Distributed Envs':>24}    {'Value':^{wide}} |", *(f"|{k:>24}    {v:^{wide}} |" for k, v in cut.items())]
    double, single = (f"+{line * (len(rows[0]) - 2)}+" for line in "=-")
    return "\n".join([double, rows[0], single, *rows[1:], double])


def announce(plan: topology.Plan, environment: dict[str, str]) -> None:
    print(environment_table(environment))
    log = topology.log_path(plan.log_dir, 0)
    print(
        f"Local start of {plan.process_count} process(es). Rank 0 is shown here and kept in {log}; rank N is in workerlog.N.",
        flush=True,
    )


def run(options: argparse.Namespace) -> int:
    from fleetx.launch import supervise  # late: elastic takes a second to import, which a usage error need not wait for

    plan = make_plan(options, visible_gpus=supervise.count_gpus())
    logs.start_fresh(plan)
    print(configuration_table(plan), flush=True)
    terminal = os.ttyname(1) if os.isatty(1) else None
    ended = supervise.run_workers(plan, terminal=terminal, announce=lambda environment: announce(plan, environment))
    if ended.stopped_by is not None:
        _complain(outcome.stop_line(ended))
    elif ended.failures:
        _complain("\n".join(tell_failure(plan, ended)))
    return ended.exit_code


def tell_failure(plan: topology.Plan, ended: outcome.Outcome) -> list[str]:
    blamed = ended.failures[0].rank
    log = topology.log_path(plan.log_dir, blamed)
    tail = logs.last_lines(log, outcome.TAIL_LINES) if blamed != 0 else []  # rank 0's are on the console already
    return outcome.failure_lines(ended, log=log, log_tail=tail)


def _complain(text: str) -> None:
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is the failing rank's, or 2 for misuse, 66 for a missing script."""
    try:
        options = parse(argv)
        if not options.module and not Path(options.command[0]).exists():
            _complain(f"fleetrun: there is no script {options.command[0]!r}; the working folder is {os.getcwd()}")
            return EXIT_NO_INPUT
        return run(options)
    except FleetError as error:
        _complain(f"fleetrun: {error}")
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
    except KeyboardInterrupt:
        _complain("fleetrun: stopped by Ctrl-C")
        return EXIT_CTRL_C
