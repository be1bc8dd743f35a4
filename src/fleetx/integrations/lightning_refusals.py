"""Refuse what a Lightning Trainer and a FleetX strategy cannot both do, each with the line to write instead."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..engine.slots import Slot
from ..errors import ConfigError, StrategyConflict
from ..strategy import DistributedStrategy


def refuse_what_both_claim(trainer: Any, plugin: Any, strategy: DistributedStrategy) -> None:
    """Check for conflicts before configure_optimizers is called; report all at once."""
    lines = [
        *_precision(plugin, strategy),
        *_clipping(trainer, strategy),
        *_accumulation(trainer, strategy),
        *_averaging(trainer, strategy),
    ]
    if lines:
        raise StrategyConflict("\n".join(lines))


def _precision(plugin: Any, strategy: DistributedStrategy) -> list[str]:
    asked = getattr(plugin, "precision", None)
    if getattr(plugin, "scaler", None) is not None:
        return [
            f"Trainer(precision={asked!r}) scales the loss by itself, without the ranks agreeing on an overflow. "
            'Leave precision out and write strategy.amp = True with strategy.amp_configs = {"dtype": "float16"}.'
        ]
    if strategy.amp and type(plugin).__name__ != "Precision":
        return [f"Trainer(precision={asked!r}) and strategy.amp both set the precision of the forward. Keep one of them."]
    return []


def _clipping(trainer: Any, strategy: DistributedStrategy) -> list[str]:
    claimants = [part.name for part in strategy.parts() if Slot.CLIP in part.claims()]
    if not trainer.gradient_clip_val or not claimants:
        return []
    return [
        f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) and strategy.{claimants[0]} both clip the gradients. "
        "Keep one of them."
    ]


def _accumulation(trainer: Any, strategy: DistributedStrategy) -> list[str]:
    asked = trainer.accumulate_grad_batches
    lines = [
        f"Trainer(accumulate_grad_batches={asked}) and strategy.{name} both say how many batches make one update. "
        "Keep one of them."
        for name in ("gradient_merge", "auto")
        if asked > 1 and getattr(strategy, name)
    ]
    if any(type(callback).__name__ == "GradientAccumulationScheduler" for callback in trainer.callbacks):
        lines.append(
            "GradientAccumulationScheduler changes how many batches make one update, which is fixed for a run here. Write "
            "Trainer(accumulate_grad_batches=...) with one number."
        )
    return lines


def _averaging(trainer: Any, strategy: DistributedStrategy) -> list[str]:
    """Refuse callbacks that average one rank's weights over time."""
    apart = [part.name for part in strategy.parts() if Slot.AVERAGE in part.claims()] + ["auto"] * strategy.auto
    found = []
    for callback in trainer.callbacks:
        name, bases = type(callback).__name__, {base.__name__ for base in type(callback).__mro__}
        if apart and bases & {"StochasticWeightAveraging", "WeightAveraging"}:
            how = "may choose Local SGD, where" if apart[0] == "auto" else "lets"
            found.append(
                f"{name} averages the weights of one rank over time, and strategy.{apart[0]} {how} ranks have weights of their "
                "own between two averagings. Keep one of them."
            )
        elif "StochasticWeightAveraging" in bases and callback.pl_module_contains_batch_norm(trainer.lightning_module):
            found.append(
                f"{name} ends with an epoch without backward for a model with BatchNorm: its statistics would be each rank's "
                "own, and Lightning makes one more update there with an old gradient. Leave it out; EMAWeightAveraging (of "
                "Lightning 2.6) averages the statistics along with the weights."
            )
    return found


def refuse_no_loss(module: Any) -> None:
    """Raise for a training_step without a loss: this rank would miss the reduce that the other ranks are in."""
    raise ConfigError(
        f"{type(module).__name__}.training_step returned None: a rank that leaves out a batch would not reach the reduce, where "
        "the others wait for it. To leave one out, return 0 * loss, so that every rank reaches the reduce."
    )


def refuse_overridden(module: Any, base: type) -> None:
    if type(module).backward is not base.backward:  # type: ignore[attr-defined]
        raise ConfigError(
            f"{type(module).__name__}.backward is overridden: its gradients would be this rank's own where Lightning clips and "
            "shows them. Take the override out, or set automatic_optimization = False and call self.manual_backward(loss)."
        )


def refuse_changed_accumulation(now: int, before: int) -> None:
    if now != before:
        raise ConfigError(
            f"trainer.accumulate_grad_batches was {before} when training began and is {now} now: how many batches make one "
            "update is fixed for a run."
        )


def homes_of(module: nn.Module, optimizers: list[Optimizer]) -> list[nn.Module]:
    """Return the module that each optimizer trains: the whole module, or with several optimizers one child each."""
    if len(optimizers) == 1:
        return [module]
    trained = [{id(p) for group in optimizer.param_groups for p in group["params"]} for optimizer in optimizers]
    children = {name: {id(p) for p in child.parameters()} for name, child in module.named_children()}
    homes = []
    for number, mine in enumerate(trained):
        names = [name for name, held in children.items() if held & mine]
        others = set().union(*(theirs for other, theirs in enumerate(trained) if other != number))
        if len(names) != 1 or not mine <= children[names[0]] or children[names[0]] & others:
            raise ConfigError(
                f"optimizer {number} of {len(optimizers)} trains parameters of {', '.join(names) or 'no child module'}: with "
                "several optimizers each must train one child of the LightningModule, and no two the same. Give the parameters "
                "of each optimizer a module of their own (self.generator, self.discriminator); or make one optimizer of groups."
            )
        homes.append(module.get_submodule(names[0]))
    return homes
