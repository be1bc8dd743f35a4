"""The end of a run: the rank to blame, the exit code, and the message about it. Pure functions, without torch."""

from __future__ import annotations

import re
import signal
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ..config.text import binary
from ..dist.control_groups import OWN, ROOT
from .console import escape

# --- out-of-memory kills in the control group that this process shares with its workers ---------------------------------


def parse_kills(events: str) -> int | None:
    """Parse the counter in a memory.events file, or in version 1's memory.oom_control; None without one."""
    match = re.search(r"^oom_kill (\d+)$", events, flags=re.MULTILINE)
    return int(match[1]) if match else None


def counter_files(membership: str, root: Path = ROOT) -> list[Path]:
    """List files that may hold the counter, from the text of /proc/self/cgroup; in a container the group is often the root."""
    files = []
    for line in membership.splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            files += [root / group.lstrip("/") / "memory.events", root / "memory.events"]
        elif "memory" in controllers.split(","):
            base = root / "memory"
            files += [base / group.lstrip("/") / "memory.oom_control", base / "memory.oom_control"]
    return files


def count_kills(files: Iterable[Path] | None = None) -> int | None:
    """Return the number of out-of-memory kills so far, or None if there is no counter."""
    try:
        candidates = counter_files(OWN.read_text()) if files is None else files
    except (OSError, ValueError):
        return None
    for path in candidates:
        try:
            kills = parse_kills(path.read_text())
        except (OSError, ValueError):
            continue
        if kills is not None:
            return kills
    return None


# --- failures and outcomes ----------------------------------------------------------------------------------------------

CRASHES = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
HINTS = {
    signal.SIGABRT: "Often a C++ error, or an NCCL timeout: its message is in the log.",
    signal.SIGSEGV: "A crash in compiled code: an extension, a driver, or a library that does not fit.",
    signal.SIGBUS: "Often a full /dev/shm: data loader workers pass their batches through it.",
}
BOX_LINES, BOX_COLUMNS = 15, 100
ADVICE_LINES = 6
BUDGET_SHARE = 0.8
"""Share of a rank's memory that the advised budget is: the interpreter and its libraries take some."""
ERROR_LINES, HEAD_LINES = 8, 3


@dataclass(frozen=True)
class Failure:
    """How one failed rank ended."""

    rank: int
    exit_code: int  # as Popen gives it: -9 is SIGKILL
    time_ns: int  # time of the exception, else of the rank's last output
    error: str | None = None  # its first few lines
    where: str | None = None
    step: int | None = None  # its current update
    is_consequence: bool = False  # it lost the connection to another rank
    advice: str | None = None  # what would fit, after an error for want of memory
    hung: str | None = None  # why it was killed: "stopped (SIGSTOP)", "silent for 12 s in backward"; the exit code is -9 then


@dataclass(frozen=True)
class Outcome:
    """How the job ended, from one node's view. If `elsewhere` is set, it is the cause, and failures here followed from it."""

    failures: tuple[Failure, ...] = ()  # the one to blame is first
    stopped_by: signal.Signals | None = None
    stopped_at: str | None = None  # where rank 0 was then
    ended_before: tuple[int, ...] = ()  # ranks that had ended with exit code 0
    restarts: int = 0  # number of restarts before this end
    elsewhere: str | None = None  # a failure on another node, as one ready sentence
    elsewhere_exit_code: int = 1  # as Popen gives it

    @property
    def exit_code(self) -> int:
        if self.stopped_by is not None:
            return 143 if self.stopped_by is signal.SIGUSR1 else 128 + self.stopped_by
        if self.elsewhere is not None:
            return _shell_code(self.elsewhere_exit_code)
        return _shell_code(self.failures[0].exit_code) if self.failures else 0


@dataclass(frozen=True)
class FailureContext:
    """What else is known about a failure. Log and device are those of the rank to blame."""

    log: Path
    log_tail: Sequence[str] = ()
    is_stack: bool = False  # whether `log_tail` is the stack of a rank that hung
    node: int = 0
    device: str = "cpu"
    max_restart: int = 0
    oom_kills_before: int | None = None
    oom_kills_after: int | None = None
    memory_bytes: int = 0  # of this machine, or what its control group allows; 0: not known
    process_count: int = 1  # ranks that share it


def _shell_code(exit_code: int) -> int:
    return exit_code if exit_code >= 0 else 128 - exit_code


def by_blame(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Sort failures, root cause first. Other ranks fail within the same poll, by SIGTERM or by a broken connection."""

    def order(failure: Failure) -> tuple[bool, bool, bool, int]:
        is_stopped, is_crash = failure.exit_code == -signal.SIGTERM, -failure.exit_code in CRASHES
        return failure.is_consequence, is_stopped, not is_crash, failure.time_ns

    return tuple(sorted(failures, key=order))


def describe_exit(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal has no name
        name = f"signal {-exit_code}"
    return f"killed by {name} (exit code {_shell_code(exit_code)})"


def explain_signal(
    exit_code: int, *, oom_kills_before: int | None, oom_kills_after: int | None, memory_bytes: int = 0, process_count: int = 1
) -> str | None:
    """Return a hint about the usual sender of this signal; for SIGKILL, from the kernel's out-of-memory counter."""
    if exit_code != -signal.SIGKILL:
        return next((hint for signum, hint in HINTS.items() if exit_code == -signum), None)
    if oom_kills_before is None or oom_kills_after is None:
        return f"Often the kernel's out-of-memory killer. {what_would_fit(memory_bytes, process_count)}"
    if oom_kills_after > oom_kills_before:
        counted = f"the kernel's count of oom_kill rose from {oom_kills_before} to {oom_kills_after}"
        return f"Out of memory: {counted}. {what_would_fit(memory_bytes, process_count)}"
    return "Another process sent it: the kernel's count of processes killed for lack of memory did not rise."


def what_would_fit(memory_bytes: int, process_count: int) -> str:
    """Say what makes room on a host whose memory ran out, in its own numbers where they are known."""
    ranks = "1 rank has" if process_count == 1 else f"{process_count} ranks share"
    budget = f"{int(BUDGET_SHARE * memory_bytes / process_count) >> 20}MiB" if memory_bytes else "2GiB"
    shared = f"{ranks} {binary(memory_bytes)}. " if memory_bytes else ""
    return (
        f'{shared}What makes room: strategy.recompute with recompute_configs = {{"budget": "{budget}"}}; a smaller batch, of '
        f'which fleet.find_batch(..., budget="{budget}") finds the largest; fewer ranks or loader workers on this machine.'
    )


def join_ranks(ranks: Iterable[int]) -> str:
    """Format ranks: "rank 3", "ranks 0, 2-7"."""
    ordered = sorted(set(ranks))
    starts = [ordered[0], *(after for before, after in pairwise(ordered) if after != before + 1)]
    ends = [*(before for before, after in pairwise(ordered) if after != before + 1), ordered[-1]]
    spans = [str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True)]
    return f"rank{'s' * (len(ordered) > 1)} {', '.join(spans)}"


def failure_box(outcome: Outcome, context: FailureContext) -> str:
    """Format the message about a failure: at most 15 lines of at most 100 columns, the cause first, the log last."""
    ending = []
    if outcome.ended_before:
        ending += _wrap(f"ended before, with exit code 0: {join_ranks(outcome.ended_before)}", most_lines=1)
    victims = outcome.failures if outcome.elsewhere is not None else outcome.failures[1:]
    if victims:
        ending += _wrap(f"then ended: {join_ranks(failure.rank for failure in victims)}", most_lines=1)
    if context.max_restart:
        ending.append(f"restarts made: {outcome.restarts} of {context.max_restart}")
    ending += _wrap(f"log: {context.log}", most_lines=2)
    space = BOX_LINES - 2 - len(ending)
    told = min(ERROR_LINES, space - HEAD_LINES)
    cause = _elsewhere(outcome.elsewhere) if outcome.elsewhere is not None else _first_failure(outcome, context, error_lines=told)
    space -= len(cause) + 1
    return _frame([*cause, *_excerpt(context, most_lines=space), *ending])


def _excerpt(context: FailureContext, *, most_lines: int) -> list[str]:
    """Return the end of the log, or the beginning of a stack, with a heading."""
    if not context.log_tail or most_lines < 1:
        return []
    heading, lines = "its last lines:", context.log_tail[-most_lines:]
    if context.is_stack:
        heading, lines = "where it was, the innermost call first:", context.log_tail[:most_lines]
    return [heading, *(_cut(f"  | {escape(line)}") for line in lines)]


def _elsewhere(sentence: str) -> list[str]:
    return _wrap(f"fleetrun: {sentence}", most_lines=ERROR_LINES)


def _first_failure(outcome: Outcome, context: FailureContext, *, error_lines: int) -> list[str]:
    first = outcome.failures[0]
    how = f"hung: {first.hung} (killed, exit code {_shell_code(first.exit_code)})"
    if first.hung is None:
        how = f"failed{' first' * (len(outcome.failures) > 1)}: {describe_exit(first.exit_code)}"
    lines = _wrap(f"fleetrun: rank {first.rank} (node {context.node}, {context.device}) {how}", most_lines=2)
    if first.error is not None:
        room = error_lines if first.advice is None else max(1, error_lines - ADVICE_LINES)
        lines += _fit([_wrap(line, most_lines=room) for line in first.error.splitlines() if line.strip()], room)
        lines += _wrap(first.advice, most_lines=ADVICE_LINES) if first.advice is not None else []
    elif first.hung is None:
        hint = explain_signal(
            first.exit_code,
            oom_kills_before=context.oom_kills_before,
            oom_kills_after=context.oom_kills_after,
            memory_bytes=context.memory_bytes,
            process_count=context.process_count,
        )
        lines += _wrap(hint, most_lines=ADVICE_LINES) if hint else []
    place = [f"at {first.where}"] if first.where else []
    place += [f"in step {first.step}"] if first.step is not None else []
    return lines + (_wrap(", ".join(place), most_lines=1) if place else [])


def _fit(paragraphs: Sequence[list[str]], most_lines: int) -> list[str]:
    """Return a long message in few lines: of each of its lines the beginning, and of those no more than fit."""
    lines = [line for paragraph in paragraphs for line in paragraph]
    if len(lines) > most_lines and len(paragraphs) > 1:
        lines = [paragraph[0] if len(paragraph) == 1 else _cut(" ".join(paragraph)) for paragraph in paragraphs]
    return lines if len(lines) <= most_lines else [*lines[: most_lines - 1], "..."]


def _wrap(text: str, *, most_lines: int) -> list[str]:
    width = BOX_COLUMNS - 4
    lines = textwrap.wrap(escape(text.strip()), width, subsequent_indent="  ", break_on_hyphens=False)
    return lines if len(lines) <= most_lines else [*lines[: most_lines - 1], _cut(" ".join(lines[most_lines - 1 :]))]


def _cut(line: str) -> str:
    width = BOX_COLUMNS - 4
    return line if len(line) <= width else line[: width - 4] + " ..."


def _frame(lines: Sequence[str]) -> str:
    wide = max(len(line) for line in lines)
    edge = f"+{'-' * (wide + 2)}+"
    return "\n".join([edge, *(f"| {line:<{wide}} |" for line in lines), edge])


def stop_line(outcome: Outcome) -> str:
    by = "Ctrl-C" if outcome.stopped_by in (signal.SIGINT, None) else signal.Signals(outcome.stopped_by).name
    where = f"; rank 0 was at {outcome.stopped_at}" if outcome.stopped_at else ""
    return f"fleetrun: stopped by {by}{where}"
