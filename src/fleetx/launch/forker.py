"""The process from which a restart forks its ranks: it has imported what they import, which takes seconds, and waits.

worker.py becomes it where FLEETX_FORKER names a socket: started by the same command as a rank, so that interpreter, flags and
what `ps` shows are those of a rank. It starts no thread of its own, opens no device and no process group. What it imports, ranks
have noted while they ran (`ImportNotes` in worker.py): which of a few long imports the script makes, and sys.path and the
variables that it had set by then, since libraries read them when they are loaded. Nothing is imported that the script did not
import itself.

Ranks are forked by a child that ends at once, so that the kernel gives them to the nearest ancestor that takes orphans: to the
launcher, for as long as it asks (warm.py). From then on a rank is the launcher's own child, as one that was executed: its exit
code, its death with the launcher and its parent's id need no help from this process, which may die at any time.
A fork by a raw clone system call with CLONE_PARENT would need no such child, but leaves out what the C library does in a fork.

One line of JSON each way on the socket:
    launcher    {"imports": [...], "path": [...], "environment": {...}}       once
    forker      {"ready": true}, or {"refused": "why"} before it ends
    launcher    {"environments": [{...}, ...]}                               for each start of ranks
    forker      {"pids": [...]}

Standard library only, until it imports for the ranks.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import socket
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

OF_FLEETX = ("fleetx.fleet", "fleetx.applications")
DEVICES = "/dev/nvidia"


class Refused(Exception):
    """Ranks must not be forked from this process."""


def serve(descriptor: int, die_with_launcher: Callable[[], None]) -> bytes:
    """Import, then fork ranks until the socket closes. Return only in a forked rank, with what the imports have printed."""
    die_with_launcher()
    with socket.socket(fileno=descriptor) as launcher:
        lines = launcher.makefile("rb")
        started_with = own_environment()
        printed = collect_output()
        try:
            wanted = json.loads(lines.readline() or b"null")
            if wanted is None:
                os._exit(0)
            import_as_the_script(wanted["imports"], wanted["path"], wanted["environment"])
            check_can_fork()
        except BaseException as error:  # ranks are then executed, and raise it themselves
            tell(launcher, {"refused": f"{type(error).__name__}: {error}"})
            os._exit(1)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        gc.collect()
        gc.freeze()  # a collection in a rank would write to all pages of what was imported
        tell(launcher, {"ready": True})
        for line in lines:
            environment = fork_ranks(launcher, json.loads(line)["environments"])
            if environment is not None:
                break
        else:
            os._exit(0)
    lines.close()
    become_rank(environment, started_with)
    said = os.pread(printed, os.fstat(printed).st_size, 0)  # all ranks share one offset of this file
    os.close(printed)
    return said


def tell(launcher: socket.socket, answer: Mapping[str, object]) -> None:
    with contextlib.suppress(OSError):  # the launcher has ended: so does this process, by the kernel
        launcher.sendall(json.dumps(answer).encode() + b"\n")


def own_environment() -> dict[str, str]:
    """Return what Python itself and site-packages have changed in the environment by now: LC_CTYPE, for example."""
    with open("/proc/self/environ", "rb") as file:
        given = dict(entry.split("=", 1) for entry in os.fsdecode(file.read()).split("\0") if "=" in entry)
    return {name: value for name, value in os.environ.items() if given.get(name) != value}


def collect_output() -> int:
    """Let what imports print go into memory: each rank has it in its log, as if it had imported itself."""
    printed = os.memfd_create("fleetrun")
    for stream in (1, 2):
        os.dup2(printed, stream)
    return printed


def import_as_the_script(names: Sequence[str], path: list[str], environment: Mapping[str, str | None]) -> None:
    """Import with the search path and the variables that the script had when it did; restore both."""
    path_before, environment_before = list(sys.path), dict(os.environ)
    sys.path[:] = path
    set_environment({name: value for name, value in {**os.environ, **environment}.items() if value is not None})
    try:
        for name in names:
            for module in OF_FLEETX if name == "fleetx" else (name,):
                importlib.import_module(module)
            if name == "fleetx":
                sys.modules["fleetx.strategies"].catalogue()
    finally:
        sys.path[:] = path_before
        set_environment(environment_before)


def set_environment(wanted: Mapping[str, str]) -> None:
    """Make os.environ these variables, in this order."""
    os.environ.clear()
    os.environ.update(wanted)


def check_can_fork() -> None:
    """Raise if an import has opened a GPU: what CUDA keeps of it is of no use in a forked process."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(DEVICES):
                raise Refused("an import has opened a GPU")


def fork() -> int:
    """Fork. Threads of numpy's BLAS stop for it and begin again, which newer Pythons warn about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return os.fork()


def fork_ranks(launcher: socket.socket, environments: list[dict[str, str]]) -> dict[str, str] | None:
    """Fork one rank for each environment and tell the launcher their ids. Return its environment in a rank, None here."""
    ids_read, ids_write = os.pipe()
    go_read, go_write = os.pipe()
    between = fork()
    if between == 0:
        with contextlib.suppress(OSError):  # no further process can be started
            for environment in environments:
                if (pid := fork()) == 0:
                    for end in (ids_read, ids_write, go_write):
                        os.close(end)
                    await_parent(go_read)
                    return environment
                os.write(ids_write, b"%d\n" % pid)
            os._exit(0)
        os._exit(1)
    os.close(ids_write)
    os.close(go_read)
    with open(ids_read, "rb") as file:
        pids = [int(line) for line in file]
    _, status = os.waitpid(between, 0)  # its children have their new parent by now
    tell(launcher, {"pids": pids if status == 0 else []})  # first, so that the launcher can find every rank that runs
    if status == 0:
        os.write(go_write, b"g" * len(pids))
    os.close(go_write)  # ranks that wait in vain end
    return None


def await_parent(go_read: int) -> None:
    """Begin a session, as an executed rank does, and wait until the kernel has given this process to the launcher."""
    os.setsid()
    if os.read(go_read, 1) == b"":
        os._exit(1)
    os.close(go_read)


def become_rank(environment: Mapping[str, str], started_with: Mapping[str, str]) -> None:
    """Make this process what Python would be, had it just been started with this environment."""
    set_environment({**environment, **started_with})
    importlib.invalidate_caches()
    modules: Mapping[str, Any] = sys.modules
    if "threading" in modules:  # Python keeps the id of the thread that forked
        modules["threading"].main_thread()._set_native_id()
    if "torch.random" in modules:  # each begins at a number of its own; Python's generator sees to that itself
        modules["torch.random"].default_generator.seed()
    if "numpy.random" in modules:
        modules["numpy.random"].seed()
    if "multiprocessing.process" in modules:
        modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    if "fleetx.dist.heartbeat" in modules:
        modules["fleetx.dist.heartbeat"].record.open_file()
