"""The ranks' log files: fresh at the start, rank 0's followed on the console, the last lines of one that failed."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from fleetx.errors import ConfigError
from fleetx.launch.topology import Plan, log_path, stale_logs

FOLLOW_SECONDS = 0.1
TAIL_BYTES = 1 << 14


def start_fresh(plan: Plan) -> None:
    ranks = range(plan.process_count)
    try:
        plan.log_dir.mkdir(parents=True, exist_ok=True)
        for rank in ranks:
            log_path(plan.log_dir, rank).write_bytes(b"")
        for path in stale_logs(list(plan.log_dir.glob("workerlog.*")), ranks):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--log_dir {plan.log_dir} cannot be written: {error}.") from error


def follow(path: Path, finished: threading.Event) -> None:
    """Copy a growing file onto the console, to its very end."""
    with path.open("rb") as log, contextlib.suppress(BrokenPipeError):  # `fleetrun ... | head` ends the copy, not the run
        while True:
            is_last_pass = finished.is_set()  # asked before reading: what was written until then is still read
            while chunk := log.read(1 << 16):
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
            if is_last_pass:
                return
            finished.wait(FOLLOW_SECONDS)


@contextlib.contextmanager
def following(path: Path) -> Iterator[None]:
    finished = threading.Event()
    follower = threading.Thread(target=follow, args=(path, finished), daemon=True)
    sys.stdout.flush()  # text printed so far comes before the bytes that the follower writes
    follower.start()
    try:
        yield
    finally:
        finished.set()
        follower.join()


def last_lines(path: Path, count: int) -> list[str]:
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - TAIL_BYTES))
        text = log.read().decode("utf-8", errors="replace")
    return [line for line in text.splitlines() if line.strip()][-count:]
