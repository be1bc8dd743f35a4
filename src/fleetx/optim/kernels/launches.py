"""The launches of one step, in order: measure, settle, apply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .lamb import lamb_advance, lamb_apply, lamb_settle
from .lars import lars_apply, lars_measure, lars_settle
from .plan import Plan


@dataclass(frozen=True, slots=True)
class Norms:
    """Which norms LARS need not measure, and whether to keep those of the new weights."""

    of_weights_carried: bool
    of_gradients_given: bool
    carry: bool


def launch(kernel: Any, plan: Plan, items: Tensor, *arguments: Any) -> None:
    """One program per item. `arguments` end with the constants that a kernel is compiled for, in its own order."""
    if not items.numel():
        return
    constants = arguments[kernel.arg_names.index("n_tensors") :]
    compiled = plan.compiled.get((kernel, *constants))
    if compiled is None:
        done = kernel[(items.numel(),)](items, *arguments, num_warps=plan.tuning.warps)
        if done is not None:  # an interpreted kernel is not compiled
            plan.compiled[(kernel, *constants)] = done
    else:
        compiled[(items.numel(), 1, 1)](items, *arguments)


def launch_lamb(plan: Plan, table: Tensor, ratios: Tensor, element: Any) -> None:
    lists, chunk, count = plan.lists(), plan.tuning.chunk_elements, plan.n_tensors
    advancing = (table, *plan.sums, count, element, plan.is_aligned, chunk)
    launch(lamb_advance, plan, lists.at_once_and_measure, *advancing)
    launch(lamb_settle, plan, plan.everyone, table, *plan.sums, plan.scales, ratios, count)
    launch(lamb_apply, plan, lists.apply, table, plan.scales, count, element, chunk)


def launch_lars(plan: Plan, table: Tensor, ratios: Tensor, element: Any, norms: Norms) -> None:
    carried, given = norms.of_weights_carried, norms.of_gradients_given
    lists, chunk, count = plan.lists(measured=carried and given), plan.tuning.chunk_elements, plan.n_tensors
    measuring = (table, *plan.sums, count, element, plan.is_aligned, not carried, not given, chunk)
    launch(lars_measure, plan, lists.measure, *measuring)
    if lists.apply.numel() or 0 in plan.tensors.numels:  # no item gives an empty tensor its ratio of 1
        launch(lars_settle, plan, plan.adapted, table, *plan.sums, plan.scales, ratios, count, not given)
    applying = (table, plan.sums[0], plan.scales, ratios, count, element, plan.is_aligned, norms.carry, chunk)
    launch(lars_apply, plan, lists.at_once_and_apply, *applying)
