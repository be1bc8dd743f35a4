"""Count the floating-point operations of a model's forward, by torch's own formulas, while it runs.

A backward takes twice the operations of its forward, so that a micro-step takes three times as many. What is computed again is
not counted: these are the operations that the model asks for, whatever a strategy adds (the convention of "model FLOP
utilisation"). Only products and convolutions and attention are counted, as usual.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

BACKWARD_TOO = 3
"""Operations of forward and backward, in those of the forward."""


class _Thread(threading.local):
    has_backward = False


_thread = _Thread()


@contextlib.contextmanager
def with_its_backward(is_so: bool) -> Iterator[None]:
    """Mark a forward that makes the products of its backward too: each counts once."""
    before, _thread.has_backward = _thread.has_backward, is_so
    try:
        yield
    finally:
        _thread.has_backward = before


@final
class FlopCount(TorchDispatchMode):
    """Counts while it is on; `begin` and `end` may be called in any order, and do nothing where there is nothing to do."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry

        self._formulas = flop_registry
        self._thread: int | None = None
        self.total = 0
        """Operations of forward and backward."""
        self.unknown = ""
        """The operation, if any, whose formula did not fit what it was given."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as it does without this mode; torch would leave it out."""
        return True

    def begin(self) -> None:
        if self._thread is None:
            self._thread = threading.get_ident()
            self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Stop, unless another mode was begun since and is on still: they end in reverse order."""
        if self._thread == threading.get_ident() and _get_current_dispatch_mode() is self:
            self._thread = None
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = self._formulas.get(func._overloadpacket)
        if formula is not None and not _is_traced(out):
            try:
                self.total += int(formula(*args, **kwargs, out_val=out)) * (1 if _thread.has_backward else BACKWARD_TOO)
            except Exception:  # torch's formulas know usual shapes: a monitor must not stop a run that has others
                self.unknown = str(func)
        return out


def _is_traced(out: Any) -> bool:
    """Return whether a compiler is tracing: its tensors have no memory."""
    first = out[0] if isinstance(out, tuple | list) and out else out
    return isinstance(first, torch.Tensor) and (first.device.type == "meta" or hasattr(first, "fake_mode"))
