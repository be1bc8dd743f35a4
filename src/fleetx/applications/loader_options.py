"""Pass the options of the applications' loaders on to the loader, its source, or both; none is ignored."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from ..config.kinds import boolean
from ..errors import ConfigError, DataError, did_you_mean

OF_LOADER = ("seed", "workers", "drop_last")


def refuse_unknown(options: Mapping[str, Any], known: Collection[str], who: str) -> None:
    """Raise a `ConfigError` for an option that `who` does not have."""
    for name in options:
        if name not in known:
            listed = ", ".join(dict.fromkeys(known))
            raise ConfigError(f"{who} has no option `{name}`.{did_you_mean(name, known)} Its options are: {listed}.")


def pick(options: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the given options whose names are among `names`."""
    return {name: options[name] for name in names if name in options}


def of_loader(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options that the loader itself takes."""
    if "drop_last" in options:
        boolean().check("drop_last", options["drop_last"])
    return pick(options, OF_LOADER)


def require_place(data: object, what: str, builtin: Collection[str]) -> None:
    """Check that `data` is an existing path; the error names the built-in data, whose name may be misspelt."""
    names = " or ".join(f'"{name}"' for name in builtin)
    if not isinstance(data, str | os.PathLike) or isinstance(os.fspath(data), bytes):
        raise ConfigError(f"data is {data!r}; it must be {what}, or {names}.")
    if not os.path.lexists(data):
        hint = did_you_mean(str(data), builtin)
        raise DataError(f"{str(data)!r}: there is no such file or folder.{hint} Give {what}, or {names}, which need no download.")
