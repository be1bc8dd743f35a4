"""What has to be said to torch elastic before it starts processes the way fleetrun wants them."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

LocalEnvironments = dict[int, dict[str, str]]  # by local rank
SIGNALS_TO_HANDLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
SIGNALS_DEFAULT = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


def silence() -> None:
    """Its warnings and tracebacks repeat, at length, what fleetrun says in a few lines."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False


@contextlib.contextmanager
def without_handlers() -> Iterator[None]:
    """Elastic would install signal handlers that raise wherever the launcher happens to be."""
    before = os.environ.get(SIGNALS_TO_HANDLE)
    os.environ[SIGNALS_TO_HANDLE] = "none"
    try:
        yield
    finally:
        del os.environ[SIGNALS_TO_HANDLE]
        if before is not None:
            os.environ[SIGNALS_TO_HANDLE] = before


class LogsAndEnvironments(LogsSpecs):
    """Elastic asks this for log files just before it starts the workers: the one place to complete their environments."""

    def __init__(self, complete: Callable[[LocalEnvironments], None]) -> None:
        super().__init__()
        self._complete = complete

    @property
    def root_log_dir(self) -> str:
        return os.devnull

    def reify(self, envs: LocalEnvironments) -> LogsDest:
        self._complete(envs)
        console = dict.fromkeys(envs, "")  # worker.py redirects; what goes wrong before that belongs on the console
        return LogsDest(stdouts=console, stderrs=dict(console), error_files=dict.fromkeys(envs, os.devnull))
