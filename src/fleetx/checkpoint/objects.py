"""Kinds of objects in a checkpoint: how the state of each is taken, checked and put back.

A state is a tree of plain values and live tensors. `check` raises before any object is changed; after it `put` must not fail.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..config.text import listed
from ..data.sampler import FleetSampler
from ..dist.fully_sharded import cut, is_divided, is_fully_sharded, shown_as
from ..engine.optimizer import FleetOptimizer
from ..engine.setup.optimizer_state import check_optimizer_state, load_optimizer_state, optimizer_state
from ..engine.state import check_training_state, load_training_state, training_state
from ..errors import CheckpointError, did_you_mean


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    recognises: Callable[[Any], bool]
    take: Callable[[Any], Any]
    put: Callable[[Any, Any], None]
    check: Callable[[Any, Any], None] = lambda target, state: None


def kind_of(value: Any) -> Kind:
    """Return the kind of an object. Any other object is a plain value, which load_checkpoint returns."""
    return next((kind for kind in KINDS if kind.recognises(value)), VALUE)


def check_all(targets: Mapping[str, Any], saved: Mapping[str, tuple[str, Any]]) -> None:
    """Raise if a saved state does not fit its target; nothing is changed."""
    for name, target in targets.items():
        if name not in saved:
            held = ", ".join(saved) or "nothing"
            raise CheckpointError(f"the checkpoint holds no `{name}`.{did_you_mean(name, saved)} It holds: {held}.")
        kind, (saved_kind, state) = kind_of(target), saved[name]
        if kind.name != saved_kind:
            raise CheckpointError(f"`{name}` was saved as {saved_kind}, and is to be loaded into {kind.name}.")
        try:
            kind.check(target, state)
        except CheckpointError as error:
            raise CheckpointError(f"`{name}`: {error}") from None


PRIVATE_KEYS = frozenset(("_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial", "_schedulers", "_milestones"))
"""Keys of torch's schedulers that not every version of torch has."""


def check_scheduler(target: Any, state: Any) -> None:
    """Raise if another kind of scheduler was saved: torch's schedulers accept any dict and would end up with a mixture.

    They make an attribute of every key: one named as a method, public or private, would take the method's place."""
    if not isinstance(target, LRScheduler):
        return
    if not isinstance(state, Mapping):
        raise CheckpointError(f"the checkpoint holds {type(state).__name__} as the state of a scheduler; it is a dict.")
    mine = target.state_dict()
    foreign = sorted({str(key) for key in mine.keys() ^ state.keys() if not str(key).startswith("_")})
    if foreign:
        raise CheckpointError(
            f"the checkpoint was saved by another kind of scheduler than {type(target).__name__}: only one of them has "
            f"{', '.join(foreign)}."
        )
    kind = type(target)
    of_torch = kind.__module__.startswith("torch.")  # a class of the user's may add attributes of its own while it runs
    unknown = sorted({str(key) for key in state.keys() - mine.keys() - PRIVATE_KEYS if of_torch or hasattr(kind, str(key))})
    if unknown:
        raise CheckpointError(f"the checkpoint's state of {kind.__name__} has keys that it does not save: {listed(unknown, 5)}.")
    for inner, saved in zip(getattr(target, "_schedulers", ()), state.get("_schedulers", ()), strict=False):
        check_scheduler(inner, saved)


# --- models -------------------------------------------------------------------------------------------------------------


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return the state dict and the non-persistent buffers, which training may have changed as well."""
    persistent: dict[str, Any] = dict(model.state_dict())
    hidden = {name: buffer for name, buffer in _buffers(model).items() if name not in persistent}
    return {"state_dict": persistent, "non_persistent": hidden}


def divided_as(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole state dict with this rank's part of the weights that fully_shard has divided. No collective."""
    mine = model.state_dict() if is_fully_sharded(model) else {}
    divided = {name: shown_as(mine[name], cut(value, mine[name])) for name, value in state.items() if is_divided(mine.get(name))}
    return {**state, **divided}


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", ""): buffer for name, buffer in model.named_buffers()}


def check_model(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Raise if names, shapes or number types of the saved model differ from this one."""
    mine = model_state(model)
    for part in ("state_dict", "non_persistent"):
        here, there = mine[part], state[part]
        missing, unexpected = [n for n in here if n not in there], [n for n in there if n not in here]
        if missing or unexpected:
            raise CheckpointError(
                f"the checkpoint is of another model. Not in it: {_listed(missing)}; not in this model: {_listed(unexpected)}."
            )
        both = [(name, here[name], there[name]) for name in here if isinstance(here[name], Tensor)]
        for what, property_of in (("shapes", lambda t: tuple(t.shape)), ("number types", lambda t: t.dtype)):
            wrong = [
                f"{name} {property_of(saved)} instead of {property_of(current)}"
                for name, current, saved in both
                if isinstance(saved, Tensor) and property_of(current) != property_of(saved)
            ]
            if wrong:
                raise CheckpointError(f"the checkpoint is of a model with other {what}: {_listed(wrong)}.")


@torch.no_grad()
def put_model(model: nn.Module, state: Mapping[str, Any]) -> None:
    model.load_state_dict(divided_as(model, state["state_dict"]))
    buffers = _buffers(model)
    for name, value in state["non_persistent"].items():
        buffers[name].copy_(value)


def _listed(entries: list[str]) -> str:
    return listed(entries, 5) or "nothing"


# --- table of kinds -----------------------------------------------------------------------------------------------------


def _is_other(value: Any) -> bool:
    """Return whether it is another object with a state dict: a scheduler, a scaler, a stateful loader, a class of the user's."""
    if isinstance(value, (nn.Module, Optimizer, FleetSampler, type)):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _put_numpy(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


def _tried(put: Callable[[Any, Any], None], copy_of: Callable[[Any], Any]) -> Callable[[Any, Any], None]:
    """Return a check that puts the state into another generator of the same kind: a state from elsewhere may not fit."""

    def check(target: Any, state: Any) -> None:
        try:
            put(copy_of(target), state)
        except Exception as error:
            raise CheckpointError(
                f"the checkpoint holds no state of a generator like this one: {type(error).__name__}: {error}"
            ) from None

    return check


def _other_numpy(generator: np.random.Generator) -> np.random.Generator:
    return np.random.Generator(type(generator.bit_generator)())


def _put_torch(generator: torch.Generator, state: Any) -> None:
    generator.set_state(state)


def _put_python(generator: random.Random, state: Any) -> None:
    generator.setstate(state)


def _put_nothing(target: Any, state: Any) -> None:
    """Do nothing: load_checkpoint returns values instead of loading them in place."""


VALUE = Kind("a value", lambda value: True, take=lambda value: value, put=_put_nothing)
TRAINING = Kind(
    "a distributed optimizer",
    lambda value: isinstance(value, FleetOptimizer),
    training_state,
    load_training_state,
    check_training_state,
)
KINDS = (
    # Loaded in this order: small objects, whose own code may still raise, come before any weight is changed.
    Kind(
        "a torch.Generator",
        lambda v: isinstance(v, torch.Generator),
        lambda v: v.get_state(),
        _put_torch,
        _tried(_put_torch, lambda v: torch.Generator(v.device)),
    ),
    Kind(
        "a numpy Generator",
        lambda v: isinstance(v, np.random.Generator),
        lambda v: v.bit_generator.state,
        _put_numpy,
        _tried(_put_numpy, _other_numpy),
    ),
    Kind(
        "a random.Random",
        lambda v: isinstance(v, random.Random),
        lambda v: v.getstate(),
        _put_python,
        _tried(_put_python, lambda v: type(v)()),
    ),
    Kind(
        "a sampler",
        lambda v: isinstance(v, FleetSampler),
        lambda v: v.state_dict(),
        lambda v, state: v.load_state_dict(state),
        lambda v, state: v.check_state_dict(state),
    ),
    Kind("an object with a state dict", _is_other, lambda v: v.state_dict(), lambda v, s: v.load_state_dict(s), check_scheduler),
    Kind("a model", lambda v: isinstance(v, nn.Module), model_state, put_model, check_model),
    TRAINING,
    Kind("an optimizer", lambda v: isinstance(v, Optimizer), optimizer_state, load_optimizer_state, check_optimizer_state),
)


def put_all(targets: Mapping[str, Any], saved: Mapping[str, tuple[str, Any]]) -> None:
    for kind in KINDS:
        for name, target in targets.items():
            if kind_of(target) is kind:
                kind.put(target, saved[name][1])
