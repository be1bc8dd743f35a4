"""The catalogue: one file in this folder is one part. There is no list to edit.

Each part is public by the name of its class, `DGC`, and its settings as a dict by `DGCSettings`. `__init__.pyi` tells type
checkers and editors of both, `switches.pyi` of the settings of `DistributedStrategy`; `make types` writes the two from the parts.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from typing import Any, TypedDict

from ..engine.slots import Part


@functools.cache
def catalogue() -> dict[str, type[Part]]:
    """Return every part by name, found by walking this folder.

    Examples:
        >>> sorted(X.strategies.catalogue())[:4]
        ['adaptive_localsgd', 'amp', 'auto', 'bf16_allreduce']
    """
    parts: dict[str, type[Part]] = {}
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Part) and value.__module__ == module.__name__:
                parts[value.name] = value
    return parts


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    # Modules begin with a small letter: a look for one must not import all of them.
    by_class = {part.__name__: part for part in catalogue().values()} if name[:1].isupper() else {}
    if name in by_class:
        return by_class[name]
    part = by_class.get(name.removesuffix("Settings"))
    if part is None or not dataclasses.fields(part):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return TypedDict(name, {field.name: Any for field in dataclasses.fields(part)}, total=False)  # type: ignore[operator]


def __dir__() -> list[str]:
    return sorted([part.__name__ for part in catalogue().values()] + ["catalogue"])
