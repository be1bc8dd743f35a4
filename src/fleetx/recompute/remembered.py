"""What segments and host memory need to know of a unit's call: what it was given, so that something else can stand for it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Remembered(Protocol):
    """A call of a unit."""

    arguments: Any
    unchanging: list[Tensor]
    versions: list[int]
