"""The optimizer a part asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from fleetx.strategies import catalogue


def fitting(names: Iterable[str], params: Any, otherwise: Callable[[Any], Optimizer]) -> Optimizer:
    """One whose place the parts may take, at a rate that suits them; where they work with any, `otherwise`."""
    wanted = [kind for name in names for kind in catalogue()[name].inner[:1]]
    if torch.optim.SGD in wanted:
        return torch.optim.SGD(params, lr=0.2, momentum=0.9)
    if torch.optim.Adam in wanted:
        return torch.optim.Adam(params, lr=0.02)
    return otherwise(params)
