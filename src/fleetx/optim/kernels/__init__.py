"""Update a whole model by a few launches of Triton kernels on CUDA, where they can run."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from ...dist.triton_support import has_triton, runs_here
from ...errors import ConfigError, warn_user
from .order import MOST_GROUPS

if TYPE_CHECKING:
    from ..layerwise import Layerwise

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose_kernels(optimizer: Layerwise, *, required: bool) -> Any:
    """Return the kernels for this optimizer, or False where they cannot run; a ConfigError if they are `required` there."""
    reason = _why_not(optimizer)
    if reason is None:
        from .fused import FusedStep

        return FusedStep(optimizer)
    if required:
        raise ConfigError(f"fused=True, but {reason}. Leave fused out, and list operations are used where kernels cannot run.")
    return False


def _why_not(optimizer: Layerwise) -> str | None:
    """Return why the kernels cannot run; None if they can."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not all(runs_here(param.device) for param in params):
        elsewhere = next(param.device for param in params if not runs_here(param.device))
        return f"the kernels run on CUDA devices, and some parameters are on {elsewhere}"
    if not has_triton():
        _warn_once()
        return "Triton is not installed"
    wrong = next((param.dtype for param in params if param.dtype not in TYPES), None)
    if wrong is not None:
        return f"a parameter is {wrong}, and the kernels know float32, bfloat16 and float16"
    if not all(torch.ops.aten.is_non_overlapping_and_dense(param) for param in params):
        return "a parameter has gaps in its memory"
    if any(param.data_ptr() % 16 for param in params):
        return "a parameter begins at an address that is no multiple of 16 bytes"
    if any(getattr(param, "grad_dtype", param.dtype) is not param.dtype for param in params):
        return "a parameter's grad_dtype allows gradients of another type than its own"
    if len(optimizer.param_groups) > MOST_GROUPS:
        return f"there are {len(optimizer.param_groups)} groups, and the kernels know {MOST_GROUPS}"
    return None


@functools.cache
def _warn_once() -> None:
    warn_user(
        "Triton is not installed: LARS and LAMB run as list operations, several times slower on a GPU than their kernels.",
    )
