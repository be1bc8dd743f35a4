"""Settings of torch elastic that fleetrun needs: quiet logs, no signal handlers, complete environments."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

LocalEnvironments = dict[int, dict[str, str]]  # by local rank
SIGNALS_TO_HANDLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
SIGNALS_DEFAULT = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


def mute_logs() -> None:
    """Mute elastic's logger: its warnings and tracebacks repeat at length what fleetrun prints in a few lines."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False


@contextlib.contextmanager
def without_handlers() -> Iterator[None]:
    """Keep elastic from installing signal handlers, which would raise at any place in the launcher."""
    before = os.environ.get(SIGNALS_TO_HANDLE)
    os.environ[SIGNALS_TO_HANDLE] = "none"
    try:
        yield
    finally:
        del os.environ[SIGNALS_TO_HANDLE]
        if before is not None:
            os.environ[SIGNALS_TO_HANDLE] = before


class StartedOtherwise(Exception):
    """The workers run already: elastic shall not start them."""


class LogsAndEnvironments(LogsSpecs):
    """Completes the workers' environments: elastic calls `reify` for log files just before it starts them. Where `start` starts
    them itself, it returns true, and `StartedOtherwise` is raised."""

    def __init__(self, complete: Callable[[LocalEnvironments], None], start: Callable[[], bool]) -> None:
        super().__init__()
        self._complete, self._start = complete, start

    @property
    def root_log_dir(self) -> str:
        return os.devnull

    def reify(self, envs: LocalEnvironments) -> LogsDest:
        self._complete(envs)
        if self._start():
            raise StartedOtherwise
        console = dict.fromkeys(envs, "")  # worker.py redirects its output; earlier errors go to the console
        return LogsDest(stdouts=console, stderrs=dict(console), error_files=dict.fromkeys(envs, os.devnull))
