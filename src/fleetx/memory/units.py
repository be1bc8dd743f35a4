"""Which modules are computed again: by name or pattern, or every repeated block of a model."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Sequence

from torch import nn

from ..errors import ConfigError, did_you_mean
from ..placement import plain_name

KEY = 'recompute_configs["checkpoints"]'


def chosen_units(model: nn.Module, wanted: Sequence[str]) -> dict[str, nn.Module]:
    """By name, in the model's order; no unit inside another, whose second run would run it a third time."""
    named = {plain_name(name): module for name, module in model.named_modules() if name}
    if not wanted:
        return {name: named[name] for name in own_choice(model, named)}
    found: dict[str, bool] = {}
    for entry in wanted:
        matches = [name for name in named if fnmatch.fnmatchcase(name, entry)]
        if not matches:
            raise ConfigError(f"{KEY} names `{entry}`; the model has no such module.{did_you_mean(entry, named)}")
        for name in matches:
            found[name] = found.get(name, False) or name == entry
    outermost = [name for name in named if name in found and not _parent_in(name, found)]
    inside = [name for name, is_named in found.items() if is_named and name not in outermost]
    if inside:
        parent = _parent_in(inside[0], found)
        raise ConfigError(f"{KEY} names both `{parent}` and `{inside[0]}`, which is a part of it. Name one of the two.")
    return {name: named[name] for name in outermost}


def _parent_in(name: str, names: dict[str, bool]) -> str | None:
    parts = name.split(".")
    above = (".".join(parts[:length]) for length in range(1, len(parts)))
    return next((parent for parent in above if parent in names), None)


def own_choice(model: nn.Module, named: dict[str, nn.Module]) -> list[str]:
    """What the model itself calls its checkpoints; else every repeated block; else its children."""
    own = getattr(model, "checkpoints", None)
    if isinstance(own, list | tuple) and own and all(isinstance(name, str) and name in named for name in own):
        return list(own)
    blocks = repeated_blocks(model)
    return blocks or [name for name, child in model.named_children() if name in named and any(True for _ in child.parameters())]


def repeated_blocks(model: nn.Module) -> list[str]:
    """Modules of one class, made of several others, that stand in a row: the outermost such rows."""
    found: list[str] = []

    def look(module: nn.Module, path: str) -> None:
        children = [(f"{path}{name}", child) for name, child in module.named_children()]
        kinds = Counter(type(child) for _, child in children if is_block(child))
        in_a_row = isinstance(module, nn.ModuleList | nn.Sequential)
        for name, child in children:
            if in_a_row and is_block(child) and kinds[type(child)] > 1:
                found.append(plain_name(name))
            else:
                look(child, f"{name}.")

    look(model, "")
    return found


def is_block(module: nn.Module) -> bool:
    """It has parameters, and several layers: of one layer alone, computed again, nothing is won."""
    leaves = sum(1 for part in module.modules() if not any(True for _ in part.children()))
    is_container = type(module) in (nn.ModuleList, nn.ModuleDict)
    return leaves > 1 and not is_container and any(True for _ in module.parameters())
