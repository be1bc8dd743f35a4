"""The kernels of LARS, LAMB and DGC on a CPU, by Triton's interpreter: while a test runs, and not beyond it.

Triton settles at import whether its functions are compiled or interpreted, and torch has imported it long before. Triton and our
kernels are therefore imported a second time under TRITON_INTERPRET=1. Each test that asks for `interpreted` sees these modules;
afterwards the first ones are back, so that all other tests go on with list operations, and those on a GPU with compiled kernels.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fleetx.optim
from fleetx.optim import TrustRatios

CHUNK = 256
LOOP = {"foreach": False, "fused": False}
OURS = "fleetx.optim.kernels"
DGC = ("fleetx.reduce.dgc_triton", "fleetx.reduce.dgc_fused", "fleetx.dist.codec_triton")


def _take_out() -> dict[str, ModuleType]:
    """Triton's modules and ours, out of Python's table. A library in C cannot be loaded twice: it stays."""
    ours = (name for name in sys.modules if name == "triton" or name.startswith(("triton.", OURS, *DGC)))
    return {name: sys.modules.pop(name) for name in list(ours) if not name.startswith("triton._C")}


def _import_interpreted() -> None:
    importlib.import_module(f"{OURS}.fused")
    importlib.import_module("fleetx.reduce.dgc_fused")
    importlib.import_module("fleetx.dist.codec_triton")
    interpreter = sys.modules["triton.runtime.interpreter"]
    kernel = sys.modules[f"{OURS}.lars"].lars_apply
    assert isinstance(kernel, interpreter.InterpretedFunction), "Triton compiles although TRITON_INTERPRET=1 is set"
    _patch_once_per_launch(interpreter)


def _patch_once_per_launch(interpreter: Any) -> None:
    """Triton prepares its language at every call of a device function. Once per launch is enough, in a third of the time."""
    with_patch = interpreter.InterpretedFunction.__call__

    def call(self: Any, *args: Any, **options: Any) -> Any:
        return (
            self.rewrite()(*args, **options)
            if self.fn.__module__.startswith((OURS, *DGC))
            else with_patch(self, *args, **options)
        )

    interpreter.InterpretedFunction.__call__ = call


_interpreted: dict[str, ModuleType] = {}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    first = vars(fleetx.optim).get("kernels")
    compiled = _take_out()
    try:
        sys.modules.update(_interpreted)
        if not _interpreted:
            _import_interpreted()
        vars(fleetx.optim)["kernels"] = sys.modules[OURS]
        with np.errstate(divide="ignore", invalid="ignore"):  # a GPU divides by zero in silence; `where` drops the result
            yield
    finally:
        _interpreted.update(_take_out())
        sys.modules.update(compiled)
        vars(fleetx.optim)["kernels"] = first
        if first is None:
            del vars(fleetx.optim)["kernels"]


def by_kernels(optimizer: Any, *, chunk_elements: int = CHUNK) -> Any:
    """This optimizer with kernels that work in small chunks. Loading a state chooses kernels once more: then again."""
    from fleetx.optim.kernels.fused import FusedStep
    from fleetx.optim.kernels.plan import Tuning

    optimizer._kernels = FusedStep(optimizer, Tuning(chunk_elements=chunk_elements))
    optimizer._kernels_device = next(p.device for group in optimizer.param_groups for p in group["params"])
    return optimizer


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- the same steps by kernels and by the loop ----------------------------------------------------------------------------


@dataclass
class Run:
    """What came of some steps."""

    params: list[nn.Parameter]
    optimizer: Any
    ratios: list[TrustRatios | None]

    def tensors(self, i: int) -> dict[str, Tensor]:
        """Weight and state of one parameter; of a 16-bit one the weight is its float32 copy."""
        param = self.params[i]
        state = dict(self.optimizer.state[param])
        return {"weight": state.pop("master", param.detach()), **state}


Gradients = Callable[[int, int, nn.Parameter], Tensor | None]
"""By step, number and parameter."""


def drawn(step: int, i: int, param: nn.Parameter) -> Tensor:
    return draw(*param.shape, seed=1000 + 100 * step + i)


def take_steps(
    kind: Any,
    values: Sequence[Tensor],
    *,
    fused: bool,
    dtype: torch.dtype = torch.float32,
    groups: Callable[[list[tuple[str, nn.Parameter]]], Any] = lambda named: named,
    gradients: Gradients = drawn,
    rates: Sequence[Any] = (0.1, 0.03),
    before: Callable[[int, Any], None] = lambda step, optimizer: None,
    **options: Any,
) -> Run:
    """One step for each rate. A group's `times` multiplies it; `before` is called when the gradients are there."""
    params = [nn.Parameter(value.clone(memory_format=torch.preserve_format).to(dtype)) for value in values]
    named = [(f"{i}.{'weight' if param.ndim > 1 else 'bias'}", param) for i, param in enumerate(params)]
    optimizer = kind(groups(named), lr=rates[0], **options, **({} if fused else LOOP))
    if fused:
        by_kernels(optimizer)
    ratios = []
    for step, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("times", 1.0)
        for i, param in enumerate(params):
            grad = gradients(step, i, param)
            param.grad = None if grad is None else grad.to(dtype)
        before(step, optimizer)
        optimizer.step()
        ratios.append(optimizer.trust_ratios())
    return Run(params, optimizer, ratios)


def both_ways(kind: Any, values: Sequence[Tensor], *, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Run, Run]:
    """The kernels in `dtype`; and the loop in float64, from the same rounded values and gradients."""
    gradients: Gradients = options.pop("gradients", drawn)

    def rounded(step: int, i: int, param: nn.Parameter) -> Tensor | None:
        grad = gradients(step, i, param)
        return None if grad is None else grad.to(dtype)

    found = take_steps(kind, values, fused=True, dtype=dtype, gradients=rounded, **options)
    narrow = [value.to(dtype) for value in values]
    return found, take_steps(kind, narrow, fused=False, dtype=torch.float64, gradients=rounded, **options)


def assert_same(found: Run, wanted: Run, *, within: float = 1e-6) -> None:
    """Weights, states and ratios of every step. The measure is the largest value in a tensor."""
    for i in range(len(wanted.params)):
        mine, right = found.tensors(i), wanted.tensors(i)
        assert mine.keys() == right.keys()
        for name, value in right.items():
            limit = within * value.double().abs().max().item() if value.numel() else 0.0
            torch.testing.assert_close(mine[name].double(), value.double(), rtol=0, atol=limit)
    for ours, theirs in zip(found.ratios, wanted.ratios, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.by_name == pytest.approx(theirs.by_name, rel=within)


def assert_equal_bits(found: Run, wanted: Run) -> None:
    for i in range(len(wanted.params)):
        for name, value in wanted.tensors(i).items():
            torch.testing.assert_close(found.tensors(i)[name], value, rtol=0, atol=0)
    assert [r and r.by_name for r in found.ratios] == [r and r.by_name for r in wanted.ratios]
