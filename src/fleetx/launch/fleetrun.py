"""`fleetrun [flags] train.py [its arguments]`: from the command line to the exit code."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

from ..config import log
from ..dist import control_groups
from ..errors import ConfigError, FleetError
from . import console, flags, logs, nodes, outcome, preflight, secret, tables, topology

EXIT_FAILED, EXIT_USAGE, EXIT_NO_INPUT, EXIT_CTRL_C = 1, 2, 66, 130
EARLY_EXITS = {signal.SIGINT: EXIT_CTRL_C, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGUSR1: 143}
RANKS_PER_CORE = 4
STOPPED_CONSOLE_SECONDS = 2.0
TAIL_LINES = 8


def keep_standard_descriptors() -> None:
    """Open descriptors 0 to 2 if they are closed (`>&-`): the next opened file would become stdout and receive its output."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)  # workers need them for the same reason
        descriptor = os.dup(descriptor)
    os.close(descriptor)


@contextlib.contextmanager
def early_signals() -> Iterator[None]:
    """Handle signals until the supervisor does: importing torch takes seconds, and a signal then must not look like a crash."""

    def leave(signum: int, frame: FrameType | None) -> None:
        name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        with contextlib.suppress(OSError):
            os.write(2, f"fleetrun: stopped by {name}; no rank is running\n".encode())
        os._exit(EARLY_EXITS[signal.Signals(signum)])  # an exception can be lost while torch is imported

    before = {}
    with contextlib.suppress(ValueError):  # only allowed in the main thread
        for signum in EARLY_EXITS:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # set by nohup
                before[signum] = signal.signal(signum, leave)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler or signal.SIG_DFL)


def make_plan(options: argparse.Namespace, *, visible_gpus: int, cores: int, where: topology.Nodes) -> topology.Plan:
    gpus = topology.parse_gpus(options.gpus) if options.gpus is not None else ()
    topology.check_gpus(gpus, visible_gpus=visible_gpus, visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"))
    count = topology.count_processes(options.nproc_per_node, gpus=gpus, visible_gpus=visible_gpus, cores=cores)
    if where.count == 1:
        topology.check_tee(options.tee, world_size=count)
    on_cpu = options.nproc_per_node == "cpu"
    return topology.Plan(
        target=options.command[0],
        is_module=options.module,
        arguments=tuple(options.command[1:]),
        process_count=count,
        gpus=gpus,
        devices=topology.assign_devices(count, gpus=gpus, visible_gpus=0 if on_cpu else visible_gpus),
        log_dir=Path(options.log_dir),
        nodes=where,
        max_restart=options.max_restart,
        keeps_warm=options.warm_restart == "auto",
        hang_timeout_seconds=options.hang_timeout,
        node_grace_seconds=options.node_grace,
        restart_window_seconds=options.restart_window,
        secret=secret.take_secret(options.job_secret_file, os.environ),
        log_overwrite=options.log_overwrite,
        log_max_mb=options.log_max_mb,
        job_id=options.job_id,
        variables=flags.split_env(options.env)[0],
        tee=options.tee,
        hides_gpus=on_cpu and visible_gpus > 0,
    )


def find_nodes(options: argparse.Namespace) -> topology.Nodes:
    node_flags = nodes.NodeFlags(
        ips=options.ips,
        nnodes=options.nnodes,
        master=options.master,
        rank=options.rank,
        host=options.host,
        start_port=options.start_port,
        source=flags.split_env(options.env)[1],
    )
    return nodes.find_nodes(node_flags, os.environ, nodes.this_machine())


class Console:
    """Prints tables and logs on stdout, once it is known which ranks run on this node."""

    def __init__(self, plan: topology.Plan, *, is_shared: bool) -> None:
        """Prepare the output; `is_shared` says that rank 0 knows the terminal and may draw on it."""
        self.first_rank = 0
        self.node = plan.nodes.rank or 0
        self._plan = plan
        self._follower = logs.Follower(is_shared=is_shared)

    def announce(self, environment: Mapping[str, str]) -> None:
        """Print the start and follow the logs. `environment`: that of this node's first rank. Does nothing on a restart."""
        if self._follower.is_started:
            return
        self.first_rank = int(environment["RANK"])
        self.node = int(environment.get("GROUP_RANK", self.node))
        ranks = range(self.first_rank, self.first_rank + self._plan.process_count)
        kept: Path | None = None
        if environment.get("FLEETX_ATTEMPT", "0") == "0":  # a node that joins a later attempt keeps the logs of those before
            kept = logs.start_fresh(self._plan.log_dir, ranks, world_size=int(environment["WORLD_SIZE"]))
        if shows(logging.DEBUG):
            print_text(tables.environment_table(environment))
        if shows(logging.INFO):
            print_text(tables.start_line(self._plan, ranks, self.node, kept=kept))
        tracebacks = console.Tracebacks()
        views = {rank: console.make_view(rank, self.node, self._plan, tracebacks) for rank in ranks}
        self._follower.start([(topology.log_path(self._plan.log_dir, rank), view) for rank, view in views.items()])

    def close(self, *, limit_seconds: float | None = None) -> None:
        self._follower.stop(limit_seconds)

    def context(self, ended: outcome.Outcome, *, oom_kills_before: int | None) -> outcome.FailureContext:
        """Collect what the failure box shows besides the outcome: log, device and counters."""
        plan = self._plan
        context = outcome.FailureContext(
            plan.log_dir, node=self.node, max_restart=plan.max_restart, oom_kills_before=oom_kills_before
        )
        if not ended.failures or ended.elsewhere is not None:
            return context
        blamed = ended.failures[0]
        log = topology.log_path(plan.log_dir, blamed.rank)
        is_on_console = plan.tee == "all" or blamed.rank in plan.tee
        stack = logs.innermost_calls(log, TAIL_LINES) if blamed.hung is not None else []
        tail = [] if is_on_console or blamed.error is not None else logs.last_lines(log, TAIL_LINES)
        return dataclasses.replace(
            context,
            log=log,
            log_tail=stack or tail,
            is_stack=bool(stack),
            device=plan.devices[blamed.rank - self.first_rank],
            oom_kills_after=outcome.count_kills(),
            memory_bytes=control_groups.host_memory(),
            process_count=plan.process_count,
        )


def run(options: argparse.Namespace) -> int:
    preflight.check_working_folder()
    log.require_known_level()
    where = find_nodes(options)
    check_target(options)
    from . import supervise  # late: it imports torch, and usage errors should come at once

    cores = len(os.sched_getaffinity(0))
    plan = make_plan(options, visible_gpus=supervise.count_gpus(), cores=cores, where=where)
    if plan.devices[0] == "cpu" and plan.process_count > RANKS_PER_CORE * cores:
        print_error(f"fleetrun: warning: {plan.process_count} ranks on {cores} cores will be slow; see --nproc_per_node")
    if options.dry_run:
        shim = supervise.SHIM
        print_text(tables.dry_run_text(plan, executable=sys.executable, shim=shim, inherited=os.environ, cores=cores))
        return 0
    logs.check_folder(plan.log_dir)
    if shows(logging.DEBUG):
        print_text(tables.configuration_table(plan))
    return supervised(plan)


def own_terminal() -> str | None:
    """Return the path of the terminal on stdout; None without one, or if it has no path in this container."""
    with contextlib.suppress(OSError):
        return os.ttyname(1) if os.isatty(1) else None
    return None


def supervised(plan: topology.Plan) -> int:
    """Run the ranks with their output on the console, and print how the run ended."""
    from . import supervise

    terminal = own_terminal() if console.shows_rank_0_bare(plan) else None
    shown = Console(plan, is_shared=terminal is not None)
    oom_kills = outcome.count_kills()
    console_seconds: float | None = STOPPED_CONSOLE_SECONDS
    try:
        ended = supervise.run_workers(plan, terminal=terminal, announce=shown.announce, notice=notice)
        if ended.stopped_by is None:
            console_seconds = None
    finally:
        shown.close(limit_seconds=console_seconds)
    if ended.stopped_by is not None:
        print_error(outcome.stop_line(ended))
    elif ended.exit_code:
        print_error(outcome.failure_box(ended, shown.context(ended, oom_kills_before=oom_kills)))
    return ended.exit_code


def check_target(options: argparse.Namespace) -> None:
    target = options.command[0]
    if options.module:
        preflight.check_module(target, sys.path if sys.flags.safe_path else [os.getcwd(), *sys.path[1:]])
    else:
        preflight.check_script(target)


def print_text(text: str, stream: TextIO | None = None) -> None:
    """Print and flush. A closed console or a character it cannot encode does not end the run."""
    stream = stream or sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"  # None if Python was started without the stream
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # Python flushes at exit, and would exit with code 120
        os.close(nowhere)


def shows(level: int) -> bool:
    """Return whether FLEETX_VERBOSE asks for messages of this level; 0 leaves what the ranks say, warnings and errors."""
    return log.terminal_level() <= level


def print_error(text: str) -> None:
    print_text(text, sys.stderr)


def notice(line: str) -> None:
    print_error(f"fleetrun: {line}")


def run_and_report(argv: Sequence[str] | None) -> int:
    try:
        return run(flags.parse(argv))
    except FleetError as error:
        print_error(f"fleetrun: {error}")
        if isinstance(error, preflight.NoInput):
            return EXIT_NO_INPUT
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is the failing rank's, or 2 for misuse, 66 for a missing script."""
    try:
        with early_signals():
            keep_standard_descriptors()
            return run_and_report(argv)
    except KeyboardInterrupt:
        print_error("fleetrun: stopped by Ctrl-C")
        return EXIT_CTRL_C


def command() -> NoReturn:
    """Run the command line and end the process at once. Everything is printed and cleaned up when `main` returns; the shutdown of
    torch would take up to a second more, during which a terminal or a cluster manager would wait."""
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
