"""From an optimizer to kernel launches: one Python pass collects addresses, one launch per type of parameter does the rest."""

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
from .lamb import lamb_kernel
from .lars import lars_kernel
from .plan import Plan, Tensors, Tuning

_grad_of = operator.attrgetter("grad")
_is_contiguous = Tensor.is_contiguous
_layout_of = operator.attrgetter("layout")

ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


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
        self._batches: dict[tuple[torch.device, torch.dtype], Batch] = {}
        numbers = {id(group): number for number, group in enumerate(optimizer.param_groups)}
        members: dict[tuple[torch.device, torch.dtype], list[Member]] = {}
        for group, param, name, flags in optimizer.parameters_with_flags():
            kind = param.device, param.dtype
            members.setdefault(kind, []).append(Member(param, name, numbers[id(group)], flags))
        self._batches = {
            (device, dtype): Batch(device, dtype, of_kind, tuning or Tuning()) for (device, dtype), of_kind in members.items()
        }

    def step(self, optimizer: Layerwise) -> TrustRatios | None:
        names: list[str | None] = []
        values: list[Tensor] = []
        for batch in self._batches.values():
            done = batch.step(optimizer)
            if done is not None:
                names += done[0]
                values.append(done[1])
        return TrustRatios(names, values) if any(names) else None

    def forget_norms(self) -> None:
        for batch in self._batches.values():
            batch.carried = None


@final
class Batch:
    """The parameters of one device and type.

    The host's work per step is a few passes of C functions over the parameters; a kernel that takes 0.2 ms must not wait
    for it. What they find is compared with the step before: as a rule nothing has moved, and nothing is sent.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, members: Sequence[Member], tuning: Tuning) -> None:
        self.device, self.dtype, self.members, self.tuning = device, dtype, list(members), tuning
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._params = [member.param for member in members]
        self._everybody = tuple(range(len(members)))
        self._contiguous = all(member.strides is None for member in members)
        self._counts: list[int] = []
        self.carried: tuple[Plan, list[int], list[int]] | None = None
        """The plan whose sums hold the squared norms of the parameters; their addresses and versions at that time."""

    def step(self, optimizer: Layerwise) -> tuple[list[str | None], Tensor] | None:
        grads: list[Tensor] = list(map(_grad_of, self._params))
        active, params, members = self._everybody, self._params, self.members
        if not all(map(operator.is_not, grads, itertools.repeat(None))):
            active = tuple(i for i, grad in enumerate(grads) if grad is not None)
            params, members = [self._params[i] for i in active], [self.members[i] for i in active]
            grads = [grads[i] for i in active]
        if not params:
            return None
        grads = self._dense(optimizer, members, grads)
        columns = self._columns(optimizer, params, grads)
        plan = self._plans.get(active) or self._new_plan(optimizer, active, members)
        settings = [_settings(optimizer, group) for group in optimizer.param_groups]
        ratios = torch.empty(len(params), dtype=torch.float32, device=self.device)
        if optimizer.counts_steps:
            self._launch_lamb(optimizer, plan, columns, settings, ratios)
        else:
            self._launch_lars(optimizer, plan, params, columns, settings, ratios)
        torch.autograd.graph.increment_version(params)
        return plan.names, ratios

    def _dense(self, optimizer: Layerwise, members: Sequence[Member], grads: list[Tensor]) -> list[Tensor]:
        """Gradients in the memory order of their parameters; as a rule they are so already."""
        strided = all(map(operator.is_, map(_layout_of, grads), itertools.repeat(torch.strided)))
        if strided and self._contiguous and all(map(_is_contiguous, grads)):
            return grads
        for i, (member, grad) in enumerate(zip(members, grads, strict=True)):
            if grad.layout is not torch.strided:
                optimizer.refuse_sparse(member.name)
            if not (grad.is_contiguous() if member.strides is None else grad.stride() == member.strides):
                grads[i] = torch.empty_like(member.param).copy_(grad)
        return grads

    def _columns(self, optimizer: Layerwise, params: Sequence[Tensor], grads: Sequence[Tensor]) -> dict[str, list[int]]:
        states = list(map(optimizer.state.__getitem__, params))
        if not all(states):
            states = [optimizer.state_of(param, count_on=self.device) for param in params]
        columns = {"param": _addresses(params), "grad": _addresses(grads)}
        for column, name in zip(("first", "second"), optimizer.moments, strict=False):
            columns[column] = _addresses(map(operator.itemgetter(name), states))
        if optimizer.counts_steps:
            counts = _addresses(map(operator.itemgetter("step"), states))
            if counts != self._counts:  # others than last time: perhaps loaded, and perhaps on the CPU
                states = [optimizer.state_of(param, count_on=self.device) for param in params]
                counts = _addresses(map(operator.itemgetter("step"), states))
            columns["step"] = self._counts = counts
        if self.dtype in NARROW:
            columns["master"] = _addresses(map(operator.itemgetter("master"), states))
        return columns

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

    def _send(self, optimizer: Layerwise, plan: Plan, columns: dict[str, list[int]], settings: list[list[float]]) -> list[Any]:
        """What both kernels begin with, up to the groups."""
        rows, groups = plan.send(columns, settings)
        width = groups.numel() // len(settings)
        for number, group in enumerate(optimizer.param_groups):
            if isinstance(group["lr"], Tensor) and group["lr"].device.type != "cpu":
                groups[number * width].copy_(group["lr"].reshape(()))
        plan.reset()
        return [rows, groups]

    def _launch(self, kernel: Any, plan: Plan, items: Tensor, arguments: list[Any], **constants: Any) -> None:
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            kernel[(items.numel(),)](
                items,
                plan.queue,
                *arguments,
                element=ELEMENTS[self.dtype],
                CHUNK=plan.tuning.chunk_elements,
                num_warps=plan.tuning.warps,
                maxnreg=plan.tuning.registers,
                KEEP=plan.tuning.keep,
                TICKET=plan.tuning.ticket,
                **constants,
            )

    def _launch_lamb(self, optimizer: Layerwise, plan: Plan, columns: Any, settings: Any, ratios: Tensor) -> None:
        arguments = self._send(optimizer, plan, columns, settings)
        arguments += [*plan.sums, plan.arrived, plan.ready, plan.scales, ratios]
        self._launch(lamb_kernel, plan, plan.items(), arguments, ALIGNED=plan.is_aligned(columns["grad"]))

    def _launch_lars(self, optimizer: Any, plan: Plan, params: list[Tensor], columns: Any, settings: Any, ratios: Tensor) -> None:
        norms = optimizer.given_norms(params)
        if norms is not None:
            columns["grad_norm"] = [norm.data_ptr() for norm in norms]
        carried = self._is_carried(plan, params, columns["param"])
        arguments = self._send(optimizer, plan, columns, settings)
        arguments += [*plan.sums, plan.arrived, plan.ready, plan.scales, ratios]
        measured = carried and norms is not None
        self._launch(
            lars_kernel,
            plan,
            plan.items(measured=measured),
            arguments,
            ALIGNED=plan.is_aligned(columns["grad"]),
            READ_WEIGHT=not carried,
            READ_GRAD=norms is None,
            CARRY=optimizer.carry_norms,
        )
        if optimizer.carry_norms:
            # One more than now: this step's own writes are counted after it.
            self.carried = plan, columns["param"], [param._version + 1 for param in params]

    def _is_carried(self, plan: Plan, params: Sequence[Tensor], addresses: list[int]) -> bool:
        """Whether the sums still belong to the parameters: nobody else has written, replaced or skipped one since."""
        if self.carried is None:
            return False
        of_plan, places, versions = self.carried
        return of_plan is plan and places == addresses and versions == [param._version for param in params]


def _settings(optimizer: Layerwise, group: dict[str, Any]) -> list[float]:
    lr, sign = group["lr"], -1.0 if group["maximize"] else 1.0
    rate = float(lr) if not isinstance(lr, Tensor) or lr.device.type == "cpu" else 0.0
    if optimizer.counts_steps:
        beta1, beta2 = group["betas"]
        return [rate, beta1, beta2, group["eps"], group["lamb_weight_decay"], sign, 1 - beta1, 1 - beta2]
    return [rate, group["momentum"], group["lars_weight_decay"], group["lars_coeff"], group["epsilon"], sign]


def _addresses(tensors: Iterable[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))
