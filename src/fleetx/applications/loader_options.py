"""Options of the applications' loaders: each goes to the loader, to its source, or to both; none is ignored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..errors import ConfigError, did_you_mean

OF_LOADER = ("seed", "workers", "drop_last")


def refuse_unknown(options: Mapping[str, Any], known: Collection[str], who: str) -> None:
    for name in options:
        if name not in known:
            listed = ", ".join(dict.fromkeys(known))
            raise ConfigError(f"{who} has no option `{name}`.{did_you_mean(name, known)} Its options are: {listed}.")


def taken(options: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Those of the options that were given and are among the names."""
    return {name: options[name] for name in names if name in options}
