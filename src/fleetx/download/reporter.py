"""Show progress: a bar on a terminal, a line every LINE_EVERY_S elsewhere, and nothing except on local rank 0."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from ..config import log
from ..config.text import decimal
from ..dist.launch_variables import role_from_env
from ..errors import ConfigError

LINE_EVERY_S = 10.0


class Reporter:
    """Shows nothing: the reporter of all ranks but the first of a node."""

    def line(self, text: str) -> None:
        """Show one line."""

    def begin(self, what: str, total: int) -> None:
        """Begin a task of `total` bytes."""

    def received(self, count: int) -> None:
        """Show that `count` bytes of the task are done."""


class Lines(Reporter):
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


class Bar(Reporter):
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
    """Read the local rank from the launcher's variables: a download may come before fleet.init()."""
    with contextlib.suppress(ConfigError):  # fleet.init reports variables that are set by half
        return role_from_env(os.environ).local_rank == 0
    return True


@contextlib.contextmanager
def reporting() -> Iterator[Reporter]:
    if not is_first_of_node() or not log.shows(logging.INFO):
        yield Reporter()
    elif not sys.stderr.isatty():
        yield Lines()
    else:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        name = TextColumn("{task.description}", markup=False)  # names come from a manifest, and may hold rich's markup
        columns = (name, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            yield Bar(progress)
