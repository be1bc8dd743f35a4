"""Real gloo processes for tests: `run_ranks(fn, size)` runs `fn(rank, ...)` on every rank and returns the values to the parent.

Workers are forked with torch imported (forked.py) and kept for the whole session; after a test that fails, or that kills one or
leaves it in a collective, there are new ones. Each test has a process group and a store of its own.
Assertions belong to the parent.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.helpers.forked import CONTEXT, start_process

TIME_LIMIT_S = 120.0


class RankFailure(AssertionError):
    """The first rank that failed, with its traceback."""


def _serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        job = pipe.recv()
        if job is None:
            return
        fn, rank, size, rendezvous, args, env = job
        try:
            pipe.send(("ok", _one_job(fn, rank, size, rendezvous, args, env)))
        except BaseException as error:
            pipe.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


def _one_job(fn: Callable[..., Any], rank: int, size: int, rendezvous: str, args: tuple[Any, ...], env: dict[str, str]) -> Any:
    import torch
    import torch.distributed as dist

    from fleetx import fleet
    from fleetx.dist import world

    os.environ.update(env)
    torch.manual_seed(1234)
    excepthook = sys.excepthook  # torch wraps it in each group that is made: hundreds of wrappers deep it would recurse too far
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
        try:
            fleet.init()
            return fn(rank, *args)
        finally:
            world.close_world()
            sys.excepthook = excepthook
            for name in env:
                os.environ.pop(name, None)


class Pool:
    """As many workers as the largest test has asked for."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []
        atexit.register(self.close)

    def grow(self, size: int) -> None:
        while len(self._workers) < size:
            mine, theirs = CONTEXT.Pipe()
            process = start_process(_serve, theirs)
            theirs.close()
            self._workers.append((process, mine))

    def run(self, fn: Callable[..., Any], size: int, args: tuple[Any, ...], env: dict[str, str]) -> list[Any]:
        self.grow(size)
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(size):
                self._workers[rank][1].send((fn, rank, size, str(Path(folder) / "rendezvous"), args, env))
            return self._collect(size)

    def _collect(self, size: int) -> list[Any]:
        pipes = {self._workers[rank][1]: rank for rank in range(size)}
        values: list[Any] = [None] * size
        while pipes:
            ready = wait(list(pipes), timeout=TIME_LIMIT_S)
            if not ready:
                waiting = sorted(pipes.values())
                self.close()
                raise RankFailure(f"ranks {waiting} gave no answer within {TIME_LIMIT_S:.0f} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pipes.pop(pipe)
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    self.close()
                    raise RankFailure(f"rank {rank} died") from None
                if kind == "error":
                    # The others may wait in a collective for this one: end them all, the first cause is what counts.
                    self.close()
                    raise RankFailure(f"rank {rank} failed: {value}")
                values[rank] = value
        return values

    def close(self) -> None:
        for process, pipe in self._workers:
            process.kill()
            process.join()
            pipe.close()
        self._workers = []


_pool = Pool()


def run_ranks(fn: Callable[..., Any], size: int, *args: Any, env: dict[str, str] | None = None) -> list[Any]:
    """`fn(rank, *args)` on `size` gloo ranks with fleet.init() done; each rank's return value, in rank order.

    On the CPU unless `env` says otherwise: the tests' data lies there, also on a machine with a GPU.
    """
    return _pool.run(fn, size, args, {"FLEETX_DEVICE": "cpu"} | (env or {}))


def raised(fn: Callable[[], Any]) -> str:
    """The error a call raises, as "Type: message", for a rank to return; a call that raises nothing says so."""
    try:
        fn()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def make_fake_comm(size: int = 2, rank: int = 0) -> Any:
    """A communicator for unit tests: all ranks hold the same tensors, and every call is written down."""
    import torch

    from fleetx.dist.comm import Comm, Pending

    class FakeComm(Comm):
        def __init__(self) -> None:
            self.rank, self.size = rank, size
            self.control_device = torch.device("cpu")
            self.calls: list[tuple[str, int]] = []

        def all_reduce(self, tensor: Any, mode: str = "sum") -> Pending:
            self.calls.append(("all_reduce", tensor.numel()))
            if mode == "sum":
                tensor.mul_(size)
            return Pending(None)

        def all_gather(self, tensor: Any) -> tuple[Any, Pending]:
            self.calls.append(("all_gather", tensor.numel()))
            return torch.stack([tensor] * size), Pending(None)

        def broadcast(self, tensor: Any, source: int = 0) -> Pending:
            self.calls.append(("broadcast", tensor.numel()))
            return Pending(None)

        def barrier(self) -> None:
            self.calls.append(("barrier", 0))

        def subgroup(self, ranks: Any) -> Comm:
            return self

    return FakeComm()
