"""Shared fixtures. A run that collects no test is a failure."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest
import torch

from fleetx import fleet, world


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A fresh world of one rank on the CPU, closed afterwards."""
    monkeypatch.setenv("FLEETX_DEVICE", "cpu")
    world.close_world()
    fleet.init()
    yield
    world.close_world()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch's compiler keeps for the whole process which functions it has given up on, and those of nn.Module are shared."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def pytest_configure() -> None:
    """Jobs in the background have SIGINT ignored, and under nohup SIGHUP; fleetrun keeps to that, and tests send both."""
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if session.testscollected == 0:
        session.exitstatus = 5


@pytest.fixture(scope="module")
def one_thread_and_no_old_objects() -> Iterator[None]:
    """Nets so small are slower with two threads; and each of many collections would go through all of torch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)
