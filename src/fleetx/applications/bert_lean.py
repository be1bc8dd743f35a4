"""Reduce what BERT's layers keep for the backward: 16-bit norms under autocast, and a GELU that is computed twice.

Kept for one layer and one sentence, 512 tokens 1024 wide, in 16 bits (dropout masks are bytes; statistics and scores are small):

    input 1 + query, key, value 3 + attended 1 + mask 0.5 + sum 1 + normed 1 + GELU's input 4 + mask 0.5 + sum 1  =  13 MiB

Torch alone keeps the GELU's result too, 4 MiB. Under autocast it also keeps both sums in float32, 2 MiB more.

Inside the encoder a layer leaves its last norm to the next layer where no hook could observe it. A recomputed layer then keeps
the same amount, the sum in place of the normed result, and computes its last product, a third of its work, only once.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def is_autocast(tensor: Tensor) -> bool:
    """Check whether autocast would change the tensor's type for a matrix product; float64 stays."""
    return torch.is_autocast_enabled(tensor.device.type) and tensor.is_floating_point() and tensor.dtype != torch.float64


def in_matmul_dtype(hidden: Tensor) -> Tensor:
    """Cast as autocast does for a linear layer, once for several layers that read it: autocast would cast for each."""
    return hidden.to(torch.get_autocast_dtype(hidden.device.type)) if is_autocast(hidden) else hidden


@final
class LayerNorm(nn.LayerNorm):
    """torch.nn.LayerNorm, except that under autocast input and result have autocast's type, where torch makes both float32.

    Mean and deviation stay float32. float16 is safe too: a post-norm layer adds a normed tensor to the result of
    one product, far below 65504, and a gradient that overflows skips the update as any other does. The class has torch's
    name because users put that on amp's black list: then it receives, and returns, float32.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        if not is_autocast(hidden):
            return super().forward(hidden)
        hidden = in_matmul_dtype(hidden)
        weight: Tensor = self.weight
        bias: Tensor = self.bias
        if hidden.device.type != "cpu":  # there one type for all; a CPU takes float32 beside 16 bits, and then rounds less
            weight, bias = weight.to(hidden.dtype), bias.to(hidden.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            return F.layer_norm(hidden, self.normalized_shape, weight, bias, self.eps)


class _LinearOfGelu(torch.autograd.Function):
    """Compute linear(gelu(inputs)). The backward computes the GELU again, to the same bits, instead of keeping it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(inputs: Tensor, weight: Tensor, bias: Tensor, is_unwanted: bool) -> Tensor:
        if is_unwanted:
            return inputs.new_empty(*inputs.shape[:-1], len(weight))
        return F.linear(F.gelu(inputs), weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        for_inputs, for_weight, for_bias, _ = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        grad_weight = grad_inputs = grad_bias = None
        if for_weight:
            # Before the gradient of the GELU's result exists: it is as large, and only one of the two is ever there.
            grad_weight = rows.t() @ F.gelu(inputs).flatten(0, -2)
        if for_bias:
            grad_bias = rows.sum(0)
        if for_inputs:
            grad_inputs = _gelu_backward((rows @ weight).view_as(inputs), inputs)
        return grad_inputs, grad_weight, grad_bias, None


def _gelu_backward(grad: Tensor, inputs: Tensor) -> Tensor:
    """Write into `grad`, which has no other user; a new tensor where this backward is itself differentiated."""
    if torch.is_grad_enabled():
        return torch.ops.aten.gelu_backward(grad, inputs)  # type: ignore[no-any-return]
    return torch.ops.aten.gelu_backward.grad_input(grad, inputs, grad_input=grad)  # type: ignore[no-any-return]


def linear_of_gelu(inputs: Tensor, layer: nn.Linear, *, is_unwanted: bool = False) -> Tensor:
    """Compute `layer(gelu(inputs))`, keeping `inputs` alone. Compiled, the compiler chooses what to keep.

    `is_unwanted`: the result is not used, only what is kept for the backward, so it may hold any values.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or in_matmul_dtype(inputs).dtype != inputs.dtype:
        return F.linear(F.gelu(inputs), layer.weight, layer.bias)
    with torch.autocast(inputs.device.type, enabled=False):
        weight, bias = layer.weight.to(inputs.dtype), layer.bias.to(inputs.dtype)
        return _LinearOfGelu.apply(inputs, weight, bias, is_unwanted)  # type: ignore[no-untyped-call, no-any-return]
