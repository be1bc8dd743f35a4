"""Compute the cross-entropy of a large vocabulary a few rows at a time: the [rows, vocabulary] logits never exist whole.

Once the logits of some rows are known, so is their gradient (softmax minus the one-hot label). It is used at once, for the
gradients of hidden, weight and bias, and dropped; the backward only scales those. In 16 bits the products are summed
and kept in float32, so that nothing underflows before the loss scale, unknown in the forward, is applied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..engine.modules.flops import with_its_backward

IGNORED = -100
LOGITS_BYTES = 2**28  # bytes of one chunk in float32; more rows at once are hardly faster on a GPU, and cost memory
_COLUMNS_MULTIPLE = 64  # matrix products in 16 bits are much slower when rows are not aligned, and 30522 is not
_HALF_SCALE = 256.0  # a probability of 1/30522 is below float16's normal numbers

_HALF_TYPES = (torch.float16, torch.bfloat16)


def rows_per_chunk(rows: int, columns: int) -> int:
    """Return the rows of one chunk: chunks of equal size, as few as the bytes of their logits allow."""
    most = max(1, LOGITS_BYTES // (4 * columns))
    chunks = max(1, -(-rows // most))
    return max(1, -(-rows // chunks))


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices. For 16-bit factors the result is float32, never rounded to 16 bits in between."""
    if left.dtype not in _HALF_TYPES:
        return left @ right
    if left.is_cuda and left.numel():
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def padded(weight: Tensor, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Convert both for the products. In 16 bits, where a copy is made anyway, add columns of probability 0 for alignment."""
    if dtype not in _HALF_TYPES:
        return weight.to(dtype), bias.to(dtype)
    extra = -weight.shape[0] % _COLUMNS_MULTIPLE
    return F.pad(weight.to(dtype), (0, 0, 0, extra)), F.pad(bias.float(), (0, extra), value=-torch.inf)


def probabilities(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the softmax, each row's loss, and which rows have their label on top."""
    best, winner = logits.max(dim=1)
    probability = logits.softmax(dim=1)
    # From the largest probability, which is at least 1/columns, not from the label's, which may be 0 in floating point.
    normaliser = best - probability.gather(1, winner[:, None]).squeeze(1).log()
    return probability, normaliser - logits.gather(1, labels[:, None]).squeeze(1), winner == labels


def chunk_gradients(
    probability: Tensor, counted: Tensor, targets: Tensor, inputs: Tensor, weights: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the summed loss, times `scale`, for inputs, weights and biases. Overwrites `probability`."""
    probability.scatter_add_(1, targets[:, None], probability.new_full((len(targets), 1), -1.0))
    factors = (counted.to(probability.dtype) * scale)[:, None]
    slope = torch.mul(probability, factors, out=torch.empty_like(probability, dtype=inputs.dtype))
    return product(slope, weights), product(slope.t(), inputs), slope.sum(dim=0, dtype=probability.dtype)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, rows: int, dtype: torch.dtype, wants_grad: bool
    ) -> tuple[Tensor, Tensor]:
        inputs = hidden.to(dtype)
        weights, biases = padded(weight, bias, dtype)
        scale = _HALF_SCALE if dtype == torch.float16 else 1.0
        loss, correct = biases.new_zeros(()), labels.new_zeros(())
        grad_hidden, grad_weight, grad_bias = [], None, None
        # At least once, so that no rows at all give gradients of zero, not none.
        for first in range(0, max(1, hidden.shape[0]), rows):
            some = slice(first, first + rows)
            counted = labels[some] != IGNORED
            targets = labels[some].where(counted, 0)
            probability, losses, hits = probabilities(product(inputs[some], weights.t()).add_(biases), targets)
            loss += losses.where(counted, 0.0).sum()
            correct += (hits & counted).sum()
            if wants_grad:
                for_hidden, for_weight, for_bias = chunk_gradients(probability, counted, targets, inputs[some], weights, scale)
                grad_hidden.append(for_hidden)
                grad_weight = for_weight if grad_weight is None else grad_weight.add_(for_weight)
                grad_bias = for_bias if grad_bias is None else grad_bias.add_(for_bias)
        if grad_weight is not None and grad_bias is not None:
            vocabulary = weight.shape[0]
            ctx.save_for_backward(torch.cat(grad_hidden), grad_weight[:vocabulary], grad_bias[:vocabulary])
        ctx.dtypes, ctx.scale = (hidden.dtype, weight.dtype, bias.dtype), scale
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        factor = grad_loss / ctx.scale
        # Not in place: a retained graph may run this backward again.
        grads = [(grad * factor).to(dtype) for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return *grads, None, None, None, None


def whole_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the same by torch's own operations, all rows at once.

    For the compiler: torch 2.11 compiles the function above into wrong gradients, and fuses these by itself.
    """
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"), (logits.argmax(dim=1) == labels).sum()


def dtype_of_products(hidden: Tensor) -> torch.dtype:
    """Return the type in which a linear layer multiplies these here: autocast's, where it is on."""
    kind = hidden.device.type
    casts = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if casts else hidden.dtype


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    rows: int | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of `hidden @ weight.T + bias`, and the number of labels on top; -100 is ignored.

    `dtype`: of the products, all else is in float32; None: autocast's, or that of hidden. `rows` at a time; None chooses by
    size. When compiled, all rows are computed at once.
    """
    bias = weight.new_zeros(weight.shape[0]) if bias is None else bias
    if torch.compiler.is_compiling():
        return whole_cross_entropy(hidden, weight, bias, labels)
    dtype = dtype or dtype_of_products(hidden)
    rows = rows or rows_per_chunk(hidden.shape[0], weight.shape[0])
    wants_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad or bias.requires_grad)
    with torch.autocast(hidden.device.type, enabled=False), with_its_backward(wants_grad):
        loss, correct = _ChunkedCrossEntropy.apply(hidden, weight, bias, labels, rows, dtype, wants_grad)  # type: ignore[no-untyped-call]
    return loss, correct
