"""Files written by the ranks of an attempt: progress and exceptions; and the failures derived from them."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..dist import heartbeat
from .agreement import Cause
from .outcome import CRASHES, Failure, by_blame
from .topology import log_path
from .worker import FAILURE_FILE

USAGE_EXIT_CODE = 2
CAUSE_LETTERS = 300


class Records:
    """The files of one attempt in the run's folder: each rank's progress record and exception."""

    def __init__(self, folder: Path, attempt: int) -> None:
        self._folder = folder / str(attempt)

    def prepare(self, local_rank: int) -> dict[str, str]:
        """Make the rank's files and return the variables that name them. On a full disk the attempt begins without them."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            heartbeat.make_file(self._progress_file(local_rank))
        return {
            heartbeat.PROGRESS_FILE: str(self._progress_file(local_rank)),
            FAILURE_FILE: str(self._failure_file(local_rank)),
        }

    def progress(self, local_rank: int) -> heartbeat.Progress | None:
        try:
            return heartbeat.read(self._progress_file(local_rank))
        except OSError:
            return None

    def failure(self, local_rank: int) -> dict[str, Any]:
        """Return what worker.py recorded when the script raised; empty if the rank was killed."""
        try:
            record = json.loads(self._failure_file(local_rank).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    def imports(self, local_rank: int) -> dict[str, Any] | None:
        """Return what worker.py noted about the script's imports; None before the first of them."""
        try:
            note: dict[str, Any] = json.loads(self.imports_file(local_rank).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return note

    def imports_file(self, local_rank: int) -> Path:
        return self._folder / f"imports.{local_rank}"

    def _progress_file(self, local_rank: int) -> Path:
        return self._folder / f"progress.{local_rank}"

    def _failure_file(self, local_rank: int) -> Path:
        return self._folder / f"failure.{local_rank}"


class FailureAnalysis:
    """Derives failures from the ranks' records and their exit codes just before the remaining ranks were killed."""

    def __init__(self, records: Records, log_dir: Path, first_rank: int) -> None:
        self._records, self._log_dir, self._first_rank = records, log_dir, first_rank

    def failures(self, exits: Mapping[int, int | None], hung: Mapping[int, str]) -> tuple[Failure, ...]:
        """Return all failures, the rank to blame first, ranks killed by the launcher last. `hung`: reason by hanging rank."""
        failures = [self._failure(local_rank, code, hung) for local_rank, code in exits.items() if code != 0]
        # A rank that raised may still have been exiting when another rank had already ended by the broken connection.
        own = [failure for failure in failures if failure.hung is None and not self._was_killed(failure, exits)]
        culprits = [failure for failure in failures if failure.hung is not None]
        killed = [failure for failure in failures if failure not in own and failure not in culprits]
        return (*culprits, *by_blame(own), *killed)

    def _was_killed(self, failure: Failure, exits: Mapping[int, int | None]) -> bool:
        return exits[failure.rank - self._first_rank] is None and failure.error is None

    def _failure(self, local_rank: int, code: int | None, hung: Mapping[int, str]) -> Failure:
        rank = self._first_rank + local_rank
        record, reached = self._records.failure(local_rank), self._records.progress(local_rank)
        if code is None:
            # Still on its way out, with an exit code that it has told, or about to be killed.
            code = record.get("exit_code", 1) if record and rank not in hung else -signal.SIGKILL
        return Failure(
            rank,
            code,
            time_ns=record.get("time_ns") or self._last_output_ns(rank),
            error=record.get("error"),
            where=record.get("where"),
            step=(reached.step or None) if reached is not None else None,
            hung=hung.get(rank),
            is_consequence=record.get("is_consequence", False),
            advice=record.get("advice"),
        )

    def _last_output_ns(self, rank: int) -> int:
        try:
            return log_path(self._log_dir, rank).stat().st_mtime_ns
        except OSError:
            return time.time_ns()

    def cause(self, failure: Failure, *, node: int, address: str, can_restart: bool) -> Cause:
        is_retryable = self._records.failure(failure.rank - self._first_rank).get("is_retryable", True)
        predicate, noun = describe_failure(failure)
        return Cause(
            here=f"rank {failure.rank} {predicate}",
            elsewhere=f"rank {failure.rank} on node {node} ({address}) failed: {noun}",
            exit_code=failure.exit_code,
            time_ns=failure.time_ns,
            is_crash=failure.hung is not None or -failure.exit_code in CRASHES,
            is_retryable=can_restart and is_retryable and failure.exit_code != USAGE_EXIT_CODE,
            is_consequence=failure.is_consequence,
        )


def describe_failure(failure: Failure) -> tuple[str, str]:
    """Describe a failure as predicate and as noun: ("was killed by SIGKILL at step 8", "killed by SIGKILL at step 8")."""
    at_step = f" at step {failure.step}" if failure.step else ""
    if failure.hung is not None:
        return f"hung{at_step}: {failure.hung}", f"hung{at_step}, {failure.hung}"
    if failure.exit_code < 0:
        killed = f"killed by {_signal_name(-failure.exit_code)}{at_step}"
        return f"was {killed}", killed
    error = failure.error.partition("\n")[0][:CAUSE_LETTERS] if failure.error is not None else f"exit code {failure.exit_code}"
    return f"failed{at_step}: {error}", f"{error}{',' if at_step else ''}{at_step}"


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal has no name
        return f"signal {signum}"
