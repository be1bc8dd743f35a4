"""Run `fleetx doctor`: gather facts, check them, run the trial, print the findings."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

from ..errors import FleetError, first_line
from . import hardware, network, software, text, variables
from .facts import Facts
from .finding import Finding, Table, count, problem
from .gather import gather
from .trial import TOPIC, Choice, check_tables, check_trial, choose, run_trial

# --- checks, in the order of their findings -----------------------------------------------------------------------------

CHECKS: tuple[Callable[[Facts], Iterable[Finding]], ...] = (
    software.check,
    software.check_triton,
    software.check_extras,
    hardware.check_gpus,
    hardware.check_cpu,
    hardware.check_memory,
    hardware.check_backends,
    network.check_name,
    network.check_addresses,
    network.check_peers,
    hardware.check_shared_memory,
    hardware.check_limits,
    hardware.check_log_folder,
    variables.check,
)


def check_all(facts: Facts) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(facts)]


# --- the command --------------------------------------------------------------------------------------------------------

EXIT_PROBLEMS = 1


@final
@dataclass(frozen=True, slots=True)
class Request:
    """The checked flags."""

    ranks: int
    sizes: tuple[int, ...]
    hosts: tuple[str, ...]
    port: int
    backend: str | None
    wants_bandwidth: bool
    as_json: bool
    limit_seconds: float


def run(request: Request) -> int:
    start = time.monotonic()
    facts = gather(hosts=request.hosts, port=request.port)
    choice = choose(facts, ranks=request.ranks, backend=request.backend, is_wanted=request.wants_bandwidth)
    with _status(request, choice):
        tables, trial_findings = _measured(request, choice)
    findings = [*check_all(facts), *choice.findings, *trial_findings, *check_tables(tables, request.sizes)]
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one rank prints for each node
        _print(request, facts, findings, tables, time.monotonic() - start)
    return EXIT_PROBLEMS if count(findings, "problem") else 0


def _measured(request: Request, choice: Choice) -> tuple[Sequence[Table], Sequence[Finding]]:
    if not choice.backends:
        return (), ()
    if choice.is_in_place:
        return _among_ranks(request, choice)
    trial = run_trial(request.ranks, choice.backends, request.sizes, limit_seconds=request.limit_seconds)
    return trial.tables, list(check_trial(trial))


def _among_ranks(request: Request, choice: Choice) -> tuple[Sequence[Table], Sequence[Finding]]:
    """Measure between the launcher's ranks. All of them come here, since their command lines and launcher variables are equal."""
    from .. import fleet  # late: importing torch may be what fails
    from .exchange import measured

    try:
        fleet.init(timeout=request.limit_seconds)
        return measured(choice.backends, request.sizes), ()
    except (FleetError, RuntimeError) as error:
        fix = "fix the problems listed above; each rank's log is in the launcher's folder"
        return (), (problem(TOPIC, f"between the ranks of the launcher: {first_line(error)}", fix),)


@contextlib.contextmanager
def _status(request: Request, choice: Choice) -> Iterator[None]:
    """Show on a terminal what the command is waiting for."""
    if not choice.backends or choice.is_in_place or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{request.ranks} ranks are started and measured over {' and '.join(choice.backends)}"):
        yield


def _print(request: Request, facts: Facts, findings: Sequence[Finding], tables: Sequence[Table], seconds: float) -> None:
    if request.as_json:
        print(text.to_json(facts, findings, tables, seconds), flush=True)
        return
    width, has_colour = text.screen()
    print(text.to_text(findings, tables, width=width, has_colour=has_colour), flush=True)
