"""Units in a row that keep one input among them: each but the first drops its own, which the unit before it returned.

When backward comes to the last of them, those before it are run once more, from the input that was kept, and each has its own
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

from ..engine.trees import map_leaves, tensors_in

# What segments and host memory need to know of a unit's call: what it was given, so that something else can stand for it.


class Remembered(Protocol):
    """A call of a unit."""

    arguments: Any
    unchanging: list[Tensor]
    versions: list[int]


# ----------------------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Gift:
    """In the place of an argument that was dropped: how to have it again."""

    call: Remembered
    """The one that returned it."""
    run: Callable[[Any], Tensor]
    requires_grad: bool
    autocast: tuple[dict[str, Any], ...]

    def again(self) -> Tensor:
        """As in the first run, with gradients, so that the same kernels run; what they would save is dropped."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(_drop, _never))
            for settings in self.autocast:
                stack.enter_context(torch.autocast(**settings))
            again = self.run(self.call).detach()
            # A view: of a leaf that requires gradients autocast would keep a copy in 16 bits.
            return again.requires_grad_().view_as(again) if self.requires_grad else again


@final
class LastCall:
    """What a unit returned last. Weak: whoever takes it as an argument decides whether it is kept."""

    def __init__(self, out: Tensor, call: Any, run: Callable[[Any], Tensor]) -> None:
        self._out, self._version, self._requires_grad = weakref.ref(out), out._version, out.requires_grad
        self._call, self._run = weakref.ref(call), run
        self._autocast = tuple(_autocast_now(kind) for kind in dict.fromkeys(["cpu", out.device.type]))

    def drop_from(self, taker: Remembered) -> None:
        """If this very tensor, unchanged, is an argument of the call, let the call keep the way to it instead.

        A plan was made where it is; if it is not this time, the argument is kept as ever."""
        out, call = self._out(), self._call()
        places = [i for i, tensor in enumerate(taker.unchanging) if tensor is out]
        if call is None or not places or any(taker.versions[i] != self._version for i in places):
            return
        gift = Gift(call, self._run, self._requires_grad, self._autocast)
        dropped = map_leaves(Tensor, lambda tensor: gift if tensor is out else tensor, taker.arguments)
        if any(tensor is out for tensor in tensors_in(dropped)):
            return
        taker.arguments = dropped
        for i in reversed(places):
            del taker.unchanging[i], taker.versions[i]


def bring_back(call: Remembered) -> None:
    """Let the call have its arguments again, and those before it in its segment theirs."""
    waiting: list[tuple[Remembered, Gift]] = []
    while (gift := next(_gifts(call.arguments), None)) is not None:
        waiting.append((call, gift))
        call = gift.call
    for taker, gift in reversed(waiting):  # from the first unit on: a recursion would be as deep as the segment is long
        taker.arguments = _replaced(taker.arguments, gift.again())


def _gifts(value: Any) -> Iterator[Gift]:
    found: list[Gift] = []

    def note(gift: Gift) -> Gift:
        found.append(gift)
        return gift

    map_leaves(Gift, note, value)
    return iter(found)


def _replaced(value: Any, by: Tensor) -> Any:
    return map_leaves(Gift, lambda _: by, value)


def _autocast_now(kind: str) -> dict[str, Any]:
    return {
        "device_type": kind,
        "dtype": torch.get_autocast_dtype(kind),
        "enabled": torch.is_autocast_enabled(kind),
        "cache_enabled": False,  # or 16-bit copies of all the segment's weights would be in use at once
    }


def _drop(_: Tensor) -> None:
    return None


def _never(_: None) -> NoReturn:
    raise RuntimeError("this run was for its result alone, and nobody may go back through it")
