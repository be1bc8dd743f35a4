"""Pack a batch into one piece of shared memory, to send it from a worker to the device.

torch sends each tensor of a batch as a separate file, and opening one costs the receiver a handshake with the sender, about
half a millisecond; each also takes its own copy to the device. Packed, a batch of any structure is one tensor. Its
largest tensor may be made in shared memory from the start (`empty_to_send`); the others are then copied into the room behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from ..config.text import binary
from ..engine.modules.nested_tensors import map_leaves, map_tensors
from ..errors import DataError

ALIGNMENT = 64  # bytes: enough for any type, and for full-speed reads on a device


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a tensor in the buffer, with its type, shape and strides."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The batch with a `Place` for each tensor. Not a container type, so torch's pinning thread skips it."""

    tree: Any


class Packed(NamedTuple):
    buffer: Tensor
    layout: Layout


def in_worker() -> bool:
    return get_worker_info() is not None


def empty_to_send(shape: tuple[int, ...], dtype: torch.dtype, *, room: int) -> Tensor:
    """Return an empty tensor; in a worker in shared memory, with `room` bytes behind it for the rest of its batch."""
    if not in_worker():
        return torch.empty(shape, dtype=dtype)
    count = torch.Size(shape).numel()
    storage = _shared_memory(_aligned(count * dtype.itemsize) + room)
    return torch.empty(0, dtype=dtype).set_(storage)[:count].view(shape)


def pack(batch: Any) -> Packed:
    """Put every tensor into one buffer of shared memory; torch would copy them there one by one."""
    tensors = _tensors(batch)
    host = next((tensor for tensor in tensors if _hosts(tensor, tensors)), None)
    places: dict[int, Place] = {}
    end = 0 if host is None else host.nbytes
    for tensor in tensors:
        offset = 0 if tensor is host else _aligned(end)
        places[id(tensor)] = _place(offset, tensor)
        end = max(end, offset + tensor.nbytes)
    storage = _shared_memory(end) if host is None else host.untyped_storage()
    buffer = torch.empty(0, dtype=torch.uint8).set_(storage)
    for tensor in tensors:
        if tensor is not host:
            _view(buffer, places[id(tensor)]).copy_(tensor)
    return Packed(buffer, Layout(map_tensors(lambda tensor: places[id(tensor)], batch)))  # type: ignore[arg-type, return-value]


def unpack(packed: Packed) -> Any:
    """Restore the batch, each tensor a view of the buffer, on the buffer's device."""
    return map_leaves(Place, lambda place: _view(packed.buffer, place), packed.layout.tree)


def _shared_memory(nbytes: int) -> torch.UntypedStorage:
    try:
        storage: torch.UntypedStorage = torch.UntypedStorage._new_shared(nbytes)
        return storage
    except RuntimeError as error:
        raise DataError(
            f"no shared memory for a batch of {binary(nbytes)} ({error}). Give /dev/shm more room (a container: --shm-size), or "
            "use a smaller batch_size, fewer workers, or workers=0, which needs none."
        ) from None


def _tensors(batch: Any) -> list[Tensor]:
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(note, batch)
    return tensors


def _hosts(tensor: Tensor, tensors: list[Tensor]) -> bool:
    """Check whether the tensor begins a piece of shared memory with room for all the others behind it."""
    if not tensor.is_shared() or tensor.storage_offset() != 0 or not _is_dense(tensor):
        return False
    needed = sum(_aligned(other.nbytes) for other in tensors)
    return tensor.untyped_storage().nbytes() >= needed


def _place(offset: int, tensor: Tensor) -> Place:
    stride = tensor.stride() if _is_dense(tensor) else tensor.contiguous().stride()
    return Place(offset, tensor.nbytes, tensor.dtype, tuple(tensor.shape), stride)


def _view(buffer: Tensor, place: Place) -> Tensor:
    piece = buffer[place.offset : place.offset + place.nbytes].view(place.dtype)
    return piece.as_strided(place.shape, place.stride)


def _is_dense(tensor: Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
