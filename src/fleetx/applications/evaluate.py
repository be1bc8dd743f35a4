"""Evaluate over all ranks: sums are added up, so that shards of unequal length count by their samples."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import fleet
from ..dist import world
from ..dist.agree import run_and_share
from ..engine.modules.nested_tensors import map_tensors
from ..errors import ConfigError, DataError

COUNTS = ("count", "pairs")
"""Entries of a tally that are counts; every other entry is a sum over what the nearest count before it counted."""


def means(sums: dict[str, float]) -> dict[str, float]:
    """Divide each sum by its count, NaN where the count is 0; the counts themselves stay."""
    found: dict[str, float] = {}
    count = math.nan
    for name, value in sums.items():
        count = value if name in COUNTS else count
        found[name] = value if name in COUNTS else value / (count or math.nan)
    return found


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode inside; afterwards restore each module's mode (a frozen BatchNorm stays in evaluation)."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def evaluate(model: Any, loader: Iterable[Any]) -> dict[str, float]:
    """Return the means of what `model.tally` sums, over all data. Every rank must call it, with its own shard, empty or not.

    The model needs a method `tally(batch)` that returns sums, the count first: {"count": samples, "loss": summed loss, ...}.

    Examples:
        >>> model = X.applications.Resnet20(num_classes=10, image_size=8)
        >>> sorted(X.applications.evaluate(model, [(torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.long))]))
        ['acc1', 'acc5', 'count', 'loss']
    """
    sums, ranks = run_and_share(
        world.current().comm,
        lambda: _local_sums(model, loader),
        list,
        report=lambda error: f"{type(error).__name__}: {error}",
        fails=lambda failures: failures.own or DataError("the evaluation failed on rank {}: {}".format(*failures.first)),
    )
    names = _agreed_names(ranks)
    device = next(iter(sums.values())).device if sums else fleet.device()
    zero = torch.zeros((), dtype=torch.float64, device=device)
    totals = fleet.util.all_reduce(torch.stack([sums.get(name, zero) for name in names]))
    return means(dict(zip(names, totals.tolist(), strict=True)))


def _local_sums(model: Any, loader: Iterable[Any]) -> dict[str, Tensor]:
    """Add up the sums on the device, which is waited for once, at the end."""
    if not callable(getattr(model, "tally", None)):
        raise ConfigError(
            f"{type(model).__name__} has no `tally`. Give it a method tally(batch) that returns sums over the batch, the count "
            'first: {"count": samples, "loss": summed loss, ...}.'
        )
    device = next((p.device for p in model.parameters()), fleet.device())
    sums: dict[str, Tensor] = {}
    with eval_mode(model), torch.no_grad():
        for batch in loader:
            tally = model.tally(map_tensors(lambda t: t.to(device, non_blocking=True), batch))
            require_sums(tally, like=list(sums))
            numbers = {name: torch.as_tensor(value, dtype=torch.float64, device=device) for name, value in tally.items()}
            sums = {name: sums[name] + number if sums else number for name, number in numbers.items()}
    return sums


def require_sums(tally: Any, *, like: list[str]) -> None:
    """Check a tally: a count first, then numbers, with the same names in every batch. Done before any collective."""
    if not isinstance(tally, Mapping) or next(iter(tally), None) not in COUNTS:
        shown = list(tally) if isinstance(tally, Mapping) else type(tally).__name__
        raise DataError(
            f"`tally` returned {shown}; it must return a dict whose first entry is `count`, by which later sums are divided."
        )
    for name, value in tally.items():
        if isinstance(value, bool) or not (isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0)):
            shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise DataError(f"`tally` returned {shown} as `{name}`; it must be one number, the sum over the batch.")
    if like and list(tally) != like:
        raise DataError(f"`tally` returned {list(tally)} for one batch and {like} for those before; the names must be the same.")


def _agreed_names(ranks: list[list[str]]) -> list[str]:
    """Return the entries of the tally, also for a rank that had no batch."""
    filled = [names for names in ranks if names]
    if not filled:
        raise DataError("the evaluation found no batch on any rank; give it a loader with data.")
    if any(other != filled[0] for other in filled):
        raise DataError(f"the ranks tally different things: {filled}. Give every rank the same model and kind of data.")
    return list(filled[0])
