"""What a group may not say: settings without effect, slips in keys, rates that are none, kernels where there are none."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from ..engine.triton_support import runs_here
from ..errors import ConfigError, did_you_mean

# --- What users write for a setting: other optimizers' names for it, slips, and two names at once ---------------------


@final
class Default(float):
    """The default of an argument, told from the same number given by the user."""


def in_our_words(given: Mapping[str, Any], spellings: Mapping[str, str], *, where: str) -> dict[str, Any]:
    """A copy under our own keys. Two spellings of one setting are refused: which of the values was meant?"""
    for theirs, ours in spellings.items():
        if theirs in given and ours in given:
            raise ConfigError(
                f"{where} has {theirs}={given[theirs]!r} and {ours}={given[ours]!r}, which are one setting. Write one of them."
            )
    return {spellings.get(key, key): value for key, value in given.items()}


def refuse_arguments(kind: str, given: Iterable[str], *, known: Iterable[str], instead: Mapping[str, str]) -> None:
    """As Python refuses an argument that nobody knows, with what to write for it."""
    known = [name for name in known if name != "synonyms"]
    for name in given:
        hint = f" {instead[name]}." if name in instead else did_you_mean(name, known)
        raise TypeError(f"{kind}() has no argument {name!r}.{hint} It takes {', '.join(known)}.")


# ----------------------------------------------------------------------------------------------------------------------

OF_OTHERS = ("nesterov", "dampening", "amsgrad", "differentiable")
OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
NEAR = 0.85
"""Of two keys: above it they are taken for one, misspelt. The user's own keys are to stay possible."""


def refuse_no_rate(number: int, lr: Any) -> None:
    """Before anything moves. A rate on a device is not looked at: nobody waits for it."""
    if (not isinstance(lr, Tensor) or lr.device.type == "cpu") and not 0.0 <= lr < math.inf:
        raise ConfigError(f"lr of group {number} is {lr!r}; it must be a finite number at least 0. Look at who has set it.")


def refuse_without_effect(kind: str, number: int, group: Mapping[str, Any], spellings: Mapping[str, str]) -> None:
    """Also in mid-run: whoever sets one of these means it."""
    for key in OF_OTHERS:
        if group.get(key):
            raise ConfigError(f"group {number} has {key}={group[key]!r}, and {kind} knows no {key}. Leave it out.")
    for theirs, ours in spellings.items():
        if group.get(theirs):
            raise ConfigError(
                f"group {number} has {theirs}={group[theirs]!r}, which {kind} does not read. Set {ours} in the group instead."
            )


def refuse_near_misses(kind: str, number: int, group: Iterable[str], known: Iterable[str]) -> None:
    """`lars_coef`, `adapts`: a key that nobody reads, and that somebody has meant."""
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
    """What is asked of the kernels where they cannot run. Parameters on the meta device are on their way to another."""

    nowhere = [device for device in devices if device.type != "meta"]
    possible = not nowhere or any(map(runs_here, nowhere))
    if carry_norms and (foreach or fused is False or not possible):
        raise ConfigError("carry_norms=True saves the kernels a pass, and they do not run here. Leave it out.")
    if fused and not possible:
        raise ConfigError(
            f"fused=True, but the kernels run on CUDA devices, and some parameters are on {nowhere[0]}. Leave fused out, and "
            "list operations are used where kernels cannot run; or move the parameters first."
        )
