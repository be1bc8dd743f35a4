"""Offload on a GPU: the bits of training without recompute, less memory there, none lost on the host. Skipped without one."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleetx import fleet
from fleetx.engine.modules.patching import PatchedForward, patch_of, patched
from fleetx.errors import ConfigError
from fleetx.recompute.host_memory import CudaMover, Pool
from fleetx.recompute.offload import Offload
from fleetx.recompute.replay import Replay
from tests.ranks.test_gpu_memory import NETS, TYPES, Encoder, alone_and_exact, cleared, loss_fn, sentences, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
__all__ = ["alone_and_exact"]  # the fixture of every test here too
LAYERS, ROWS = 16, 256
INPUT = ROWS * 64 * 256 * 4
"""Bytes between two layers of the deep encoder."""


@pytest.fixture
def deep(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(NETS, "deep encoder", (lambda: Encoder(layers=LAYERS), sentences, ROWS))
    return "deep encoder"


def assert_equal_bits(ours: Any, theirs: Any) -> None:
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("net", "dtype"), [("encoder", "float32"), ("encoder", "bfloat16"), ("u-net", "float32")])
def test_offload_has_the_bits_of_training_without_recompute_on_a_gpu(net: str, dtype: str) -> None:
    theirs, _ = train(net, None, **TYPES[dtype])
    ours, _ = train(net, {"offload": True}, **TYPES[dtype])
    assert_equal_bits(ours, theirs)


def distributed(offload: bool) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Encoder(layers=LAYERS)
    strategy = fleet.DistributedStrategy(recompute=True, recompute_configs={"offload": offload})
    return fleet.distribute(model, torch.optim.AdamW(model.parameters(), lr=1e-3), strategy)


def test_a_step_with_offload_needs_less_of_the_device() -> None:
    peaks, seconds = [], []
    for offload in (False, True):
        cleared()
        model, optimizer = distributed(offload)
        batch = [tensor.cuda() for tensor in sentences(ROWS)]
        optimizer.minimize(loss_fn(model, batch))  # the optimizer's state, and the host's buffers
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        for _ in range(5):
            optimizer.minimize(loss_fn(model, batch))
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - begun) / 5)
        peaks.append(torch.cuda.max_memory_allocated())
        del model, optimizer, batch
    print(f"FIGURE peak {peaks} seconds {seconds}")
    # Of fifteen inputs (the first layer's is the user's) two are on the device at a time, and one is a gradient's worth.
    assert peaks[0] - peaks[1] > 0.7 * (LAYERS - 1) * INPUT


def pool_of(model: nn.Module) -> Pool:
    for module in model.modules():
        forward: Any = patch_of(module)
        while isinstance(forward, PatchedForward):
            if isinstance(forward.around, Replay) and forward.around._offload is not None:
                return forward.around._offload.pool
            forward = forward.inner
    raise LookupError("no unit offloads its inputs")


def test_twenty_steps_lose_no_pinned_memory() -> None:
    model, optimizer = distributed(True)
    pool = pool_of(model)
    for step in range(20):
        optimizer.minimize(loss_fn(model, sentences(ROWS)))
        loss_fn(model, sentences(ROWS // 2))  # a graph that is thrown away
        assert pool.host_bytes == (LAYERS - 1) * INPUT, step
        assert pool.idle_bytes == pool.host_bytes, step


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_budgets_below_the_smallest_without_offload_hold(deep: str, dtype: str) -> None:
    theirs, _ = train(deep, None, **TYPES[dtype])
    smallest = []
    for offload in (False, True):
        cleared()
        with pytest.raises(ConfigError) as refused:
            train(deep, {"budget": "1MB", "offload": offload}, **TYPES[dtype])
        smallest.append(int(re.search(r'no plan keeps to it: .* Write "budget": (\d+)', str(refused.value))[1]))
        del refused
    without, with_it = smallest
    assert with_it < without
    cleared()
    ours, optimizer = train(deep, {"budget": (without + with_it) // 2, "offload": True}, **TYPES[dtype])
    plan = optimizer.memory_plan
    print(f"FIGURE {dtype} smallest {smallest}\n{plan}")
    assert plan.parked and plan.reserved_bytes <= plan.budget < without
    assert abs(plan.predicted_bytes / plan.real_bytes - 1) < 0.05
    assert_equal_bits(ours, theirs)


class Sine(nn.Module):
    """Its gradient depends on every bit of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


def test_copies_that_take_longer_than_the_units_are_waited_for() -> None:
    """Units that do next to nothing, on large inputs: every copy is still under way when its unit is over."""
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    model = nn.Sequential(*(Sine() for _ in range(12)))
    x = torch.randn(2**24, device=device, requires_grad=True)
    (theirs,) = torch.autograd.grad(model(x).sum(), x)
    offload = Offload(CudaMover(device))
    with patched((unit, Replay(str(i), unit, device, offload=offload)) for i, unit in enumerate(model)):
        for _ in range(5):
            (ours,) = torch.autograd.grad(model(x).sum(), x)
            assert torch.equal(ours, theirs)
    assert offload.pool.idle_bytes == offload.pool.host_bytes == 11 * x.nbytes


def test_the_speed_of_copies_is_measured_once_and_plausible() -> None:
    mover = CudaMover(torch.device("cuda"))
    speed = mover.bytes_per_second()
    print(f"FIGURE {speed / 1e9:.1f} GB/s")
    assert 1e8 < speed < 1e12 and mover.bytes_per_second() == speed
