"""The folder of a run. Worker 0 writes it; each rank adds its own log.

strategy.yaml      what was asked for (strategy.2.yaml of a second pair)
environment.json   versions, devices, ranks, command: once for each time the run was started
metrics.jsonl      a line for each update
memory.json        memory over one step
summary.json       how it ended
workerlog.N        what rank N wrote: a link into fleetrun's folder, and a copy at the end (.previous: of the start before)

A run that is resumed goes on in the same folder: a start that begins at step s takes the place of earlier lines from s on. One
that begins at step 1 is a new run: the lines before are kept as metrics.jsonl.previous.
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
    """Whole or not at all: somebody may be reading."""
    partial = path.with_name(f".{path.name}.part")
    partial.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read_json(path: Path, default: Any) -> Any:
    """What an earlier start has left; a file that was cut off is as good as none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return default


def last_record(path: Path) -> dict[str, Any] | None:
    """The last whole line of a file of records."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return None


def strategy_file(number: int) -> str:
    return "strategy.yaml" if number == 1 else f"strategy.{number}.yaml"


@final
class Folder:
    """As worker 0 writes it. A disk that fails later ends the record and not the training: once warned of."""

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
        """Of earlier starts."""

    @property
    def start(self) -> int:
        """How many times the run was started, this one included."""
        return len(self._starts) + 1

    def _seconds_before(self) -> float:
        if not self._starts:
            return 0.0
        last, record = self._starts[-1], last_record(self.path / "metrics.jsonl") or {}
        seconds = record.get("seconds", 0.0) if record.get("start") == last.get("start") else 0.0
        return float(last.get("seconds_before", 0.0)) + float(seconds)

    def begin_anew(self) -> None:
        """The first update of this start is the first of all: an earlier run in this folder is over, and laid aside."""
        self._starts, self.seconds_before = [], 0.0
        self._metrics.close()
        self._bear(lambda: os.replace(self.path / "metrics.jsonl", self.path / "metrics.jsonl.previous"))
        self._bear(self._reopen)

    def _reopen(self) -> None:
        self._metrics = _opened(self.path / "metrics.jsonl")

    def begin(self, start: Mapping[str, Any]) -> None:
        for old in self.path.glob("strategy*.yaml"):  # of an earlier start that had more pairs
            if old.name not in {strategy_file(place) for place in range(1, len(start.get("pairs", ())) + 1)}:
                self._bear(functools.partial(old.unlink, missing_ok=True))
        starts = [*self._starts, {**start, "seconds_before": self.seconds_before}]
        self.note("environment.json", {"starts": starts})

    def note_strategy(self, place: int, strategy: DistributedStrategy) -> None:
        self._bear(lambda: strategy.save(self.path / strategy_file(place)))

    def write(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        self._bear(lambda: self._metrics.write(line))

    def note(self, name: str, value: Any) -> None:
        self._bear(lambda: write_json(self.path / name, value))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._metrics.close()

    def _bear(self, write: Callable[[], object]) -> None:
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
    """To append, line by line and not through a buffer; a line that a kill has cut off stays a line of its own."""
    file = path.open("a+b", buffering=0)
    file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
    if file.read() not in (b"", b"\n"):
        file.write(b"\n")
    return file


def _known_starts(path: Path) -> list[dict[str, Any]]:
    found = read_json(path / "environment.json", {})
    starts = found.get("starts", []) if isinstance(found, dict) else []
    return [start for start in starts if isinstance(start, dict)]


@final
class OwnLog:
    """This rank's log under fleetrun, in the folder of the run."""

    def __init__(self, folder: Path, rank: int) -> None:
        log = os.environ.get(WORKER_LOG)
        self._log = Path(log) if log else None
        self._place = folder / f"workerlog.{rank}"
        if self._log is not None and not self._is_there():
            with contextlib.suppress(OSError):  # a courtesy: the log itself is where fleetrun keeps it
                folder.mkdir(parents=True, exist_ok=True)
                if self._place.is_file() and not self._place.is_symlink():  # of an earlier start, perhaps with its traceback
                    os.replace(self._place, self._place.with_name(f"{self._place.name}.previous"))
                self._place.unlink(missing_ok=True)
                self._place.symlink_to(self._log)
            atexit.register(self.keep)  # once more: the traceback of what ended the run comes after its monitor is closed

    def _is_there(self) -> bool:
        """fleetrun --log_dir names the folder of the run."""
        assert self._log is not None
        return self._log.parent.resolve() == self._place.parent.resolve()

    def keep(self) -> None:
        """The next run empties the log where it lies."""
        if self._log is None or self._is_there():
            return
        with contextlib.suppress(OSError):
            partial = self._place.with_name(f".{self._place.name}.part")
            shutil.copyfile(self._log, partial)
            os.replace(partial, self._place)


# Where and of what a run is made: versions, devices, ranks, the command. No variable of the environment is written down.

SECRET_WORDS = frozenset(
    "token password passwd pwd pass passphrase secret secrets key apikey auth authorization access credential credentials".split()
)
HIDDEN = "(hidden)"


def command_of(arguments: Sequence[str]) -> list[str]:
    """The command line, but for values that sound like secrets: `--api-key X`, `hub.token=X`, `https://user:X@host`."""
    shown, hides_next = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_secret = bool(SECRET_WORDS & set(re.split(r"[-_.+/]", name.lower())))
        shown.append(HIDDEN if hides_next else f"{name}={HIDDEN}" if is_secret and equals else without_password(argument))
        hides_next = is_secret and not equals and name.startswith("-")
    return shown


def without_password(text: str) -> str:
    """Of an address with a user in it."""
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
        "pairs": [told(pair) for pair in pairs],
    }


def told(pair: Pair) -> dict[str, Any]:
    found = {"model": pair.model_name, "parameters": pair.parameters, "optimizer": pair.optimizer_name}
    return found | ({"wrapped_in": "DistributedDataParallel"} if pair.is_wrapped else {})
