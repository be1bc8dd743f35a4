"""Start the workers with torch elastic, watch, restart or stop them, and return how the run ended.

Elastic starts the processes, but its own monitoring is not used: when a rank dies it sends SIGTERM to the others and waits up to
30 seconds, and a rank blocked in a collective uses all of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

from ..config import log
from ..dist.notes import NOTE_KEY
from ..errors import FleetError, LaunchError
from . import hang
from .agreement import End, Job, Phase, first_rank
from .budget import Limits
from .console import escape
from .control import Coordinator, Terms
from .door import raise_file_limit
from .elastic import (
    SIGNALS_DEFAULT,
    SIGNALS_TO_HANDLE,
    LocalEnvironments,
    LogsAndEnvironments,
    StartedOtherwise,
    mute_logs,
    without_handlers,
)
from .guardian import RUN_ID, kill_run
from .logs import mark_attempt
from .member import Member
from .outcome import Failure, Outcome
from .processes import Guardian, Workers, guarded
from .records import FailureAnalysis, Records
from .rendezvous import FreshRendezvous, LocalNode, listen_on, own_interfaces, socket_variables
from .seal import job_key, note_key
from .seats import Hello
from .secret import make_secret
from .signals import Signals
from .topology import Plan, log_path, shim_arguments, worker_arguments, worker_environment
from .warm import Forker
from .worker import IMPORTS_FILE, LAUNCHER_PID

SHIM = Path(__file__).with_name("worker.py")
ATTEMPT = "FLEETX_ATTEMPT"
POLL_SECONDS = 0.1
HANG_POLL_SECONDS = 0.25
CTRL_C_SECONDS, REST_SECONDS = 5.0, 1.0
EXIT_SECONDS, STOPPED_EXIT_SECONDS = 5.0, 1.0
KILL_SECONDS, CAUSE_SECONDS = 2.0, 1.0


def count_gpus() -> int:
    return torch.cuda.device_count()


@dataclass
class Stopping:
    """A request to stop that was passed on to the workers. After Ctrl-C they have a few seconds, otherwise no limit.

    Once one has ended, the others have a second more: they may wait for it in a collective, or be about to end too."""

    signum: signal.Signals
    limit_seconds: float = float("inf")  # monotonic time at which remaining ranks are killed

    def note_end(self) -> None:
        self.limit_seconds = min(self.limit_seconds, time.monotonic() + REST_SECONDS)


@dataclass(frozen=True)
class Run:
    """Objects that one run of the launcher shares."""

    plan: Plan
    run_id: str
    folder: Path
    guardian: Guardian
    local_node: LocalNode
    terminal: str | None
    announce: Callable[[dict[str, str]], None]
    notice: Callable[[str], None]
    secret: str

    def say(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be closed, as after SIGHUP
            self.notice(escape(line))

    def debug(self, line: str) -> None:
        if log.terminal_level() <= logging.DEBUG:
            self.say(line)


class Supervisor(LocalElasticAgent):
    """The launcher of one node. A rank is numbered over all nodes, a local rank on this one."""

    def __init__(self, run: Run, rendezvous: FreshRendezvous) -> None:
        spec = WorkerSpec(
            role="worker",
            local_world_size=run.plan.process_count,
            rdzv_handler=rendezvous,
            entrypoint=sys.executable,
            args=shim_arguments(SHIM, run.plan),
            max_restarts=run.plan.max_restart,
            monitor_interval=POLL_SECONDS,
            local_addr=run.plan.nodes.address,
        )
        super().__init__(spec, LogsAndEnvironments(self._complete, self._fork_workers))
        self._run, self._plan, self._local_node = run, run.plan, run.local_node
        self._handler = rendezvous
        self._workers: Workers | None = None
        self._job = Job()
        self._records = Records(run.folder, 0)
        command = (sys.executable, *worker_arguments(SHIM, run.plan))
        self._forker = Forker(command, run.debug, is_wanted=run.plan.max_restart > 0 and run.plan.keeps_warm)
        self._elastic_signals = os.environ.get(SIGNALS_TO_HANDLE, SIGNALS_DEFAULT)
        self._stopping: Stopping | None = None
        self._watched: dict[int, hang.Watched] = {}
        self._checked_seconds = 0.0
        self._has_cautioned = False  # of the silence that goes on
        self._broken_seconds = 0.0  # when ranks lost a connection; 0: they have not
        self._failures: tuple[Failure, ...] = ()
        self._ended_before: tuple[int, ...] = ()

    # --- called by elastic ----------------------------------------------------------------------------------------------

    def _invoke_run(self, role: str = "") -> RunResult:
        with contextlib.suppress(RendezvousClosedError):
            while True:
                self._initialize_workers(self._worker_group)
                self._job = self._watch()
                if self._job.end is not None or self._local_node.is_killed:
                    break
                self._prepare_restart()
        self._job = self._local_node.agree()
        is_success = self._job.end is End.SUCCEEDED
        values = {worker.global_rank: None for worker in self._worker_group.workers}
        return RunResult(WorkerState.SUCCEEDED if is_success else WorkerState.FAILED, return_values=values)

    def _assign_worker_ranks(self, store: object, group_rank: int, group_world_size: int, spec: WorkerSpec) -> list[Worker]:
        """Number the ranks without the store, in which elastic would wait for nodes that have ended."""
        counts = self._local_node.control.process_counts
        first, size = first_rank(counts, group_rank), sum(counts)
        return [
            Worker(local_rank, global_rank=rank, role_rank=rank, world_size=size, role_world_size=size)
            for local_rank, rank in enumerate(range(first, first + spec.local_world_size))
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._records = Records(self._run.folder, self._local_node.attempt)
        self._remaining_restarts = self._plan.max_restart - self._handler.job.tries.spent
        with contextlib.suppress(StartedOtherwise), without_handlers():
            super()._start_workers(worker_group)
            assert isinstance(self._pcontext, SubprocessContext)
            processes = {rank: handler.proc for rank, handler in self._pcontext.subprocess_handlers.items()}
            self._workers = Workers(processes, self._run.run_id)
        pids: dict[int, Any] = self._started.pids()
        self._run.guardian.announce(pids.values())
        return pids

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, timeout: int = 0) -> None:
        if self._workers is not None and self._workers.running() and not self._kill_workers():
            return  # elastic would wait for them for 30 seconds
        super()._shutdown(signal.SIGKILL)

    def _construct_event(self, state: str, source: EventSource, *details: object, **more: object) -> Event:
        # Elastic's version looks up the machine's full name, which takes many seconds without a name server.
        return Event(f"fleetrun.{state}", source=source)

    def _complete(self, envs: LocalEnvironments) -> None:
        plan, attempt = self._plan, self._local_node.attempt
        inherited = {**os.environ, **plan.variables}
        sockets = socket_variables(
            plan.nodes.address, is_only_node=plan.nodes.count == 1, interfaces=own_interfaces(), inherited=inherited
        )
        common = {
            **sockets,
            RUN_ID: self._run.run_id,
            LAUNCHER_PID: str(os.getpid()),
            ATTEMPT: str(attempt),
            NOTE_KEY: note_key(self._run.secret, plan.job_id, self._handler.job.nonce, attempt),
            SIGNALS_TO_HANDLE: self._elastic_signals,
        }
        cores = len(os.sched_getaffinity(0))
        for local_rank, env in envs.items():
            added = worker_environment(env, plan, inherited=os.environ, cores=cores, terminal=self._run.terminal)
            env.update({**common, **added, **self._records.prepare(local_rank)})
        for env in envs.values() if attempt else ():
            mark_attempt(log_path(plan.log_dir, int(env["RANK"])), attempt, plan.max_restart, overwrite=plan.log_overwrite)
        self._run.announce(envs[0])
        self._forker.begin_attempt({local_rank: {**os.environ, **env} for local_rank, env in envs.items()})
        for local_rank, env in envs.items() if self._forker.is_wanted else ():
            env[IMPORTS_FILE] = str(self._records.imports_file(local_rank))

    def _fork_workers(self) -> bool:
        """Fork the ranks of a restart; return False if they must be executed."""
        forked = self._forker.fork() if self._local_node.attempt else None
        if forked is not None:
            self._workers = Workers(forked, self._run.run_id)
        return forked is not None

    def _kill_workers(self) -> bool:
        return self._started.kill(spared=self._forker.pids)

    # --- watch ----------------------------------------------------------------------------------------------------------

    def _watch(self) -> Job:
        """Watch the workers until the job ends or moves on to the next attempt; return the job."""
        self._local_node.phase = Phase.RUNNING
        self._checked_seconds = time.monotonic()
        while True:
            job = self._local_node.agree()
            # Checked before the end: one exchange may bring both, and the request to stop must always be printed.
            if job.stop_signal is not None and self._stopping is None and self._is_running():
                self._pass_on_stop(signal.Signals(job.stop_signal), job.stop_node)
            if job.end is not None or self._local_node.is_killed or job.attempt != self._local_node.attempt:
                return job
            if not self._check_workers(job):
                time.sleep(POLL_SECONDS)

    def _is_running(self) -> bool:
        return self._local_node.phase is Phase.RUNNING and not self._local_node.is_killed

    def _check_workers(self, job: Job) -> bool:
        """Check the workers once; return whether the node's state changed and should be sent at once."""
        if self._local_node.wants_stacks():
            self._started.write_stacks(self._logs(), wake=False)
            self._run.say("the stacks of all ranks are in their logs")
        if self._local_node.phase is not Phase.RUNNING:
            return False
        exits = self._started.exits()
        if self._must_end(exits):
            if self._may_still_learn_the_cause(exits):
                return False
            self._end_attempt({})
            return True
        if all(code == 0 for code in exits.values()):
            self._note_done(exits)
            return True
        return self._check_hang([rank for rank, code in exits.items() if code is None], job)

    def _must_end(self, exits: Mapping[int, int | None]) -> bool:
        has_failed = any(code not in (None, 0) for code in exits.values())
        if self._stopping is None:
            return has_failed
        # After SIGTERM a rank that ended with code 0 left its loop with all others, which may only be slower to end.
        if has_failed or (self._stopping.signum is signal.SIGINT and any(code is not None for code in exits.values())):
            self._stopping.note_end()
        return time.monotonic() > self._stopping.limit_seconds or (has_failed and None not in exits.values())

    def _may_still_learn_the_cause(self, exits: Mapping[int, int | None]) -> bool:
        """Return whether to wait a moment: the ranks that failed lost a connection, and the one that broke it may be on its way
        out, with an exit code or an error of its own."""
        failed = [self._records.failure(rank) for rank, code in exits.items() if code not in (None, 0)]
        running = [self._records.failure(rank) for rank, code in exits.items() if code is None]
        if self._stopping is not None or not running or not all(record.get("is_consequence") for record in failed):
            return False
        if any(record and not record.get("is_consequence") for record in running):
            return False  # it has told
        self._broken_seconds = self._broken_seconds or time.monotonic()
        return time.monotonic() - self._broken_seconds < CAUSE_SECONDS

    def _note_done(self, exits: Mapping[int, int | None]) -> None:
        if any(self._records.failure(rank).get("left_by_request") for rank in exits):  # one of them was sent SIGTERM itself
            self._local_node.stop_signal = self._local_node.stop_signal or signal.SIGTERM
        self._local_node.phase = Phase.DONE

    def _pass_on_stop(self, signum: signal.Signals, node: int) -> None:
        if signum is signal.SIGINT and self._started.listen(signal.SIGTERM):
            # The script asks whether to stop: it may save and leave its loop. The next Ctrl-C ends it at once.
            self._stopping = Stopping(signal.SIGTERM)
            self._started.send(signal.SIGTERM)
            return self._run.say("stopping at the script's next fleet.should_stop(); press Ctrl-C again to end at once")
        self._stopping = Stopping(signum)
        if signum is signal.SIGINT:
            self._stopping.limit_seconds = time.monotonic() + CTRL_C_SECONDS
            return self._started.interrupt()
        self._started.send(signal.SIGTERM)
        where = f" on node {node}" if node != self._local_node.node else ""
        self._run.say(f"stopping ({signum.name}{where}); send it again to end at once")

    def _check_hang(self, running: list[int], job: Job) -> bool:
        elapsed_seconds = time.monotonic() - self._checked_seconds
        if elapsed_seconds < HANG_POLL_SECONDS and not job.all_hang:
            return False
        self._checked_seconds = time.monotonic()
        self._watched = {rank: self._observe(rank, elapsed_seconds) for rank in self._ranks(running)}
        self._local_node.step = max((watched.step for watched in self._watched.values()), default=self._local_node.step)
        self._forker.consider(self._records.imports, is_training=all(watched.step for watched in self._watched.values()))
        limit_seconds, is_only_node = self._plan.hang_timeout_seconds, self._plan.nodes.count == 1
        self._local_node.all_wait = not is_only_node and hang.all_wait(self._watched, hang_timeout_seconds=limit_seconds)
        if job.all_hang:
            verdict: hang.Hang | None = hang.blame_all(self._watched)
        else:
            verdict = hang.judge(self._watched, hang_timeout_seconds=limit_seconds, is_only_node=is_only_node)
        if verdict is None:
            self._caution()
            return False
        self._end_hung(verdict)
        return True

    def _caution(self) -> None:
        """Name a rank that the others wait for, once for each silence."""
        limit_seconds = self._plan.hang_timeout_seconds
        seen = hang.caution(self._watched, hang_timeout_seconds=limit_seconds)
        if seen is not None and not self._has_cautioned:
            self._run.say(hang.describe_caution(seen, self._watched, hang_timeout_seconds=limit_seconds))
        self._has_cautioned = seen is not None

    def _observe(self, rank: int, elapsed_seconds: float) -> hang.Watched:
        local_rank = rank - self._first_rank
        seen = hang.Sighting(self._records.progress(local_rank), self._started.status(local_rank))
        return hang.observe(self._watched.get(rank), seen, elapsed_seconds)

    def _end_hung(self, verdict: hang.Hang) -> None:
        for line in hang.describe(verdict, self._watched):
            self._run.say(line)
        self._started.write_stacks(self._logs(), wake=True)
        self._end_attempt(verdict.culprits)

    def _end_attempt(self, hung: Mapping[int, str]) -> None:
        """Kill the remaining ranks, which may be blocked in a collective for ever, and derive the cause of the failure."""
        exits = self._started.exits()
        is_gone = self._kill_workers()
        analysis = FailureAnalysis(self._records, self._plan.log_dir, self._first_rank)
        self._failures = analysis.failures(exits, hung)
        self._local_node.step = max(self._local_node.step, *(failure.step or 0 for failure in self._failures), 0)
        self._ended_before = tuple(self._ranks([local_rank for local_rank, code in exits.items() if code == 0]))
        if not self._failures:  # all ended with code 0 meanwhile
            self._note_done(exits)
            return
        address = self._plan.nodes.address
        cause = analysis.cause(self._failures[0], node=self._local_node.node, address=address, can_restart=is_gone)
        if self._stopping is None and self._local_node.attempt < self._plan.max_restart and not cause.is_retryable:
            why = "another attempt would end the same way" if is_gone else "what it left behind cannot be killed"
            self._run.say(f"not restarting: {cause.here}; {why}")
        self._local_node.phase, self._local_node.cause = Phase.FAILED, cause

    def _prepare_restart(self) -> None:
        self._run.say(f"restarting ({self._job.tries.spent} of {self._plan.max_restart}): {self._job.reason}")
        if not self._kill_workers():
            raise LaunchError("the ranks of the last attempt cannot be killed: they sleep in the kernel. Restart this machine.")
        self._local_node.attempt = self._job.attempt
        self._worker_group.store = self._store = None  # drops the last reference: the old store closes
        self._watched, self._failures, self._broken_seconds = {}, (), 0.0

    # --- end ------------------------------------------------------------------------------------------------------------

    def outcome(self) -> Outcome:
        job, local_node = self._job, self._local_node
        stop_signal = local_node.stop_signal or job.stop_signal
        if stop_signal is not None and (local_node.is_killed or job.end is End.STOPPED):
            where = self._records.failure(0).get("where") if local_node.node == 0 else None
            return Outcome(stopped_by=signal.Signals(stop_signal), stopped_at=where, restarts=job.tries.spent)
        if job.end is End.SUCCEEDED:
            return Outcome(restarts=job.tries.spent)
        if self._workers is None:
            raise LaunchError(job.sentence)
        if job.blamed_node == local_node.node and self._failures:
            return Outcome(self._failures, ended_before=self._ended_before, restarts=job.tries.spent)
        return Outcome(self._failures, restarts=job.tries.spent, elsewhere=job.sentence, elsewhere_exit_code=job.exit_code)

    def close(self, outcome: Outcome | None) -> None:
        """Kill what is left of the run; after a success, processes that the script left running stay."""
        self._forker.close()
        if self._workers is not None and (outcome is None or outcome.exit_code):
            self._workers.kill()
        elif outcome is None:
            kill_run(self._run.run_id, (), limit_seconds=KILL_SECONDS)
        is_stopped = outcome is None or outcome.stopped_by is not None
        self._local_node.leave(limit_seconds=STOPPED_EXIT_SECONDS if is_stopped else EXIT_SECONDS)
        self._worker_group.store = self._store = None
        self._worker_group.spec.rdzv_handler.shutdown()

    @property
    def _started(self) -> Workers:
        assert self._workers is not None
        return self._workers

    @property
    def _first_rank(self) -> int:
        return first_rank(self._local_node.control.process_counts, self._local_node.node)

    def _ranks(self, local_ranks: list[int]) -> list[int]:
        return [self._first_rank + local_rank for local_rank in local_ranks]

    def _logs(self) -> dict[int, Path]:
        """Return the path of each log by local rank."""
        count = self._plan.process_count
        return {local_rank: log_path(self._plan.log_dir, self._first_rank + local_rank) for local_rank in range(count)}


def join_job(run: Run, rendezvous: FreshRendezvous) -> Coordinator | Member:
    plan, nodes = run.plan, run.plan.nodes
    hello = Hello(nodes.count, plan.max_restart, plan.process_count, nodes.address, nodes.rank)
    limits = Limits(plan.max_restart, plan.restart_window_seconds)
    terms = Terms(job_key(run.secret, plan.job_id), bool(run.secret), plan.node_grace_seconds, limits, nodes.addresses)
    if nodes.count == 1:
        return Coordinator(hello, run.run_id, rendezvous.open_store, run.say, terms=terms)
    if nodes.rank == 0:
        return Coordinator(hello, run.run_id, rendezvous.open_store, run.say, listen_on(nodes.master, nodes.port or 0), terms)
    return Member(hello, nodes.master, nodes.port or 0, run.say, terms)


def run_workers(
    plan: Plan,
    *,
    terminal: str | None,
    announce: Callable[[dict[str, str]], None],
    notice: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Run the plan to its end. `announce` is called with the first local rank's environment just before the workers start."""
    mute_logs()
    raise_file_limit()
    signals, run_id = Signals(), secrets.token_hex(16)
    with signals.noted(), guarded(run_id) as (folder, guardian):
        local_node = LocalNode(signals)
        secret = make_secret(folder) if plan.nodes.count == 1 else plan.secret
        run = Run(plan, run_id, folder, guardian, local_node, terminal, announce, notice, secret)
        rendezvous = FreshRendezvous(plan.nodes, local_node, run_id)
        local_node.control = join_job(run, rendezvous)
        supervisor, outcome = Supervisor(run, rendezvous), None
        try:
            supervisor.run()
            outcome = supervisor.outcome()
        except FleetError:
            raise
        except Exception as error:
            raise LaunchError(f"the workers could not be run: {error}") from error
        finally:
            supervisor.close(outcome)
    return outcome
