"""Make an update only where its gradients are finite, by an answer that is on the device: the host has not seen it yet.

    takes    the optimizer takes `found_inf`, and writes nothing where it is not 0: torch's fused SGD, Adam, AdamW and Adagrad;
             LARS and LAMB by their kernels
    keeps    its parameters and state are small: the old values are kept beside, and the device puts them back where it must
    waits    all others: the host waits for the answer, once in each update

A number of the state that is on the host (how many steps there were) is put back there, once the host has heard.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module

from ...dist.triton_support import has_triton, runs_here
from ..bucket import view_like
from ..setup.own_optimizer import Update
from ..user_loop.optimizer_hooks import may_change_gradients

PutBackOnHost = Callable[[], None]

MOST_BYTES_KEPT = 256 * 2**20
"""Largest size of parameters and state beside which copies are kept: writing these takes a GPU less time than a wait costs it."""
TAKES_FOUND = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
"""Optimizers whose fused kernel (fused=True) takes a flag on the device."""
NAMES = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop")
HOLDS_TENSORS = tuple(getattr(torch.optim, name) for name in NAMES)
"""Torch's optimizers of which all that a step changes is parameters, and what `state` holds."""
CHUNK_BYTES = 2**14
"""Bytes that one program of the kernel copies back."""


class Way(enum.Enum):
    TAKES = "takes found_inf"
    KEEPS = "keeps the values before"
    WAITS = "waits"


def way_of(optimizer: Optimizer) -> Way:
    """Return how a step of this optimizer is made before the host knows whether it should be. The same on every rank."""
    mine = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    of_all = (optimizer_module._global_optimizer_pre_hooks, optimizer_module._global_optimizer_post_hooks)
    if any(may_change_gradients(hooks) for hooks in (*mine, *of_all)):
        return Way.WAITS  # a hook of the user's is called for updates that are made, and for no others
    if isinstance(optimizer, Update):
        return Way.TAKES if optimizer.takes_found_inf() else Way.KEEPS
    kind = type(optimizer)
    if kind in TAKES_FOUND and all(group.get("fused") for group in optimizer.param_groups):
        return Way.TAKES
    return Way.KEEPS if kind in HOLDS_TENSORS else Way.WAITS


@final
class ConditionalStep:
    """The steps of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._kept: _KeptValues | None = None

    def can_be_made(self) -> bool:
        """Return whether the coming step can be made before the host knows."""
        way = way_of(self._optimizer)
        return way is Way.TAKES or (way is Way.KEEPS and self._find_kept() is not None)

    def make_room(self) -> None:
        """Allocate, after an update that was made, what later ones need, so that it is part of what a run is measured to take."""
        if way_of(self._optimizer) is Way.KEEPS:
            kept = self._find_kept()
            if kept is not None:
                kept.allocate()

    def step(self, found: Tensor) -> tuple[bool, PutBackOnHost]:
        """Step where `found` is 0. Whether state was made that was not there before, and what puts numbers on the host back:
        to be called if it turns out that the step was not to be made."""
        optimizer = self._optimizer
        before = _StateBefore(optimizer)
        if way_of(optimizer) is Way.TAKES:
            optimizer.found_inf = found  # type: ignore[attr-defined]  # as a GradScaler does
            try:
                optimizer.step()
            finally:
                del optimizer.found_inf  # type: ignore[attr-defined]
        else:
            kept = self._kept
            assert kept is not None
            kept.keep()
            optimizer.step()
            kept.put_back(found)
        return before.has_grown(), before.put_back

    @torch.no_grad()
    def _find_kept(self) -> _KeptValues | None:
        """Copies of what a step changes; None where that is too much, or not all of it is tensors on one device."""
        params = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        values = [value for state in self._optimizer.state.values() for value in state.values() if value is not None]
        if not params or not all(isinstance(value, Tensor) for value in values):
            return None
        tensors: list[Tensor] = [*params, *(value for value in values if not _is_on_host(value))]
        if self._kept is not None and self._kept.is_of(tensors):
            return self._kept
        self._kept = None
        fits = sum(tensor.nbytes for tensor in tensors) <= MOST_BYTES_KEPT
        if fits and all(tensor.device == params[0].device and tensor.layout is torch.strided for tensor in tensors):
            self._kept = _KeptValues(tensors)
        return self._kept


def _is_on_host(value: Any) -> bool:
    """Return whether this is one number that the optimizer reads and writes on the host, also in the state of a GPU's
    parameters."""
    return isinstance(value, Tensor) and value.dim() == 0 and value.device.type == "cpu"


@final
class _StateBefore:
    """What keys each parameter's state had, in the order in which they were made, and its numbers on the host."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._state = optimizer.state
        self._sizes = list(map(len, optimizer.state.values()))
        numbers = [value for state in optimizer.state.values() for value in state.values() if _is_on_host(value)]
        self._numbers = numbers
        self._values = torch.stack(numbers) if numbers else None

    def has_grown(self) -> bool:
        return list(map(len, self._state.values())) != self._sizes

    @torch.no_grad()
    def put_back(self) -> None:
        if self._values is not None:
            torch._foreach_copy_(self._numbers, list(self._values.unbind()))
        for place, (param, state) in enumerate(list(self._state.items())):
            size = self._sizes[place] if place < len(self._sizes) else 0
            for key in list(state)[size:]:
                del state[key]
            if place >= len(self._sizes):
                del self._state[param]


@final
class _KeptValues:
    """Copies of tensors, one after the other in one stretch of memory for each type."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._copies: list[Tensor] = []
        self._put_back: PutBack | None = None

    def is_of(self, tensors: list[Tensor]) -> bool:
        return len(tensors) == len(self._tensors) and all(one is other for one, other in zip(tensors, self._tensors, strict=True))

    def allocate(self) -> None:
        if self._copies:
            return
        copies: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in self._tensors):
            same = [(i, tensor) for i, tensor in enumerate(self._tensors) if tensor.dtype == dtype]
            flat = torch.empty(sum(tensor.numel() for _, tensor in same), dtype=dtype, device=same[0][1].device)
            pieces = flat.split([tensor.numel() for _, tensor in same])
            copies |= {i: view_like(piece, tensor) for (i, tensor), piece in zip(same, pieces, strict=True)}
        self._copies = [copies[i] for i in range(len(self._tensors))]
        self._put_back = PutBack(self._tensors, self._copies)

    @torch.no_grad()
    def keep(self) -> None:
        self.allocate()
        torch._foreach_copy_(self._copies, self._tensors)

    @torch.no_grad()
    def put_back(self, found: Tensor) -> None:
        assert self._put_back is not None
        self._put_back(found)


@final
class PutBack:
    """Copies `copies` back into `tensors` of the same types, shapes and strides where a flag on the device says so: by one kernel
    that ends at once where it does not, or by a select."""

    def __init__(self, tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        self._tensors, self._copies = list(tensors), list(copies)
        self._places: list[int] = []
        self._table: Tensor | None = None
        device = self._tensors[0].device
        by_kernel = has_triton() and runs_here(device) and all(map(_is_alike, self._tensors, self._copies))
        self._kernel: Any = _kernel() if by_kernel else None

    def __call__(self, found: Tensor) -> None:
        """Copy where `found` is not 0."""
        if self._kernel is None:
            flag = found != 0.0
            for tensor, copy in zip(self._tensors, self._copies, strict=True):
                torch.where(flag, copy, tensor, out=tensor)
            return
        table = self._chunks()
        self._kernel[(len(table),)](table, found, CHUNK_BYTES, num_warps=4)
        torch.autograd.graph.increment_version(self._tensors)

    def _chunks(self) -> Tensor:
        """Return addresses and lengths, a row for each chunk; written again where a tensor has moved (`param.data = ...`)."""
        places = list(map(Tensor.data_ptr, self._tensors))
        if self._table is None or places != self._places:
            rows = []
            for place, tensor, copy in zip(places, self._tensors, self._copies, strict=True):
                for start in range(0, tensor.nbytes, CHUNK_BYTES):
                    rows.append([place + start, copy.data_ptr() + start, min(CHUNK_BYTES, tensor.nbytes - start)])
            on_gpu = self._tensors[0].device.type == "cuda"
            host = torch.tensor(rows, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
            self._places, self._table = places, host.to(self._tensors[0].device, non_blocking=on_gpu)
        return self._table


def _is_alike(tensor: Tensor, copy: Tensor) -> bool:
    """Return whether both are the same in memory, so that bytes can be copied."""
    return tensor.stride() == copy.stride() and bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


@functools.cache
def _kernel() -> Any:
    from .device_copy_triton import put_back  # Triton is imported only where it is used

    return put_back
