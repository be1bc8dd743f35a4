"""Apply a function to every tensor in a nested value, keeping the containers' own types."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor


def map_tensors(fn: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Map tensors in lists, tuples, named tuples, mappings and dataclasses; anything else is passed through as it is."""
    return map_leaves(Tensor, fn, value)


def tensors_in(value: Any) -> list[Tensor]:
    """List all tensors, in the order in which they are found."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, value)
    return found


def map_leaves(kind: type[Any], fn: Callable[[Any], Any], value: Any) -> Any:
    """Map leaves of another kind than tensors."""
    if isinstance(value, kind):
        return fn(value)
    if type(value) is dict:
        return {key: map_leaves(kind, fn, item) for key, item in value.items()}
    if isinstance(value, MutableMapping):
        if torch.compiler.is_compiling() and dataclasses.is_dataclass(type(value)):  # the compiler cannot trace copy.copy
            return type(value)(**{key: map_leaves(kind, fn, item) for key, item in value.items()})
        changed = copy.copy(value)  # a Hugging Face ModelOutput is a mapping whose keys are attributes too
        for key, item in value.items():
            changed[key] = map_leaves(kind, fn, item)
        return changed
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(kind, fn, item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_leaves(kind, fn, item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f.name for f in dataclasses.fields(value) if f.init]
        return dataclasses.replace(value, **{name: map_leaves(kind, fn, getattr(value, name)) for name in fields})
    return value
