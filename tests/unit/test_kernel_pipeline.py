"""The kernels under fleet.distribute: gradients are views of flat buckets, and LARS is given the norms that were taken anyway."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from fleetx.engine.user_loop.optimizer_hooks import refuse_before_step
from tests.helpers import kernel_interpreter
from tests.helpers.kernel_interpreter import by_kernels
from tests.helpers.models import batch

interpreted = kernel_interpreter.interpreted
pytestmark = pytest.mark.usefixtures("interpreted", "alone")
both = pytest.mark.parametrize("part", ["lars", "lamb"])
INNER = {"lars": (torch.optim.SGD, {"lr": 0.2, "momentum": 0.9}), "lamb": (torch.optim.Adam, {"lr": 0.02})}


def net() -> nn.Sequential:
    """Of odd sizes; the first weight has two chunks, the other one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 5))


def train(part: str, *, kernels: bool, **settings: Any) -> dict[str, Any]:
    model = net()
    kind, options = INNER[part]
    ways = {} if kernels else {"foreach": False}
    strategy = fleet.DistributedStrategy(**{part: True}, **settings)
    model, ours = fleet.distribute(model, kind(model.parameters(), **options, **ways), strategy)
    if kernels:
        by_kernels(ours.update)
    offsets: set[int] = set()
    given: list[bool] = []

    def look(update: Any, *_: Any) -> None:
        offsets.update(p.grad.data_ptr() % 16 for p in model.parameters())
        given.append(bool(getattr(update, "_gradient_norms", None)))

    refuse_before_step(ours.update, look)  # it only looks: any other hook may change gradients, and no norm is handed over
    ratios = []
    for step in range(3):
        x, y = batch(step)
        report = ours.minimize(F.cross_entropy(model(x), y))
        ratios.append(report.trust_ratios.by_name)
    weights: list[Tensor] = [p.detach().clone() for p in model.parameters()]
    return {"weights": weights, "ratios": ratios, "offsets": offsets, "given": given, "kernels": bool(ours.update._kernels)}


@pytest.mark.parametrize(
    "settings",
    [{}, {"clip_norm": True, "clip_norm_configs": {"max_norm": 0.1}}, {"lars_configs": {"carry_norms": True}}],
    ids=["plain", "clipped", "kept norms"],
)
@both
def test_kernels_do_in_the_pipeline_what_the_loop_does(part: str, settings: dict[str, Any]) -> None:
    if part == "lamb" and "lars_configs" in settings:
        pytest.skip("LAMB has no such option")
    found = train(part, kernels=True, **settings)
    wanted = train(part, kernels=False, **{k: v for k, v in settings.items() if k != "lars_configs"})
    assert found["kernels"] and not wanted["kernels"]
    assert found["offsets"] - {0}, "no gradient begins at an odd address"
    assert found["given"] == [part == "lars"] * 3 and wanted["given"] == [False] * 3
    for mine, right in zip(found["ratios"], wanted["ratios"], strict=True):
        assert set(mine) == {"0.weight", "2.weight"} and mine == pytest.approx(right, rel=1e-5)
    for mine, right in zip(found["weights"], wanted["weights"], strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-6)
