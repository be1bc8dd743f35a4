"""A batch as one piece of shared memory, for its way from a worker to the device.

torch sends each tensor of a batch as a file of its own, and opening one costs the receiver a handshake with the sender, about
half a millisecond; each is a copy to the device of its own, too. Packed, a batch is one tensor, whatever it is made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..trees import map_leaves, map_tensors

ALIGNMENT = 64  # bytes: any type may be read from there, and a device reads it at its best


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the buffer a tensor lies, and how it is read there."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The batch with a place for each tensor. Not a container: torch's pinning thread has nothing to look for in it."""

    tree: Any


class Packed(NamedTuple):
    buffer: Tensor
    layout: Layout


def pack(batch: Any) -> Packed:
    """Copy every tensor into one buffer of shared memory; torch would copy them there one by one."""
    tensors: list[Tensor] = []
    places: list[Place] = []

    def place_for(tensor: Tensor) -> Place:
        end = places[-1].offset + places[-1].nbytes if places else 0
        dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
        stride = tensor.stride() if dense else tensor.contiguous().stride()
        place = Place(-(-end // ALIGNMENT) * ALIGNMENT, tensor.nbytes, tensor.dtype, tuple(tensor.shape), stride)
        tensors.append(tensor)
        places.append(place)
        return place

    layout = Layout(map_tensors(place_for, batch))  # type: ignore[arg-type]
    nbytes = places[-1].offset + places[-1].nbytes if places else 0
    storage = torch.UntypedStorage._new_shared(nbytes)
    buffer = torch.empty(0, dtype=torch.uint8).set_(storage)
    for tensor, place in zip(tensors, places, strict=True):
        _view(buffer, place).copy_(tensor)
    return Packed(buffer, layout)


def unpack(packed: Packed) -> Any:
    """The batch as it was, each tensor a view of the buffer, on whatever device that is."""
    return map_leaves(Place, lambda place: _view(packed.buffer, place), packed.layout.tree)


def _view(buffer: Tensor, place: Place) -> Tensor:
    piece = buffer[place.offset : place.offset + place.nbytes].view(place.dtype)
    return piece.as_strided(place.shape, place.stride)
