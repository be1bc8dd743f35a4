"""FleetX for PyTorch: large-batch and low-bandwidth training strategies that compose."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import applications, errors, fleet, optim, strategies, utils
    from .cli.train_configs import parse_train_configs
    from .strategy import DistributedStrategy

__version__ = "0.1.0"
__all__ = [
    "DistributedStrategy",
    "__version__",
    "applications",
    "errors",
    "fleet",
    "optim",
    "parse_train_configs",
    "strategies",
    "utils",
]

_MODULES = ("applications", "errors", "fleet", "optim", "strategies", "utils")
_HOMES = {"DistributedStrategy": ".strategy", "parse_train_configs": ".cli.train_configs"}


def _late(name: str) -> Any:
    """Import a public name when it is first used: fleetrun must answer Ctrl-C and --help before torch's seconds of importing."""
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # checkers know the names, so that they find unknown ones
    __getattr__ = _late


def __dir__() -> list[str]:
    return sorted(__all__)
