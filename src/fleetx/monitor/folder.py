"""Write the run folder. Worker 0 writes its files; each rank adds its own log.

strategy.yaml      the strategy (strategy.2.yaml: of a second pair of model and optimizer)
environment.json   versions, devices, ranks and command of each start of the run
metrics.jsonl      one line per update
memory.json        memory over one step
summary.json       result and totals of the run
workerlog.N        output of rank N: a link into fleetrun's folder, replaced by a copy at the end (.previous: of the last start)

A resumed run continues in the same folder: a start that begins at step s replaces earlier lines from s on. A start that begins
at step 1 is a new run: the earlier run's files are moved to a folder with a number, run-1, which is a run folder like another.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

import torch

from .. import __version__
from ..config import log
from ..config.secret_texts import command_without_secrets
from ..dist.own_files import check_own_folder, replace_file, replacing
from ..dist.world import World
from ..engine.setup.registry import Pair
from ..errors import ConfigError, warn_user
from ..strategy import DistributedStrategy
from .lasting_files import LastingFiles

METRICS = "metrics.jsonl"
OF_A_RUN = ("environment.json", "summary.json", "memory.json", "strategy*.yaml")
"""Files of a run beside its lines."""
WORKER_LOG = "FLEETX_WORKER_LOG"
TAIL_BYTES = 1 << 16
GIT_SECONDS = 3.0


def read_json(path: Path, default: Any) -> Any:
    """Read a file of an earlier start; return the default if it is missing or truncated."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return default


def last_record(path: Path) -> dict[str, Any] | None:
    """Return the last complete record of a JSONL file, or None."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict):
                return record
    return None


def strategy_file(number: int) -> str:
    return "strategy.yaml" if number == 1 else f"strategy.{number}.yaml"


@final
class Folder:
    """The run folder that worker 0 writes. While the disk fails, what is recorded waits in memory and training continues."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            check_own_folder(path)
            self._earlier = _contents(path)
            """Files of a run that was here before, which this start writes over."""
            self._files = LastingFiles(path, METRICS)
        except OSError as error:
            raise ConfigError(
                f"the run folder {path} cannot be written: {error}. Name another one in fleet.Monitor(...)."
            ) from error
        self._starts = _known_starts(path)
        self.seconds_before = self._seconds_before()
        """Training time of all earlier starts of this run, in seconds."""

    @property
    def start(self) -> int:
        """Number of this start, counted from 1."""
        return len(self._starts) + 1

    def _seconds_before(self) -> float:
        if not self._starts:
            return 0.0
        last, record = self._starts[-1], last_record(self.path / METRICS) or {}
        seconds = record.get("seconds", 0.0) if record.get("start") == last.get("start") else 0.0
        return float(last.get("seconds_before", 0.0)) + float(seconds)

    def start_over(self) -> None:
        """Begin a new run: this start begins at step 1, so that earlier records in the folder belong to another run."""
        self._starts, self.seconds_before = [], 0.0
        number = next(n for n in itertools.count(1) if not (self.path / f"run-{n}").exists())
        kept = self.path / f"run-{number}"
        try:
            kept.mkdir()
            for name, content in self._earlier.items():
                replace_file(kept / name, content)
            log.say(f"fleetx: {self.path} held an earlier run, which is in {kept} now.")
            self._files.move_lines(f"{kept.name}/{METRICS}")
        except OSError as error:  # no room for a folder: training goes on, and the lines at least are kept
            warn_user(f"the earlier run in {self.path} could not be moved ({error}); its lines are in {METRICS}.previous.")
            self._files.move_lines(f"{METRICS}.previous")

    def begin(self, start: Mapping[str, Any]) -> None:
        places = range(1, len(start.get("pairs", ())) + 1)
        self._files.keep_only({strategy_file(place) for place in places}, "strategy*.yaml")  # an earlier start may have had more
        self.put_json("environment.json", {"starts": [*self._starts, {**start, "seconds_before": self.seconds_before}]})

    def put_strategy(self, place: int, strategy: DistributedStrategy) -> None:
        self._files.put(strategy_file(place), strategy.to_yaml().encode())

    def write(self, record: Mapping[str, Any]) -> None:
        self._files.add_line(json.dumps(record, allow_nan=False).encode() + b"\n")

    def put_json(self, name: str, value: Any) -> None:
        self._files.put(name, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())

    def close(self) -> None:
        self._files.close()


def _contents(folder: Path) -> dict[str, bytes]:
    """Read the files of a run beside its lines; links in their place are not followed."""
    files = [file for pattern in OF_A_RUN for file in folder.glob(pattern)]
    return {file.name: file.read_bytes() for file in files if file.is_file() and not file.is_symlink()}


def _known_starts(path: Path) -> list[dict[str, Any]]:
    environment = read_json(path / "environment.json", {})
    starts = environment.get("starts", []) if isinstance(environment, dict) else []
    return [start for start in starts if isinstance(start, dict)]


@final
class OwnLog:
    """Puts this rank's log under fleetrun into the run folder: a link first, a copy at the end."""

    def __init__(self, folder: Path, rank: int) -> None:
        log = os.environ.get(WORKER_LOG)
        self._log = Path(log) if log else None
        self._place = folder / f"workerlog.{rank}"
        if self._log is not None and not self._lies_in_folder():
            with contextlib.suppress(OSError):  # optional: fleetrun has the log itself
                folder.mkdir(parents=True, exist_ok=True)
                if self._place.is_file() and not self._place.is_symlink():  # of an earlier start
                    os.replace(self._place, self._place.with_name(f"{self._place.name}.previous"))
                self._place.unlink(missing_ok=True)
                self._place.symlink_to(self._log)
            atexit.register(self.copy)  # again: a traceback that ends the run is printed after its monitor is closed

    def _lies_in_folder(self) -> bool:
        """Return whether fleetrun --log_dir is the run folder itself."""
        assert self._log is not None
        return self._log.parent.resolve() == self._place.parent.resolve()

    def copy(self) -> None:
        """Replace the link by a copy: the next run truncates the log in fleetrun's folder."""
        if self._log is None or self._lies_in_folder():
            return
        with contextlib.suppress(OSError), self._log.open("rb") as log, replacing(self._place) as copy:
            shutil.copyfileobj(log, copy)


# --- environment.json: versions, devices, ranks, the command. No environment variable is recorded. ----------------------


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def commit_of_script() -> str | None:
    """Return the commit that the script's folder is at, with "-dirty" where files differ from it; None outside of git."""
    folder = Path(sys.argv[0]).resolve().parent if sys.argv and sys.argv[0] not in ("", "-c", "-m") else Path.cwd()
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # git may not write here
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        ended = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=GIT_SECONDS, check=False
        )
        return ended.stdout.strip() or None
    return None


def start_of_run(number: int, world: World, pairs: Sequence[Pair], *, total_steps: int | None) -> dict[str, Any]:
    return {
        "start": number,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "fleetx": __version__,
        "commit": commit_of_script(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device_name(world.device),
        "backend": world.comm.backend,
        "ranks": world.comm.size,
        "nodes": world.node_num,
        "hosts": list(dict.fromkeys(endpoint.rpartition(":")[0] for endpoint in world.endpoints)),
        "command": command_without_secrets(sys.argv),
        "total_steps": total_steps,
        "pairs": [describe_pair(pair) for pair in pairs],
    }


def describe_pair(pair: Pair) -> dict[str, Any]:
    names = {"model": pair.model_name, "parameters": pair.parameters, "optimizer": pair.optimizer_name}
    return names | ({"wrapped_in": "DistributedDataParallel"} if pair.is_wrapped else {})
