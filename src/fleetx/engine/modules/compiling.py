"""Which modules are compiled, and by whom."""

from __future__ import annotations

from typing import Literal

from torch import nn


def compiled_by(module: nn.Module) -> Literal["user"] | None:
    """Return who has compiled this very module: the user, by torch.compile(module) or module.compile(); None: it is not."""
    is_wrapper = type(module).__name__ == "OptimizedModule"
    return "user" if is_wrapper or getattr(module, "_compiled_call_impl", None) is not None else None
