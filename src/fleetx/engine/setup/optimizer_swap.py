"""Put our optimizer in the place of the user's: the same group dicts, state and hooks, so that scripts stay as they are."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...dist.agree import ranks_where
from ...errors import ConfigError
from ..slots import Part, Site
from .own_optimizer import Update
from .placement import plain_name

HOOKS = [f"_optimizer_{what}_{when}_hooks" for what in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")]
STATE_OF = "_fleetx_state_of"
UNSUITED = "_fleetx_state_is_unsuited"
"""On an optimizer that was given: whether it cannot go on with the state that the one in its place has left."""
STAND_IN = "_fleetx_stand_in"
"""On an optimizer that was given: a weak reference to the one in its place; None once it has its place back."""
NEUTRAL: Mapping[str, Any] = {"nesterov": False, "dampening": 0, "amsgrad": False, "differentiable": False}


# --- what is refused, before anything is touched --------------------------------------------------------------------


def require_inner(part: Part, optimizer: Optimizer, *, write: str) -> None:
    """Require exactly one of these classes: a step of the user's own, in a subclass, would be lost without a word."""
    if type(optimizer) in part.inner:
        return
    given = type(optimizer).__name__
    if isinstance(optimizer, Update) and optimizer.rule_settings:
        write += f"; or leave strategy.{part.name} out: {given} is a rule of its own"
    own = ", a class of your own whose step would be lost" if isinstance(optimizer, part.inner) else ""
    names = " or ".join(f"torch.optim.{kind.__name__}" for kind in part.inner)
    raise ConfigError(f"strategy.{part.name} takes the place of {names}; the one given is {given}{own}. Write {write}.")


def require_neutral(part: Part, optimizer: Optimizer) -> None:
    """Settings that the rule has no place for must be off, in every group."""
    for number, group in enumerate(optimizer.param_groups):
        for name, value in NEUTRAL.items():
            if group.get(name, value) != value:
                raise ConfigError(
                    f"strategy.{part.name} knows no {name}, and group {number} of the optimizer has {name}={group[name]!r}. "
                    f"Write {name}={value!r}, or leave it out."
                )


def require_no_state(part: Part, site: Site, *, why: str) -> None:
    """Asked on all ranks: a state that only rank 0 has loaded must not leave the others waiting."""
    if site.optimizer.__dict__.get(STATE_OF) == part.name:
        return  # of an earlier pair with the same rule, which was ended: it goes on with it
    mine = any(site.optimizer.state.values())  # reading the state of a parameter leaves an empty one behind
    ranks = ranks_where(site.comm, mine)
    if ranks:
        raise ConfigError(
            f"strategy.{part.name} was given an optimizer that has made updates or loaded a state (on ranks {ranks}). {why} "
            f"Give fleet.distribute(...) a new {type(site.optimizer).__name__}, and load a state of {part.name} into the "
            "optimizer that it returns."
        )


def require_own_state(optimizer: Optimizer, parts: Sequence[Part]) -> None:
    """Refuse to go on with a state that an earlier pair's rule has left, where the optimizer itself knows no such state."""
    rule = optimizer.__dict__.get(STATE_OF)
    if optimizer.__dict__.get(UNSUITED) and rule not in [part.name for part in parts] and any(optimizer.state.values()):
        kind = type(optimizer).__name__
        raise ConfigError(
            f"the state in this {kind} was made by strategy.{rule}, and {kind} cannot go on with it. Keep strategy.{rule}, or "
            f"give fleet.distribute(...) a new {kind}."
        )


# --- handing over ---------------------------------------------------------------------------------------------------


def parameter_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """List the parameters' names by group; the model's own names, where it has the parameter."""
    named = {id(p): plain_name(name) for name, p in model.named_parameters()}
    found: list[list[str]] = []
    for i, group in enumerate(optimizer.param_groups):
        given = group.get("param_names") or [f"(outside the model: {j} of group {i})" for j in range(len(group["params"]))]
        found.append([named.get(id(p), name) for p, name in zip(group["params"], given, strict=True)])
    return found


def named_groups(site: Site, *, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Copies of the groups with what the new optimizer reads of them; and the user's own keys, among which it finds slips."""
    _take_back(site.optimizer)
    unread = {"param_names", *site.optimizer.defaults} - {*keys}
    return [
        {**{k: value for k, value in group.items() if k not in unread}, "params": list(zip(names, group["params"], strict=True))}
        for group, names in zip(site.optimizer.param_groups, parameter_names(site.model, site.optimizer), strict=True)
    ]


def way_to_run(optimizer: Optimizer) -> dict[str, Any]:
    """Return what the user has set of foreach and fused. fused=True is the default, where there are kernels."""
    said = {(group.get("foreach"), group.get("fused")) for group in optimizer.param_groups}
    foreach, fused = said.pop() if len(said) == 1 else (None, None)
    if foreach is False and not fused:
        return {"foreach": False, "fused": False}
    return {"foreach": foreach, "fused": False if fused is False else None}


def take_over(inner: Optimizer, update: Update, settings: Mapping[str, Any]) -> None:
    """Give `update` the group dicts, the state and the hooks of `inner`, which from now on only holds them.

    A key that a group has of its own counts more than the strategy's."""
    added = [{key: value for key, value in settings.items() if key not in group} for group in inner.param_groups]
    for group, values in zip(inner.param_groups, added, strict=True):
        group.update(values)
    inner.__dict__["_fleetx_added"] = [list(values) for values in added]
    update.adopt_groups(inner.param_groups, {})
    update.state = inner.state
    for name in HOOKS:
        setattr(update, name, getattr(inner, name))
    # A scheduler built on `inner` asks whether that one has stepped, and it never will.
    inner._opt_called = True  # type: ignore[attr-defined]
    inner.__dict__[STAND_IN] = weakref.ref(update)
    if refuse_replaced not in inner._optimizer_load_state_dict_pre_hooks.values():
        inner.register_load_state_dict_pre_hook(refuse_replaced)


def mark_state(inner: Optimizer, update: Optimizer) -> None:
    """Note by which rule the state was made that an ended pair leaves behind."""
    inner.__dict__[STATE_OF] = type(update).__name__.lower()
    inner.__dict__[UNSUITED] = isinstance(update, Update) and not update.state_suits_inner


def _take_back(inner: Optimizer) -> None:
    """Settings of a strategy before: of a pair that is gone, or that was refused half-way."""
    for group, names in zip(inner.param_groups, inner.__dict__.pop("_fleetx_added", []), strict=False):
        for name in names:
            group.pop(name, None)


def give_back(inner: Optimizer) -> None:
    """Give the optimizer back to the user as it was: the pair has ended."""
    _take_back(inner)
    inner.__dict__[STAND_IN] = None


def refuse_replaced(optimizer: Optimizer, *_: Any) -> None:
    """Refuse to step or load an optimizer that was given: it would go past the one in its place."""
    standing_in = (optimizer.__dict__.get(STAND_IN) or (lambda: None))()
    if standing_in is not None:
        raise ConfigError(
            f"this {type(optimizer).__name__} was given to fleet.distribute(...), and {type(standing_in).__name__} has "
            "taken its place. Use the optimizer that fleet.distribute(...) returned."
        )
