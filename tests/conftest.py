"""Shared fixtures. A run that collects no test is a failure."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from fleetx import fleet
from fleetx.dist import world
from tests.helpers.forked import start_forker

settings.register_profile("fleetx", deadline=None)  # a busy machine is slow, and no test rests on timing
settings.load_profile("fleetx")


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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--campaigns", action="store_true", help="run what is marked as a campaign, and tests/campaigns, alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the campaigns alone with --campaigns; without it leave out what is marked as one."""
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        is_marked = item.get_closest_marker("campaign") is not None
        is_campaign = is_marked or "campaigns" in item.path.parts
        is_wanted = is_campaign if config.getoption("--campaigns") else not is_marked
        (kept if is_wanted else dropped).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("numprocesses", None):  # of pytest-xdist: its workers run the tests, and have none
        start_forker()
    _undo_ignored_signals()


def _undo_ignored_signals() -> None:
    """Jobs in the background have SIGINT ignored, and under nohup SIGHUP; fleetrun keeps to that, and tests send both."""
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)


def pytest_collection_finish() -> None:
    torch.set_num_threads(1)  # nets so small are slower with two


@pytest.fixture(scope="module", autouse=True)
def freeze_old_objects() -> None:
    """Leave what earlier tests have imported out of garbage collections: each of many would go through all of torch."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if session.testscollected == 0:
        session.exitstatus = 5
