"""What a CPU has that is better than list operations: torch's fused kernels, one pass each, and norms that keep their digits.

The kernels walk memory from its start and know neither strides nor trust ratios: both rules are put in their terms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

KERNELS = hasattr(torch, "_fused_sgd_") and hasattr(torch, "_fused_adamw_")
"""Private names of torch: without them list operations do the same."""
ROW_ELEMENTS = 2**12
"""torch adds the squares of a float32 tensor one after another: of 38 million three digits are left, of these eight."""
BLOCK_ELEMENTS = 2**20
"""Five blocks of float32 fit the cache that cores share; smaller ones cost more in calls than they save in memory."""


def same_memory_order(tensors: Sequence[Tensor]) -> bool:
    """Whether equal places in memory are equal places in the tensors, without gaps: also channels_last, if all are."""
    if all(map(Tensor.is_contiguous, tensors)):
        return True
    strides = {tensor.stride() for tensor in tensors}
    return len(strides) == 1 and bool(torch.ops.aten.is_non_overlapping_and_dense(tensors[0]))


def kernels_take(*lists: Sequence[Tensor]) -> bool:
    """Lists of one device and type; each parallel set of tensors must lie in memory alike."""
    if not KERNELS or lists[0][0].device.type != "cpu":
        return False
    return all(same_memory_order(parallel) for parallel in zip(*lists, strict=True))


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor in the order of its memory, whatever its strides."""
    return torch.as_strided(tensor, (tensor.numel(),), (1,), int(tensor.storage_offset()))


def matrices(tensor: Tensor) -> list[Tensor]:
    """All elements in rows, in any order; what does not fill a row comes last."""
    size = tensor.numel()
    in_rows = size - size % ROW_ELEMENTS
    if in_rows == size > 0 and tensor.is_contiguous():
        return [tensor.view(-1, ROW_ELEMENTS)]
    elements = flat(tensor if same_memory_order([tensor]) else tensor.contiguous())
    found = [elements[:in_rows].view(-1, ROW_ELEMENTS)] if in_rows else []
    return found if in_rows == size > 0 else [*found, elements[in_rows:].unsqueeze(0)]


def norms(tensors: Sequence[Tensor]) -> list[float]:
    """As fast as torch's own, and right."""
    of_rows = [torch.linalg.vector_norm(matrix, dim=1) for tensor in tensors for matrix in matrices(tensor)]
    values = iter(torch.cat(of_rows).tolist())
    rows = (max(1, math.ceil(tensor.numel() / ROW_ELEMENTS)) for tensor in tensors)
    return [math.hypot(*itertools.islice(values, count)) for count in rows]


def rate_survives(rate: float, dtype: torch.dtype) -> bool:
    """The SGD kernel is told 1 - rate, in float64. What comes back is as good as float32 above 1e-9; float64 asks for more."""
    return abs((1 - (1 - rate)) - rate) <= rate * torch.finfo(dtype).eps / 4


def lars_by_sgd(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    velocities: Sequence[Tensor],
    *,
    rates: Sequence[float],
    momentum: float,
    decay: float,
) -> None:
    """v = momentum * v + rate * (g + decay * p); p = p - v. To SGD a rate within the velocity is 1 - dampening."""
    of_rate: dict[float, list[int]] = {}
    for i, rate in enumerate(rates):
        of_rate.setdefault(rate, []).append(i)
    for rate, chosen in of_rate.items():
        torch._fused_sgd_(
            [params[i] for i in chosen],
            [grads[i] for i in chosen],
            [velocities[i] for i in chosen],
            weight_decay=decay,
            momentum=momentum,
            lr=1.0,
            dampening=1 - rate,
            nesterov=False,
            maximize=False,
            is_first_step=False,  # a velocity of zeros is none
        )
    torch.autograd.graph.increment_version(params)  # the kernels do not, and a backward pass would not notice


def adam(
    params: list[Tensor],
    grads: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    *,
    steps: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Without decay; `steps` count from 1 and are only read."""
    torch._fused_adamw_(
        params,
        grads,
        means,
        squares,
        [],
        steps,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=0.0,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
    torch.autograd.graph.increment_version(params)


def directions_by_adam(
    params: list[Tensor],
    grads: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    *,
    steps: list[Tensor],
    decay: float,
    **betas_and_eps: float,
) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """LAMB's, of many small tensors together or of a large one in blocks: parameters, directions; norms of these and those.

    A direction is what Adam at rate -1 makes of parameters that are decay * p. Moments are brought up to date.
    """
    together = [(params, grads, means, squares)]
    if len(params) == 1:
        cut = [flat(tensor).split(BLOCK_ELEMENTS) for (tensor,) in together[0]]
        together = [([p], [g], [m], [s]) for p, g, m, s in zip(*cut, strict=True)]
    weights, directions, lengths = [], [], []
    for some_params, some_grads, some_means, some_squares in together:
        found = list(torch._foreach_mul(some_params, decay))
        adam(found, some_grads, some_means, some_squares, steps=steps, lr=-1.0, **betas_and_eps)
        lengths.append(norms([*some_params, *found]))  # now: they are in cache
        weights += some_params
        directions += found
    return weights, directions, [math.hypot(*parts) for parts in zip(*lengths, strict=True)]
