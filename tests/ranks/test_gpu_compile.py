"""On a GPU: no update waits for the device; compiled blocks, computed again or recorded, train as those that are not.

Skipped without one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fleetx import fleet
from fleetx.dist import world
from tests.helpers.compiled_runs import Blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("fresh_compiler"),
]
ROWS, UPDATES = 4096, 6
BFLOAT16 = {"amp": {"dtype": "bfloat16"}}


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    world.close_world()
    monkeypatch.setenv("FLEETX_DEVICE", "cuda")
    fleet.init()
    yield
    world.close_world()


def batch(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(index)
    x = torch.randn(ROWS, 8, generator=generator, device="cuda")
    return x, torch.randint(0, 4, (ROWS,), generator=generator, device="cuda")


def pair(*, optimizer: str = "SGD", **strategy: Any) -> tuple[Any, Any]:
    model: Any = Blocks()
    made = {
        "SGD": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
        "Adam": lambda: torch.optim.Adam(model.parameters(), lr=0.01),
        "plain SGD": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    }[optimizer]()
    return fleet.distribute(model, made, fleet.DistributedStrategy(**strategy), sample=batch(0))


def trained(**settings: Any) -> tuple[list[float], list[Tensor]]:
    model, optimizer = pair(**settings)
    torch.manual_seed(3)
    losses = [optimizer.minimize(model.loss(batch(step))).loss for step in range(UPDATES)]
    return losses, [tensor.detach().clone() for tensor in model.state_dict().values()]


WITHOUT_A_WAIT: dict[str, dict[str, Any]] = {
    "plain": {},
    "an optimizer that is not fused": {"optimizer": "plain SGD"},
    "bfloat16": BFLOAT16,
    "float16": {"amp": {"dtype": "float16"}},
    "lars": {"optimizer": "plain SGD", "lars": True},
    "lamb": {"optimizer": "Adam", "lamb": True},
    "merge": {"gradient_merge": {"k_steps": 2}},
    "clip": {"clip_norm": True},
    "recompute": {"recompute": True},
    "compile": {**BFLOAT16, "compile": True},
    "compile and recompute": {**BFLOAT16, "compile": True, "recompute": True},
    "the whole compiled": {**BFLOAT16, "compile": {"scope": "model"}},
}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", WITHOUT_A_WAIT)
def test_a_whole_update_never_waits_for_the_device(name: str) -> None:
    model, optimizer = pair(**WITHOUT_A_WAIT[name])
    batches = [batch(step) for step in range(2 * UPDATES)]
    for one in batches[:UPDATES]:  # kernels are compiled and loaded, state is made
        optimizer.minimize(model.loss(one))
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for one in batches[UPDATES:]:
            optimizer.minimize(model.loss(one))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("again", [True, {"budget": "4MB"}], ids=["by name", "by a budget"])
@pytest.mark.parametrize("amp", [{}, BFLOAT16], ids=["float32", "bfloat16"])
def test_compiled_blocks_computed_again_have_the_bits_of_those_that_are_not(amp: dict[str, Any], again: Any) -> None:
    plain, found = trained(compile=True, **amp), trained(compile=True, recompute=again, **amp)
    assert found[0] == plain[0]
    for a, b in zip(found[1], plain[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("scope", ["blocks", "model"])
@pytest.mark.parametrize("merges", [1, 2])
def test_recorded_graphs_train_as_those_that_are_launched(scope: str, merges: int) -> None:
    merging = {"gradient_merge": {"k_steps": merges}} if merges > 1 else {}
    launched = trained(compile={"scope": scope}, **merging)
    recorded = trained(compile={"scope": scope, "mode": "reduce-overhead"}, **merging)
    assert recorded[0] == pytest.approx(launched[0], rel=1e-5)
    for a, b in zip(recorded[1], launched[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
