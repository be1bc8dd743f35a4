"""The catalogue: one file in this folder is one part. There is no list to edit."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from ..engine.slots import Part


@functools.cache
def catalogue() -> dict[str, type[Part]]:
    """Return every part by name, found by walking this folder."""
    parts: dict[str, type[Part]] = {}
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Part) and value.__module__ == module.__name__:
                parts[value.name] = value
    return parts
