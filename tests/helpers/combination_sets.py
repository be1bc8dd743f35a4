"""Sets of up to three strategies: which are legal, and how each strategy is set where its effect is to be seen. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

from fleetx.engine.setup.conflicts import check_parts
from fleetx.engine.slots import Risk
from fleetx.errors import StrategyConflict
from fleetx.strategies import catalogue
from fleetx.strategy import DistributedStrategy

PARTS = {name: part for name, part in catalogue().items() if name != "auto"}
LARGEST = 3

FLEETS_TEN = (
    ("amp", "recompute"),
    ("dgc", "recompute"),
    ("lars", "recompute"),
    ("lamb", "recompute"),
    ("amp", "localsgd"),
    ("adaptive_localsgd", "amp"),
    ("amp", "lars"),
    ("amp", "lamb"),
    ("amp", "lars", "recompute"),
    ("amp", "lamb", "recompute"),
)
"""Those that Fleet documents."""
BEYOND_FLEET = (
    ("amp", "dgc"),
    ("lars", "localsgd"),
    ("lamb", "localsgd"),
    ("localsgd", "recompute"),
    ("gradient_merge", "localsgd"),
    ("amp", "localsgd"),
    ("dgc", "gradient_merge"),
    ("amp", "fp16_allreduce"),
    ("adaptive_localsgd", "lamb"),
)
"""Those that it cannot do, or drops."""
ADAPTIVE_WITH_ADAM = (("adaptive_localsgd",), "Adam")
"""Nor this; the second is the optimizer."""

ACTIVE: dict[str, dict[str, Any]] = {
    "adaptive_localsgd": {"init_k_steps": 2},
    "amp": {"dtype": "float16", "init_loss_scaling": 1024.0, "decr_every_n_nan_or_inf": 1},
    "clip_norm": {"max_norm": 1.0},
    "dgc": {"rampup_begin_step": 2, "rampup_step": 4, "sparsity": [0.5, 0.8], "min_numel": 64},
    "gradient_merge": {"k_steps": 2},
    "lars": {"lars_coeff": 0.1},
    "localsgd": {"k_steps": 3},
    "powersgd": {"begin_step": 2, "rank": 2, "min_compression": 1.0},
}
"""Settings by which each does something within a few updates of a small net; the others' own are such."""
AVERAGING = ("localsgd", "adaptive_localsgd")
NOT_LINEAR = ("amp", "lars", "lamb", "muon", "clip_norm")

Names = tuple[str, ...]


def all_sets(sizes: Sequence[int] = range(1, LARGEST + 1)) -> list[Names]:
    return [names for size in sizes for names in itertools.combinations(PARTS, size)]


def clashes(names: Collection[str]) -> list[Names]:
    """Pairs that claim one slot."""
    return [pair for pair in itertools.combinations(sorted(names), 2) if PARTS[pair[0]]().claims() & PARTS[pair[1]]().claims()]


def is_legal(names: Collection[str]) -> bool:
    return not clashes(names)


def neutral_settings(names: Collection[str], *, is_linear: bool = True) -> dict[str, dict[str, Any]]:
    """Of the parts that can be set to do nothing, these settings.

    Local SGD with a period of 1 averages weights after each update, which is averaging gradients only as long as the update is
    linear in them. Beside quantized_allreduce sharding saves a rounding: an owner takes the sum itself."""
    averages = is_linear and not any(name in NOT_LINEAR for name in names)
    settings = {name: PARTS[name].neutral() for name in names if averages or name not in AVERAGING}
    if "quantized_allreduce" in names:
        settings.pop("sharding", None)
    return {name: setting for name, setting in settings.items() if setting is not None}


def without_rounding(names: Collection[str]) -> Names:
    return tuple(name for name in names if PARTS[name].risk_class != Risk.ROUNDING)


def refusal(names: Names) -> tuple[str, list[str]]:
    """What a user is told who asks for an illegal set, and what is wrong with that; nothing, if all is well."""
    strategy = DistributedStrategy()
    for name in names:
        setattr(strategy, name, True)
    try:
        check_parts(strategy.parts())
    except StrategyConflict as conflict:
        text = str(conflict)
    else:
        return "", ["it is not refused"]
    slots = {slot for one, other in clashes(names) for slot in PARTS[one]().claims() & PARTS[other]().claims()}
    wrong = [f"`{slot.value}` is not named" for slot in slots if f"claim `{slot.value}`" not in text]
    wrong += [f"{name} is not named" for pair in clashes(names) for name in pair if name not in text]
    return text, wrong + ([] if "Keep one of them." in text else ["nothing says what to do"])
