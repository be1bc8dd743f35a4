"""Copy batches to the device; on a GPU one batch ahead of the loop, so that the copy overlaps the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engine.modules.nested_tensors import map_tensors
from .packing import Packed, unpack


class Fetched(NamedTuple):
    """One batch as a worker returns it. A tuple, so that torch's pinning thread finds the tensors in it."""

    batch: Any
    replaced: list[str]  # a sentence for each unreadable sample that another one replaced
    failure: str | None  # why the batch could not be read; None for a good one
    samples: int


def on_device(fetched: Iterator[Fetched], device: torch.device, finish: Callable[[Any], Any]) -> Iterator[Fetched]:
    """Yield the batches in order, copied to the device and finished by the source; a failed one passes through."""
    if device.type == "cuda":
        yield from _one_ahead(fetched, device, finish)
    else:
        for item in fetched:
            yield item if item.failure else _finished(item, device, finish)


def _to_device(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Packed):
        return unpack(batch._replace(buffer=batch.buffer.to(device, non_blocking=True)))
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def _finished(item: Fetched, device: torch.device, finish: Callable[[Any], Any]) -> Fetched:
    batch = finish(_to_device(item.batch, device))
    return item._replace(batch=map_tensors(_owned, batch) if isinstance(item.batch, Packed) else batch)


def _owned(tensor: Tensor) -> Tensor:
    """Copy a small part of a packed batch: a view would keep the whole buffer, and its open file, alive."""
    return tensor.clone() if 2 * tensor.nbytes < tensor.untyped_storage().nbytes() else tensor


def _one_ahead(fetched: Iterator[Fetched], device: torch.device, finish: Callable[[Any], Any]) -> Iterator[Fetched]:
    # Waiting here for the next batch before this one is handed out costs nothing: the workers read while the step runs, and a
    # loop that is faster than they are waits for the same reading one batch later.
    stream = torch.cuda.Stream(device)
    ahead: tuple[Fetched, torch.cuda.Event] | None = None
    for item in fetched:
        ready, ahead = ahead, _send(item, device, stream, finish)
        if ready is not None:
            yield _receive(*ready, device)
    if ahead is not None:
        yield _receive(*ahead, device)


def _send(
    item: Fetched, device: torch.device, stream: torch.cuda.Stream, finish: Callable[[Any], Any]
) -> tuple[Fetched, torch.cuda.Event]:
    with torch.cuda.stream(stream):
        sent = item if item.failure else _finished(item, device, finish)
        return sent, stream.record_event()


def _receive(item: Fetched, sent: torch.cuda.Event, device: torch.device) -> Fetched:
    """Hand the batch to the loop's stream; unrecorded, its memory could be reused while that stream still reads it."""
    current = torch.cuda.current_stream(device)
    current.wait_event(sent)

    def record(tensor: Tensor) -> Tensor:
        tensor.record_stream(current)
        return tensor

    map_tensors(record, item.batch)
    return item
