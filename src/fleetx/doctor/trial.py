"""The trial: whether to run all-reduces and over which backends, run them by fleetrun with a time limit, judge the outcome."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from ..launch.logs import last_lines
from ..launch.topology import log_path
from .facts import Facts
from .finding import Finding, Table, from_json, note, ok, problem
from .variables import BY_LAUNCHER, is_launched

TOPIC = "all-reduce"
SLOW_BYTES_PER_SECOND = 100e6
"""Rates below this get a note; a laptop's loopback reaches several times as much."""
STOP_SECONDS = 10.0
TAIL_LINES = 4
BOX = "╭╮╰╯│─━┃┏┓┗┛|+-= "
"""Characters that frame fleetrun's messages."""


# --- what to try --------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """The backends to try, and findings about those that are not tried."""

    backends: tuple[str, ...] = ()
    is_in_place: bool = False
    """Whether to measure between the ranks of the launcher that started this process, instead of starting ranks."""
    findings: tuple[Finding, ...] = ()


def ranks_of(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else 1


def choose(facts: Facts, *, ranks: int, backend: str | None, is_wanted: bool) -> Choice:
    if not is_wanted:
        return Choice(findings=(note(TOPIC, "not tried: --no-bandwidth"),))
    if facts.software.torch_error:
        return Choice(findings=(note(TOPIC, "not tried: torch cannot be imported"),))
    if not is_launched(facts.variables):
        return _backends(facts, ranks, backend)
    started = ranks_of(facts.variables, "WORLD_SIZE")
    if started > 1 and any(name in facts.variables for name in BY_LAUNCHER):
        started_by = note(TOPIC, f"started under a launcher: measured between its {started} ranks, without starting others")
        choice = _backends(facts, ranks_of(facts.variables, "LOCAL_WORLD_SIZE"), backend)
        return Choice(choice.backends, is_in_place=True, findings=(started_by, *choice.findings))
    left_over = note(
        TOPIC,
        f"no ranks were started: RANK or WORLD_SIZE is set, as by a launcher of {started}",
        "unset RANK WORLD_SIZE, or start `fleetx doctor` without a launcher",
    )
    return Choice(findings=(left_over,))


def _backends(facts: Facts, local_ranks: int, backend: str | None) -> Choice:
    """Choose gloo, and NCCL as well if there is a GPU for each rank of this machine."""
    gpus = len(facts.devices.gpus) if facts.variables.get("FLEETX_DEVICE") != "cpu" else 0
    can_nccl = facts.backends.nccl is not None and gpus >= local_ranks
    if can_nccl:
        return Choice(("gloo", "nccl") if backend is None else (backend,))
    why = f"it needs a GPU for each rank: {local_ranks} rank{'s' * (local_ranks != 1)}, {gpus} GPU{'s' * (gpus != 1)}"
    if backend == "nccl":
        return Choice(findings=(problem(TOPIC, f"NCCL not tried: {why}", "write --backend gloo, or start fewer ranks"),))
    return Choice(("gloo",), findings=(note(TOPIC, f"NCCL not tried: {why}"),) if gpus and backend is None else ())


# --- run ----------------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Trial:
    """Outcome of the trial; with an error there are no tables."""

    ranks: int
    backends: tuple[str, ...]
    tables: tuple[Table, ...] = ()
    error: str = ""
    log_tail: tuple[str, ...] = ()
    is_late: bool = False


def command(ranks: int, folder: Path, backends: Sequence[str], sizes: Sequence[int]) -> list[str]:
    return [
        *(sys.executable, "-m", "fleetx.launch", "--nproc_per_node", str(ranks)),
        *("--env", "local", "--log_dir", str(folder), "--tee", "none"),
        *("-m", "fleetx.doctor.exchange", str(folder / "tables.json"), ",".join(backends), ",".join(map(str, sizes))),
    ]


def environment(inherited: Mapping[str, str], backends: Sequence[str]) -> dict[str, str]:
    """Return the user's environment, whose settings are part of the trial. Without NCCL the GPUs are not used."""
    return dict(inherited) | ({} if "nccl" in backends else {"FLEETX_DEVICE": "cpu"})


def run_trial(ranks: int, backends: Sequence[str], sizes: Sequence[int], *, limit_seconds: float) -> Trial:
    with tempfile.TemporaryDirectory(prefix="fleetx-doctor-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        process = subprocess.Popen(
            command(ranks, folder, backends, sizes),
            env=environment(os.environ, backends),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C then reaches only this process, which stops fleetrun below
        )
        try:
            _, said = process.communicate(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            tail = _tail(folder, ranks)
            _stop(process)
            return Trial(ranks, tuple(backends), error=f"no end within {limit_seconds:g} s", log_tail=tail, is_late=True)
        finally:
            _stop(process)
        tables = folder / "tables.json"
        if process.returncode == 0 and tables.exists():
            return Trial(ranks, tuple(backends), tables=from_json(json.loads(tables.read_text())))
        return Trial(ranks, tuple(backends), error=_summary(said, process.returncode), log_tail=_tail(folder, ranks))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop fleetrun, which ends its ranks; if it is killed, its guardian ends them."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=STOP_SECONDS)


def _summary(said: bytes, code: int) -> str:
    """Return the start of fleetrun's message, without its frame and without the path of the deleted logs."""
    lines = [line.strip(BOX) for line in said.decode("utf-8", "replace").splitlines()]
    message = "; ".join(line for line in lines if line and not line.startswith("log:"))[:400]
    return message or f"fleetrun ended with exit code {code}"


def _tail(folder: Path, ranks: int) -> tuple[str, ...]:
    """Return the last lines of each rank's log, once for ranks with equal lines."""
    first_rank: dict[tuple[str, ...], int] = {}
    for rank in range(ranks):
        first_rank.setdefault(tuple(last_lines(log_path(folder, rank), TAIL_LINES)), rank)
    return tuple(f"rank {rank}: {line}" for lines, rank in first_rank.items() for line in lines)


# --- findings -----------------------------------------------------------------------------------------------------------


def check_trial(trial: Trial) -> Iterable[Finding]:
    """Report a trial that hung or failed."""
    if not trial.error:
        return
    what = "hangs" if trial.is_late else "failed"
    tail = " | ".join(trial.log_tail) or "nothing"
    text = f"{trial.ranks} ranks over {' and '.join(trial.backends)}: {what}: {trial.error}. Their logs end with: {tail}"
    if trial.is_late:
        fix = "try again with --limit 300, on a less busy machine; if it hangs again, fix the problems listed above"
    else:
        fix = "fix the problems listed above; then `fleetrun -m fleetx.cli doctor` shows each rank's own log"
    yield problem(TOPIC, text, fix)


def check_tables(tables: Sequence[Table], sizes: Sequence[int]) -> Iterable[Finding]:
    for table in tables:
        name = f"{table.backend}, {table.ranks} ranks"
        wrong = [row.size_bytes for row in table.rows if not row.is_sum_right]
        if wrong:
            text = f"{name}: wrong sums of {', '.join(f'{size:,}' for size in wrong)} bytes"
            yield problem(TOPIC, text, "do not train here: look for broken memory, a broken GPU or a broken driver")
        if len(table.rows) < len(sizes):
            yield note(TOPIC, f"{name}: only the {len(table.rows)} smallest sizes, since the link is slow")
        best = max((row.bus_bytes_per_second for row in table.rows if row.size_bytes >= 1e6), default=None)
        if best is not None and best < SLOW_BYTES_PER_SECOND:
            text = f"{name}: {best / 1e6:.0f} MB/s at most"
            yield note(TOPIC, text, "bf16_allreduce, gradient_merge, localsgd, powersgd or dgc send less over a slow link")
        if not wrong:
            yield ok(TOPIC, f"{name}: sums are right, {1e6 * table.rows[0].seconds:,.0f} us at least")
