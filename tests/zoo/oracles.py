"""What the loops of the zoo are handed: fleetx, or one of the oracles that it is compared with.

An oracle is DDP, or, for what DDP cannot do, a mean over ranks made by hand after each backward.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from fleetx import fleet


class Api(Protocol):
    """All that a loop of the zoo knows of ranks."""

    def distribute(self, model: nn.Module, optimizer: Optimizer) -> tuple[Any, Any]: ...

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]: ...

    def running(self) -> AbstractContextManager[Any]: ...


class Fleetx:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._strategy = fleet.DistributedStrategy(**settings)

    def distribute(self, model: nn.Module, optimizer: Optimizer) -> tuple[Any, Any]:
        return fleet.distribute(model, optimizer, self._strategy)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = fleet.no_sync()
        return context

    @contextmanager
    def running(self) -> Iterator[None]:
        with warnings.catch_warnings():
            # On many CPUs 16 bits are slower than float32, and amp says so; warnings are errors in these processes.
            warnings.filterwarnings("ignore", message="amp:")
            yield


class Ddp:
    def __init__(self, *, autocast: bool = False, find_unused: bool = False) -> None:
        self._autocast, self._find_unused = autocast, find_unused

    def distribute(self, model: nn.Module, optimizer: Optimizer) -> tuple[Any, Any]:
        if isinstance(model, DistributedDataParallel):  # a second optimizer on one model
            return model, optimizer
        if self._autocast:
            compute_in_bfloat16(model)
        return DistributedDataParallel(model, find_unused_parameters=self._find_unused), optimizer

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        assert isinstance(model, DistributedDataParallel)
        return model.no_sync()

    def running(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()


class Mean:
    """The mean over ranks of every gradient, after each backward: of what was averaged before, it changes nothing.

    With a `period`, so many calls of step() make one update. Before the last of them gradients are put aside, so that step()
    finds none; then they come back, and what the update gets is the sum of all backwards, divided by the period.
    """

    def __init__(self, *, period: int = 1, autocast: bool = False) -> None:
        self._period, self._autocast = period, autocast
        self._params: dict[Tensor, None] = {}
        self._aside: dict[Tensor, Tensor] = {}
        self._reduced: dict[Tensor, Tensor] = {}
        """What the backwards before this one have left, in the last micro-step of a window."""
        self._micro_step, self._depth = 1, 0
        self._local = self._pending = False

    def distribute(self, model: nn.Module, optimizer: Optimizer) -> tuple[Any, Any]:
        if self._autocast:
            compute_in_bfloat16(model)
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        for tensor in [*model.parameters(), *model.buffers(), *trained]:
            dist.broadcast(tensor.detach(), 0)
        if not self._params:  # two optimizers step one after the other, with no backward between them
            optimizer.register_step_post_hook(lambda *_: self._after_step())
        self._params |= {p: None for p in [*model.parameters(), *trained] if p.requires_grad}
        optimizer.register_step_pre_hook(lambda *_: self._average() if self._pending else None)
        return model, optimizer

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        self._local = True
        yield
        self._local = False

    @contextmanager
    def running(self) -> Iterator[None]:
        backward = torch.autograd.backward

        def then_average(*args: Any, **kwargs: Any) -> None:
            self._depth += 1  # a re-entrant checkpoint calls backward within backward
            backward(*args, **kwargs)
            self._depth -= 1
            if self._depth == 0:
                self._after_backward()

        with mock.patch.object(torch.autograd, "backward", then_average):
            yield

    def _after_backward(self) -> None:
        self._pending = True
        if self._local:
            return
        if self._micro_step < self._period:
            self._put_aside()
        else:
            self._take_back()
            self._average()
            self._reduced = {p: p.grad.clone() for p in self._params if p.grad is not None}

    def _after_step(self) -> None:
        self._micro_step = self._micro_step % self._period + 1
        self._reduced = {}

    def _put_aside(self) -> None:
        for p in self._params:
            if p.grad is not None:
                self._aside[p] = self._aside[p] + p.grad if p in self._aside else p.grad
                p.grad = None
        self._pending = False

    def _take_back(self) -> None:
        if self._period == 1:
            return
        nothing = torch.zeros(())
        for p in self._params:
            if p.grad is not None or p in self._aside:
                before = self._reduced.get(p, nothing)
                fresh = nothing if p.grad is None else p.grad - before
                p.grad = before + (self._aside.pop(p, nothing) + fresh) / self._period

    def _average(self) -> None:
        for p in self._params:
            present = torch.tensor(float(p.grad is not None))
            dist.all_reduce(present)
            if present:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
                p.grad.div_(dist.get_world_size())
        self._pending = False


def compute_in_bfloat16(model: nn.Module) -> None:
    """Autocast over the model's forward, and float32 outputs, as amp has it."""
    forward = model.forward

    def autocast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            out = forward(*args, **kwargs)
        return tree_map(lambda t: t.float() if isinstance(t, Tensor) and t.is_floating_point() else t, out)

    model.forward = autocast
