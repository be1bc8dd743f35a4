"""Numbers on their way from the device: asked for now, read when they are here. Nobody waits for them while training."""

from __future__ import annotations

import math
from typing import Any, Protocol, final

import torch
from torch import Tensor


class Awaited(Protocol):
    @property
    def is_here(self) -> bool: ...

    def value(self) -> Any:
        """Waits, where it is not here."""


@final
class Here:
    """Known already."""

    is_here = True

    def __init__(self, value: Any) -> None:
        self._value = value

    def value(self) -> Any:
        return self._value


@final
class OnItsWay:
    """A number on a GPU. It is copied in the order of the stream, into memory that the copy need not wait for."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = torch.empty((), dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor.detach().reshape(()), non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(tensor.device))

    @property
    def is_here(self) -> bool:
        return bool(self._copied.query())

    def value(self) -> float | None:
        self._copied.synchronize()
        return finite(float(self._host))


def number(value: Any) -> Awaited:
    """Of a tensor with one entry, or of whatever float() takes."""
    if isinstance(value, Tensor) and value.device.type == "cuda":
        return OnItsWay(value)
    return Here(None if value is None else finite(float(value)))


def finite(value: float) -> float | None:
    """JSON has no other numbers."""
    return value if math.isfinite(value) else None
