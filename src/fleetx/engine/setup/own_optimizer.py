"""Our own optimizers, as the engine sees them, and loading state into the dicts that an optimizer holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...errors import ConfigError


class Shares(Protocol):
    """What each rank has of the parameters' elements, for a rule that needs whole tensors. They are told by the ids of the
    parameters given to fleet.distribute, in whose place the optimizer has shares while it steps."""

    def gather_whole(
        self, parts: Mapping[int, Tensor], *, among: Sequence[Tensor], wanted: Collection[int], dtype: torch.dtype
    ) -> dict[int, Tensor]:
        """Return whole tensors of which every rank has a part, shaped as their parameters; of those `among` these this rank
        gets the `wanted` ones. Every rank is here, with the same `among`; a part that no rank gives is zeros."""

    def own_part(self, param: Tensor, whole: Tensor) -> Tensor | None:
        """Return this rank's part of a tensor that is shaped as `param`; None where it has none."""


class Update(Optimizer):
    """Base of our own optimizers, which fill the slot UPDATE; the user's others are used as they are."""

    sum_over_ranks: Callable[[Tensor], Tensor] | None = None
    """Set where each rank updates its share of the parameters: sums a vector over the ranks that have the others."""
    shares: Shares | None = None
    """Set there as well."""
    rule_settings: ClassVar[tuple[str, ...]] = ()
    """Keys of a group that only this rule has: a checkpoint must not undo what a script says of them. Empty: torch's own."""

    state_suits_inner: ClassVar[bool] = True
    """Whether the optimizer in whose place this one was can go on with the state that it leaves."""

    def adopt_groups(self, groups: list[dict[str, Any]], settings: Mapping[str, Any]) -> None:
        """Take over another optimizer's very group dicts, of the same parameters: schedulers and the user hold them."""
        raise NotImplementedError

    def takes_found_inf(self) -> bool:
        """Return whether the coming step reads the attribute `found_inf`, and changes nothing where that is not 0."""
        return False

    def describe(self) -> str | None:
        """Say how each parameter is treated, a line each; None where the groups say it all."""
        return None

    def flags_by_name(self) -> dict[str, dict[str, bool]]:
        """Map each parameter's name to whether it is decayed and adapted; empty where the rule knows no such flags."""
        return {}

    def forget_norms(self) -> None:
        """Measure again what was kept of the weights, since they were written through `.data`."""
        raise ConfigError(f"{type(self).__name__} keeps no norms from the last update. Leave forget_norms() out.")


def load_in_place(optimizer: Optimizer, load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]) -> None:
    """Load an optimizer's state into the very dicts it has: a scheduler made before holds them, and must go on to move them.

    `load` is torch's own, which puts new dicts in their place; or another, which may have loaded in place already."""
    held, groups, state = optimizer.param_groups, list(optimizer.param_groups), optimizer.state
    load(state_dict)
    for group, new in zip(groups, optimizer.param_groups, strict=True):
        group.update(new)
    if optimizer.state is not state:
        state.clear()
        state.update(optimizer.state)
        optimizer.state = state
    held[:] = groups
    optimizer.param_groups = held
