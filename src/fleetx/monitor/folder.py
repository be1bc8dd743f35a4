"""Write the run folder. Worker 0 writes its files; each rank adds its own log.

strategy.yaml      the strategy (strategy.2.yaml: of a second pair of model and optimizer)
environment.json   versions, devices, ranks and command of each start of the run
metrics.jsonl      one line per update
memory.json        memory over one step
summary.json       result and totals of the run
workerlog.N        output of rank N: a link into fleetrun's folder, replaced by a copy at the end (.previous: of the last start)

A resumed run continues in the same folder: a start that begins at step s replaces earlier lines from s on. A start that begins
at step 1 is a new run: the earlier lines are moved to metrics.jsonl.previous.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, final

import torch

from .. import __version__
from ..dist.world import World
from ..engine.registry import Pair
from ..errors import ConfigError, warn_user
from ..strategy import DistributedStrategy

WORKER_LOG = "FLEETX_WORKER_LOG"
TAIL_BYTES = 1 << 16


def write_json(path: Path, value: Any) -> None:
    """Write a file and rename it into place, so that a reader never sees half of it."""
    partial = path.with_name(f".{path.name}.part")
    partial.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


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
    """The run folder that worker 0 writes. If the disk fails later, it warns once and training continues without records."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_broken = False
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._metrics: IO[bytes] = _opened(path / "metrics.jsonl")
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
        last, record = self._starts[-1], last_record(self.path / "metrics.jsonl") or {}
        seconds = record.get("seconds", 0.0) if record.get("start") == last.get("start") else 0.0
        return float(last.get("seconds_before", 0.0)) + float(seconds)

    def start_over(self) -> None:
        """Begin a new run: this start begins at step 1, so that earlier records in the folder belong to another run."""
        self._starts, self.seconds_before = [], 0.0
        self._metrics.close()
        self._try(lambda: os.replace(self.path / "metrics.jsonl", self.path / "metrics.jsonl.previous"))
        self._try(self._reopen)

    def _reopen(self) -> None:
        self._metrics = _opened(self.path / "metrics.jsonl")

    def begin(self, start: Mapping[str, Any]) -> None:
        for old in self.path.glob("strategy*.yaml"):  # left by an earlier start that had more pairs
            if old.name not in {strategy_file(place) for place in range(1, len(start.get("pairs", ())) + 1)}:
                self._try(functools.partial(old.unlink, missing_ok=True))
        starts = [*self._starts, {**start, "seconds_before": self.seconds_before}]
        self.put_json("environment.json", {"starts": starts})

    def put_strategy(self, place: int, strategy: DistributedStrategy) -> None:
        self._try(lambda: strategy.save(self.path / strategy_file(place)))

    def write(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        self._try(lambda: self._metrics.write(line))

    def put_json(self, name: str, value: Any) -> None:
        self._try(lambda: write_json(self.path / name, value))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._metrics.close()

    def _try(self, write: Callable[[], object]) -> None:
        if self._is_broken:
            return
        try:
            write()
        except OSError as error:
            self._is_broken = True
            warn_user(
                f"the run folder {self.path} cannot be written any more ({error}); training goes on without it.",
            )


def _opened(path: Path) -> IO[bytes]:
    """Open for unbuffered appending. Terminate a last line that a kill truncated, so that new records start on a new one."""
    file = path.open("a+b", buffering=0)
    file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
    if file.read() not in (b"", b"\n"):
        file.write(b"\n")
    return file


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
        with contextlib.suppress(OSError):
            partial = self._place.with_name(f".{self._place.name}.part")
            shutil.copyfile(self._log, partial)
            os.replace(partial, self._place)


# --- environment.json: versions, devices, ranks, the command. No environment variable is recorded. ----------------------

SECRET_WORDS = frozenset(
    "token password passwd pwd pass passphrase secret secrets key apikey auth authorization access credential credentials".split()
)
HIDDEN = "(hidden)"


def command_of(arguments: Sequence[str]) -> list[str]:
    """Return the command line without values that look secret: `--api-key X`, `hub.token=X`, `https://user:X@host`."""
    shown, hides_next = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_secret = bool(SECRET_WORDS & set(re.split(r"[-_.+/]", name.lower())))
        shown.append(HIDDEN if hides_next else f"{name}={HIDDEN}" if is_secret and equals else without_password(argument))
        hides_next = is_secret and not equals and name.startswith("-")
    return shown


def without_password(text: str) -> str:
    """Hide the password in URLs of the form scheme://user:password@host."""
    return re.sub(r"(://[^/@:\s]*):[^/@\s]+@", rf"\1:{HIDDEN}@", text)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def start_of_run(number: int, world: World, pairs: Sequence[Pair], *, total_steps: int | None) -> dict[str, Any]:
    return {
        "start": number,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "fleetx": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device_name(world.device),
        "backend": world.comm.backend,
        "ranks": world.comm.size,
        "nodes": world.node_num,
        "hosts": list(dict.fromkeys(endpoint.rpartition(":")[0] for endpoint in world.endpoints)),
        "command": command_of(sys.argv),
        "total_steps": total_steps,
        "pairs": [describe_pair(pair) for pair in pairs],
    }


def describe_pair(pair: Pair) -> dict[str, Any]:
    names = {"model": pair.model_name, "parameters": pair.parameters, "optimizer": pair.optimizer_name}
    return names | ({"wrapped_in": "DistributedDataParallel"} if pair.is_wrapped else {})
