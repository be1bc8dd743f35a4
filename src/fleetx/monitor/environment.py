"""Where and of what a run is made: versions, devices, ranks, the command. No variable of the environment is written down."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import torch

from .. import __version__
from ..running import Pair
from ..world import World

SECRET_WORDS = ("token", "password", "passwd", "secret", "api_key", "api-key", "apikey", "credential")
HIDDEN = "(hidden)"


def command_of(arguments: Sequence[str]) -> list[str]:
    """The command line, but for values of flags that sound like secrets."""
    shown, hides_next = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_secret = name.startswith("-") and any(word in name.lower() for word in SECRET_WORDS)
        shown.append(HIDDEN if hides_next else f"{name}={HIDDEN}" if is_secret and equals else argument)
        hides_next = is_secret and not equals
    return shown


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
    return {"model": pair.model_name, "parameters": pair.parameters, "optimizer": pair.optimizer_name}
