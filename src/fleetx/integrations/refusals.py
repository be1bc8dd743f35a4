"""What a strategy cannot do inside another framework's loop, as sentences: found before anything is touched."""

from __future__ import annotations

from ..engine.slots import Slot
from ..errors import ConfigError, StrategyConflict
from ..strategy import DistributedStrategy


def clips_by_itself(strategy: DistributedStrategy) -> str | None:
    """The name of the part that has clipping to itself: clip_norm, or dgc, which clips before it sends."""
    return next((part.name for part in strategy.parts() if Slot.CLIP in part.claims()), None)


def refuse_second_clipping(strategy: DistributedStrategy, said: str, *, write: str) -> None:
    """`said`: the framework's own clipping, as the user wrote it."""
    name = clips_by_itself(strategy)
    if name is None:
        return
    own = ' (dgc clips before it sends, by dgc_configs["clip_norm"])' if name == "dgc" else ""
    raise StrategyConflict(f"{said} and strategy.{name} both clip the gradients{own}. {write}")


def refuse_plans(strategy: DistributedStrategy, *, who: str) -> None:
    """A plan is made by running steps of a batch, and `who` is given none."""
    if strategy.auto:
        raise ConfigError(
            f"strategy.auto chooses by running steps of a batch, and {who} is given none. Plan first, with `fleetx plan` or, in "
            "a script of its own, model, optimizer = fleet.distribute(model, optimizer, strategy, sample=batch); then give "
            f"{who} what was chosen: optimizer.plan.strategy."
        )
    budget = strategy.recompute_configs["budget"] if strategy.recompute else None
    if budget is not None:
        raise ConfigError(
            f'recompute_configs["budget"] is {budget}: its plan is made by running steps of a batch, and {who} is given none. '
            "Plan first, in a script of its own: model, optimizer = fleet.distribute(model, optimizer, strategy, sample=batch); "
            'then write recompute_configs = {"checkpoints": [...]} with the names in optimizer.memory_plan.recomputed.'
        )
