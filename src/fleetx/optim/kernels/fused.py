"""From an optimizer to kernel launches: a few passes of C functions over the parameters, then three launches.

A step of a small model takes the device 0.2 ms, and must not wait for the host. What the passes find is compared with the
step before: as a rule nothing has moved, and nothing is sent.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
import triton.language as tl
from torch import Tensor

from ...errors import ConfigError
from ..layerwise import NARROW, Layerwise
from ..param_groups import Flags
from ..trust_ratios import TrustRatios
from .lamb import lamb_advance, lamb_apply, lamb_settle
from .lars import lars_apply, lars_measure, lars_settle
from .plan import Plan, Tensors, Tuning

ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_grad_of = operator.attrgetter("grad")


class Member:
    """One parameter, with what does not change from step to step."""

    __slots__ = ("flags", "group", "name", "param", "strides")

    def __init__(self, param: Tensor, name: str, group: int, flags: Flags) -> None:
        self.param, self.name, self.group, self.flags = param, name, group, flags
        self.strides = None if param.is_contiguous() else param.stride()


@final
class FusedStep:
    """The kernels of one optimizer."""

    def __init__(self, optimizer: Layerwise, tuning: Tuning | None = None) -> None:
        numbers = {id(group): number for number, group in enumerate(optimizer.param_groups)}
        members: dict[tuple[torch.device, torch.dtype], list[Member]] = {}
        for group, param, name, flags in optimizer.parameters_with_flags():
            kind = param.device, param.dtype
            members.setdefault(kind, []).append(Member(param, name, numbers[id(group)], flags))
        self.batches = [Batch(*kind, of_kind, tuning or Tuning()) for kind, of_kind in members.items()]
        self._states: list[dict[str, Any]] = []

    def step(self, optimizer: Layerwise) -> TrustRatios | None:
        names: list[str | None] = []
        values: list[Tensor] = []
        if not self._has_same_states(optimizer):
            for batch in self.batches:
                batch.states = None
        settings = [_settings(optimizer, group) for group in optimizer.param_groups]
        for batch in self.batches:
            done = batch.step(optimizer, settings)
            if done is not None:
                names += done[0]
                values.append(done[1])
        return TrustRatios(names, values) if any(names) else None

    def _has_same_states(self, optimizer: Layerwise) -> bool:
        """Whether each parameter's state is the very dict of the step before. Looking it up by parameter costs ten times this."""
        now = optimizer.state.values()
        same = len(now) == len(self._states) and all(map(operator.is_, now, self._states))
        if not same or not now:
            self._states = list(now)
        return same and bool(now)

    def forget_norms(self) -> None:
        for batch in self.batches:
            batch.carried = None


@final
class Batch:
    """The parameters of one device and type."""

    def __init__(self, device: torch.device, dtype: torch.dtype, members: Sequence[Member], tuning: Tuning) -> None:
        self.device, self.dtype, self.members, self.tuning = device, dtype, list(members), tuning
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._params = [member.param for member in members]
        self._everybody = tuple(range(len(members)))
        self._contiguous = all(member.strides is None for member in members)
        self._kept: list[Tensor] = []
        self.states: list[dict[str, Any]] | None = None
        """Of all parameters; None when it is not known that they are those of the step before."""
        self._counts: list[int] = []
        self.carried: tuple[Plan, list[int], list[int]] | None = None
        """The plan whose sums hold the squared norms of the parameters; their addresses and versions at that time."""

    def step(self, optimizer: Layerwise, settings: list[list[float]]) -> tuple[list[str | None], Tensor] | None:
        grads: list[Tensor] = list(map(_grad_of, self._params))
        active, params, members = self._everybody, self._params, self.members
        if not all(map(operator.is_not, grads, itertools.repeat(None))):
            active = tuple(i for i, grad in enumerate(grads) if grad is not None)
            params, members = [self._params[i] for i in active], [self.members[i] for i in active]
            grads, self.states = [grads[i] for i in active], None
        if not params:
            return None
        grads = self._dense(optimizer, members, grads)
        columns = self._columns(optimizer, params, grads)
        plan = self._plans.get(active) or self._new_plan(optimizer, active, members)
        ratios = torch.empty(len(params), dtype=torch.float32, device=self.device)
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            if optimizer.counts_steps:
                self._launch_lamb(plan, self._table(optimizer, plan, columns, settings), columns, ratios)
            else:
                self._launch_lars(optimizer, plan, params, columns, settings, ratios)
        torch.autograd.graph.increment_version(params)
        if active is not self._everybody:
            self.states = None
        return plan.names, ratios

    def _dense(self, optimizer: Layerwise, members: Sequence[Member], grads: list[Tensor]) -> list[Tensor]:
        """Gradients in the memory order of their parameters; as a rule they are so already."""
        if len(grads) == len(self._kept) and all(map(operator.is_, grads, self._kept)):
            return grads
        given = list(grads)
        for i, (member, grad) in enumerate(zip(members, given, strict=True)):
            if grad.layout is not torch.strided:
                optimizer.refuse_sparse(member.name)
            if not (grad.is_contiguous() if member.strides is None else grad.stride() == member.strides):
                grads[i] = torch.empty_like(member.param).copy_(grad)
        self._kept = grads if all(map(operator.is_, grads, given)) else []
        return grads

    def _columns(self, optimizer: Layerwise, params: Sequence[Tensor], grads: Sequence[Tensor]) -> dict[str, list[int]]:
        if self.states is None:
            self.states = [optimizer.state_of(param, count_on=self.device) for param in params]
        columns = {"param": _addresses(params), "grad": _addresses(grads)}
        for column, name in zip(("first", "second"), optimizer.moments, strict=False):
            columns[column] = _addresses(map(operator.itemgetter(name), self.states))
        if optimizer.counts_steps:
            columns["step"] = self._addresses_of_counts(optimizer, params)
        if self.dtype in NARROW:
            columns["master"] = _addresses(map(operator.itemgetter("master"), self.states))
        return columns

    def _addresses_of_counts(self, optimizer: Layerwise, params: Sequence[Tensor]) -> list[int]:
        assert self.states is not None
        counts = _addresses(map(operator.itemgetter("step"), self.states))
        if counts != self._counts:  # others than last time: perhaps put there by somebody, and perhaps on the CPU
            self.states = [optimizer.state_of(param, count_on=self.device) for param in params]
            counts = self._counts = _addresses(map(operator.itemgetter("step"), self.states))
        return counts

    def _new_plan(self, optimizer: Layerwise, active: tuple[int, ...], members: Sequence[Member]) -> Plan:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ConfigError("run one step of this optimizer before capturing a graph of it.")
        tensors = Tensors(
            numels=[member.param.numel() for member in members],
            adapted=[member.flags.adapt for member in members],
            decayed=[member.flags.decay for member in members],
            groups=[member.group for member in members],
        )
        names = [member.name if member.flags.adapt else None for member in members]
        plan = Plan(tensors, names=names, n_groups=len(optimizer.param_groups), device=self.device, tuning=self.tuning)
        self._plans[active] = plan
        return plan

    def _table(self, optimizer: Layerwise, plan: Plan, columns: dict[str, list[int]], settings: list[list[float]]) -> Tensor:
        table = plan.send(columns, settings)
        for number, group in enumerate(optimizer.param_groups):
            if _is_on_device(group["lr"]):
                place = plan.place_of_lr(number)
                table[place : place + 1].view(torch.float64).copy_(group["lr"].reshape(1))
        return table

    def _launch(self, kernel: Any, plan: Plan, items: Tensor, *arguments: Any, **constants: Any) -> None:
        if items.numel():
            element, tuning = ELEMENTS[self.dtype], plan.tuning
            constants |= {"element": element, "CHUNK": tuning.chunk_elements, "num_warps": tuning.warps}
            kernel[(items.numel(),)](items, *arguments, plan.n_tensors, **constants)

    def _launch_lamb(self, plan: Plan, table: Tensor, columns: dict[str, list[int]], ratios: Tensor) -> None:
        lists, aligned = plan.lists(), plan.is_aligned(columns["grad"])
        self._launch(lamb_advance, plan, lists.at_once_and_measure, table, *plan.sums, ALIGNED=aligned)
        lamb_settle[(plan.n_tensors,)](plan.everyone, table, *plan.sums, plan.scales, ratios, plan.n_tensors)
        self._launch(lamb_apply, plan, lists.apply, table, plan.scales)

    def _launch_lars(
        self, optimizer: Any, plan: Plan, params: Sequence[Tensor], columns: dict[str, list[int]], settings: Any, ratios: Tensor
    ) -> None:
        norms = optimizer.given_norms(params)
        if norms is not None:
            columns["grad_norm"] = _addresses(norms)
        carried, given, carry = self._is_carried(plan, params, columns["param"]), norms is not None, optimizer.carry_norms
        table = self._table(optimizer, plan, columns, settings)
        lists, aligned = plan.lists(measured=carried and given), plan.is_aligned(columns["grad"])
        reads = {"READ_WEIGHT": not carried, "READ_GRAD": not given}
        self._launch(lars_measure, plan, lists.measure, table, *plan.sums, ALIGNED=aligned, **reads)
        if lists.apply.numel():
            arguments = (table, *plan.sums, plan.scales, ratios, plan.n_tensors)
            lars_settle[(plan.adapted.numel(),)](plan.adapted, *arguments, READ_GRAD=not given)
        arguments = (table, plan.sums[0], plan.scales, ratios)
        self._launch(lars_apply, plan, lists.at_once_and_apply, *arguments, ALIGNED=aligned, CARRY=carry)
        # One more than now: this step's own writes are counted after it.
        self.carried = (plan, columns["param"], [param._version + 1 for param in params]) if carry else None

    def _is_carried(self, plan: Plan, params: Sequence[Tensor], addresses: list[int]) -> bool:
        """Whether the sums still belong to the parameters: nobody else has written, replaced or skipped one since."""
        if self.carried is None:
            return False
        of_plan, places, versions = self.carried
        return of_plan is plan and places == addresses and versions == [param._version for param in params]


def _settings(optimizer: Layerwise, group: dict[str, Any]) -> list[float]:
    lr, sign = group["lr"], -1.0 if group["maximize"] else 1.0
    rate = 0.0 if _is_on_device(lr) else float(lr)
    if optimizer.counts_steps:
        beta1, beta2 = group["betas"]
        return [rate, beta1, beta2, group["eps"], group["lamb_weight_decay"], sign, 1 - beta1, 1 - beta2]
    return [rate, group["momentum"], group["lars_weight_decay"], group["lars_coeff"], group["epsilon"], sign]


def _is_on_device(lr: float | Tensor) -> bool:
    return isinstance(lr, Tensor) and lr.device.type != "cpu"


def _addresses(tensors: Iterable[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))
