"""Options of the applications' loaders: each goes to the loader, to its source, or to both; none is ignored."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from ..config.kinds import boolean
from ..errors import ConfigError, DataError, did_you_mean

OF_LOADER = ("seed", "workers", "drop_last")


def refuse_unknown(options: Mapping[str, Any], known: Collection[str], who: str) -> None:
    for name in options:
        if name not in known:
            listed = ", ".join(dict.fromkeys(known))
            raise ConfigError(f"{who} has no option `{name}`.{did_you_mean(name, known)} Its options are: {listed}.")


def taken(options: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Those of the options that were given and are among the names."""
    return {name: options[name] for name in names if name in options}


def of_loader(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that the loader itself takes."""
    if "drop_last" in options:
        boolean().check("drop_last", options["drop_last"])
    return taken(options, OF_LOADER)


def require_place(data: object, what: str, builtin: Collection[str]) -> None:
    """Data are given by a path that exists, or else by the name of built-in data, which may have been misspelt."""
    names = " or ".join(f'"{name}"' for name in builtin)
    if not isinstance(data, str | os.PathLike) or isinstance(os.fspath(data), bytes):
        raise ConfigError(f"data is {data!r}; it must be {what}, or {names}.")
    if not os.path.lexists(data):
        hint = did_you_mean(str(data), builtin)
        raise DataError(f"{str(data)!r}: there is no such file or folder.{hint} Give {what}, or {names}, which need no download.")
