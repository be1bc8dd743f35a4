"""Refuse what a strategy cannot do inside another framework's loop, before anything is changed."""

from __future__ import annotations

from ..engine.slots import Slot
from ..errors import ConfigError, StrategyConflict
from ..strategy import DistributedStrategy


def clipping_part(strategy: DistributedStrategy) -> str | None:
    """Return the name of the part that claims clipping: clip_norm, or dgc, which clips before it sends; None if no part does."""
    return next((part.name for part in strategy.parts() if Slot.CLIP in part.claims()), None)


def refuse_second_clipping(strategy: DistributedStrategy, said: str, *, write: str) -> None:
    """Raise if the strategy clips too. `said`: the framework's clipping, as the user wrote it."""
    name = clipping_part(strategy)
    if name is None:
        return
    own = ' (dgc clips before it sends, by dgc_configs["clip_norm"])' if name == "dgc" else ""
    raise StrategyConflict(f"{said} and strategy.{name} both clip the gradients{own}. {write}")


def refuse_plans(strategy: DistributedStrategy, *, who: str) -> None:
    """Raise for parts that plan by running steps on a batch, which `who` does not have."""
    if strategy.auto:
        raise ConfigError(
            f"strategy.auto chooses by running steps on a batch, and {who} is given none. Plan first, with `fleetx plan` or, in "
            "a script of its own, model, optimizer = fleet.distribute(model, optimizer, strategy, sample=batch); then give "
            f"{who} what was chosen: optimizer.plan.strategy."
        )
    budget = strategy.recompute_configs["budget"] if strategy.recompute else None
    if budget is not None:
        raise ConfigError(
            f'recompute_configs["budget"] is {budget}: its plan is made by running steps on a batch, and {who} is given none. '
            "Plan first, in a script of its own: model, optimizer = fleet.distribute(model, optimizer, strategy, sample=batch); "
            'then write recompute_configs = {"checkpoints": [...]} with the names in optimizer.memory_plan.recomputed.'
        )


def refuse_divided_weights(strategy: DistributedStrategy, *, who: str) -> None:
    """Raise for weights of which each rank has a share alone: a framework saves and evaluates on one rank."""
    if any(part.divides_weights for part in strategy.parts()):
        raise ConfigError(
            f"strategy.sharding of stage 3 divides the weights, and {who} saves and loads whole ones. Write "
            'strategy.sharding_configs = {"stage": 2}, or call fleet.distribute(...) in a loop of your own.'
        )
