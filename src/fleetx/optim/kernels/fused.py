"""Turn an optimizer's step into kernel launches: a few passes of C functions over the parameters, then three launches.

A step of a small model takes the device 0.2 ms, and must not wait for the host. Addresses are compared with the last step's: as
a rule nothing has moved, and nothing is sent.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
import triton.language as tl
from torch import Tensor

from ...errors import ConfigError
from ..layerwise import Layerwise
from ..param_groups import Flags
from ..trust_ratio_report import TrustRatios
from ..work import NARROW
from .lamb import lamb_advance, lamb_apply, lamb_settle
from .lars import lars_apply, lars_measure, lars_settle
from .plan import Plan, Tensors, Tuning

# --- the launches of one step, in order: measure, settle, apply -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Norms:
    """Which norms LARS need not measure."""

    of_weights_carried: bool
    """The weights' norms are known from the last step."""
    of_gradients_given: bool
    """The gradients' norms were given by `take_gradient_norms`."""
    carry: bool
    """Keep the norms of the new weights."""


def launch(kernel: Any, plan: Plan, items: Tensor, *arguments: Any) -> None:
    """Launch one program per item; `arguments` end with the constants that the kernel is compiled for, in its own order."""
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


def launch_lamb(plan: Plan, table: Tensor, ratios: Tensor, found: Tensor, element: Any) -> None:
    """Launch LAMB's three kernels, which change nothing where `found` is not 0."""
    lists, chunk, count = plan.lists(), plan.tuning.chunk_elements, plan.n_tensors
    advancing = (table, *plan.sums, found, count, element, plan.is_aligned, chunk)
    launch(lamb_advance, plan, lists.at_once_and_measure, *advancing)
    launch(lamb_settle, plan, plan.all_tensors, table, *plan.sums, plan.scales, ratios, found, count)
    launch(lamb_apply, plan, lists.apply, table, plan.scales, found, count, element, chunk)


def launch_lars(plan: Plan, table: Tensor, ratios: Tensor, found: Tensor, element: Any, norms: Norms) -> None:
    """Launch LARS' kernels: up to three, fewer where norms are known. They change nothing where `found` is not 0."""
    carried, given = norms.of_weights_carried, norms.of_gradients_given
    lists, chunk, count = plan.lists(measured=carried and given), plan.tuning.chunk_elements, plan.n_tensors
    measuring = (table, *plan.sums, count, element, plan.is_aligned, not carried, not given, chunk)
    launch(lars_measure, plan, lists.measure, *measuring)
    if lists.apply.numel() or 0 in plan.tensors.numels:  # an empty tensor has no items, and still needs its ratio of 1
        launch(lars_settle, plan, plan.adapted, table, *plan.sums, plan.scales, ratios, count, not given)
    applying = (table, plan.sums[0], plan.scales, ratios, found, count, element, plan.is_aligned, norms.carry, chunk)
    launch(lars_apply, plan, lists.at_once_and_apply, *applying)


# --- from an optimizer to its launches --------------------------------------------------------------------------------

TUNINGS = {
    torch.float32: Tuning(chunk_elements=4096, warps=8),
    torch.bfloat16: Tuning(chunk_elements=2048, warps=8),  # two arrays more: with 4096 one program fills a processor
    torch.float16: Tuning(chunk_elements=2048, warps=8),
}
ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

MOST_PLANS = 32
"""Plans kept per batch: one for each set of parameters that had gradients."""


class Member:
    """One parameter, with what stays the same from step to step."""

    __slots__ = ("flags", "group", "name", "param", "strides")

    def __init__(self, param: Tensor, name: str, group: int, flags: Flags) -> None:
        self.param, self.name, self.group, self.flags = param, name, group, flags
        self.strides = None if param.is_contiguous() else param.stride()

    def lies_as_before(self) -> bool:
        return self.param.is_contiguous() if self.strides is None else self.param.stride() == self.strides


class Prepared(NamedTuple):
    """A step of one batch, checked and ready to launch."""

    plan: Plan
    params: list[Tensor]
    dense: list[Tensor]
    """Gradients, referenced until the launches are under way, since some may be copies."""
    columns: dict[str, list[int]]
    """Addresses, by column of the table."""


@final
class FusedStep:
    """The kernels of one optimizer."""

    def __init__(self, optimizer: Layerwise, tuning: Tuning | None = None) -> None:
        numbers = {id(group): number for number, group in enumerate(optimizer.param_groups)}
        members: dict[tuple[torch.device, torch.dtype], list[Member]] = {}
        for group, param, name, flags in optimizer.parameters_with_flags():
            kind = param.device, param.dtype
            members.setdefault(kind, []).append(Member(param, name, numbers[id(group)], flags))
        self.batches = [Batch(*kind, of_kind, tuning or TUNINGS[kind[1]]) for kind, of_kind in members.items()]
        self._states: list[dict[str, Any]] = []

    def still_fits(self) -> bool:
        """Return whether parameters have the type, device and layout of the start, which model.half() and the like change."""
        return all(map(Batch.still_fits, self.batches))

    def step(self, optimizer: Layerwise) -> TrustRatios | None:
        if not self._has_same_states(optimizer):
            for batch in self.batches:
                batch.states = None
        settings = [_settings(optimizer, group) for group in optimizer.param_groups]
        prepared = [batch.prepare(optimizer) for batch in self.batches]  # all refusals come before anything changes
        names: list[str | None] = []
        values: list[Tensor] = []
        for batch, ready in zip(self.batches, prepared, strict=True):
            if ready is not None:
                names += ready.plan.names
                values.append(batch.launch(optimizer, ready, settings))
        return TrustRatios(names, values) if any(names) else None

    def _has_same_states(self, optimizer: Layerwise) -> bool:
        """Return whether all state dicts are those of the last step. Looking them up by parameter costs ten times as much."""
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
    """Update the parameters of one device and type."""

    def __init__(self, device: torch.device, dtype: torch.dtype, members: Sequence[Member], tuning: Tuning) -> None:
        self.device, self.dtype, self.members, self.tuning = device, dtype, list(members), tuning
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._params = [member.param for member in members]
        self._param_places = list(map(Tensor.data_ptr, self._params))
        self._all_members = tuple(range(len(members)))
        self.states: list[dict[str, Any]] | None = None
        """State dicts of all parameters; None where they may have changed since the last step."""
        self._known: dict[str, tuple[list[Tensor], list[int]]] = {}
        """Tensors of the state and their addresses, by name."""
        self._contiguous = all(member.strides is None for member in members)
        self._seen: tuple[list[int], list[int]] = [], []
        """Ids and addresses of gradients whose layout was checked."""
        self.carried: tuple[Plan, list[int], list[int]] | None = None
        """The plan whose sums hold the squared norms of the parameters; their addresses and versions at that time."""

    def still_fits(self) -> bool:
        places = list(map(Tensor.data_ptr, self._params))
        if places == self._param_places:
            return True
        self._param_places = places
        return all(
            member.param.dtype is self.dtype and member.param.device == self.device and member.lies_as_before()
            for member in self.members
        )

    def prepare(self, optimizer: Layerwise) -> Prepared | None:
        """Do all that can fail; None if no parameter has a gradient."""
        grads: list[Any] = [param.grad for param in self._params]
        active, params, members, places = self._all_members, self._params, self.members, self._param_places
        if not all(map(operator.is_not, grads, itertools.repeat(None))):
            active = tuple(i for i, grad in enumerate(grads) if grad is not None)
            params, members = [params[i] for i in active], [members[i] for i in active]
            places, grads, self.states = [places[i] for i in active], [grads[i] for i in active], None
        if not params:
            return None
        dense, grad_places = self._dense(optimizer, members, grads)
        columns = {**self._columns(optimizer, params), "param": places, "grad": grad_places}
        plan = self._plans.get(active) or self._new_plan(optimizer, active, members)
        if active is not self._all_members:
            self.states = None
        return Prepared(plan, params, dense, columns)

    def launch(self, optimizer: Any, ready: Prepared, settings: list[list[float]]) -> Tensor:
        """Launch the kernels; return the trust ratios."""
        plan, params, _, columns = ready
        ratios = torch.empty(len(params), dtype=torch.float32, device=self.device)
        told = vars(optimizer).get("found_inf")
        found = plan.nothing_found if told is None else told.to(self.device, torch.float32, non_blocking=True)
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            if optimizer.counts_steps:
                launch_lamb(plan, self._table(optimizer, plan, columns, settings), ratios, found, ELEMENTS[self.dtype])
            else:
                norms = self._norms(optimizer, ready)
                launch_lars(plan, self._table(optimizer, plan, columns, settings), ratios, found, ELEMENTS[self.dtype], norms)
                # Versions as they will be below, once this step's own writes are counted.
                versions = [param._version + 1 for param in params] if norms.carry else []
                self.carried = (plan, columns["param"], versions) if norms.carry else None
        torch.autograd.graph.increment_version(params)
        return ratios

    def _norms(self, optimizer: Any, ready: Prepared) -> Norms:
        """Decide which norms LARS need not measure, and put gradient_norms norms in the table."""
        gradient_norms = optimizer.accepted_norms(ready.params)
        if gradient_norms is not None:
            ready.columns["grad_norm"] = list(map(Tensor.data_ptr, gradient_norms))
        carried = self._is_carried(ready.plan, ready.params, ready.columns["param"])
        return Norms(of_weights_carried=carried, of_gradients_given=gradient_norms is not None, carry=optimizer.carry_norms)

    def _dense(self, optimizer: Layerwise, members: Sequence[Member], grads: list[Tensor]) -> tuple[list[Tensor], list[int]]:
        """Return gradients in the memory order of their parameters, and their addresses; as a rule they have it already.

        Checked only if ids or addresses differ from the last step's, since autograd keeps to one layout.
        """
        with contextlib.suppress(RuntimeError):  # a sparse one has no address
            seen = list(map(id, grads)), list(map(Tensor.data_ptr, grads))
            if seen == self._seen:
                return grads, seen[1]
            if self._contiguous and all(map(_is_strided, grads)) and all(map(Tensor.is_contiguous, grads)):
                self._seen = seen
                return grads, seen[1]
        grads = [self._in_order_of(member, grad, optimizer) for member, grad in zip(members, grads, strict=True)]
        return grads, list(map(Tensor.data_ptr, grads))

    def _in_order_of(self, member: Member, grad: Tensor, optimizer: Layerwise) -> Tensor:
        if grad.layout is not torch.strided:
            optimizer.refuse_sparse(member.name)
        if grad.is_contiguous() if member.strides is None else grad.stride() == member.strides:
            return grad
        return torch.empty_like(member.param).copy_(grad)

    def _columns(self, optimizer: Layerwise, params: Sequence[Tensor]) -> dict[str, list[int]]:
        """Return the table's columns of addresses of the state."""
        if self.states is None:
            self.states = [optimizer.state_of(param, count_on=self.device) for param in params]
            self._known.clear()
        columns = {}
        for column, name in zip(("first", "second"), optimizer.moments, strict=False):
            columns[column] = self._places(optimizer, params, name)
        if optimizer.counts_steps:
            columns["step"] = self._places(optimizer, params, "step")
        if self.dtype in NARROW:
            columns["master"] = self._places(optimizer, params, "master")
        return columns

    def _places(self, optimizer: Layerwise, params: Sequence[Tensor], name: str) -> list[int]:
        """Return the addresses of one part of the state, from the last step where nothing has moved.

        Checked are the identity of all tensors and the addresses of the first and last: code that writes `.data` moves all."""
        assert self.states is not None
        tensors: list[Any] = [state.get(name) for state in self.states]
        known, places = self._known.get(name, ([], []))
        same = len(tensors) == len(known) and all(map(operator.is_, tensors, known))
        if not (same and (tensors[0].data_ptr(), tensors[-1].data_ptr()) == (places[0], places[-1])):
            tensors = [optimizer.state_of(param, count_on=self.device)[name] for param in params]
            places = list(map(Tensor.data_ptr, tensors))
            self._known[name] = tensors, places
        return places

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
        plan.lists(measured=optimizer.carry_norms)  # now, since nothing can be sent while a graph is captured
        if len(self._plans) >= MOST_PLANS:
            del self._plans[next(iter(self._plans))]
        self._plans[active] = plan
        return plan

    def _table(self, optimizer: Layerwise, plan: Plan, columns: dict[str, list[int]], settings: list[list[float]]) -> Tensor:
        table = plan.send(columns, settings)
        for number, group in enumerate(optimizer.param_groups):
            if _is_on_device(group["lr"]):
                place = plan.place_of_lr(number)
                table[place : place + 1].view(torch.float64).copy_(group["lr"].reshape(1))
        return table

    def _is_carried(self, plan: Plan, params: Sequence[Tensor], addresses: list[int]) -> bool:
        """Return whether the sums still belong to the parameters: none was written, replaced or skipped since."""
        if self.carried is None:
            return False
        of_plan, places, versions = self.carried
        return of_plan is plan and places == addresses and versions == [param._version for param in params]


def _settings(optimizer: Layerwise, group: dict[str, Any]) -> list[float]:
    """Return a group's settings in the order of the kernels' columns."""
    lr, sign = group["lr"], -1.0 if group["maximize"] else 1.0
    rate = 0.0 if _is_on_device(lr) else float(lr)
    if optimizer.counts_steps:
        beta1, beta2 = group["betas"]
        return [rate, beta1, beta2, group["eps"], group["lamb_weight_decay"], sign, 1 - beta1, 1 - beta2]
    return [rate, group["momentum"], group["lars_weight_decay"], group["lars_coeff"], group["epsilon"], sign]


def _is_strided(grad: Tensor) -> bool:
    return grad.layout is torch.strided


def _is_on_device(lr: float | Tensor) -> bool:
    return isinstance(lr, Tensor) and lr.device.type != "cpu"
