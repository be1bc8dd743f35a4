"""Steps of an optimizer that was not given to fleet.distribute: one made for a second phase, or a new one for each epoch.

The pair reduces the gradients, whichever optimizer applies them. Torch calls a hook before every step of every
optimizer (optimizer.py); where parameters of a pair are among those to be stepped, the pair refuses what would leave a part of
its strategy out.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import ConfigError
from ..setup.placement import plain_name
from ..slots import Part, Slot
from . import model_pairs

IN_STEP = frozenset({Slot.BACKWARD, Slot.MERGE, Slot.CLIP, Slot.MOMENTUM, Slot.UPDATE, Slot.AVERAGE, Slot.SHARD})
"""What a part claims that acts in the pair's own step()."""


def before_step(optimizer: Optimizer) -> None:
    """Let each pair whose parameters are to be stepped refuse, or reduce."""
    reached = model_pairs.reached_by(optimizer)
    for pair in reached:
        pair.before_other_step(optimizer)
    if not reached and optimizer not in _looked_at:
        _looked_at.add(optimizer)
        model_pairs.refuse_unreduced(optimizer)


_looked_at: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers without a parameter of a pair: a new last layer's, say, which are looked at once."""


def part_in_step(parts: Iterable[Part], *, on_nan_inf: str) -> str | None:
    """Name the part of a strategy that a step of another optimizer would leave out; None: none."""
    for part in parts:
        acts = part.claims() & IN_STEP
        if acts and not (acts == {Slot.MERGE} and part.no_effect()):
            return f"strategy.{part.name}"
    return 'strategy.on_nan_inf = "skip"' if on_nan_inf == "skip" else None


def refuse_past(part: str | None, optimizer: Optimizer) -> None:
    """Refuse a step that would leave this part out."""
    if part is not None:
        kind = type(optimizer).__name__
        raise ConfigError(
            f"the {kind} that is stepped here was not given to fleet.distribute(...), and {part} acts in the step() of the "
            f"optimizer that was: it would be left out. Before the first step of this {kind} write "
            "model, optimizer = fleet.distribute(model, optimizer, strategy)."
        )


def refuse_unreduced(model: nn.Module | None, optimizer: Optimizer, known: set[int]) -> None:
    """Refuse to step parameters of this model whose gradients no pair reduces. `known`: ids of the model's pair."""
    held = (param for group in optimizer.param_groups for param in group["params"])
    others: list[Tensor] = [param for param in held if param.requires_grad and id(param) not in known]
    unreduced = {id(param) for param in others if model_pairs.owner_of(param) is None}
    if not unreduced or model is None:
        return
    names = [plain_name(name) for name, param in model.named_parameters() if id(param) in unreduced]
    if names:
        kind = type(optimizer).__name__
        raise ConfigError(
            f"the {kind} that is stepped here was not given to fleet.distribute(...), and trains `{names[0]}`, which the one "
            "that was given does not hold: such gradients are this rank's own. Before its first step write model, optimizer = "
            "fleet.distribute(model, optimizer, strategy); where two optimizers share a model, one such call for each; where "
            "they share parameters, one call alone, with an optimizer that holds all of them and need not step itself: "
            "fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)."
        )


def refuse_inside_backward(optimizer: Optimizer) -> None:
    kind = type(optimizer).__name__
    raise ConfigError(
        f"this {kind} is stepped while a backward is going on (by a hook of a parameter, say), where gradients are this rank's "
        "own: they are reduced when backward ends. Call its step() after loss.backward()."
    )
