"""Report which backends of torch.distributed this build of torch has."""

from __future__ import annotations

import torch
import torch.distributed as dist


def has_gloo() -> bool:
    return bool(dist.is_available() and dist.is_gloo_available())


def has_mpi() -> bool:
    return bool(dist.is_available() and dist.is_mpi_available())


def nccl_version() -> str | None:
    if not (dist.is_available() and dist.is_nccl_available()):
        return None
    version = torch.cuda.nccl.version()
    return ".".join(str(part) for part in version) if isinstance(version, tuple) else str(version)
