"""Run a training script on hosts of this machine (bench/lib/netns.py), through fleetrun on each."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.lib.netns import Host, cluster, why_not
from bench.lib.netns_sweep import kill_processes
from fleetx.errors import ConfigError, LaunchError

ROOT = Path(__file__).parents[2]
EXIT_TIMEOUT = 124
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Run:
    """How a script ended on all hosts; lists are in the order of the hosts."""

    exit_codes: list[int]
    """Of fleetrun on each host: 128 + n for signal n, 124 if it ran out of time."""
    tx_bytes: list[int]
    """What each link sent, from the start of the script to its end, with all headers."""
    seconds: float
    stdout: str
    """All that rank 0 wrote, to stderr too."""
    consoles: list[str]
    """All that fleetrun wrote on each host."""

    @property
    def worst(self) -> int:
        return max(self.exit_codes)


def run_on_cluster(
    script: str | Path,
    args: Sequence[str] = (),
    *,
    hosts: int,
    rate_mbit: float | None,
    procs_per_host: int = 1,
    env: Mapping[str, str] | None = None,
    timeout: float,
) -> Run:
    """Make the hosts, run the script on all of them through `fleetrun --ips`, and remove them."""
    reason = why_not()
    if reason is not None:
        raise LaunchError(reason)
    with cluster(hosts=hosts, rate_mbit=rate_mbit) as made:
        return run_on_hosts(made, script, args, procs_per_host=procs_per_host, env=env, timeout=timeout)


def run_on_hosts(
    hosts: Sequence[Host],
    script: str | Path,
    args: Sequence[str] = (),
    *,
    procs_per_host: int = 1,
    env: Mapping[str, str] | None = None,
    timeout: float,
    shows: bool = False,
) -> Run:
    """The same on hosts that are there already. `env` goes to every rank. Whatever still runs on them at the end is killed."""
    _check(procs_per_host, timeout)
    before, began = [host.tx_bytes() for host in hosts], time.monotonic()
    addresses = ",".join(host.address for host in hosts)
    logs = Path(tempfile.mkdtemp(prefix="log-", dir=hosts[0].home))  # of this run alone, and of all ranks
    flags = ["--ips", addresses, "--nproc_per_node", str(procs_per_host), "--log_dir", str(logs)]
    command = [sys.executable, "-m", "fleetx.launch", *flags, str(script), *args]
    jobs: list[_Job] = []
    try:
        for host in hosts:
            variables = _variables(host, len(hosts) * procs_per_host, env)
            jobs.append(_Job(host, command, variables, shows=shows and host is hosts[0]))
        codes = _wait(jobs, began + timeout)
        seconds = time.monotonic() - began
    finally:
        for job in jobs:
            job.process.kill()  # one that has just been started may not have entered its namespace yet
        kill_processes([host.namespace for host in hosts])
        consoles = [job.close() for job in jobs]
    sent = [host.tx_bytes() - earlier for host, earlier in zip(hosts, before, strict=True)]
    log = logs / "workerlog.0"
    stdout = log.read_text(errors="backslashreplace") if log.exists() else ""
    return Run(codes, sent, seconds, stdout, consoles)


def _check(procs_per_host: int, timeout: float) -> None:
    if isinstance(procs_per_host, bool) or not isinstance(procs_per_host, int) or procs_per_host < 1:
        raise ConfigError(f"procs_per_host is {procs_per_host!r}; it must be a whole number of at least 1.")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise ConfigError(f"timeout is {timeout!r}; it must be a number of seconds above 0.")


def _variables(host: Host, rank_count: int, env: Mapping[str, str] | None) -> dict[str, str]:
    inherited = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // rank_count)), **os.environ}
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**host.environment(inherited), "PYTHONPATH": os.pathsep.join(paths), **(env or {})}


class _Job:
    """A launcher on a host: reads what it writes, and shows it line by line."""

    def __init__(self, host: Host, command: Sequence[str], environment: Mapping[str, str], *, shows: bool) -> None:
        self._prefix = f"{host.address}| " if shows else None
        self._lines: list[str] = []
        self.process = subprocess.Popen(
            host.command(*command),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="backslashreplace",
            start_new_session=True,  # a Ctrl-C is for the parent alone: it ends them
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            if self._prefix is not None:
                print(self._prefix + line, end="", flush=True)

    def exit_code(self) -> int | None:
        """128 + n for signal n; None while it runs."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    def close(self) -> str:
        """All that it wrote, once nothing of it runs any more."""
        self._thread.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process.wait()
        return "".join(self._lines)


def _wait(jobs: Sequence[_Job], deadline: float) -> list[int]:
    while None in (codes := [job.exit_code() for job in jobs]) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return [EXIT_TIMEOUT if code is None else code for code in codes]
