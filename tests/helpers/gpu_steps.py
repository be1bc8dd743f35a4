"""Some steps of LARS and LAMB on a GPU, in every way one can take them: for tests/ranks/test_gpu_optim.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fleetx.optim import Lamb, Lars

DEVICE = torch.device("cuda")
SHAPES = [(1100, 4096), (64, 32, 3, 3), (64, 64), (1, 4097), (3, 5), (0, 4), (20, 30), (1000,), (7,)]
"""Above 1024 chunks of 4096 elements, some, exactly one, one and one element, few, none, a tensor of zeros; two biases."""
ZEROS, CONVOLUTION = 6, 1
RATES = {Lars: (2.0, 4.0, 3.0, 1.0, 0.5), Lamb: (0.001, 0.01, 0.008, 0.004, 0.002)}
LOOP = {"foreach": False, "fused": False}


def draw(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def fresh(dtype: torch.dtype, rounded: torch.dtype, *, channels_last: bool = False) -> list[nn.Parameter]:
    """Values that `rounded` can hold, in `dtype`."""
    values = [draw(shape, i).mul_(0.0 if i == ZEROS else 0.05).to(rounded) for i, shape in enumerate(SHAPES)]
    if channels_last:
        values[CONVOLUTION] = values[CONVOLUTION].to(memory_format=torch.channels_last)
    return [nn.Parameter(value.to(DEVICE, dtype)) for value in values]


def gradient(step: int, i: int, rounded: torch.dtype) -> Tensor:
    return draw(SHAPES[i], 100 + 10 * step + i).mul_(0.01).to(rounded)


def separate(params: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(param) for param in params]


def in_one_buffer(params: Sequence[Tensor]) -> list[Tensor]:
    """As a reducer lays them, here never at a multiple of 16 bytes by luck."""
    sizes = [param.numel() for param in params]
    buffer = torch.zeros(1 + sum(sizes), dtype=params[0].dtype, device=DEVICE)[1:]
    return [part.view(param.shape) for part, param in zip(buffer.split(sizes), params, strict=True)]


def make(kind: Any, params: Sequence[nn.Parameter], lr: Any, **options: Any) -> Any:
    return kind([(f"{i}.{'weight' if p.ndim > 1 else 'bias'}", p) for i, p in enumerate(params)], lr=lr, **options)


def capture(optimizer: Any) -> Callable[[], object]:
    """After a step outside. Capturing itself moves nothing."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph.replay


def take_steps(
    kind: Any,
    *,
    dtype: torch.dtype = torch.float32,
    rounded: torch.dtype = torch.float32,
    views: Callable[[Sequence[Tensor]], list[Tensor]] = separate,
    rates: Sequence[float] = (),
    lr_on_device: bool = False,
    in_graph: bool = False,
    before: Callable[[list[nn.Parameter], Any], None] = lambda params, optimizer: None,
    channels_last: bool = False,
    **options: Any,
) -> tuple[list[nn.Parameter], Any]:
    """Gradients stay where they are and are overwritten for each step, as a graph needs it."""
    params = fresh(dtype, rounded, channels_last=channels_last)
    places = views(params)
    for param, place in zip(params, places, strict=True):
        param.grad = place
    rates = rates or RATES[kind]
    rate = torch.tensor(rates[0], device=DEVICE, dtype=torch.float64) if lr_on_device else rates[0]
    optimizer = make(kind, params, rate, **options)
    step = optimizer.step
    for number, now in enumerate(rates):
        for i, place in enumerate(places):
            place.copy_(gradient(number, i, rounded))
        if lr_on_device:
            rate.fill_(now)  # type: ignore[union-attr]
        else:
            optimizer.param_groups[0]["lr"] = now
        if in_graph and number == 1:
            step = capture(optimizer)
        before(params, optimizer)
        step()
    return params, optimizer


def tensors_of(params: Sequence[nn.Parameter], optimizer: Any) -> list[dict[str, Tensor]]:
    """Weight (of a 16-bit parameter its float32 copy) and state of each."""
    found = []
    for param in params:
        state = dict(optimizer.state[param])
        found.append({"weight": state.pop("master", param.detach()), **state})
    return found


def assert_close(found: Any, wanted: Any, *, within: float) -> None:
    """The measure is the largest value in a tensor."""
    for i, (mine, right) in enumerate(zip(tensors_of(*found), tensors_of(*wanted), strict=True)):
        assert mine.keys() == right.keys()
        for name, value in right.items():
            scale = value.double().abs().max().item() if value.numel() else 0.0
            apart = (mine[name].double() - value.to(DEVICE).double()).abs().max().item() if value.numel() else 0.0
            assert apart <= within * scale, f"{name} of {i}: {apart} apart, the largest value is {scale}"


def assert_equal_bits(found: Any, wanted: Any) -> None:
    for mine, right in zip(tensors_of(*found), tensors_of(*wanted), strict=True):
        assert mine.keys() == right.keys()
        for name, value in right.items():
            torch.testing.assert_close(mine[name], value, rtol=0, atol=0)
