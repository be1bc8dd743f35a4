"""Flags of `fleetrun`: spellings, allowed values, and those of Paddle that are refused, with the reason."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NoReturn, get_args

from .. import __version__
from ..errors import ConfigError, did_you_mean
from .nodes import PORTS, Source

ProcessCount = int | Literal["auto", "gpu", "cpu"]
Tee = Literal["all"] | frozenset[int]

FLAGS = (
    *("--gpus", "--devices", "--selected_gpus", "--nproc_per_node", "--module", "--env", "--dry_run", "--run_mode"),
    *("--version", "--help"),
    *("--ips", "--nnodes", "--master", "--rank", "--host", "--start_port", "--job_id", "--max_restart", "--max_restarts"),
    *("--hang_timeout", "--log_dir", "--log_overwrite", "--log_max_mb", "--tee", "--job_secret_file", "--node_grace"),
    *("--restart_window", "--warm_restart"),
)
PARAMETER_SERVER = (
    *("--servers", "--server_num", "--server_endpoints", "--workers", "--worker_num", "--worker_endpoints", "--trainers"),
    *("--trainer_num", "--heter_workers", "--heter_worker_num", "--heter_devices", "--coordinators", "--coordinator_num"),
    *("--http_port", "--gloo_port", "--with_gloo"),
)
REFUSED = {
    **dict.fromkeys(
        PARAMETER_SERVER, "is for parameter-server training, and fleetrun is collective only; use --nproc_per_node N"
    ),
    "--elastic_level": "is not taken, as the number of nodes is fixed; write --max_restart N to start a failed job again",
    "--elastic_timeout": "is not taken, as a job starts when all nodes joined; for silent ranks, write --hang_timeout SECONDS",
    "--log_level": "is not taken; choose whose output is shown with --tee all, --tee none or --tee 0,3",
}
RESERVED = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|PADDLE_TRAINER(_ID|S_NUM)|TORCHELASTIC_.*|FLEETX_.*"
)


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError on wrong flags, to be printed in one line without the usage text."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See `fleetrun --help`.")


def _whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    allowed = f"at least {least}" if most is None else f"{least} to {most}"

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and least <= int(text) <= (most or int(text))):
            raise argparse.ArgumentTypeError(f"a whole number of {allowed} is needed, got {text!r}")
        return int(text)

    return parse


def _process_count(text: str) -> ProcessCount:
    if text in ("auto", "gpu", "cpu"):
        return text  # type: ignore[return-value]  # one of the three words
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"a whole number of at least 1, or auto, gpu or cpu, is needed, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"a number of seconds above 0 is needed, got {text!r}")
    return seconds


def _tee(text: str) -> Tee:
    if text == "all":
        return "all"
    ranks = [] if text == "none" else [entry.strip() for entry in text.split(",")]
    if not all(entry.isascii() and entry.isdigit() for entry in ranks):
        raise argparse.ArgumentTypeError(f"all, none, or ranks such as 0,3 are needed, got {text!r}")
    return frozenset(int(entry) for entry in ranks)


def _job_id(text: str) -> str:
    if not re.fullmatch(r"[\w.:-]{1,100}", text, flags=re.ASCII):
        raise argparse.ArgumentTypeError(f"up to 100 letters, digits and any of _ . : - are needed, got {text!r}")
    return text


def _warm_restart(text: str) -> str:
    if text not in ("auto", "off"):
        raise argparse.ArgumentTypeError(f"auto or off is needed, got {text!r}")
    return text


def _run_mode(text: str) -> str:
    if text != "collective":
        raise argparse.ArgumentTypeError(f"fleetrun is collective only, got {text!r}; leave the flag out")
    return text


def _add(parser: argparse.ArgumentParser, *flags: str, **settings: object) -> None:
    """Add a flag with its aliases, each also spelt with - between its words. The first one names the option."""
    spellings = dict.fromkeys(spelling for flag in flags for spelling in (flag, "--" + flag[2:].replace("_", "-")))
    parser.add_argument(*spellings, dest=flags[0][2:], **settings)  # type: ignore[arg-type]


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fleetrun",
        usage="fleetrun [flags] script.py [arguments]\n       fleetrun [flags] -m module [arguments]",
        description="Start a script on several ranks: one for each GPU of this machine, or two on the CPU.",
        epilog="Every flag may be written with - or with _ between its words.",
        allow_abbrev=False,
    )
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module, as in `python -m`")
    parser.add_argument("--version", action="version", version=f"fleetx {__version__}")
    _add(parser, "--dry_run", action="store_true", help="print what would be started, and start nothing")
    _add_ranks(parser)
    _add_nodes(parser)
    _add_endings(parser)
    _add_output(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the script and its arguments")
    return parser


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    devices = ("--gpus", "--devices", "--selected_gpus")
    _add(parser, *devices, metavar="0,1", help="GPUs to use (default: all that are visible)")
    count_help = "ranks to start here: a number, gpu (one for each), cpu (one for each core), or auto (default)"
    _add(parser, "--nproc_per_node", type=_process_count, default="auto", metavar="N", help=count_help)
    env_help = "set a variable for every rank, may be repeated; or local, slurm, mpi: whose variables describe the nodes"
    _add(parser, "--env", action="append", default=[], metavar="NAME=VALUE", help=env_help)
    _add(parser, "--run_mode", type=_run_mode, metavar="collective", help="the only mode; accepted for compatibility")


def _add_nodes(parser: argparse.ArgumentParser) -> None:
    port = _whole_number(PORTS.start, PORTS.stop - 1)
    _add(parser, "--ips", metavar="A,B", help="addresses of all nodes, the same on each: the first is node 0")
    _add(parser, "--nnodes", type=_whole_number(1), metavar="N", help="number of nodes, together with --master")
    _add(parser, "--master", metavar="HOST[:PORT]", help="address of node 0")
    _add(parser, "--rank", type=_whole_number(0), metavar="R", help="this node's number (default: in order of arrival)")
    _add(parser, "--host", metavar="ADDRESS", help="this node's own address, if it has several")
    _add(parser, "--start_port", type=port, metavar="PORT", help="rendezvous port on node 0, for several nodes (default: 6070)")
    _add(parser, "--job_id", type=_job_id, default="default", metavar="NAME", help="must be the same on all nodes of a job")
    secret_help = "file with a secret that all nodes of the job share, so that no stranger can join (default: $FLEETX_JOB_SECRET)"
    _add(parser, "--job_secret_file", metavar="FILE", help=secret_help)
    grace_help = "how long another node may be out of reach before it is lost (default: 60)"
    _add(parser, "--node_grace", type=_seconds, default=60.0, metavar="SECONDS", help=grace_help)


def _add_endings(parser: argparse.ArgumentParser) -> None:
    restarts = ("--max_restart", "--max_restarts")
    _add(parser, *restarts, type=_whole_number(0), default=0, metavar="N", help="number of restarts after failures (default: 0)")
    window_help = "an attempt with progress that ran for so long gives all restarts back (default: 3600)"
    _add(parser, "--restart_window", type=_seconds, default=3600.0, metavar="SECONDS", help=window_help)
    warm_help = "auto (default): a restart forks its ranks from a process that has imported torch; off: it imports it again"
    _add(parser, "--warm_restart", type=_warm_restart, default="auto", metavar="auto|off", help=warm_help)
    hang_help = "stop or restart ranks that make no progress for this long (default: 1800)"
    _add(parser, "--hang_timeout", type=_seconds, default=1800.0, metavar="SECONDS", help=hang_help)


def _add_output(parser: argparse.ArgumentParser) -> None:
    _add(parser, "--log_dir", default="log", metavar="DIR", help="folder of workerlog.N (default: log)")
    _add(parser, "--log_overwrite", action="store_true", help="a restart empties the logs (default: it appends to them)")
    size_help = "a log larger than this becomes workerlog.N.1, and a new one begins (default: 1024; 0: no limit)"
    _add(parser, "--log_max_mb", type=_whole_number(0), default=1024, metavar="MIB", help=size_help)
    tee_help = "ranks shown in full: all, none, or 0,3 (default: 0); others show warnings and tracebacks only"
    _add(parser, "--tee", type=_tee, default=frozenset({0}), metavar="RANKS", help=tee_help)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    options, unknown = make_parser().parse_known_args(argv)
    if unknown:
        raise ConfigError(_unknown_flag(unknown[0].split("=")[0]))
    if options.command[:1] == ["--"]:
        del options.command[0]
    if not options.command:
        raise ConfigError("no script was given. Write `fleetrun train.py`; see `fleetrun --help`.")
    return options


def _unknown_flag(flag: str) -> str:
    plain = flag.replace("-", "_").replace("__", "--", 1)
    if plain in REFUSED:
        return f"{flag} {REFUSED[plain]}."
    return f"unknown flag {flag}.{did_you_mean(plain, FLAGS)} Flags of the script come after its name."


def split_env(entries: Iterable[str]) -> tuple[dict[str, str], Source | None]:
    """Split all --env entries into variables for the ranks, and the source of the variables that describe the nodes."""
    variables: dict[str, str] = {}
    source: Source | None = None
    for entry in entries:
        name, is_variable, value = entry.partition("=")
        if is_variable:
            variables[_checked_name(name)] = value
        elif entry not in get_args(Source) or source not in (None, entry):
            raise ConfigError(f"--env takes NAME=VALUE, or one of local, slurm and mpi; got {entry!r}.")
        else:
            source = entry  # type: ignore[assignment]  # one of them, as just checked
    return variables, source


def _checked_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ConfigError(f"--env {name}=... does not name a variable; write a name such as OMP_NUM_THREADS=4.")
    if name == "CUDA_VISIBLE_DEVICES":
        raise ConfigError("--env CUDA_VISIBLE_DEVICES=... is not taken; choose GPUs with --gpus 0,1.")
    if RESERVED.fullmatch(name):
        raise ConfigError(f"--env {name}=... is not taken, as fleetrun gives each rank its own; leave it out.")
    return name
