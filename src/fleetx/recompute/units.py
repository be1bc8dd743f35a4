"""Choose the modules to compute again: by name or pattern, or every repeated block of a model."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ..engine.setup.placement import plain_name
from ..errors import ConfigError, did_you_mean

KEY = 'recompute_configs["checkpoints"]'


def chosen_units(model: nn.Module, wanted: Sequence[str]) -> dict[str, nn.Module]:
    """Return units by name, in the model's order: `wanted`, else the model's own list, else repeated blocks, or children."""
    every = {plain_name(name): module for name, module in model.named_modules(remove_duplicate=False) if name}
    chosen = outermost(every, wanted, KEY) if wanted else natural_units(model)
    if not chosen:
        raise ConfigError(
            f"recompute finds nothing to compute again in {type(model).__name__}: it has no modules inside that have parameters. "
            f"Name some in {KEY}, or leave recompute out."
        )
    for name in chosen:
        if any(isinstance(part, torch.jit.ScriptModule) for part in every[name].modules()):
            raise ConfigError(
                f"recompute cannot take `{name}`: it is a TorchScript module, or holds one, whose buffers and mode cannot be put "
                f"back for a second run. Leave it unscripted, or name other modules in {KEY}."
            )
    names = {id(every[name]): name for name in reversed(chosen)}  # a module that stands in two places is one unit
    return {name: every[name] for name in chosen if names[id(every[name])] == name}


def natural_units(model: nn.Module) -> list[str]:
    """Return the names of a model's units where none are named: its own list, else repeated blocks, else children."""
    own = getattr(model, "checkpoints", None)
    if own and isinstance(own, list | tuple):
        every = {plain_name(name): module for name, module in model.named_modules(remove_duplicate=False) if name}
        return outermost(every, own, f"{KEY} is empty, and model.checkpoints")
    return repeated_blocks(model) or called_children(model)


def outermost(every: Mapping[str, nn.Module], wanted: Sequence[str], whose: str) -> list[str]:
    """Match names and patterns, and drop units inside another one, whose second run would run them a third time."""
    called = [name for name, module in every.items() if is_called(module)]
    matched: dict[str, bool] = {}
    for entry in wanted:
        if not isinstance(entry, str):
            raise ConfigError(f"{whose} names {entry!r}, a {type(entry).__name__}. Write names of modules, as text.")
        matches = [name for name in called if fnmatch.fnmatchcase(name, entry)]
        if not matches and entry in every:
            raise ConfigError(
                f"{whose} names `{entry}`, a {type(every[entry]).__name__}, which has no forward and so is never called itself. "
                f"Name the modules in it: `{entry}.*`."
            )
        if not matches:
            near = did_you_mean(entry, called) or " model.named_modules() lists those there are."
            raise ConfigError(f"{whose} names `{entry}`; the model has no such module.{near}")
        for name in matches:
            matched[name] = matched.get(name, False) or name == entry
    chosen = [name for name in called if name in matched and not _parent_in(name, matched)]
    inside = [name for name, is_named in matched.items() if is_named and name not in chosen]
    if inside:
        parent = _parent_in(inside[0], matched)
        raise ConfigError(f"{whose} names both `{parent}` and `{inside[0]}`, which is a part of it. Name one of the two.")
    return chosen


def _parent_in(name: str, names: dict[str, bool]) -> str | None:
    parts = name.split(".")
    above = (".".join(parts[:length]) for length in range(1, len(parts)))
    return next((parent for parent in above if parent in names), None)


def called_children(model: nn.Module, path: str = "") -> list[str]:
    """Return the names of children with parameters; for a list of modules, of the modules in it."""
    names: list[str] = []
    for name, child in model.named_children():
        if not is_called(child):
            names += called_children(child, f"{path}{name}.")
        elif any(True for _ in child.parameters()):
            names.append(plain_name(f"{path}{name}"))
    return names


def is_called(module: nn.Module) -> bool:
    """Return whether the module has a forward; a ModuleList and similar ones have none, so a patch would never run."""
    forward = getattr(type(module), "forward", None)  # a scripted module's class has none that can be read
    return forward is not nn.Module.forward or "forward" in vars(module)


def repeated_blocks(model: nn.Module) -> list[str]:
    """Return the outermost modules in a ModuleList or Sequential that have several layers and a class in common."""
    blocks: list[str] = []

    def look(module: nn.Module, path: str) -> None:
        children = [(f"{path}{name}", child) for name, child in module.named_children()]
        kinds = Counter(type(child) for _, child in children if is_block(child))
        in_a_row = isinstance(module, nn.ModuleList | nn.Sequential)
        for name, child in children:
            if in_a_row and is_block(child) and kinds[type(child)] > 1:
                blocks.append(plain_name(name))
            else:
                look(child, f"{name}.")

    look(model, "")
    return blocks


def is_block(module: nn.Module) -> bool:
    """Return whether it has parameters and several layers; computing one layer again would save nothing."""
    leaves = sum(1 for part in module.modules() if not any(True for _ in part.children()))
    return leaves > 1 and is_called(module) and any(True for _ in module.parameters())
