"""Update lists of tensors: work in portions, factors that differ from tensor to tensor, and torch's fused CPU kernels.

On a CPU the fused kernels need one pass over memory each, and the norms keep more digits than torch's. The kernels walk memory
from its start and know neither strides nor trust ratios: both update rules are put in their terms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

PORTION_ELEMENTS = 2**21
"""Elements of a portion: after its norms are taken, it is still in the cache that a CPU's cores share."""

Numbers: TypeAlias = Any
"""A list of floats or of tensors: torch's list operations take both, though their signatures allow one at a time."""
Norm = TypeVar("Norm", float, Tensor)

KERNELS = hasattr(torch, "_fused_sgd_") and hasattr(torch, "_fused_adamw_")
"""Whether torch has these private functions; without them list operations do the same."""
ROW_ELEMENTS = 2**13
"""Elements whose squares are summed at once: torch sums one by one, and keeps seven digits here, three of 38 million elements."""
BLOCK_ELEMENTS = 2**20
"""Elements of a block: five float32 blocks fit the cache that cores share; smaller ones cost more in calls than they save."""


def portions(tensors: Sequence[Tensor]) -> Iterator[slice]:
    """Cut a list into portions: on a CPU runs of small tensors, or one large tensor; elsewhere all of it, to save launches."""
    if not tensors or tensors[0].device.type != "cpu":
        yield slice(0, len(tensors))
        return
    start = size = 0
    for i, tensor in enumerate(tensors):
        if i > start and size + tensor.numel() > PORTION_ELEMENTS:
            yield slice(start, i)
            start, size = i, 0
        size += tensor.numel()
    yield slice(start, len(tensors))


def norms(tensors: list[Tensor]) -> Numbers:
    """Return norms as plain numbers on a CPU, else as a vector, since reading it would wait for the device."""
    return cpu_norms(tensors) if tensors[0].device.type == "cpu" else torch.stack(torch._foreach_norm(tensors))


def as_vector(lengths: Numbers, device: torch.device) -> Tensor:
    """Return norms, of which `norms` makes numbers or a vector, as a vector in float64."""
    return lengths.double() if isinstance(lengths, Tensor) else torch.tensor(lengths, dtype=torch.float64, device=device)


def scaled_rates(lr: float | Tensor, lengths: Numbers, trust_ratio: Callable[..., Any]) -> tuple[Tensor, Numbers]:
    """Return trust ratios as a vector, and each tensor's rate; `lengths` are norms of parameters, then those paired with them."""
    half = len(lengths) // 2
    if isinstance(lengths, Tensor):
        ratios: Tensor = trust_ratio(lengths[:half], lengths[half:])
        return ratios, list((lr * ratios).unbind())
    plain = list(map(trust_ratio, lengths[:half], lengths[half:]))
    return torch.tensor(plain, dtype=torch.float64), [lr * ratio for ratio in plain]


def subtract(tensors: list[Tensor], others: list[Tensor], *, factors: Numbers) -> None:
    """Compute tensor - factor * other in place, in one pass where factors are plain numbers. Overwrites `others`."""
    if isinstance(factors[0], Tensor):
        torch._foreach_mul_(others, factors)
        torch._foreach_sub_(tensors, others)
        return
    for tensor, other, factor in zip(tensors, others, factors, strict=True):
        tensor.sub_(other, alpha=factor)


# --- on a CPU: torch's fused kernels, and norms ------------------------------------------------------------------------


def same_memory_order(tensors: Sequence[Tensor]) -> bool:
    """Return whether equal places in memory are equal elements, without gaps: also of channels_last tensors, if all are."""
    if all(map(Tensor.is_contiguous, tensors)):
        return True
    strides = {tensor.stride() for tensor in tensors}
    return len(strides) == 1 and bool(torch.ops.aten.is_non_overlapping_and_dense(tensors[0]))


def kernels_take(*lists: Sequence[Tensor]) -> bool:
    """Return whether the fused kernels can take these lists (of one device and type): parallel tensors must share a layout."""
    if not KERNELS or lists[0][0].device.type != "cpu":
        return False
    return all(same_memory_order(parallel) for parallel in zip(*lists, strict=True))


def flat_view(tensor: Tensor) -> Tensor:
    """View a dense tensor in the order of its memory, whatever its strides."""
    return torch.as_strided(tensor, (tensor.numel(),), (1,), int(tensor.storage_offset()))


def as_rows(tensor: Tensor) -> list[Tensor]:
    """View all elements, in any order, as a matrix of about ROW_ELEMENTS columns, and a last row of what remains."""
    size = tensor.numel()
    rows = max(1, size // ROW_ELEMENTS)
    length, left = divmod(size, rows)
    if tensor.is_contiguous() and not left:
        return [tensor.view(rows, length)]
    elements = flat_view(tensor if same_memory_order([tensor]) else tensor.contiguous())
    matrix = elements[: size - left].view(rows, length)
    return [matrix, elements[size - left :].unsqueeze(0)] if left else [matrix]


def cpu_norms(tensors: Sequence[Tensor]) -> list[float]:
    """Return norms as fast as torch's own, with all digits of float32."""
    cut = [as_rows(tensor) for tensor in tensors]
    of_rows = torch.cat([torch.linalg.vector_norm(matrix, dim=1) for matrix in itertools.chain(*cut)])
    values = iter(of_rows.tolist())
    return [math.hypot(*itertools.islice(values, sum(matrix.shape[0] for matrix in of_tensor))) for of_tensor in cut]


def rate_survives(rate: float, dtype: torch.dtype) -> bool:
    """Return whether 1 - (1 - rate) keeps the digits of `dtype`: the SGD kernel gets 1 - rate, in float64."""
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
    """Update v = momentum * v + rate * (g + decay * p); p = p - v, by the SGD kernel, whose 1 - dampening is the rate."""
    of_rate: dict[float, tuple[list[Tensor], list[Tensor], list[Tensor]]] = {}
    for rate, *tensors in zip(rates, params, grads, velocities, strict=True):
        for same_rate, tensor in zip(of_rate.setdefault(rate, ([], [], [])), tensors, strict=True):
            same_rate.append(tensor)
    for rate, lists in of_rate.items():
        torch._fused_sgd_(
            *lists,
            weight_decay=decay,
            momentum=momentum,
            lr=1.0,
            dampening=1 - rate,
            nesterov=False,
            maximize=False,
            is_first_step=False,  # a velocity of zeros is no velocity
        )
    torch.autograd.graph.increment_version(params)  # the kernels do not: a backward pass would miss the change


def adam_by_kernel(
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
    """Update by Adam without decay; `steps` count from 1 and are only read."""
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
    """Compute LAMB's directions and update the moments, of many small tensors together or of a large one in blocks.

    Returns parameters and directions, block by block, and the norms of all parameters, then of all directions. A direction is
    what Adam at rate -1 makes of parameters that are decay * p.
    """
    together = [(params, grads, means, squares)]
    if len(params) == 1:
        cut = [flat_view(tensor).split(BLOCK_ELEMENTS) for (tensor,) in together[0]]
        together = [([p], [g], [m], [s]) for p, g, m, s in zip(*cut, strict=True)]
    weights, directions, lengths = [], [], []
    for some_params, some_grads, some_means, some_squares in together:
        some_directions = list(torch._foreach_mul(some_params, decay))
        adam_by_kernel(some_directions, some_grads, some_means, some_squares, steps=steps, lr=-1.0, **betas_and_eps)
        lengths.append(cpu_norms([*some_params, *some_directions]))  # now: they are in cache
        weights += some_params
        directions += some_directions
    return weights, directions, [math.hypot(*parts) for parts in zip(*lengths, strict=True)]
