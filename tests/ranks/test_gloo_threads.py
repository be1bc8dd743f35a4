"""A thread of gloo that still has a tensor to let go of when a rank ends: it is given Python's lock for that."""

from __future__ import annotations

import sys
import time
import weakref

import pytest
import torch

from fleetx import gloo_threads, world
from harness import run_ranks


def _held_up(rank: int) -> tuple[int, int, int]:
    """How many tensors gloo has let go of: while Python's lock is held, after that, and once its threads are at rest."""
    comm, gone = world.current().comm, list[object]()
    comm.barrier()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # nobody is given the lock unless this thread waits for something
    try:
        tensor = torch.zeros(1)
        watch = weakref.ref(tensor, gone.append)
        comm.all_reduce(tensor)
        del tensor  # from here on gloo alone has it
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            pass
        before = len(gone)
        gloo_threads.rest()
        return before, len(gone), len(gloo_threads._states())
    finally:
        sys.setswitchinterval(interval)
        del watch


def test_tensors_that_gloo_has_are_let_go_of_before_python_ends() -> None:
    for before, after, threads in run_ranks(_held_up, 2):
        assert (before, after) == (0, 1) and threads >= 2


def test_where_there_are_none_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_threads, "THREAD_NAME", "of nobody")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waited"))
    gloo_threads.rest()
