"""Refuse settings of a group: those without effect, misspelt keys, rates that are not finite, kernels where none can run."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from ..dist.triton_support import runs_here
from ..errors import ConfigError, did_you_mean

# --- arguments under other optimizers' names ---------------------------------------------------------------------------


@final
class Default(float):
    """The default of an argument, distinct from the same number given by the user."""


def in_own_names(settings: Mapping[str, Any], spellings: Mapping[str, str], *, where: str) -> dict[str, Any]:
    """Return a copy under our own keys; refuse two spellings of one setting, since either value may be meant."""
    for theirs, ours in spellings.items():
        if theirs in settings and ours in settings:
            raise ConfigError(
                f"{where} has {theirs}={settings[theirs]!r} and {ours}={settings[ours]!r}, which are one setting. "
                "Write one of them."
            )
    return {spellings.get(key, key): value for key, value in settings.items()}


def refuse_arguments(kind: str, given: Iterable[str], *, known: Iterable[str], instead: Mapping[str, str]) -> None:
    """Raise a TypeError for the first unknown argument, as Python does, with what to write instead."""
    known = [name for name in known if name != "synonyms"]
    for name in given:
        hint = f" {instead[name]}." if name in instead else did_you_mean(name, known)
        raise TypeError(f"{kind}() has no argument {name!r}.{hint} It takes {', '.join(known)}.")


# --- settings of a group ----------------------------------------------------------------------------------------------

OF_OTHERS = ("nesterov", "dampening", "amsgrad", "differentiable")
OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
NEAR = 0.85
"""Similarity above which an unknown key counts as a misspelt one; below, it is a key of the user's own."""


def refuse_no_rate(number: int, lr: Any) -> None:
    """Refuse a learning rate that is not finite or below 0. One on a device is not read: that would wait for the device."""
    if (not isinstance(lr, Tensor) or lr.device.type == "cpu") and not 0.0 <= lr < math.inf:
        raise ConfigError(f"lr of group {number} is {lr!r}; it must be a finite number at least 0. Check the code that sets it.")


def refuse_without_effect(kind: str, number: int, group: Mapping[str, Any], spellings: Mapping[str, str]) -> None:
    """Refuse settings that this optimizer does not read; checked at every step, since they may be set during the run."""
    for key in OF_OTHERS:
        if group.get(key):
            raise ConfigError(f"group {number} has {key}={group[key]!r}, and {kind} knows no {key}. Leave it out.")
    for theirs, ours in spellings.items():
        if group.get(theirs):
            raise ConfigError(
                f"group {number} has {theirs}={group[theirs]!r}, which {kind} does not read. Set {ours} in the group instead."
            )


def refuse_near_misses(kind: str, number: int, group: Iterable[str], known: Iterable[str]) -> None:
    """Refuse keys such as `lars_coef` or `adapts`, which are not read and look like misspelt ones."""
    known = [*known]
    for key in group:
        if key in known or key in OF_SCHEDULERS or key in ("params", "param_names"):
            continue
        if key.startswith(("lars_", "lamb_")) or difflib.get_close_matches(key, known, n=1, cutoff=NEAR):
            near = did_you_mean(key, known)
            raise ConfigError(f"group {number} has {key!r}, which {kind} does not know.{near} It knows {', '.join(known)}.")


def refuse_without_kernels(
    devices: Iterable[torch.device], *, carry_norms: bool, foreach: bool | None, fused: bool | None
) -> None:
    """Refuse options of the kernels where they cannot run; parameters on the meta device may still move to a GPU."""
    placed = [device for device in devices if device.type != "meta"]
    possible = not placed or any(map(runs_here, placed))
    if carry_norms and (foreach or fused is False or not possible):
        raise ConfigError("carry_norms=True saves the kernels a pass, and they do not run here. Leave it out.")
    if fused and not possible:
        raise ConfigError(
            f"fused=True, but the kernels run on CUDA devices, and some parameters are on {placed[0]}. Leave fused out, and "
            "list operations are used where kernels cannot run; or move the parameters first."
        )
