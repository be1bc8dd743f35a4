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
ROW_ELEMENTS = 2**13
"""torch adds the squares of a float32 tensor one after another: of 38 million three digits are left, of these seven."""
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
    """All elements in rows of about a length, in any order; what is left comes last."""
    size = tensor.numel()
    rows = max(1, size // ROW_ELEMENTS)
    length, left = divmod(size, rows)
    if tensor.is_contiguous() and not left:
        return [tensor.view(rows, length)]
    elements = flat(tensor if same_memory_order([tensor]) else tensor.contiguous())
    found = [elements[: size - left].view(rows, length)]
    return [*found, elements[size - left :].unsqueeze(0)] if left else found


def norms(tensors: Sequence[Tensor]) -> list[float]:
    """As fast as torch's own, and right."""
    cut = [matrices(tensor) for tensor in tensors]
    of_rows = torch.cat([torch.linalg.vector_norm(matrix, dim=1) for matrix in itertools.chain(*cut)])
    values = iter(of_rows.tolist())
    return [math.hypot(*itertools.islice(values, sum(matrix.shape[0] for matrix in of_tensor))) for of_tensor in cut]


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
    of_rate: dict[float, tuple[list[Tensor], list[Tensor], list[Tensor]]] = {}
    for rate, *tensors in zip(rates, params, grads, velocities, strict=True):
        for kept, tensor in zip(of_rate.setdefault(rate, ([], [], [])), tensors, strict=True):
            kept.append(tensor)
    for rate, lists in of_rate.items():
        torch._fused_sgd_(
            *lists,
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
