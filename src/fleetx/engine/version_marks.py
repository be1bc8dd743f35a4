"""Whether a tensor was written to or replaced since: asked of its version counter, at no cost for the device."""

from __future__ import annotations

import weakref
from typing import NamedTuple

from torch import Tensor


class Mark(NamedTuple):
    tensor: weakref.ref[Tensor]
    """Not its id: a new tensor may get the id of one that is gone."""
    version: int


def mark_of(tensor: Tensor) -> Mark:
    return Mark(weakref.ref(tensor), _version(tensor))


def is_unchanged(mark: Mark, tensor: Tensor) -> bool:
    return mark.tensor() is tensor and mark.version == _version(tensor)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # those of inference mode cannot be written to elsewhere
