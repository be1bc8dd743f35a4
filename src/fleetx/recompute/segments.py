"""Let units in a row keep one input among them: each but the first drops its own, which the unit before it returned.

When backward comes to the last of them, those before it run once more, from the input that was kept, and each gets its own
again. So a segment costs its units' forward twice, and keeps as little as one unit.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, final

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..engine.modules.nested_tensors import map_leaves, tensors_in


class RecordedCall(Protocol):
    """What segments and host memory read of a unit's call, and replace in it."""

    arguments: Any
    unchanging: list[Tensor]
    """Tensors that must not change before the second run; `versions` are their versions."""
    versions: list[int]


@final
@dataclass(frozen=True, slots=True)
class DroppedInput:
    """Stands in for an argument that was dropped, and computes it again."""

    call: RecordedCall
    """The call that returned it."""
    run: Callable[[Any], Tensor]
    """Runs that call's forward again."""
    requires_grad: bool
    autocast: tuple[dict[str, Any], ...]

    def again(self) -> Tensor:
        """Compute it with gradients, so that the same kernels run as the first time; what they save is dropped."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(_drop, _refuse_backward))
            for settings in self.autocast:
                stack.enter_context(torch.autocast(**settings))
            again = self.run(self.call).detach()
            # A view: of a leaf that requires gradients autocast would keep a copy in 16 bits.
            return again.requires_grad_().view_as(again) if self.requires_grad else again


@final
class LastOutput:
    """What a unit returned last, by weak reference: the call that takes it as an argument decides whether it is kept."""

    def __init__(self, out: Tensor, call: Any, run: Callable[[Any], Tensor]) -> None:
        self._out, self._version, self._requires_grad = weakref.ref(out), out._version, out.requires_grad
        self._call, self._run = weakref.ref(call), run
        self._autocast = tuple(_autocast_now(kind) for kind in dict.fromkeys(["cpu", out.device.type]))

    def drop_from(self, taker: RecordedCall) -> None:
        """Let the call keep a `DroppedInput` if this very tensor, unchanged, is one of its arguments.

        It was when the plan was made; if it is not this time, the argument is kept as usual."""
        out, call = self._out(), self._call()
        places = [i for i, tensor in enumerate(taker.unchanging) if tensor is out]
        if call is None or not places or any(taker.versions[i] != self._version for i in places):
            return
        dropped = DroppedInput(call, self._run, self._requires_grad, self._autocast)
        arguments = map_leaves(Tensor, lambda tensor: dropped if tensor is out else tensor, taker.arguments)
        if any(tensor is out for tensor in tensors_in(arguments)):
            return
        taker.arguments = arguments
        for i in reversed(places):
            del taker.unchanging[i], taker.versions[i]


def restore_inputs(call: RecordedCall) -> None:
    """Compute the call's dropped arguments again, and first those of the calls before it in its segment."""
    waiting: list[tuple[RecordedCall, DroppedInput]] = []
    while (dropped := next(_dropped_inputs(call.arguments), None)) is not None:
        waiting.append((call, dropped))
        call = dropped.call
    for taker, dropped in reversed(waiting):  # from the first unit on; recursion would be as deep as the segment is long
        taker.arguments = _replaced(taker.arguments, dropped.again())


def _dropped_inputs(value: Any) -> Iterator[DroppedInput]:
    inputs: list[DroppedInput] = []

    def collect(dropped: DroppedInput) -> DroppedInput:
        inputs.append(dropped)
        return dropped

    map_leaves(DroppedInput, collect, value)
    return iter(inputs)


def _replaced(value: Any, by: Tensor) -> Any:
    return map_leaves(DroppedInput, lambda _: by, value)


def _autocast_now(kind: str) -> dict[str, Any]:
    return {
        "device_type": kind,
        "dtype": torch.get_autocast_dtype(kind),
        "enabled": torch.is_autocast_enabled(kind),
        "cache_enabled": False,  # or 16-bit copies of all the segment's weights would be in use at once
    }


def _drop(_: Tensor) -> None:
    return None


def _refuse_backward(_: None) -> NoReturn:
    raise RuntimeError("this run was for its result alone: there is no backward through it")
