"""What is shown of a download: a bar on a terminal, a line now and then elsewhere, nothing on all but worker 0 of a node."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol

from ..config import log
from ..config.text import decimal
from ..dist.roles import role_from_env
from ..errors import ConfigError

LINE_EVERY_S = 10.0


class Reporter(Protocol):
    def line(self, text: str) -> None: ...

    def begin(self, what: str, total: int) -> None: ...

    def received(self, count: int) -> None:
        """So many bytes of what was begun."""


class Silent:
    def line(self, text: str) -> None:
        pass

    def begin(self, what: str, total: int) -> None:
        pass

    def received(self, count: int) -> None:
        pass


class Lines:
    def __init__(self) -> None:
        self._what, self._total, self._next = "", 0, 0.0

    def line(self, text: str) -> None:
        log.say(f"fleetx: {text}", stream=sys.stderr)

    def begin(self, what: str, total: int) -> None:
        self._what, self._total, self._next = what, total, time.monotonic() + LINE_EVERY_S
        self.line(f"{what}, {decimal(total)}")

    def received(self, count: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_EVERY_S
            self.line(f"{self._what}: {decimal(count)} of {decimal(self._total)}")


class Bar:
    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._task: Any = None

    def line(self, text: str) -> None:
        self._progress.console.print(f"fleetx: {text}", markup=False, highlight=False)

    def begin(self, what: str, total: int) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(what, total=total)

    def received(self, count: int) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=count)


def is_first_of_node() -> bool:
    """From a launcher's variables: a download may come before fleet.init()."""
    with contextlib.suppress(ConfigError):  # half-set ones are fleet.init's to complain about
        return role_from_env(os.environ).local_rank == 0
    return True


@contextlib.contextmanager
def reporting() -> Iterator[Reporter]:
    if not is_first_of_node() or not log.shows(logging.INFO):
        yield Silent()
    elif not sys.stderr.isatty():
        yield Lines()
    else:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        name = TextColumn("{task.description}", markup=False)  # others chose it
        columns = (name, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            yield Bar(progress)
