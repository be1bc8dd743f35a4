"""`fleet.util`: small collectives on plain values, for metrics and bookkeeping. Every rank must call them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from . import world
from .comm import OPS

__all__ = ["all_gather", "all_reduce", "barrier", "get_file_shard", "print_on_rank"]

T = TypeVar("T")


def all_reduce(value: T, mode: str = "sum") -> T:
    """Reduce a number, array, tensor or dict of them over all ranks by sum, min, max or mean; return a new value of that type.

    Examples:
        >>> fleet.util.all_reduce(2.0, "sum")  # on one worker
        2.0
    """
    if mode not in (*OPS, "mean"):
        raise ConfigError(f"mode is {mode!r}; it must be one of 'sum', 'min', 'max', 'mean'.")
    entries = value if isinstance(value, dict) else {"": value}
    tensors = {key: _as_tensor(entry) for key, entry in entries.items()}
    world.for_call("fleet.util.all_reduce")
    _agree([[str(key), str(t.dtype), list(t.shape), mode] for key, t in tensors.items()])
    reduced = {key: _back(_reduce(tensors[key], mode), entry) for key, entry in entries.items()}
    result: Any = reduced if isinstance(value, dict) else reduced[""]
    return result  # type: ignore[no-any-return]


def all_gather(value: T) -> list[T]:
    """Return every rank's value, in rank order: numbers, arrays or tensors of equal shapes, or JSON values.

    Examples:
        >>> fleet.util.all_gather(3)  # on one worker
        [3]
    """
    comm = world.for_call("fleet.util.all_gather")
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, (Tensor, np.ndarray)):
        try:
            return comm.gather_json(value)
        except TypeError:
            raise ConfigError(
                f"all_gather was given {type(value).__name__}; it takes numbers, arrays, tensors and JSON values."
            ) from None
    tensor = _as_tensor(value)
    _agree([str(tensor.dtype), list(tensor.shape)])
    gathered, pending = world.current().comm.all_gather(_to_comm(tensor))  # all ranks are here: they have just agreed
    pending.wait()
    return [_back(row.to(tensor.device), value) for row in gathered]


def barrier() -> None:
    """Wait until every rank has called it.

    Examples:
        >>> fleet.util.barrier()
    """
    world.for_call("fleet.util.barrier").barrier()


def get_file_shard(files: Sequence[str]) -> list[str]:
    """Return this rank's contiguous block of a list; if it does not divide evenly, the first ranks get one more.

    Examples:
        >>> fleet.util.get_file_shard(["a.txt", "b.txt"])  # on one worker
        ['a.txt', 'b.txt']
    """
    if not isinstance(files, (list, tuple)):
        raise ConfigError(f"get_file_shard was given {type(files).__name__}; it takes a list of file names.")
    comm = world.current().comm
    base, extra = divmod(len(files), comm.size)
    start = comm.rank * base + min(comm.rank, extra)
    return list(files[start : start + base + (comm.rank < extra)])


def print_on_rank(message: object, rank: int) -> None:
    """Print on one rank only.

    Examples:
        >>> fleet.util.print_on_rank("hello", 0)
        hello
    """
    if world.current().comm.rank == rank:
        print(message, flush=True)


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, (bool, int, np.integer, np.bool_)):
        return torch.tensor(int(value), dtype=torch.int64)
    if isinstance(value, (float, np.floating)):
        return torch.tensor(float(value), dtype=torch.float64)
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value)).view(value.shape)
    raise ConfigError(f"all_reduce was given {type(value).__name__}; it takes a number, an array, a tensor, or a dict of them.")


def _to_comm(tensor: Tensor) -> Tensor:
    control = world.current().comm.control_device
    return tensor if tensor.device.type == "cuda" and control.type == "cuda" else tensor.to(control)


def _reduce(tensor: Tensor, mode: str) -> Tensor:
    comm = world.current().comm
    if mode == "mean" and not tensor.is_floating_point():
        tensor = tensor.double()
    work = _to_comm(tensor).clone()
    comm.all_reduce(work, "sum" if mode == "mean" else mode).wait()
    return (work / comm.size if mode == "mean" else work).to(tensor.device)


def _back(tensor: Tensor, like: Any) -> Any:
    if isinstance(like, Tensor):
        return tensor
    if isinstance(like, np.ndarray):
        return tensor.numpy()
    return tensor.item()


def _agree(spec: Any) -> None:
    """Raise on all ranks if shapes, types or keys differ: the collective would hang or mix up numbers."""
    ranks = world.current().calls.gather_json(spec)
    if any(other != ranks[0] for other in ranks):
        shown = "; ".join(f"rank {i}: {other}" for i, other in enumerate(ranks) if i == 0 or other != ranks[0])
        raise ConfigError(f"ranks do not agree on what to reduce. {shown}")


def __dir__() -> list[str]:
    return sorted(__all__)
