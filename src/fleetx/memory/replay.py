"""A module's forward, computed again in backward: what it saved for it is dropped, its inputs are kept.

    forward     runs as ever; inputs, random states and the buffers that it changes are remembered, activations are not
    backward    before it needs the first of them, forward runs again, in the world of then: random numbers, buffers, autocast,
                and what other ranks said; afterwards everything is as if it had not

Everything is equal to the bit: gradients, random numbers afterwards, running statistics, which count each batch once.
The engine is torch.utils.checkpoint, without re-entering autograd.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import CheckpointError as MetadataMismatch
from torch.utils.checkpoint import checkpoint

from ..errors import FleetError
from ..trees import tensors_in

SMALL_BUFFER_BYTES = 2**16
Found = TypeVar("Found")
_here = threading.local()
"""`call`: of the unit that runs in this thread now, first or again. `last`: the name of the unit that ran again last."""


class RandomStates(NamedTuple):
    """Of all generators that a forward may draw from without being given one."""

    cpu: Tensor
    device: Tensor | None
    python: Any
    numpy: Any

    @classmethod
    def now(cls, device: torch.device) -> RandomStates:
        on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), on_gpu, random.getstate(), np.random.get_state())

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def equals(self, other: RandomStates) -> bool:
        on_gpu = self.device is None or other.device is None or torch.equal(self.device, other.device)
        numpy = all(np.array_equal(mine, theirs) for mine, theirs in zip(self.numpy, other.numpy, strict=True))
        return on_gpu and numpy and torch.equal(self.cpu, other.cpu) and self.python == other.python


@dataclass(slots=True)
class Call:
    """One call of a unit, remembered for its second run."""

    name: str
    buffers: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    """What they were before it, of those that it changed."""
    said: list[Any] = field(default_factory=list)
    """What was agreed with other ranks in it, in order."""
    heard: int = 0
    runs_again: bool = False
    random: RandomStates | None = None
    """Before it, if it has drawn any."""


def agreed(ask: Callable[[], Found]) -> Found:
    """Ask the other ranks. A unit that runs again hears what they said then: nobody is asked twice, in whatever order units
    are run again."""
    call: Call | None = getattr(_here, "call", None)
    if call is None:
        return ask()
    if call.runs_again:
        answer: Found = call.said[call.heard]
        call.heard += 1
        return answer
    answer = ask()
    call.said.append(answer)
    return answer


@final
class Replay:
    """Around the forward of one unit (patch_forward)."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._module = name, module
        self._changing: set[tuple[int, str]] | None = None
        """Buffers that its forward has changed so far; None before the first call."""

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or getattr(_here, "call", None) is not None:
            return forward(*args, **kwargs)  # nothing is saved; or a unit around this one is computed again anyway
        call = Call(self._name)
        inputs = tensors_in((args, kwargs))
        versions = [tensor._version for tensor in inputs]

        def run() -> Any:
            if call.runs_again and [tensor._version for tensor in inputs] != versions:
                raise FleetError(
                    f"recompute: an input of `{self._name}` was changed in place after its forward, so it cannot be computed "
                    f"again. {self._advice()}"
                )
            return forward(*args, **kwargs)

        # Random states are ours to keep: torch looks for devices among positional arguments alone, and not at Python's.
        contexts = lambda: (self._first(call), self._again(call))  # noqa: E731
        out = checkpoint(run, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        if [tensor._version for tensor in inputs] != versions:
            raise FleetError(
                f"recompute: `{self._name}` changes an input in place (as relu_ or `x += ...` do): it cannot be computed again. "
                f"{self._advice()}"
            )
        return out

    def _advice(self) -> str:
        return 'Let it work on a copy, or leave it out of recompute_configs["checkpoints"].'

    # --- the first run ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _first(self, call: Call) -> Iterator[None]:
        before = self._buffers()
        written_unseen = self._running_statistics()
        held = {
            place: buffer.clone()
            for place, buffer in before.items()
            if self._changing is None or place in self._changing | written_unseen or buffer.nbytes <= SMALL_BUFFER_BYTES
        }
        versions = {place: buffer._version for place, buffer in before.items()}
        states = RandomStates.now(self._device())
        _here.call = call
        try:
            yield
        finally:
            _here.call = None
        for place, buffer in self._buffers().items():
            if before.get(place) is buffer and versions[place] == buffer._version and place not in written_unseen:
                continue
            call.buffers[place] = self._value_before(place, before, held)
        self._changing = (self._changing or set()) | set(call.buffers)
        call.random = None if states.equals(RandomStates.now(self._device())) else states

    def _value_before(
        self, place: tuple[int, str], before: Mapping[tuple[int, str], Tensor], held: Mapping[tuple[int, str], Tensor]
    ) -> Tensor:
        if place in held:
            return held[place]
        if place in before and self._buffers()[place] is not before[place]:
            return before[place]  # replaced, not written to
        raise FleetError(
            f"recompute: the buffer `{place[1]}` in `{self._name}` was changed by its forward first in a later call, "
            f"and what it was is gone. {self._advice()}"
        )

    def _running_statistics(self) -> set[tuple[int, str]]:
        """torch's norm layers write theirs without counting it in a tensor's version."""
        layers = [(i, m) for i, m in enumerate(self._module.modules()) if isinstance(m, _NormBase) and m.training]
        return {(i, name) for i, layer in layers for name, buffer in layer._buffers.items() if buffer is not None}

    def _device(self) -> torch.device:
        tensor = next(itertools.chain(self._module.parameters(), self._module.buffers()), None)
        return torch.device("cpu") if tensor is None else tensor.device

    def _buffers(self) -> dict[tuple[int, str], Tensor]:
        modules = enumerate(self._module.modules())
        return {(i, name): buffer for i, m in modules for name, buffer in m._buffers.items() if buffer is not None}

    # --- the second -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _again(self, call: Call) -> Iterator[None]:
        owners = list(self._module.modules())
        now = {place: owners[place[0]]._buffers[place[1]] for place in call.buffers}
        states = RandomStates.now(self._device()) if call.random is not None else None
        call.runs_again, call.heard = True, 0
        _here.call, _here.last = call, self._name
        try:
            for (i, name), value in call.buffers.items():
                owners[i]._buffers[name] = value.clone()  # it may be run again once more (retain_graph)
            if call.random is not None:
                call.random.restore(self._device())
            yield
        finally:
            _here.call, call.runs_again = None, False
            for (i, name), buffer in now.items():
                owners[i]._buffers[name] = buffer
            if states is not None:
                states.restore(self._device())


@contextlib.contextmanager
def errors_name_the_unit() -> Iterator[None]:
    """Around a backward. torch notices that a second run saved other things than the first, and does not say of what."""
    try:
        yield
    except MetadataMismatch as mismatch:
        raise FleetError(
            f"recompute: `{getattr(_here, 'last', '?')}` computed something else when it was run again in backward. Its forward "
            "depends on what has changed since: an attribute that it counts up, a cache, a global, or data. Leave it out of "
            f'recompute_configs["checkpoints"], or make its forward depend on its inputs alone. ({first_line(mismatch)})'
        ) from mismatch


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
