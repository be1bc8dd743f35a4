"""Steps that leave no trace: they are measured, then weights, buffers, optimizer, stages and random numbers are put back.

A rehearsed forward and backward talk to no other rank, so one that runs out of memory leaves nobody waiting: `everywhere` then
tells all ranks, before the next collective. A rehearsed update does talk; every rank makes it, or none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from .comm import Comm
from .errors import ConfigError, FleetError, RecomputeError, first_line
from .memory.random_states import NUMPY, PYTHON, held_sources, torch_sources
from .optimizer import FleetOptimizer
from .rehearsing import rehearsing
from .resume import load_training_state, training_state
from .trees import map_tensors, tensors_in

Found = TypeVar("Found")


class OutOfMemory(FleetError):
    """Some rank had not enough memory for a rehearsed step; raised on all of them."""


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """What is used without a loss_fn."""
    compute = getattr(model, "loss", None)
    if not callable(compute):
        raise ConfigError(
            f"{type(model).__name__} has no method `loss(batch)`. Say how its loss is computed: "
            "fleet.distribute(model, optimizer, strategy, sample=batch, loss_fn=lambda model, batch: ...)."
        )
    found: Tensor = compute(batch)
    return found


@final
class Sample:
    """A batch on the device, of its own: a forward may write to what it is given, and the next one is to find it as it was."""

    def __init__(self, batch: Any, device: torch.device) -> None:
        self._source = batch
        self.value = map_tensors(lambda tensor: tensor.to(device, copy=True), batch)
        self._versions = [tensor._version for tensor in tensors_in(self.value)]

    @torch.no_grad()
    def renew(self) -> None:
        tensors = tensors_in(self.value)
        for i, (tensor, source) in enumerate(zip(tensors, tensors_in(self._source), strict=True)):
            if tensor._version != self._versions[i]:
                tensor.copy_(source)
                self._versions[i] = tensor._version


@final
@dataclass(frozen=True, slots=True)
class Rehearsal:
    model: nn.Module
    optimizer: FleetOptimizer
    loss_fn: Callable[[nn.Module, Any], Tensor]
    sample: Sample
    comm: Comm
    device: torch.device

    @contextlib.contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        if self.optimizer.pipeline.buckets.has_new():
            raise ConfigError(
                "the model has gradients already, which steps that are run to be measured would mix with. Call model.zero_grad() "
                "before fleet.distribute(...) or fleet.find_batch(...)."
            )
        saved = Snapshot(self.model, self.optimizer, self.device)
        self.model.train()
        try:
            with rehearsing():
                yield
        finally:
            saved.put_back()

    def forward(self) -> Tensor:
        self.sample.renew()
        loss = self.loss_fn(self.model, self.sample.value)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            told = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(f"loss_fn(model, sample) gave {told}; it must give a loss: one number, with gradients.")
        return loss

    def backward(self, loss: Tensor) -> None:
        """As inside a merge window: gradients come to lie where they always do, and nothing is reduced."""
        self.optimizer.pipeline.rehearse(loss)

    def step(self) -> None:
        self.backward(self.forward())

    def gather_gradients(self) -> None:
        """For an update: of zero, which no loss scale makes infinite. Collective."""
        self.everywhere(lambda: self.optimizer.pipeline.rehearse(self.forward(), seed=0.0, keeps=True))

    def update(self) -> None:
        """By the gradients gathered. Collective."""
        self.optimizer.rehearse_update()

    def everywhere(self, work: Callable[[], Found]) -> Found:
        """Its result; or, if it failed on some rank, an error on every one. Collective at the end: `work` itself may not be."""
        result: Found | None = None
        error: Exception | None = None
        told: dict[str, str] | None = None
        try:
            result = work()
        except torch.OutOfMemoryError as found:
            self.optimizer.pipeline.drop_rehearsed()
            error, told = OutOfMemory(first_line(found)), {"kind": "memory", "text": first_line(found)}
        except RecomputeError as found:
            error, told = found, {"kind": "unit", "text": str(found), "unit": found.unit}
        except Exception as found:
            error, told = found, {"kind": "other", "text": f"{type(found).__name__}: {found}"}
        failed = [(rank, said) for rank, said in enumerate(self.comm.gather_json(told)) if said is not None]
        if failed:
            # By what the first of them says: somebody may go on after one kind of error, and then all ranks must.
            rank, said = failed[0]
            raise _verdict(rank, said, own=error if told is not None and told["kind"] == said["kind"] else None)
        return result  # type: ignore[return-value]

    def lasting(self) -> Iterable[Tensor]:
        """Tensors that live from step to step, for a device whose allocator does not count them."""
        pipeline = self.optimizer.pipeline
        yield from self.model.parameters()
        yield from self.model.buffers()
        yield from pipeline.buckets.flats
        yield from tensors_in(training_state(self.optimizer))
        yield from tensors_in(self.sample.value)


def _verdict(rank: int, said: Mapping[str, str], *, own: Exception | None) -> Exception:
    if said["kind"] == "unit":
        return RecomputeError(said["text"], unit=said["unit"])
    if own is not None:
        return own
    if said["kind"] == "memory":
        return OutOfMemory(f"on rank {rank}: {said['text']}")
    return FleetError(f"a rehearsed step failed on rank {rank}: {said['text']}")


@final
class Snapshot:
    """Of all that a step changes, in host memory: a copy on the device would count as the step's own."""

    def __init__(self, model: nn.Module, optimizer: FleetOptimizer, device: torch.device) -> None:
        self._model, self._optimizer = model, optimizer
        self._modes = [module.training for module in model.modules()]
        self._buffers = [dict(module._buffers) for module in model.modules()]
        self._values = [(tensor, _on_host(tensor)) for tensor in [*model.parameters(), *model.buffers()]]
        self._training = map_tensors(_on_host, training_state(optimizer))
        held = held_sources(value for module in model.modules() for value in vars(module).values())
        self._random = [(source, source.get()) for source in [*torch_sources(device), PYTHON, NUMPY, *held]]

    @torch.no_grad()
    def put_back(self) -> None:
        self._optimizer.pipeline.drop_rehearsed()
        for module, mode, buffers in zip(self._model.modules(), self._modes, self._buffers, strict=True):
            module.training = mode
            module._buffers.clear()
            module._buffers.update(buffers)
        for tensor, value in self._values:
            tensor.copy_(value)
        load_training_state(self._optimizer, self._training)
        for source, state in self._random:
            source.set(state)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
