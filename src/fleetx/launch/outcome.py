"""How a run ended: which rank is to blame, the exit code, and the few lines that tell it. Pure functions, without torch."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

CRASHES = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
HINTS = {
    signal.SIGKILL: " (often the kernel's out-of-memory killer)",
    signal.SIGABRT: " (a C++ error, or an NCCL timeout; its message is in the log)",
}
SAME_POLL_SECONDS = 5  # elastic notes whole seconds, and gives peers 30 of them before it kills
TAIL_LINES = 8
LINE_WIDTH = 200


@dataclass(frozen=True)
class Failure:
    """How one rank ended that did not end well."""

    rank: int
    exit_code: int  # as Popen gives it: -9 is SIGKILL
    seen_at: int  # seconds; when elastic noticed
    time_ns: int  # the exception's own time, else that of the rank's last words
    error: str | None = None
    where: str | None = None
    step: int | None = None  # the update it was in
    hung: str | None = None  # why it was killed: "stopped (SIGSTOP)", "silent for 12 s in backward"; the exit code is -9 then


@dataclass(frozen=True)
class Outcome:
    """How the job ended, as one node's launcher tells it. `elsewhere`, where set, is the cause; failures here followed."""

    failures: tuple[Failure, ...] = ()  # the one to blame is first
    stopped_by: signal.Signals | None = None
    stopped_at: str | None = None  # where rank 0 stood then
    restarts: int = 0  # made before this end
    elsewhere: str | None = None  # a failure on another node, as one ready sentence
    elsewhere_exit_code: int = 1  # as Popen gives it

    @property
    def exit_code(self) -> int:
        if self.stopped_by is not None:
            return 143 if self.stopped_by is signal.SIGUSR1 else 128 + self.stopped_by
        if self.elsewhere is not None:
            return _shell_code(self.elsewhere_exit_code)
        return _shell_code(self.failures[0].exit_code) if self.failures else 0


def _shell_code(exit_code: int) -> int:
    return exit_code if exit_code >= 0 else 128 - exit_code


def by_blame(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """The root cause first. Its peers fail too, within one poll: stopped by elastic, or because a connection broke."""
    seen = list(failures)
    deadline = min((failure.seen_at for failure in seen), default=0) + SAME_POLL_SECONDS

    def order(failure: Failure) -> tuple[bool, bool, int]:
        stopped = failure.exit_code == -signal.SIGTERM or failure.seen_at > deadline
        return stopped, -failure.exit_code not in CRASHES, 0 if stopped else failure.time_ns

    return tuple(sorted(seen, key=order))


def describe_exit(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        killer = signal.Signals(-exit_code)
    except ValueError:  # a real-time signal has no name
        return f"killed by signal {-exit_code}"
    return f"killed by {killer.name}{HINTS.get(killer, '')}"


def failure_lines(outcome: Outcome, *, log: Path, log_tail: Sequence[str]) -> list[str]:
    """At most 13 lines for the console; `log` and its last lines are those of the rank to blame."""
    first, *others = outcome.failures
    lines = [f"fleetrun: rank {first.rank} failed first: {describe_exit(first.exit_code)}"]
    if first.error is not None:
        lines.append(f"  {first.error[:LINE_WIDTH]}" + (f"  ({first.where})" if first.where else ""))
    if log_tail:
        lines.append("  its last lines:")
        lines += [f"    | {line[:LINE_WIDTH]}" for line in log_tail[-TAIL_LINES:]]
    if others:
        lines.append(f"  then ended: rank {', '.join(str(failure.rank) for failure in others)[:LINE_WIDTH]}")
    return [*lines, f"  log: {log}"]


def stop_line(outcome: Outcome) -> str:
    by = "Ctrl-C" if outcome.stopped_by in (signal.SIGINT, None) else signal.Signals(outcome.stopped_by).name
    where = f"; rank 0 was at {outcome.stopped_at}" if outcome.stopped_at else ""
    return f"fleetrun: stopped by {by}{where}"
