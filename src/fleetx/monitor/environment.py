"""Where and of what a run is made: versions, devices, ranks, the command. No variable of the environment is written down."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import torch

from .. import __version__
from ..dist.world import World
from ..engine.registry import Pair

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
