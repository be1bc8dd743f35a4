"""The whole of `fleetx doctor`: gather, judge, let ranks talk, tell."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

from fleetx.errors import FleetError, first_line

from . import hardware, network, software, text, variables
from .exchanging import TOPIC, Choice, check_tables, check_trial, choose
from .facts import Facts
from .finding import Finding, Table, count, problem
from .gather import gather
from .trial import run_trial

# --- All checks of facts, in the order in which they are told -----------------------------------------------------------

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
    hardware.check_clock,
    variables.check,
)


def judged(facts: Facts) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(facts)]


# ----------------------------------------------------------------------------------------------------------------------

EXIT_PROBLEMS = 1


@final
@dataclass(frozen=True, slots=True)
class Asked:
    """The flags, checked."""

    ranks: int
    sizes: tuple[int, ...]
    hosts: tuple[str, ...]
    port: int
    backend: str | None
    wants_bandwidth: bool
    as_json: bool
    limit_seconds: float


def run(asked: Asked) -> int:
    begun = time.monotonic()
    facts = gather(hosts=asked.hosts, port=asked.port)
    choice = choose(facts, ranks=asked.ranks, backend=asked.backend, is_wanted=asked.wants_bandwidth)
    with _patience(asked, choice):
        tables, of_ranks = _exchanged(asked, choice)
    findings = [*judged(facts), *choice.findings, *of_ranks, *check_tables(tables, asked.sizes)]
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one voice on each node
        _tell(asked, facts, findings, tables, time.monotonic() - begun)
    return EXIT_PROBLEMS if count(findings, "problem") else 0


def _exchanged(asked: Asked, choice: Choice) -> tuple[Sequence[Table], Sequence[Finding]]:
    if not choice.backends:
        return (), ()
    if choice.is_in_place:
        return _among_ranks(asked, choice)
    trial = run_trial(asked.ranks, choice.backends, asked.sizes, limit_seconds=asked.limit_seconds)
    return trial.tables, list(check_trial(trial))


def _among_ranks(asked: Asked, choice: Choice) -> tuple[Sequence[Table], Sequence[Finding]]:
    """All ranks come here, and do the same: the command line and what the launcher set are the same for each."""
    from fleetx import fleet  # late: torch may be what is broken

    from .exchange import measured

    try:
        fleet.init(timeout=asked.limit_seconds)
        return measured(choice.backends, asked.sizes), ()
    except (FleetError, RuntimeError) as error:
        fix = "mend what is told above; each rank's own log is in the launcher's folder"
        return (), (problem(TOPIC, f"between the ranks of the launcher: {first_line(error)}", fix),)


@contextlib.contextmanager
def _patience(asked: Asked, choice: Choice) -> Iterator[None]:
    """Say what is waited for, where somebody watches."""
    if not choice.backends or choice.is_in_place or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{asked.ranks} ranks are started, and talk over {' and '.join(choice.backends)}"):
        yield


def _tell(asked: Asked, facts: Facts, findings: Sequence[Finding], tables: Sequence[Table], seconds: float) -> None:
    if asked.as_json:
        print(text.to_json(facts, findings, tables, seconds), flush=True)
        return
    width, has_colour = text.screen()
    print(text.in_words(findings, tables, width=width, has_colour=has_colour), flush=True)
