"""Which leaf tensors a loss reaches."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def leaves(loss: Tensor) -> list[Tensor]:
    """The tensors whose `.grad` a backward of `loss` would write, found by walking its graph."""
    if loss.grad_fn is None:
        return [loss] if loss.requires_grad else []
    found: list[Tensor] = []
    seen: set[Any] = {loss.grad_fn}
    stack: list[Any] = [loss.grad_fn]
    while stack:
        node = stack.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.append(variable)
        for successor, _ in node.next_functions:
            if successor is not None and successor not in seen:
                seen.add(successor)
                stack.append(successor)
    return found
