"""Parameters that torch's fully_shard (FSDP2) has divided between ranks: recognised, made, cut, shown and gathered.

Of a parameter with n rows each of d ranks has ceil(n / d) in a row, the last ranks fewer, or none: what torch calls `Shard(0)`.
With two dimensions of the mesh, sets of d neighbours hold the same rows as every other set.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .comm import Comm


def is_fully_sharded(model: nn.Module) -> bool:
    """Return whether fully_shard was called on the model, or on modules of it."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)  # not imported: nothing is sharded by it
    return kind is not None and any(isinstance(module, kind) for module in model.modules())


def is_divided(tensor: object) -> bool:
    """Return whether this rank has a part of the tensor's numbers alone (a DTensor)."""
    kind: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def shard_by_blocks(
    model: nn.Module, blocks: Sequence[nn.Module], comm: Comm, *, degree: int | None, device: torch.device
) -> None:
    """Divide the model's parameters between all ranks, or between `degree` neighbours: block by block, then all that is left.

    Every rank is here. The numbers of a block are gathered right before its forward, and freed after it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if degree is None or degree == comm.size:
        mesh = init_device_mesh(device.type, (comm.size,), mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh(device.type, (comm.size // degree, degree), mesh_dim_names=("replicate", "shard"))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def show_shards(model: nn.Module) -> None:
    """Let the modules hold the divided parameters, also after a forward that no backward has followed. No collective."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    for module in model.modules() if kind is not None else ():
        if isinstance(module, kind):
            module.reshard()


@dataclass(frozen=True, slots=True)
class Division:
    """How a parameter is divided."""

    shards: int
    """Ranks that have different rows of it."""
    replicas: int
    """Sets of such ranks."""
    by_rows: bool
    """Along the first dimension, between neighbours, in the order of ranks."""


def division_of(param: Tensor) -> Division:
    mesh: Any = param.device_mesh  # type: ignore[attr-defined]
    placements: Any = param.placements  # type: ignore[attr-defined]
    ranks = mesh.mesh.flatten().tolist()
    in_order = ranks == list(range(len(ranks))) and mesh.ndim in (1, 2)
    by_rows = in_order and placements[-1].is_shard(0) and all(placement.is_replicate() for placement in placements[:-1])
    shards = int(mesh.size(mesh.ndim - 1))
    return Division(shards, len(ranks) // shards, by_rows)


def local_of(param: Tensor) -> Tensor:
    """Return this rank's rows, in the memory of the parameter itself."""
    with torch.no_grad():
        local: Tensor = param.to_local()  # type: ignore[attr-defined]
    return local.detach()


def shown_as(param: Tensor, local: Tensor) -> Tensor:
    """Return these rows as a tensor that is divided as the parameter is. No collective, and no copy."""
    from torch.distributed.tensor import DTensor

    mesh: Any = param.device_mesh  # type: ignore[attr-defined]
    placements: Any = param.placements  # type: ignore[attr-defined]
    with torch.no_grad():
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())


def cut(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's rows of a tensor that it has the whole of."""
    rows, chunk = _rows(like), _chunk(like)
    mesh: Any = like.device_mesh  # type: ignore[attr-defined]
    start = min(rows, int(mesh.get_local_rank(mesh.ndim - 1)) * chunk)
    return whole[start : min(rows, start + chunk)]


def ranges_of_rows(param: Tensor) -> tuple[list[tuple[int, int]], int | None]:
    """Return which elements each rank of a set has, and this rank's number among them; None where its set is not the first."""
    rows, chunk, width = _rows(param), _chunk(param), param.numel() // max(1, _rows(param))
    mesh: Any = param.device_mesh  # type: ignore[attr-defined]
    ends = [(min(rows, rank * chunk) * width, min(rows, (rank + 1) * chunk) * width) for rank in range(division_of(param).shards)]
    is_first = mesh.ndim == 1 or mesh.get_local_rank(0) == 0
    return ends, int(mesh.get_local_rank(mesh.ndim - 1)) if is_first else None


def gathered(local: Tensor, like: Tensor, inside: Comm) -> Tensor:
    """Return the whole of a tensor that is divided as `like` is, from this rank's rows. Every rank of `inside` is here."""
    width = like.numel() // max(1, _rows(like))
    own = local.new_zeros(_chunk(like) * width)
    own[: local.numel()].copy_(local.reshape(-1))
    row = own.new_empty(own.numel() * inside.size)
    inside.all_gather_into(row, own).wait()
    return row[: like.numel()].view(like.shape)  # only the last ranks' rows are filled up, at their end


def whole_tensors(named: Mapping[str, Any]) -> dict[str, Tensor]:
    """Gather those of these tensors that are divided, on the CPU. Every rank is here, with the same names in one order."""
    return {name: value.full_tensor().detach().cpu() for name, value in named.items() if is_divided(value)}


def _rows(param: Tensor) -> int:
    return int(param.shape[0])


def _chunk(param: Tensor) -> int:
    return -(-_rows(param) // division_of(param).shards)
