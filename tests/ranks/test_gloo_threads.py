"""A thread of gloo that still has a tensor to let go of when a rank ends: it is given Python's lock for that."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from fleetx.dist import gloo_threads, world
from tests.helpers.harness import run_ranks


def _let_go(rank: int) -> tuple[int, int]:
    """How many tensors gloo has let go of: while Python's lock is held, and once its threads are at rest."""
    comm, gone = world.current().comm, list[object]()
    tensor = torch.zeros(1)
    watch = weakref.ref(tensor, gone.append)
    comm.barrier()
    comm.all_reduce(tensor)
    del tensor  # from here on gloo alone has it
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        pass
    before = len(gone)
    gloo_threads.wait_until_idle()
    del watch
    return before, len(gone)


def _some_tries(rank: int) -> list[tuple[int, int]]:
    """Until one went well on all ranks: on a busy machine the other rank may come later than this one looks."""
    found, interval = list[tuple[int, int]](), sys.getswitchinterval()
    sys.setswitchinterval(60)  # no thread is given the lock unless this thread waits for something
    try:
        for _ in range(10):
            found.append(_let_go(rank))
            if all(told == [0, 1] for told in world.current().comm.gather_json(found[-1])):
                break
        return found
    finally:
        sys.setswitchinterval(interval)


def test_tensors_that_gloo_has_are_let_go_of_before_python_ends() -> None:
    for found in run_ranks(_some_tries, 2):
        assert found[-1] == (0, 1), found


def test_where_there_are_none_no_rank_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_threads, "THREAD_NAME", b"no such name")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waited"))
    gloo_threads.wait_until_idle()


def test_any_name_of_another_thread_is_read() -> None:
    """The kernel keeps fifteen bytes of a name, be it in the middle of a letter."""
    done, names = threading.Event(), [b"a" * 14 + b"\xc3", b"a) R (b", b""]

    def named(name: bytes) -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_bytes(name)
        done.wait(10)

    threads = [threading.Thread(target=named, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    try:
        assert all(state in b"RSD" for state in gloo_threads._states())
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_where_the_count_is_unknown_it_waits_a_little(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    waited: list[float] = []
    monkeypatch.setattr(gloo_threads, "THREADS_FOLDER", tmp_path / "none")
    monkeypatch.setattr(time, "sleep", waited.append)
    gloo_threads.wait_until_idle()
    assert waited == [25 * gloo_threads.PAUSE_SECONDS]
