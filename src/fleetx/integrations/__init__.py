"""Adapt FleetX to training frameworks: the framework's loop stays, and a strategy takes the place of its DDP wrapper.

accelerate     Accelerator(strategy=...)                    transformers   FleetTrainer(..., fleet_strategy=...)
lightning      Trainer(strategy=FleetStrategy(...))         Ray Train needs none: fleet.init() adopts its process group
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

from ..errors import ConfigError


def require_package(name: str, *, extra: str, oldest: tuple[int, ...]) -> Any:
    """Import the framework, or raise an error with the line that installs it."""
    try:
        module = importlib.import_module(name)
    except ImportError as missing:
        raise ConfigError(f'fleetx.integrations needs {name} ({missing}). Write: pip install "fleetx[{extra}]"') from missing
    found = importlib.metadata.version(name)
    numbers = tuple(int(part) for part in found.split(".")[: len(oldest)] if part.isdigit())
    if numbers < oldest:
        wanted = ".".join(map(str, oldest))
        raise ConfigError(f'{name} is {found}; the adapter needs {wanted} or later. Write: pip install "fleetx[{extra}]"')
    return module


def require_seams(owner: Any, names: tuple[str, ...]) -> None:
    """Check that the framework still has the methods the adapter overrides: without one it would be bypassed silently."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        version = importlib.metadata.version(owner.__module__.split(".")[0])
        raise ConfigError(
            f"{owner.__module__}.{owner.__name__} of version {version} has no {', '.join(missing)}, which the adapter needs. "
            "Use a version that has, or fleet.distribute(...) in a loop of your own."
        )
