"""The state of a plain torch optimizer: taken, checked, put back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ...config.text import listed
from ...errors import CheckpointError
from .own_optimizer import Update, load_in_place

CLASS, FLAGS, SHARES = "class", "flags", "shares"
RESTORE = "_fleetx_restore_state"
"""On an optimizer whose state is divided between the ranks: gathers it."""
SHAPED_AS_THE_PARAMETER = frozenset(
    "momentum_buffer exp_avg exp_avg_sq max_exp_avg_sq exp_inf square_avg grad_avg acc_delta sum prev ax step_size master".split()
)
"""In torch's own optimizers. Others may be factored, flattened or single numbers."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A tensor that is divided between ranks, as each of them writes it: its own parts, and where all of them lie."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """By which the elements, in the order of memory, make the tensor."""
    pieces: tuple[tuple[int, int, Tensor | None], ...]
    """First element, the one after the last, and the numbers where this rank is to write them."""


def optimizer_state(optimizer: Optimizer, state_dict: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the state dict and the class: Adam's state looks like AdamW's, and would silently turn one into the other.

    Of LARS and LAMB also who is decayed and adapted: settings of the script, which the state dict does not hold. `state_dict`:
    of all ranks, where each has a share; None: the optimizer's own."""
    said: dict[str, Any] = {CLASS: type(optimizer).__name__}
    if isinstance(optimizer, Update) and optimizer.rule_settings:
        said[FLAGS] = optimizer.flags_by_name()
    return {**said, **(optimizer.state_dict() if state_dict is None else state_dict)}


def give_whole_state_back(optimizer: Optimizer) -> None:
    """Undo the sharding of an earlier pair, before this optimizer is distributed again. Collective, where there was one."""
    restore = optimizer.__dict__.pop(RESTORE, None)
    if restore is not None:
        restore()


def check_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raise if this state is another optimizer's; nothing is changed."""
    if state[CLASS] != type(optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint was saved by another kind of optimizer than {type(optimizer).__name__}: by {state[CLASS]}."
        )
    mine, saved = ([len(group["params"]) for group in groups] for groups in (optimizer.param_groups, state["param_groups"]))
    if mine != saved:
        raise CheckpointError(
            f"the checkpoint's optimizer has groups of {saved} parameters, this one of {mine}. "
            "Build the optimizer as in the run that saved."
        )
    if SHARES not in state:
        _check_shapes(optimizer, state)
    if isinstance(optimizer, Update) and optimizer.rule_settings:
        _check_rule(optimizer, state)


def _check_rule(optimizer: Update, state: Mapping[str, Any]) -> None:
    """Raise where the file's settings differ from the script's: torch would let the file win, and drop the script's without a
    word."""
    differ = [
        f"{key} {saved[key]!r} in group {number}, this one {group[key]!r}"
        for number, (group, saved) in enumerate(zip(optimizer.param_groups, state["param_groups"], strict=True))
        for key in optimizer.rule_settings
        if key in saved and saved[key] != group[key]
    ]
    before, now = state.get(FLAGS, {}), optimizer.flags_by_name()  # a file of an older version has none
    differ += [
        f"{key}={before[name][key]} for {name}, this one {value}"
        for name, flags in now.items()
        if name in before
        for key, value in flags.items()
        if before[name][key] != value
    ]
    if differ:
        part = type(optimizer).__name__.lower()
        raise CheckpointError(
            f"the checkpoint's {type(optimizer).__name__} has {listed(differ, 5, separator='; ')}. Write the checkpoint's values "
            f"into {part}_configs, the groups or {type(optimizer).__name__}(...); or start without the optimizer's state: leave "
            "the optimizer out of fleet.load_checkpoint(...)."
        )


def _check_shapes(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raise where state and parameter differ in shape: torch loads any, and fails in the next step or, worse, broadcasts. It
    tells parameters by number alone."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    wrong = [
        f"{key} of parameter {number} {tuple(value.shape)} instead of {tuple(params[number].shape)}"
        for number, held in state["state"].items()
        for key, value in held.items()
        if key in SHAPED_AS_THE_PARAMETER and isinstance(value, Tensor) and value.shape != params[number].shape
    ]
    if wrong:
        raise CheckpointError(
            f"the checkpoint's optimizer has parameters of other shapes, or in another order: {listed(wrong, 5)}."
        )


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load the state; what was kept wider than a 16-bit parameter is put back after load_state_dict, which casts state to the
    parameter's type."""
    plain = {key: value for key, value in state.items() if key not in (CLASS, FLAGS, SHARES)}
    load_in_place(optimizer, optimizer.load_state_dict, plain)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for number, saved in state["state"].items():
        mine = optimizer.state[params[number]]
        for key, value in saved.items():
            if isinstance(value, Tensor) and isinstance(mine.get(key), Tensor) and mine[key].dtype != value.dtype:
                mine[key] = value.to(mine[key].device)
