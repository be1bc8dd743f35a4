"""Steps that leave no trace: they are measured, then weights, buffers, optimizer, stages and random numbers are put back.

A rehearsed forward and backward send nothing, so a rank that runs out of memory leaves no other one waiting: `everywhere`
raises on all ranks then, before the next collective. A rehearsed update does talk; no recompute would make room for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from ..dist.agree import Failures, run_on_all
from ..dist.comm import Comm
from ..errors import ConfigError, FleetError, RecomputeError, first_line
from . import dry_steps
from .dry_steps import rehearsing
from .modules.nested_tensors import map_tensors, tensors_in
from .modules.random_states import NUMPY, PYTHON, States, held_sources, torch_sources
from .optimizer import FleetOptimizer
from .state import load_training_state, training_state

Found = TypeVar("Found")


class OutOfMemory(FleetError):
    """Some rank had not enough memory for a rehearsed step; raised on all of them."""


class NoHostMemory(ConfigError):
    """The host has no more pinned memory to give."""


class UpdateOutOfMemory(ConfigError):
    """This rank had not enough memory in the middle of an update; the others are still in it, and no rank can go on."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error is torch's own kind, or what the libraries below it say when there is no room for their
    workspaces."""
    told = ("error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "unable to find an engine")
    return isinstance(error, torch.OutOfMemoryError | NoHostMemory) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in told)
    )


def with_own_out_of_memory(work: Callable[[], Found]) -> Found:
    """Run `work`; where memory runs out raise `OutOfMemory` in place of the error, whose frames would keep tensors in memory."""
    try:
        return work()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        text = first_line(error)
    raise OutOfMemory(text)  # outside of the `except`, which would make the other error its context


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """Compute the loss as the model does, where there is no loss_fn."""
    compute = getattr(model, "loss", None)
    if not callable(compute):
        raise ConfigError(
            f"{type(model).__name__} has no method `loss(batch)`. Say how its loss is computed: "
            "loss_fn=lambda model, batch: ..., beside sample=, in fleet.distribute(...) or fleet.find_batch(...)."
        )
    found: Tensor = compute(batch)
    return found


@final
class Sample:
    """A batch on the device, of its own: a forward may write to what it is given, and the next one is to find it as it was."""

    def __init__(self, batch: Any, device: torch.device) -> None:
        self.source = batch
        self.value = map_tensors(lambda t: t.detach().to(device, copy=True).requires_grad_(t.requires_grad), batch)
        self._tensors = tensors_in(self.value)
        self._versions = [tensor._version for tensor in self._tensors]

    def renewed(self) -> Any:
        """Return the batch in lists and dictionaries of its own, which a forward may empty."""
        with torch.no_grad():
            for i, (tensor, source) in enumerate(zip(self._tensors, tensors_in(self.source), strict=True)):
                tensor.grad = None
                if tensor._version != self._versions[i]:
                    tensor.copy_(source)
                    self._versions[i] = tensor._version
        return map_tensors(lambda tensor: tensor, self.value)


@final
@dataclass(frozen=True, slots=True)
class Rehearsal:
    model: nn.Module
    optimizer: FleetOptimizer
    loss_fn: Callable[[nn.Module, Any], Tensor]
    sample: Sample
    comm: Comm
    device: torch.device
    random: States = field(default_factory=list)

    @contextlib.contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        self.everywhere(self._refuse_gradients)
        saved = Snapshot(self.model, self.optimizer, self.device)
        self.random[:] = saved.random
        if not self.model.training:  # modules that are not, in a model that is, are the user's choice
            self.model.train()
        try:
            with rehearsing():
                yield
        finally:
            saved.put_back()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # what a plan that was given up has reserved

    def _refuse_gradients(self) -> None:
        if self.optimizer.pipeline.buckets.has_new():
            raise ConfigError(
                "the model has gradients already, which steps that are run to be measured would mix with. Call model.zero_grad() "
                "before fleet.distribute(...) or fleet.find_batch(...)."
            )

    def set_random_back(self) -> None:
        """Put the random states back before each step: all steps draw the same, and so take the same way through the model."""
        for source, state in self.random:
            source.set(state)

    def forward(self) -> Tensor:
        self.set_random_back()
        loss = self.loss_fn(self.model, self.sample.renewed())
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            told = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(f"loss_fn(model, sample) gave {told}; it must give a loss: one number, with gradients.")
        return loss

    def backward(self, loss: Tensor) -> None:
        """Run a backward as inside a merge window: gradients come to lie where they always do, and nothing is reduced."""
        dry_steps.backward(self.optimizer.pipeline, loss)

    def step(self) -> None:
        self.backward(self.forward())

    def gather_gradients(self) -> None:
        """Make gradients of zero for an update, which no loss scale makes infinite. Collective."""
        self.everywhere(lambda: dry_steps.backward(self.optimizer.pipeline, self.forward(), seed=0.0, keeps=True))

    def update(self) -> None:
        """Update by the gradients gathered. Collective, and so are its parts: a rank without memory for the optimizer's state can
        only leave word of it, and the others hear it when the connection breaks."""
        try:
            self.optimizer.rehearse_update()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            text = f"there is not enough memory for the update itself, whatever is computed again: {first_line(error)}"
            self.comm.post_error(f"rank {self.comm.rank}: {text}")
            raise UpdateOutOfMemory(text) from error

    def everywhere(self, work: Callable[[], Found]) -> Found:
        """Return the result of `work`; or, if it failed on some rank, raise on every one. Collective at the end: `work` itself
        may not be."""
        return run_on_all(self.comm, lambda: with_own_out_of_memory(work), report=_report, fails=self._verdict)

    def _verdict(self, failures: Failures) -> Exception:
        """Choose by what the first of them says: a caller may go on after one kind of error, and then all ranks must."""
        rank, said = failures.first
        if said["kind"] != "other":
            dry_steps.drop_gradients(self.optimizer.pipeline)  # also where it went well
        if said["kind"] == "unit":
            return RecomputeError(said["text"], unit=said["unit"])
        if failures.own is not None and failures.by_rank[self.comm.rank]["kind"] == said["kind"]:
            return failures.own
        if said["kind"] == "memory":
            return OutOfMemory(f"on rank {rank}: {said['text']}")
        return FleetError(f"a rehearsed step failed on rank {rank}: {said['text']}")

    def lasting(self) -> Iterable[Tensor]:
        """Return tensors that live from step to step, for a device whose allocator does not count them."""
        pipeline = self.optimizer.pipeline
        yield from self.model.parameters()
        yield from self.model.buffers()
        yield from (bucket.reduced if bucket.frees else bucket.flat for bucket in pipeline.buckets)
        yield from tensors_in(training_state(self.optimizer))
        yield from tensors_in(self.sample.value)


def _report(error: Exception) -> dict[str, str]:
    if isinstance(error, RecomputeError):
        return {"kind": "unit", "text": str(error), "unit": error.unit}
    if isinstance(error, OutOfMemory):
        return {"kind": "memory", "text": str(error)}
    return {"kind": "other", "text": f"{type(error).__name__}: {error}"}


@final
class Snapshot:
    """A copy of all that a step changes, in host memory: a copy on the device would count as the step's own."""

    def __init__(self, model: nn.Module, optimizer: FleetOptimizer, device: torch.device) -> None:
        self._model, self._optimizer = model, optimizer
        self._modes = [module.training for module in model.modules()]
        self._buffers = [dict(module._buffers) for module in model.modules()]
        self._values = [(tensor, _on_host(tensor)) for tensor in [*model.parameters(), *model.buffers()]]
        self._training = map_tensors(_on_host, training_state(optimizer))
        held = held_sources(value for module in model.modules() for value in vars(module).values())
        self.random = [(source, source.get()) for source in [*torch_sources(device), PYTHON, NUMPY, *held]]

    @torch.no_grad()
    def put_back(self) -> None:
        dry_steps.drop_gradients(self._optimizer.pipeline)
        for module, mode, buffers in zip(self._model.modules(), self._modes, self._buffers, strict=True):
            module.training = mode
            module._buffers.clear()
            module._buffers.update(buffers)
        for tensor, value in self._values:
            tensor.copy_(value)
        load_training_state(self._optimizer, self._training)
        for source, state in self.random:
            source.set(state)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
