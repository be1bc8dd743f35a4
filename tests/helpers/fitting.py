"""What a part asks for: its optimizer, and of the compiler no more than a test needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from fleetx.strategies import catalogue


def compile_by_torchs_kernels() -> None:
    """Let `strategy.compile` in this process run torch's own kernels: torch's compiler takes minutes to build those of a CPU."""
    choose = getattr(torch.compiler, "set_default_backend", None)  # of newer releases of torch
    if choose is not None:
        choose("aot_eager")


def fitting(names: Iterable[str], params: Any, otherwise: Callable[[Any], Optimizer]) -> Optimizer:
    """One whose place the parts may take, at a rate that suits them; where they work with any, `otherwise`."""
    names = list(names)
    if "compile" in names:
        compile_by_torchs_kernels()
    wanted = [kind for name in names for kind in catalogue()[name].inner[:1]]
    if torch.optim.SGD in wanted:
        return torch.optim.SGD(params, lr=0.2, momentum=0.9)
    if torch.optim.Adam in wanted:
        return torch.optim.Adam(params, lr=0.02)
    if torch.optim.AdamW in wanted:
        return torch.optim.AdamW(params, lr=0.02)
    return otherwise(params)
