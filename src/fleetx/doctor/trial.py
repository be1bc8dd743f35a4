"""Ranks of the doctor's own, started as users start theirs: by fleetrun, on this machine, with a limit on their time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from fleetx.launch.logs import last_lines
from fleetx.launch.topology import log_path

from .finding import Table, from_json

STOP_SECONDS = 10.0
TAIL_LINES = 4
BOX = "╭╮╰╯│─━┃┏┓┗┛|+-= "
"""What frames the words of fleetrun's own message."""


@final
@dataclass(frozen=True, slots=True)
class Trial:
    """How it ended; with an error there are no tables."""

    ranks: int
    backends: tuple[str, ...]
    tables: tuple[Table, ...] = ()
    error: str = ""
    log_tail: tuple[str, ...] = ()
    is_late: bool = False


def command(ranks: int, folder: Path, backends: Sequence[str], sizes: Sequence[int]) -> list[str]:
    return [
        *(sys.executable, "-m", "fleetx.launch", "--nproc_per_node", str(ranks)),
        *("--env", "local", "--log_dir", str(folder), "--tee", "none"),
        *("-m", "fleetx.doctor.exchange", str(folder / "tables.json"), ",".join(backends), ",".join(map(str, sizes))),
    ]


def environment(inherited: Mapping[str, str], backends: Sequence[str]) -> dict[str, str]:
    """The user's own: what is set there is what is tried. Without NCCL, GPUs are left alone."""
    return dict(inherited) | ({} if "nccl" in backends else {"FLEETX_DEVICE": "cpu"})


def run_trial(ranks: int, backends: Sequence[str], sizes: Sequence[int], *, limit_seconds: float) -> Trial:
    with tempfile.TemporaryDirectory(prefix="fleetx-doctor-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        process = subprocess.Popen(
            command(ranks, folder, backends, sizes),
            env=environment(os.environ, backends),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is ours, and passed on below as a request to stop
        )
        try:
            _, said = process.communicate(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            tail = _tail(folder, ranks)
            _stop(process)
            return Trial(ranks, tuple(backends), error=f"no end within {limit_seconds:g} s", log_tail=tail, is_late=True)
        finally:
            _stop(process)
        tables = folder / "tables.json"
        if process.returncode == 0 and tables.exists():
            return Trial(ranks, tuple(backends), tables=from_json(json.loads(tables.read_text())))
        return Trial(ranks, tuple(backends), error=_summary(said, process.returncode), log_tail=_tail(folder, ranks))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """fleetrun ends its ranks; if it cannot, its guardian does."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=STOP_SECONDS)


def _summary(said: bytes, code: int) -> str:
    """The first words of fleetrun's message, without its frame, and without the place of logs that are gone by now."""
    lines = [line.strip(BOX) for line in said.decode("utf-8", "replace").splitlines()]
    words = "; ".join(line for line in lines if line and not line.startswith("log:"))[:400]
    return words or f"fleetrun ended with exit code {code}"


def _tail(folder: Path, ranks: int) -> tuple[str, ...]:
    """The end of what each rank wrote; of ranks that wrote the same, the first."""
    found: dict[tuple[str, ...], int] = {}
    for rank in range(ranks):
        found.setdefault(tuple(last_lines(log_path(folder, rank), TAIL_LINES)), rank)
    return tuple(f"rank {rank}: {line}" for lines, rank in found.items() for line in lines)
