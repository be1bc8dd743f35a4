"""Start the workers on torch elastic, watch them, stop what is left, and return how it ended. Others print."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from fleetx.errors import LaunchError
from fleetx.launch.logs import following
from fleetx.launch.outcome import Failure, Outcome, by_blame
from fleetx.launch.topology import Plan, log_path, shim_arguments, worker_environment
from fleetx.launch.worker import FAILURE_FILE

LocalEnvironments = dict[int, dict[str, str]]  # by local rank
SHIM = Path(__file__).with_name("worker.py")
LOOPBACK = "127.0.0.1"
POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def count_gpus() -> int:
    return torch.cuda.device_count()


class _Workers(LogsSpecs):
    """Elastic asks this for log files just before it starts the workers: the one place to complete their environments."""

    def __init__(self, complete: Callable[[LocalEnvironments], None]) -> None:
        super().__init__()
        self._complete = complete

    @property
    def root_log_dir(self) -> str:
        return os.devnull

    def reify(self, envs: LocalEnvironments) -> LogsDest:
        self._complete(envs)
        console = dict.fromkeys(envs, "")  # worker.py redirects; what goes wrong before that belongs on the console
        return LogsDest(stdouts=console, stderrs=dict(console), error_files=dict.fromkeys(envs, os.devnull))


def make_rendezvous(run_id: str) -> RendezvousHandler:
    """One node, on a free port of its own."""
    return get_rendezvous_handler(RendezvousParameters("c10d", f"{LOOPBACK}:0", run_id, 1, 1, local_addr=LOOPBACK))


def make_agent(plan: Plan, run_id: str, complete: Callable[[LocalEnvironments], None]) -> LocalElasticAgent:
    spec = WorkerSpec(
        role="worker",
        local_world_size=plan.process_count,
        rdzv_handler=make_rendezvous(run_id),
        entrypoint=sys.executable,
        args=shim_arguments(SHIM, plan),
        max_restarts=0,
        monitor_interval=POLL_SECONDS,
        local_addr=LOOPBACK,
    )
    return LocalElasticAgent(spec, _Workers(complete))


def silence_elastic() -> None:
    """Its warnings and tracebacks repeat, at length, what fleetrun says in a few lines."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False


def signal_workers(agent: LocalElasticAgent, run_id: str, signum: signal.Signals) -> None:
    """Signal what still lives in the workers' process groups; the run's id tells it from a stranger with a reused number."""
    groups = {worker.id for worker in agent.get_worker_group().workers}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) in groups and process.environ().get("TORCHELASTIC_RUN_ID") == run_id:
                process.send_signal(signum)


@contextlib.contextmanager
def interruptible(agent: LocalElasticAgent, run_id: str) -> Iterator[None]:
    """Ctrl-C reaches the workers as SIGINT. Elastic would wait 30 s for one blocked in a collective: after 5 s, SIGTERM.

    A second Ctrl-C kills."""
    timer = threading.Timer(GRACE_SECONDS, signal_workers, (agent, run_id, signal.SIGTERM))
    timer.daemon = True

    def interrupt(signum: int, frame: FrameType | None) -> None:
        if timer.ident is not None:  # pressed again
            return signal_workers(agent, run_id, signal.SIGKILL)
        timer.start()
        raise SignalException("Ctrl-C", signal.SIGINT)

    before = {signum: signal.getsignal(signum) for signum in HANDLED}
    signal.signal(signal.SIGINT, interrupt)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGHUP,SIGQUIT"  # elastic's own handlers: all but ours
    try:
        yield
    finally:
        timer.cancel()
        for signum, handler in before.items():
            signal.signal(signum, handler)


def read_record(records: Path, rank: int) -> dict[str, Any]:
    """What worker.py noted when this rank's script raised; nothing if it was killed."""
    try:
        record = json.loads((records / str(rank)).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def collect_failures(result: RunResult, plan: Plan, records: Path) -> tuple[Failure, ...]:
    failures = []
    for rank, seen in result.failures.items():
        record = read_record(records, rank)
        time_ns = record.get("time_ns") or log_path(plan.log_dir, rank).stat().st_mtime_ns
        failures.append(Failure(rank, seen.exitcode, seen.timestamp, time_ns, record.get("error"), record.get("where")))
    return by_blame(failures)


def watch(agent: LocalElasticAgent, plan: Plan, run_id: str, records: Path) -> Outcome:
    outcome: Outcome | None = None
    try:
        outcome = Outcome(collect_failures(agent.run(), plan, records))
    except SignalException as stop:
        outcome = Outcome(stopped_by=stop.sigval, stopped_at=read_record(records, 0).get("where"))
    except Exception as error:
        raise LaunchError(f"the workers could not be run: {error}") from error
    finally:
        for signum in HANDLED:  # nothing may cut the cleaning up short
            signal.signal(signum, signal.SIG_IGN)
        if outcome is None or outcome.exit_code:
            signal_workers(agent, run_id, signal.SIGKILL)  # data loaders of a rank that was killed, and the like
        agent.get_worker_group().spec.rdzv_handler.shutdown()
    return outcome


def run_workers(plan: Plan, *, terminal: str | None, announce: Callable[[dict[str, str]], None]) -> Outcome:
    """Run the plan to its end. `announce` gets rank 0's environment just before the workers start."""
    run_id = uuid.uuid4().hex
    silence_elastic()
    with tempfile.TemporaryDirectory(prefix="fleetrun_") as folder:

        def complete(envs: LocalEnvironments) -> None:
            cores = len(os.sched_getaffinity(0))
            for env in envs.values():
                env.update(worker_environment(env, plan, inherited=os.environ, cores=cores, terminal=terminal))
                env[FAILURE_FILE] = os.path.join(folder, env["RANK"])
            announce(envs[0])

        agent = make_agent(plan, run_id, complete)
        with following(log_path(plan.log_dir, 0)), interruptible(agent, run_id):
            return watch(agent, plan, run_id, Path(folder))
